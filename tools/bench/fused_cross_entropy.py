# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Time and memory of output projection and cross entropy, in one and one after the other.

python -m tools.bench.fused_cross_entropy --output docs/benchmarks/fused_cross_entropy.json
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel import Group
from mcore_parallel.backends import Fp8Config, Fp8LossProducts
from mcore_parallel.tensor_parallel import MainGradient, Route, fused_linear_cross_entropy, vocab_parallel_cross_entropy
from tools.bench._record import record


def measure(work: Callable[[], object], device: torch.device, warmup: int, steps: int) -> dict[str, float]:
    """Median milliseconds of forward and backward, and the bytes they need above those allocated before."""
    times, base = [], 0
    for step in range(warmup + steps):
        if device.type == "cuda":
            torch.cuda.synchronize()
            if step == warmup:
                base = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    memory = (torch.cuda.max_memory_allocated() - base) / 2**20 if device.type == "cuda" else 0.0
    return {"median_ms": statistics.median(times[warmup:]) * 1e3, "min_ms": min(times[warmup:]) * 1e3, "peak_mib": memory}


def variants(hidden: Tensor, weight: Tensor, target: Tensor, chunk_tokens: int | None) -> dict[str, Callable[[], object]]:
    """Forward and backward of the summed loss, by name."""
    one, ones = Group.single(), torch.ones(target.shape[0], device=target.device)
    total = MainGradient(torch.zeros(weight.shape, device=weight.device))
    leaves = (hidden, weight)

    def backward(losses: Tensor) -> object:
        return torch.autograd.grad(losses.sum(), leaves, allow_unused=True)

    narrow = Fp8LossProducts(Fp8Config(output_layer=True))
    route = Route(group=one, sequence_parallel=False, main_grad=total)
    # As in training, where the weight is cast once a step.
    narrow.weight_changed()

    def fused(**options: Any) -> object:
        return backward(fused_linear_cross_entropy(hidden, weight, target, one, chunk_tokens=chunk_tokens, **options))

    return {
        "torch": lambda: backward(F.cross_entropy(F.linear(hidden, weight).float(), target, reduction="none")),
        "unfused": lambda: backward(vocab_parallel_cross_entropy(F.linear(hidden, weight), target, group=one)),
        "fused": fused,
        "fused, weights known": lambda: fused(token_weights=ones),
        "fused, main gradient": lambda: fused(main_grad=total),
        "fused, weights known, main gradient": lambda: fused(token_weights=ones, main_grad=total),
        "eight bits, main gradient": lambda: backward(narrow.losses(hidden, weight, target, ones, route, weight.shape[0])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[0, 1024, 2048, 4096], help="0 for the default")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16
    hidden = torch.randn(arguments.tokens, arguments.width, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(arguments.vocab, arguments.width, device=device) * 0.02).to(dtype).requires_grad_()
    target = torch.randint(0, arguments.vocab, (arguments.tokens,), device=device)
    flops = 6 * arguments.tokens * arguments.width * arguments.vocab
    rows: list[dict[str, Any]] = []
    for chunk in arguments.chunk_tokens:
        for name, work in variants(hidden, weight, target, chunk or None).items():
            if chunk != arguments.chunk_tokens[0] and not name.startswith("fused"):
                continue
            values = measure(work, device, warmup=3, steps=arguments.steps)
            rows.append({"variant": name, "chunk_tokens": chunk, "model_tflops_per_s": flops / values["median_ms"] / 1e9, **values})
            print(rows[-1], flush=True)
    if arguments.output:
        sizes = {"tokens": arguments.tokens, "width": arguments.width, "vocab": arguments.vocab, "dtype": "bfloat16"}
        record(arguments.output, {"work": "forward and backward of output projection and cross entropy", **sizes, "rows": rows})


if __name__ == "__main__":
    main()
