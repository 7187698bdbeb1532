# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Norms, activations and rotary embedding against the bytes that they must move, and against torch.compile and Transformer Engine.

python -m tools.bench.elementwise --output docs/benchmarks/elementwise.json
"""

import argparse
import importlib
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.nn import Activation, LayerNorm, RMSNorm, apply_rotary, rotary_frequencies, rotary_tables, split_rotary
from tools.bench._record import record
from tools.bench._timing import COPY_BYTES_PER_S, milliseconds

_CALLS = 10
"""In a row between two time stamps."""

Function = Callable[[Tensor], Any]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation over an input, with what computes it."""

    name: str
    x: Tensor
    ours: Function
    forward_elements: int
    """That the forward reads and writes, of the input's dtype."""
    backward_elements: int
    further_bytes: int = 0
    """That each way reads besides, tables for instance."""
    peers: dict[str, Function] = field(default_factory=dict)

    def measure(self, device: torch.device, repeats: int) -> list[dict[str, Any]]:
        """A row for each way and each who computes it."""
        size, rows = self.x.element_size(), []
        floors = {"forward": self.forward_elements * size + self.further_bytes}
        floors["forward and backward"] = floors["forward"] + self.backward_elements * size + self.further_bytes
        for who, function in {"mcore": self.ours, **self.peers}.items():
            wanted, leaves = function(self.x), [self.x, *_parameters(function)]
            grads = [torch.randn_like(y) for y in _tensors(wanted)]
            del wanted

            def both(function: Function = function, leaves: list[Tensor] = leaves, grads: list[Tensor] = grads) -> None:
                torch.autograd.grad(_tensors(function(self.x)), leaves, grads)

            def forward(function: Function = function) -> None:
                with torch.no_grad():
                    function(self.x)

            for way, work in (("forward", forward), ("forward and backward", both)):
                times, floor = milliseconds(work, device, repeats, calls=_CALLS), floors[way] / COPY_BYTES_PER_S * 1e3
                ms = statistics.median(times)
                rows.append(
                    {"operation": self.name, "shape": list(self.x.shape), "way": way, "by": who, "ms": ms,
                     "min_ms": min(times), "max_ms": max(times), "floor_ms": floor, "ratio": ms / floor}
                )  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
        return rows


def operations(tokens: int, width: int, ffn: int, device: torch.device, peers: bool) -> list[Callable[[], Operation]]:
    """Makers of the operations: the inputs of one fit beside nothing else."""
    place: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    engine = _engine() if peers else None

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, **place).requires_grad_()

    def others(function: Function, theirs: Callable[[], Function] | None) -> dict[str, Function]:
        if not peers:
            return {}
        # Under the compiler the layers are their torch code.
        functions: dict[str, Function] = {"torch.compile": torch.compile(function)}
        return functions | ({"transformer_engine": theirs()} if theirs else {})

    def norm(kind: type[RMSNorm] | type[LayerNorm]) -> Operation:
        ours, rows = kind(width, **place), tokens * width
        theirs = None if engine is None else lambda: getattr(engine, kind.__name__)(width, **place)
        return Operation(
            name=kind.__name__, x=draw(tokens, width), ours=ours, forward_elements=2 * rows, backward_elements=3 * rows,
            peers=others(kind(width, **place), theirs),
        )  # fmt: skip

    def activation(choice: Activation, name: str | None, weighted: bool = False) -> Operation:
        wide, out = (1 + choice.gated) * tokens * ffn, tokens * ffn
        weights = torch.rand(tokens, device=device) if weighted else None
        module = None if engine is None or name is None else getattr(engine.ops, name, None)

        def run(x: Tensor) -> Tensor:
            return choice(x, weights=weights)

        options = {"offset": choice.offset, "clamp": choice.clamp, "fp8 store": choice.fp8_input_store, "weights": weighted}
        return Operation(
            name=", ".join([choice.name, *(key for key, value in options.items() if value)]), x=draw(tokens, wide // tokens), ours=run,
            # Eight bits a number are stored by the forward and read in place of the input by the backward.
            forward_elements=wide + out + (wide // 2 if choice.fp8_input_store else 0),
            backward_elements=wide + out + (wide // 2 if choice.fp8_input_store else wide),
            peers=others(run, module),
        )  # fmt: skip

    def rotary(share: float, interleaved: bool, packed: bool) -> Operation:
        head, kv_heads, options = 128, 8, {"interleaved": interleaved}
        tables = rotary_tables(torch.arange(tokens, device=device), rotary_frequencies(int(head * share), 500_000.0, device), **options)
        shape = (kv_heads, width // head // kv_heads + 2, head) if packed else (width // head, head)

        def run(x: Tensor) -> Any:
            return split_rotary(x, tables, **options) if packed else apply_rotary(x, tables, **options)

        x = draw(tokens, *shape)
        what = "rotary of queries, keys and values" if packed else "rotary"
        return Operation(
            name=f"{what}, {share:.0%} of a head{', interleaved' if interleaved else ''}", x=x, ours=run,
            # Each angle stands twice in the tables, and is read once.
            forward_elements=2 * x.numel(), backward_elements=2 * x.numel(), further_bytes=tables[0].numel() * tables[0].element_size(),
            peers=others(run, None),
        )  # fmt: skip

    return [
        lambda: norm(RMSNorm),
        lambda: norm(LayerNorm),
        lambda: activation(Activation(name="swiglu"), "SwiGLU"),
        lambda: activation(Activation(name="geglu_tanh"), "GEGLU"),
        lambda: activation(Activation(name="geglu"), None),
        lambda: activation(Activation(name="quick_geglu", offset=1.0, clamp=7.0), None, weighted=True),
        lambda: activation(Activation(name="swiglu", fp8_input_store=True), None),
        lambda: activation(Activation(name="squared_relu"), "SReLU"),
        lambda: rotary(1.0, interleaved=False, packed=False),
        *(
            lambda share=share, interleaved=interleaved: rotary(share, interleaved, packed=True)
            for share, interleaved in itertools.product((1.0, 0.5), (False, True))
        ),
    ]


def _engine() -> Any:
    try:
        return importlib.import_module("transformer_engine.pytorch")
    except ImportError:
        return None


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def _parameters(function: Function) -> list[Tensor]:
    return list(function.parameters()) if isinstance(function, nn.Module) else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=4096, help="of the norms, a multiple of 1024; heads have 128 channels")
    parser.add_argument("--ffn", type=int, default=14336)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows = []
    for make in operations(arguments.tokens, arguments.width, arguments.ffn, device, peers=device.type == "cuda"):
        torch.compiler.reset()
        rows += make().measure(device, arguments.repeats)
    if arguments.output:
        record(arguments.output, {"work": "between a layer's products", "rows": rows})


if __name__ == "__main__":
    main()
