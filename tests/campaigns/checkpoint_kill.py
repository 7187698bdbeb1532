# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that save steps one after another, killed at a random time: the newest committed step loads, none is lost.

Every other asynchronous trial also kills the writer processes again and again meanwhile; training goes on and saves the next step.

python -m tests.campaigns.checkpoint_kill --kills 1000 --output docs/benchmarks/checkpoint_kill.json
"""

import argparse
import json
import os
import random
import signal
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt import CheckpointingException, CheckpointManager, ShardedTensor, read_tensor
from mcore_ckpt.manifest import is_checkpoint
from tools.bench._record import record

__all__ = ["Kill", "campaign", "main"]

_REPORT = struct.Struct("<i")
"""A step that is committed; -1 for one that was lost with its writer."""
_SHAPES = {"layers.0.weight": (64, 48), "layers.1.weight": (64, 48), "norm": (48,), "optim.moments": (4001,)}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """What one trial came to."""

    asynchronous: bool
    whole_job: bool
    """Whether all ranks were killed at once, or one first and the others when they had noticed."""
    kill_writers: bool
    """Whether the writer processes were killed meanwhile."""
    saves_lost: int
    """Saves that were refused because of it."""
    confirmed: int
    """The newest step whose save had returned on the first rank."""
    found: int
    """The newest step afterwards."""
    half_done: bool
    """Whether a later step had been begun."""
    problem: str = ""


def campaign(kills: int, folder: Path, *, num_ranks: int = 4, seed: int = 0, span_s: float = 0.25) -> Iterator[Kill]:
    """Kill ``kills`` jobs of ``num_ranks`` processes, each at a time drawn evenly from ``span_s`` of continuous saving.

    Synchronous and asynchronous saves take turns; every third time one rank dies alone. What came of each is told as it happens.
    """
    rng = random.Random(seed)
    # The children are forked: no thread may be running here.
    torch.set_num_threads(1)
    for number in range(kills):
        with tempfile.TemporaryDirectory(dir=folder) as place:
            trial = _Trial(number % 2 == 1, number % 3 != 2, number % 4 == 3, rng.uniform(0, span_s), rng.randrange(num_ranks))
            result = _one(Path(place), num_ranks, trial)
        yield result


@dataclass(frozen=True)
class _Trial:
    asynchronous: bool
    whole_job: bool
    kill_writers: bool
    delay_s: float
    victim: int


def _one(place: Path, num_ranks: int, trial: _Trial) -> Kill:
    asynchronous, whole_job, victim = trial.asynchronous, trial.whole_job, trial.victim
    reading, writing = os.pipe()
    ranks = []
    for rank in range(num_ranks):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            os.close(reading)
            _save_for_ever(place, rank, num_ranks, trial, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as reports:
        # Step 0 is there: saving goes on from here.
        first = reports.read(_REPORT.size)
        # Where writers are killed, there is time for some of them.
        time.sleep(trial.delay_s * (4 if trial.kill_writers else 1))
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
        said = first + reports.read()
    steps = [step for (step,) in _REPORT.iter_unpack(said)]
    confirmed, lost = max(steps, default=-1), sum(step < 0 for step in steps)
    manager = CheckpointManager(place / "run", keep=2)
    found = manager.latest()
    facts = {"asynchronous": asynchronous, "whole_job": whole_job, "confirmed": confirmed}
    facts |= {"kill_writers": trial.kill_writers, "saves_lost": lost}
    if not first or found is None:
        return Kill(**facts, found=-1, half_done=False, problem="no step at all")
    begun = [path for path in (place / "run").iterdir() if not is_checkpoint(path)]
    problem = _check(manager, found) or ("" if found >= confirmed else f"step {confirmed} was confirmed and is gone")
    if not problem:
        # Whoever starts again saves on, and what was half done goes. Steps lost with their writer were skipped.
        newest = max([found, *(int(path.name.removeprefix("step_")) for path in begun)])
        manager.save(newest + 1, {"w": torch.ones(1)})
        if any(path.exists() and not is_checkpoint(path) for path in begun):
            problem = "what was half done stays"
    return Kill(**facts, found=found, half_done=bool(begun), problem=problem)


def _save_for_ever(place: Path, rank: int, num_ranks: int, trial: _Trial, report: int) -> None:
    try:
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=num_ranks, timeout=limit)
        manager = CheckpointManager(place / "run", keep=2)
        rng = random.Random(rank)
        for step in range(1_000_000):
            told = step
            if trial.kill_writers and step and rng.random() < 0.3:
                threading.Timer(rng.uniform(0, 0.02), _kill_writer, (manager,)).start()
            try:
                request = manager.save(step, _state(rank, num_ranks, step), {"step": step}, asynchronous=trial.asynchronous)
                if request is not None:
                    request.wait()
            except CheckpointingException as error:
                if "the writer process" not in str(error):
                    raise
                told = -1
            if rank == 0:
                os.write(report, _REPORT.pack(told))
    finally:
        os._exit(1)


def _kill_writer(manager: CheckpointManager) -> None:
    manager._worker.kill()


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
    start, results = time.monotonic(), []
    for result in campaign(options.kills, options.folder, num_ranks=options.ranks, seed=options.seed):
        results.append(result)
        # What was done stands, should it be interrupted.
        if options.output and len(results) % 50 == 0:
            record(options.output, _figures(results, options.ranks, start))
    figures = _figures(results, options.ranks, start)
    print(json.dumps(figures, indent=1))
    if options.output:
        record(options.output, figures)
    return 1 if figures["lost_or_damaged"] else 0


def _figures(results: Sequence[Kill], num_ranks: int, start: float) -> dict[str, Any]:
    bad = [result.problem for result in results if result.problem]
    return {
        "kills": len(results),
        "ranks": num_ranks,
        "asynchronous": sum(result.asynchronous for result in results),
        "writers_killed_meanwhile": sum(result.kill_writers for result in results),
        "saves_lost_with_their_writer": sum(result.saves_lost for result in results),
        "one_rank_alone": sum(not result.whole_job for result in results),
        "killed_with_a_step_half_done": sum(result.half_done for result in results),
        "newest_after_minus_confirmed": dict(sorted(Counter(str(result.found - result.confirmed) for result in results).items())),
        "lost_or_damaged": len(bad),
        "problems": bad[:10],
        "seconds": round(time.monotonic() - start, 1),
    }


if __name__ == "__main__":
    raise SystemExit(main())
