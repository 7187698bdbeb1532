# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Refit between a trainer and an engine that are processes of one device. Random weights."""

import statistics
import tempfile
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mcore_parallel import ParallelPlan
from mcore_parallel.models import GPTModel
from mcore_rl import Placement, WeightTransfer, refit
from tools.bench.rl import Clock, Work, build_engine
from tools.bench.serve import MODELS

__all__ = ["refits_between"]
_LATER = 5
_LIMIT_S = 300.0


def refits_between(model: str, work: Work, device: torch.device) -> dict[str, Any]:
    """The first, and the median of later ones, of the process that takes longer; memory of each beyond what it has anyway, and what the
    device holds more after the last than after the first.

    Args:
        model: the shape.
        work: sizes of the engine.
        device: of both.
    """
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Any] = []
        processes: list[Any] = []
        for rank in range(2):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, model, work, str(device), f"file://{folder}/store", theirs), daemon=True)
            process.start()
            # Who dies closes it.
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            trainer, engine = (pipe.recv() for pipe in pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()
    assert trainer["sums"] == engine["sums"], "the engine has other weights"
    times = [max(pair) for pair in zip(trainer["ms"], engine["ms"], strict=True)]
    return {
        "first_ms": round(times[0], 2), "later_ms": round(statistics.median(times[1:]), 2),
        "trainer_extra_mib": trainer["extra_mib"], "engine_extra_mib": engine["extra_mib"], "bucket_mib": trainer["bucket_mib"],
        "device_growth_mib": max(trainer["growth_mib"], engine["growth_mib"]), "ipc": trainer["ipc_peers"] == [1],
    }  # fmt: skip


def _rank(rank: int, model: str, work: Work, kind: str, store: str, pipe: Connection) -> None:
    device = torch.device("cuda", 0) if kind.startswith("cuda") else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # NCCL has no two ranks of one GPU; over these two gloo alone is used.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2)
    placement, clock, transfer = Placement.split(ParallelPlan()), Clock(device), WeightTransfer()
    engine, policy = None, None
    if placement.groups is None:
        engine = build_engine(model, work, device)
        own: Any = engine.model
    else:
        own = policy = GPTModel(MODELS[model], placement.groups, device=device, dtype=torch.bfloat16, seed=None)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.normal_(std=0.02)
    ms, used, extra = [], [], []
    for _ in range(1 + _LATER):
        placement.gather(None, _LIMIT_S, "refit")
        clock.peak()
        before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        ms.append(1e3 * clock(lambda: refit(policy, placement.groups, engine, transfer, placement=placement)))
        extra.append(clock.peak() - before)
        placement.gather(None, _LIMIT_S, "refit")
        used.append(clock.used())
    pipe.send(
        {
            "ms": ms, "extra_mib": round(max(0, *extra) / 2**20, 1), "growth_mib": round((used[-1] - used[0]) / 2**20, 1),
            "sums": {name: value.double().sum().item() for name, value in own.named_parameters()},
            "bucket_mib": transfer.bucket_bytes / 2**20, "ipc_peers": sorted(transfer.ipc_peers),
        }
    )  # fmt: skip
