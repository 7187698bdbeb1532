# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that save steps one after another, killed at a random time: the newest committed step loads, none is lost.

python -m tests.campaigns.checkpoint_kill --kills 1000 --output docs/benchmarks/checkpoint_kill.json
"""

import argparse
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointManager, ShardedTensor, read_tensor
from mcore_ckpt.manifest import is_checkpoint
from tools.bench._record import record

__all__ = ["Kill", "campaign", "main"]

_SHAPES = {"layers.0.weight": (64, 48), "layers.1.weight": (64, 48), "norm": (48,), "optim.moments": (4001,)}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What one trial came to."""

    asynchronous: bool
    whole_job: bool
    """Whether all ranks were killed at once, or one first and the others when they had noticed."""
    confirmed: int
    """The newest step whose save had returned on the first rank."""
    found: int
    """The newest step afterwards."""
    half_done: bool
    """Whether a later step had been begun."""
    problem: str = ""


def campaign(kills: int, folder: Path, *, num_ranks: int = 4, seed: int = 0, span_s: float = 0.25) -> list[Kill]:
    """Kill ``kills`` jobs of ``num_ranks`` processes, each at a time drawn evenly from ``span_s`` of continuous saving.

    Synchronous and asynchronous saves take turns; every third time one rank dies alone.
    """
    rng = random.Random(seed)
    # The children are forked: no thread may be running here.
    torch.set_num_threads(1)
    results = []
    for number in range(kills):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            results.append(_one(Path(place), num_ranks, number % 2 == 1, number % 3 != 2, rng.uniform(0, span_s), rng.randrange(num_ranks)))
    return results


def _one(place: Path, num_ranks: int, asynchronous: bool, whole_job: bool, delay_s: float, victim: int) -> Kill:
    reading, writing = os.pipe()
    ranks = []
    for rank in range(num_ranks):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.close(reading)
            _save_for_ever(place, rank, num_ranks, asynchronous, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as reports:
        # Step 0 is there: saving goes on from here.
        first = reports.read(1)
        time.sleep(delay_s)
        os.kill(ranks[victim], signal.SIGKILL)
        if not whole_job:
            # The others must hear of it by themselves; a rank that waits longer than its limit ends too.
            os.waitpid(ranks[victim], 0)
            time.sleep(0.05)
        for rank in ranks:
            if whole_job or rank != ranks[victim]:
                os.kill(rank, signal.SIGKILL)
        for rank in ranks:
            if whole_job or rank != ranks[victim]:
                os.waitpid(rank, 0)
        confirmed = len(first + reports.read()) - 1
    manager = CheckpointManager(place / "run", keep=2)
    found = manager.latest()
    facts = {"asynchronous": asynchronous, "whole_job": whole_job, "confirmed": confirmed}
    if not first or found is None:
        return Kill(**facts, found=-1, half_done=False, problem="no step at all")
    begun = [path for path in (place / "run").iterdir() if not is_checkpoint(path)]
    problem = _check(manager, found) or ("" if found >= confirmed else f"step {confirmed} was confirmed and is gone")
    if not problem:
        # Whoever starts again saves on, and what was half done goes.
        manager.save(found + 1, {"w": torch.ones(1)})
        if any(path.exists() and not is_checkpoint(path) for path in begun):
            problem = "what was half done stays"
    return Kill(**facts, found=found, half_done=bool(begun), problem=problem)


def _save_for_ever(place: Path, rank: int, num_ranks: int, asynchronous: bool, report: int) -> None:
    try:
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=num_ranks, timeout=limit)
        manager = CheckpointManager(place / "run", keep=2)
        for step in range(1_000_000):
            request = manager.save(step, _state(rank, num_ranks, step), {"step": step}, asynchronous=asynchronous)
            if request is not None:
                request.wait()
            if rank == 0:
                os.write(report, b".")
    finally:
        os._exit(1)


def _state(rank: int, num_ranks: int, step: int) -> dict[str, ShardedTensor]:
    state = {}
    for name, shape in _SHAPES.items():
        share = -(-shape[0] // num_ranks)
        begin = min(rank * share, shape[0])
        size = min(share, shape[0] - begin)
        state[name] = ShardedTensor(torch.full((size, *shape[1:]), float(step)), shape, (begin,) + (0,) * (len(shape) - 1))
    state["replicated"] = ShardedTensor(torch.full((1000,), float(step)), (1000,), (0,), rank)
    return state


def _check(manager: CheckpointManager, newest: int) -> str:
    for step in manager.steps():
        try:
            target = {name: torch.full(shape, -1.0) for name, shape in {**_SHAPES, "replicated": (1000,)}.items()}
            _, extra = manager.load(target, step)
        except Exception as error:
            return f"step {step} does not load: {type(error).__name__}: {error}"
        if extra != {"step": step} or any(bool((tensor != step).any()) for tensor in target.values()):
            return f"step {step} holds values of another"
    return "" if bool((read_tensor(manager.path(newest), "norm") == newest).all()) else f"step {newest} holds values of another"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, write its figures, return 1 where a step was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the steps lie meanwhile")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    start = time.monotonic()
    results = campaign(options.kills, options.folder, num_ranks=options.ranks, seed=options.seed)
    bad = [result.problem for result in results if result.problem]
    figures = {
        "kills": len(results),
        "ranks": options.ranks,
        "asynchronous": sum(result.asynchronous for result in results),
        "one_rank_alone": sum(not result.whole_job for result in results),
        "killed_with_a_step_half_done": sum(result.half_done for result in results),
        "newest_after_minus_confirmed": dict(sorted(Counter(str(result.found - result.confirmed) for result in results).items())),
        "lost_or_damaged": len(bad),
        "problems": bad[:10],
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(figures, indent=1))
    if options.output:
        record(options.output, figures)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
