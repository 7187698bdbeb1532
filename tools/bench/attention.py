# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention cores: their rate at full causal attention beside torch's kernels and flash-attn, and their time against the window.

python -m tools.bench.attention --output docs/benchmarks/attention.json

TFLOP/s count the pairs of a query and a key that it sees: 4 d for each pair and head forward, and 2.5 times that backward.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import AttentionSpec, Step, attention_capabilities, choose_attention
from tools.bench._record import record
from tools.bench._timing import milliseconds

Core = Callable[[Tensor, Tensor, Tensor], Tensor]
"""[T, A, d] and twice [T, K, d] -> [T, A, d]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sequences of one length, and the heads that look at them."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a query sees, its own among them."""
    packed: bool = False

    @property
    def forward_flops(self) -> float:
        window = self.length if self.window is None else min(self.window, self.length)
        pairs = window * (window + 1) / 2 + (self.length - window) * window
        return 4.0 * self.head_dim * self.heads * self.batch * pairs

    def spec(self, device: torch.device) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=None if self.window is None else (self.window - 1, 0),
            packed=self.packed,
            dtype=torch.bfloat16,
            device=device.type,
        )

    def step(self, device: torch.device) -> Step:
        if not self.packed:
            return Step.causal(self.batch, self.length, device)
        bounds = torch.arange(self.batch + 1) * self.length
        return dataclasses.replace(Step.causal(1, self.batch * self.length, device), cu_seqlens=bounds)


def cores(shape: AttentionShape, device: torch.device) -> dict[str, Callable[[], Core]]:
    """Makers of the registry's cores that can do it, and of "auto"."""
    spec, step, groups = shape.spec(device), shape.step(device), ProcessGroups.single()

    def build(backend: str) -> Core:
        core = choose_attention(spec, groups, backend)
        return lambda q, k, v: core(q, k, v, 0, step)

    able = [row.backend for row in attention_capabilities() if row.is_installed and not row.missing(spec, groups)]
    # The definition holds all scores.
    names = ["auto", *(name for name in able if name != "reference" or device.type == "cpu")]
    return {name: functools.partial(build, name) for name in names}


def peers(shape: AttentionShape, device: torch.device) -> dict[str, Callable[[], Core]]:
    """Torch's kernels one by one, also with a key-value head for every query head, and flash-attn where it is installed."""
    if shape.packed:
        return {}
    found: dict[str, Callable[[], Core]] = {}
    if shape.window is None:
        kernels = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION") if device.type == "cuda" else ("MATH",)
        for name in kernels:
            found[f"torch {name}"] = functools.partial(_torch_kernel, shape, getattr(SDPBackend, name))
            if shape.kv_heads < shape.heads:
                found[f"torch {name}, heads repeated"] = functools.partial(_torch_kernel, shape, getattr(SDPBackend, name), repeat=True)
    for module in ("flash_attn_interface", "flash_attn"):
        if device.type == "cuda" and importlib.util.find_spec(module) is not None:
            found[module] = functools.partial(_flash_attn, shape, module)
    return found


def _torch_kernel(shape: AttentionShape, kernel: SDPBackend, *, repeat: bool = False) -> Core:
    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if repeat:
            k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, dim=1) for x in (k, v))
        q, k, v = (x.view(shape.batch, shape.length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(kernel):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)

    return core


def _flash_attn(shape: AttentionShape, module: str) -> Core:
    function = importlib.import_module(module).flash_attn_func
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0)

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = function(*(x.view(shape.batch, shape.length, *x.shape[1:]) for x in (q, k, v)), causal=True, window_size=window)
        return (out[0] if isinstance(out, tuple) else out).flatten(0, 1)

    return core


def measure(shape: AttentionShape, device: torch.device, repeats: int, part: str) -> list[dict[str, Any]]:
    """A row for each way and each who computes it; who cannot is a row with the reason."""
    T, rows = shape.batch * shape.length, []
    generator = torch.Generator(device).manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(T, heads, shape.head_dim, device=device, generator=generator).bfloat16()

    leaves = [draw(heads).requires_grad_() for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    grad = draw(shape.heads)
    for who, make in (cores(shape, device) | peers(shape, device)).items():
        facts = {"part": part, "by": who, **dataclasses.asdict(shape)}
        try:
            core = make()

            def forward(core: Core = core) -> None:
                with torch.no_grad():
                    core(*leaves)

            def both(core: Core = core) -> None:
                torch.autograd.grad(core(*leaves), leaves, grad)

            for way, work, factor in (("forward", forward, 1.0), ("forward and backward", both, 3.5)):
                times = milliseconds(work, device, repeats, calls=10)
                ms = statistics.median(times)
                rate = factor * shape.forward_flops / ms / 1e9
                rows.append({**facts, "way": way, "ms": ms, "min_ms": min(times), "max_ms": max(times), "tflops": rate})
                print(json.dumps(rows[-1]), flush=True)
        except (RuntimeError, ValueError, ImportError) as error:
            rows.append({**facts, "error": str(error)[-300:]})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=16384 if cuda else 128, help="of a batch, and of a sequence under windows")
    parser.add_argument("--length", type=int, default=4096 if cuda else 64, help="of the sequences without windows")
    parser.add_argument("--heads", type=int, default=32 if cuda else 4)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[32, 8] if cuda else [4, 2])
    parser.add_argument("--head-dim", type=int, default=128 if cuda else 16)
    parser.add_argument("--windows", type=int, nargs="*", default=[8192, 4096, 1024, 512, 128] if cuda else [64, 16])
    parser.add_argument("--parts", nargs="+", choices=("full", "windows", "packed"), default=["full", "windows", "packed"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    batch, width = arguments.tokens // arguments.length, {"heads": arguments.heads, "head_dim": arguments.head_dim}
    fewest = min(arguments.kv_heads)
    work: list[tuple[str, AttentionShape]] = []
    if "full" in arguments.parts:
        work += [("full", AttentionShape(batch=batch, length=arguments.length, kv_heads=count, **width)) for count in arguments.kv_heads]
    if "windows" in arguments.parts:
        work += [
            ("windows", AttentionShape(batch=1, length=arguments.tokens, kv_heads=fewest, window=window, **width))
            for window in (None, *arguments.windows)
        ]
    if "packed" in arguments.parts:
        work += [
            ("packed", AttentionShape(batch=batch, length=arguments.length, kv_heads=fewest, window=window, packed=True, **width))
            for window in (None, *arguments.windows[-3:])
        ]
    rows = []
    for (part, _), shapes in itertools.groupby(work, key=lambda item: (item[0], item[1].kv_heads)):
        # Kernels for these shapes, not those for any shape into which torch compiles what it has met in several.
        torch.compiler.reset()
        rows += [row for _, shape in shapes for row in measure(shape, device, arguments.repeats, part)]
    if arguments.output:
        record(arguments.output, {"work": "attention cores", "rows": rows})


if __name__ == "__main__":
    main()
