# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Time of one pre-training step of the quickstart's model.

python -m tools.bench.pretrain_step --ranks 1 2 --output docs/benchmarks/pretrain_step.json
"""

import argparse
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from mcore_parallel import ParallelPlan
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from tools.assemble import assemble
from tools.bench._record import record
from tools.launch import launch
from tools.recipes import RunConfig, recipe


def measure(config: RunConfig, kind: str, warmup: int, steps: int) -> dict[str, float]:
    """Median seconds of a step on this rank, with random tokens."""
    device = torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    parts = assemble(config, device)
    train = config.train
    generator = torch.Generator().manual_seed(parts.groups.dp.rank)
    shape = (train.micro_batch_size, train.seq_len)
    count = train.global_batch_size // (train.micro_batch_size * parts.groups.dp.size)
    batches = [
        Batch(
            tokens=torch.randint(config.model.vocab_size, shape, generator=generator).to(device),
            labels=torch.randint(config.model.vocab_size, shape, generator=generator).to(device),
            loss_mask=torch.ones(shape, device=device),
        )
        for _ in range(count)
    ]
    times = []
    for _ in range(warmup + steps):
        begin = time.perf_counter()
        train_step(parts.model, batches, CrossEntropyObjective(), parts.sync, parts.optimizer, lr=1e-4)
        if kind == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    times = times[warmup:]
    memory = torch.cuda.max_memory_allocated() / 2**20 if kind == "cuda" else 0.0
    return {"median_ms": statistics.median(times) * 1e3, "min_ms": min(times) * 1e3, "peak_mib": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    base = recipe("moe_tiny")
    base = dataclasses.replace(base, train=dataclasses.replace(base.train, dtype=arguments.dtype))
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        plans = (
            [ParallelPlan()] if ranks == 1 else [ParallelPlan(tp=ranks, ep=ranks), ParallelPlan(dp=ranks, ep=ranks), ParallelPlan(pp=ranks)]
        )
        for plan in plans:
            config = dataclasses.replace(base, plan=plan)
            values = launch(measure, ranks, device=kind, config=config, kind=kind, warmup=5, steps=arguments.steps)[0]
            tokens = base.train.global_batch_size * base.train.seq_len
            layout = {"tp": plan.tp, "pp": plan.pp, "dp": plan.dp, "ep": plan.ep}
            rows.append({"ranks": ranks, **layout, "dtype": arguments.dtype, "tokens_per_s": tokens / values["median_ms"] * 1e3, **values})
            print(rows[-1], flush=True)
    if arguments.output:
        record(arguments.output, {"work": "one step of moe_tiny", "rows": rows})


if __name__ == "__main__":
    main()
