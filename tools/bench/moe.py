# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A layer of experts by itself: forward alone, and forward with backward, beside its GEMMs alone and dense GEMMs of as many operations.

python -m tools.bench.moe --output docs/benchmarks/moe_layer.json

128 experts of width 768, top 8, width 2,048, 32,768 tokens, as routed by a fresh router and with forced balance. Weight gradients are
added to float32 buffers in place, as in training; the experts are also timed in fp8, by both recipes. Only the GEMMs of the routed experts
count as operations: 6 a token, expert and weight forward with a gated activation, three times as many with the backward.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mcore_moe import MoEConfig, MoELayer
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.models import Site, TransformerConfig
from mcore_parallel.nn import Step
from mcore_parallel.tensor_parallel import MainGradient
from tools.bench._record import record
from tools.bench._timing import in_turn

WORK = MappingProxyType({"tokens": 32768, "hidden": 2048, "ffn": 768, "experts": 128, "topk": 8})
# T tokens, D model, F width of an expert, E experts, K experts a token, R = T K rows.


def build(sizes: argparse.Namespace, device: torch.device, *, balanced: bool, fp8: Fp8Config | None = None) -> MoELayer:
    """The layer, with float32 buffers for the gradients of its experts; casts of weights are kept as between two updates."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = TransformerConfig(num_layers=1, hidden_size=sizes.hidden, num_attention_heads=1, vocab_size=128, activation="swiglu")
    mixture = MoEConfig(
        num_moe_experts=sizes.experts, moe_router_topk=sizes.topk, moe_ffn_hidden_size=sizes.ffn, moe_router_force_load_balancing=balanced
    )
    layers = choose_backend("torch", fp8=fp8).layers(0, 1)
    site = Site(layer=0, local_layer=0, config=model, groups=ProcessGroups.single(), layers=layers, dtype=dtype, device=device)
    layer = MoELayer(mixture, site, dtype=dtype, device=device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    weights = {name: layer.experts.get_parameter(name) for name in ("up", "down")}
    layer.experts.accumulate_weight_gradients_into(
        {name: MainGradient(torch.zeros_like(weight, dtype=torch.float32)) for name, weight in weights.items()}
    )
    layer.experts.parameters_changed()
    return layer


def works(sizes: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], object]]:
    """What is timed, by name; each does the same operations forward, and three times as many with the backward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x_TD = torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=dtype, requires_grad=True)
    grad_TD = torch.randn_like(x_TD)
    step = Step.causal(1, sizes.tokens, device=device)
    timed: dict[str, Callable[[], object]] = {}

    def add(name: str, forward: Callable[[], Tensor], grad: Tensor) -> None:
        def alone() -> None:
            with torch.no_grad():
                forward()

        timed[f"{name} forward"] = alone
        timed[f"{name} both"] = lambda: torch.autograd.backward(forward(), grad)

    for name, balanced in (("layer, routed", False), ("layer, balanced", True)):
        layer = build(sizes, device, balanced=balanced)
        add(name, lambda layer=layer: layer(x_TD, step)[0], grad_TD)
    rows = sizes.tokens * sizes.topk
    rows_RD = torch.randn(rows, sizes.hidden, device=device, dtype=dtype, requires_grad=True)
    share = rows // sizes.experts
    ends_N = torch.arange(share, rows + 1, share, dtype=torch.int32, device=device)
    for recipe in (None, "tensorwise", "rowwise"):
        fp8 = None if recipe is None else Fp8Config(recipe=recipe)
        experts = build(sizes, device, balanced=False, fp8=fp8).experts
        name = "experts, rows in order" + ("" if recipe is None else f", fp8 {recipe}")
        add(name, lambda experts=experts: experts(rows_RD, ends_N), torch.randn_like(rows_RD))
    up = torch.randn(2 * sizes.ffn, sizes.hidden, device=device, dtype=dtype, requires_grad=True)
    down = torch.randn(sizes.hidden, sizes.ffn, device=device, dtype=dtype, requires_grad=True)
    add("dense GEMMs", lambda: (rows_RD @ up.t())[:, : sizes.ffn] @ down.t(), torch.randn_like(rows_RD))
    return timed


def measure(sizes: argparse.Namespace, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """A row for each work, forward and both."""
    forward = 6 * sizes.tokens * sizes.topk * sizes.hidden * sizes.ffn
    times = in_turn(works(sizes, device), device, repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name, ms in medians.items():
        work, _, part = name.rpartition(" ")
        ratio = medians[f"dense GEMMs {part}"] / ms
        spread = [round(edge(times[name]), 4) for edge in (min, max)]
        tflops = forward * (1 if part == "forward" else 3) / ms / 1e9
        row = {"work": work, "part": part, "ms": round(ms, 4), "spread_ms": spread, "tflops": round(tflops, 2), "ratio": round(ratio, 3)}
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    for name, default in WORK.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = measure(options, device, options.repeats)
    for row in rows:
        print(row)
    record(
        options.output, {"work": {name: getattr(options, name) for name in ("tokens", "hidden", "ffn", "experts", "topk")}, "rows": rows}
    )


if __name__ == "__main__":
    main()
