# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The projections of a model in fp8, each alone, by every backend.

python -m tools.bench.fp8_layers --tokens 8192 --output docs/benchmarks/fp8_layers.json

A layer runs forward and backward and adds its weight gradient to a float32 sum; its weight was cast before, as in training with several
micro-batches. ``floor_ms`` is what the casts of input and output gradient move (two reads in 16 bits, two writes in eight) at the speed
of a device copy. Backends that this machine lacks are left out.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.tensor_parallel import MainGradient
from tools.bench._record import record
from tools.bench._timing import COPY_BYTES_PER_S, median_ms

_SHAPES = {"qkv": (4096, 6144), "out": (4096, 4096), "up": (4096, 28672), "down": (14336, 4096)}
"""(input, output) features of Llama-3 8B."""
_SMALL = {"up": (64, 128), "down": (128, 64)}
_BACKENDS: tuple[tuple[Any, Any], ...] = (
    ("torch", None),
    ("torch", "tensorwise"),
    ("torch", "rowwise"),
    ("te", None),
    ("te", "tensorwise"),
    ("te", "delayed"),
    ("te", "blockwise"),
)


def kernels(work: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Microseconds of each kernel of one call, the costliest first; empty without a GPU."""
    if device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    return {event.key[:70]: round(event.self_device_time_total, 1) for event in events if event.self_device_time_total > 0}


def layers(name: str, shape: tuple[int, int], tokens: int, device: torch.device) -> list[dict[str, Any]]:
    """Forward and backward of the whole layer by each backend."""
    groups = ProcessGroups.single()
    x = torch.randn(tokens, shape[0], device=device, dtype=torch.bfloat16).requires_grad_()
    grad = torch.randn(tokens, shape[1], device=device, dtype=torch.bfloat16) * 1e-3
    rows = []
    for backend, recipe in _BACKENDS:
        try:
            chosen = choose_backend(backend, fp8=None if recipe is None else Fp8Config(recipe=recipe))
        except (RuntimeError, ValueError) as error:
            print(f"{backend} {recipe}: {error}", flush=True)
            continue
        layer: Any = chosen.layers(0, 1).column_linear(*shape, groups, dtype=torch.bfloat16, device=device)
        layer.accumulate_weight_gradients_into({"weight": MainGradient(torch.zeros(shape[1], shape[0], device=device))})
        layer.parameters_changed()

        def both(layer: Any = layer, chosen: Any = chosen) -> None:
            x.grad = None
            with chosen.running(groups):
                y = layer(x)
            y.backward(grad)

        ms = median_ms(both, device, 20)
        rows.append({
            "layer": name, "backend": backend, "recipe": recipe, "ms": ms, "tflops": 6 * tokens * shape[0] * shape[1] / ms / 1e9,
            "floor_ms": None if recipe is None else tokens * sum(shape) * 6 / COPY_BYTES_PER_S * 1e3, "kernels_us": kernels(both, device),
        })  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    tokens = arguments.tokens if on_gpu else 64
    rows = []
    for name, shape in (_SHAPES if on_gpu else _SMALL).items():
        part = layers(name, shape, tokens, device)
        for row in part:
            print(json.dumps(row), flush=True)
        rows += part
    if arguments.output:
        record(arguments.output, {"work": "projections of Llama-3 8B in eight bits", "tokens": tokens, "rows": rows})


if __name__ == "__main__":
    main()
