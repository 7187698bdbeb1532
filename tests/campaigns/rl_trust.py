# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What goes wrong in reinforcement learning costs itself, is counted exactly and is named in time.

Parts: stragglers (one answer of 64 never ends), crashes (answers that end, kill, fill or hang their judge's process), conversations (their
tools do), refits (the engine's process is killed while weights come), resumes (a run is killed in each of its phases and started again),
drift (a learning rate of 0 over 200 iterations), layouts (weights between random layouts, the digest of every tensor compared), packing
(bins of log-normal lengths).

python -m tests.campaigns.rl_trust --output docs/benchmarks/rl_trust.json
"""

import argparse
import asyncio
import hashlib
import json
import logging
import os
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import (
    GenericGenerationArgs,
    GRPOConfig,
    InferenceInterface,
    InferenceRequest,
    InferenceResponse,
    JudgeLimits,
    PackingConfig,
    Placement,
    ProcessJudge,
    RefitTimeoutError,
    WeightTransfer,
    plan_refit,
    refit,
)
from mcore_rl._rollouts._collect import draw, exchange
from mcore_rl.envs import CharacterShare
from tests.campaigns._rl_conversations import conversations
from tests.campaigns._rl_resume import PHASES, mismatches, resume
from tests.support.environments import Hostile
from tests.support.refit_layouts import carried, random_layout
from tests.support.world import run as run_world
from tools.bench._record import record

__all__ = ["conversations", "crashes", "drift", "killed_refits", "layouts", "main", "packing", "resumes", "stragglers"]

_SIZES = TransformerConfig(num_layers=4, hidden_size=64, num_attention_heads=2, ffn_hidden_size=96, vocab_size=256)
_HOSTILE = ("exit", "kill", "loop", "memory", "raise", "text", "network")
_ENDS_ITS_PROCESS = {"exit", "kill", "loop"}


class _Scripted(InferenceInterface):
    """Gives the answers of a list, one a request; None never comes."""

    def __init__(self, answers: Sequence[str | None]) -> None:
        self._answers, self.running = iter(answers), 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        answer, [prompt] = next(self._answers), request.prompts
        self.running += 1
        try:
            await asyncio.sleep(3600 if answer is None else 0)
        finally:
            self.running -= 1
        text = answer or ""
        return [[InferenceResponse(response=text, token_ids=[*prompt, 1], prompt_length=len(prompt), logprobs=[-1.0])]]


def stragglers(runs: int) -> dict[str, Any]:
    """One of 64 answers never ends: its group goes on without it after ``rollout_timeout_s``."""
    config = GRPOConfig(num_groups=8, group_size=8, seq_len=8, rollout_timeout_s=0.2)
    lost, left, seconds, unequal = 0, 0, [], 0
    for run in range(runs):
        answers: list[str | None] = ["a"] * 64
        answers[run % 64] = None
        interface, begin = _Scripted(answers), time.monotonic()
        drawn = draw(config, CharacterShare(["x"], "a"), interface, 8)
        groups = exchange(config, drawn, ProcessGroups.single(), torch.device("cpu")).groups
        seconds.append(time.monotonic() - begin)
        lost += 64 - sum(map(len, groups))
        left += interface.running
        unequal += sorted(map(len, groups)) != [7] + [8] * 7
    return {
        "part": "stragglers", "runs": runs, "answers": 64 * runs, "limit_s": config.rollout_timeout_s, "lost": lost,
        "still_running": left, "wrong_groups": unequal, "median_s": _round(statistics.median(seconds)), "most_s": _round(max(seconds)),
        "ok": lost == runs and not left and not unequal and max(seconds) < 5,
    }  # fmt: skip


def crashes(count: int) -> dict[str, Any]:
    """One answer of 8 does something to its judge; the others are judged as ever."""
    judge = ProcessJudge(Hostile, JudgeLimits(num_workers=2, time_s=0.5, memory_gb=0.5))
    lost, wrong, seconds, begin = 0, 0, [], time.monotonic()
    kinds = [_HOSTILE[number % len(_HOSTILE)] for number in range(count)]
    try:
        for number, hostile in enumerate(kinds):
            answers: list[str | None] = ["good", "bad"] * 4
            answers[number % 8] = hostile
            wanted = sorted(float(answer == "good") for answer in answers if answer != hostile)
            start = time.monotonic()
            group = asyncio.run(judge.group_rollout(_Scripted(answers), size=8, args=GenericGenerationArgs(max_tokens=1)))
            seconds.append(time.monotonic() - start)
            lost += 8 - len(group)
            wrong += sorted(rollout.reward for rollout in group) != wanted
        restarts = judge.num_restarts
    finally:
        judge.close()
    ended = sum(kind in _ENDS_ITS_PROCESS for kind in kinds)
    # The process that the last one ended is replaced by the next judgement that needs it.
    return {
        "part": "crashes", "crashes": count, "kinds": dict(Counter(kinds)), "answers": 8 * count, "lost": lost, "wrong_rewards": wrong,
        "processes_ended": ended, "processes_replaced": restarts, "median_s": _round(statistics.median(seconds)),
        "most_s": _round(max(seconds)), "seconds": _round(time.monotonic() - begin),
        "ok": lost == count and not wrong and ended - 2 <= restarts <= ended,
    }  # fmt: skip


class _Dying:
    """An engine that is killed when it has taken so many weights of the second refit."""

    def __init__(self, after: int) -> None:
        self._after, self._refits = after, 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._refits += 1
        for number, _ in enumerate(weights):
            if self._refits == 2 and number == self._after:
                os.kill(os.getpid(), signal.SIGKILL)


def _refit_into_dying(after: int) -> tuple[float, str]:
    placement, transfer = Placement.split(ParallelPlan()), WeightTransfer(bucket_bytes=20_000, timeout_s=10.0)
    model = None if placement.groups is None else GPTModel(_SIZES, placement.groups, seed=3)
    sink = None if placement.trains else _Dying(after)
    refit(model, placement.groups, sink, transfer, placement=placement)
    begin = time.monotonic()
    try:
        refit(model, placement.groups, sink, transfer, placement=placement)
        # What fits into the connection's memory is sent; the next one waits for the engine.
        refit(model, placement.groups, sink, transfer, placement=placement)
    except (RefitTimeoutError, RuntimeError) as error:
        return time.monotonic() - begin, f"{type(error).__name__}: {error}"
    return time.monotonic() - begin, ""


def killed_refits(count: int, seed: int = 0) -> dict[str, Any]:
    """The engine's process is killed after a random number of weights; how soon the trainer is told, and by what name."""
    num_weights = sum(1 for _ in GPTModel(_SIZES, ProcessGroups.single(), device="meta", seed=None).named_parameters())
    rng, seconds, named, untold = random.Random(seed), [], 0, 0
    for _ in range(count):
        told = run_world(_refit_into_dying, 2, doomed=(1,), after=rng.randrange(num_weights))[0]
        seconds.append(told[0])
        untold += not told[1]
        named += "rank 1" in told[1]
    return {
        "part": "refits", "killed": count, "untold": untold, "named": named, "median_s": _round(statistics.median(seconds)),
        "most_s": _round(max(seconds)), "ok": not untold and named == count and max(seconds) < 10,
    }  # fmt: skip


def resumes(count: int) -> dict[str, Any]:
    """Runs that are killed twice in a phase, and end when they are started once more."""
    torch.set_num_threads(1)
    problems, kills, begin = [], Counter[str](), time.monotonic()
    for number in range(count):
        phase = PHASES[number % len(PHASES)]
        with tempfile.TemporaryDirectory() as folder:
            result = resume(Path(folder), phase, number)
        kills[phase] += result.kills
        problems += [f"{phase}: {result.problem}"] if result.problem else []
    return {
        "part": "resumes", "runs": count, "kills": dict(kills), "problems": problems[:10], "seconds": _round(time.monotonic() - begin),
        "ok": not problems and all(kills[phase] for phase in PHASES[:count]),
    }  # fmt: skip


def drift(steps: int) -> dict[str, Any]:
    """A policy that does not move: engine and trainer stay as close as they are at first."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        values = mismatches(Path(folder), steps)
    half = len(values) // 2
    first, second = (statistics.mean(part) for part in (values[:half] or values, values[half:]))
    return {
        "part": "drift", "steps": len(values), "dtype": "float32", "first_half": first, "second_half": second, "most": max(values),
        "ok": len(values) == steps and max(values) < 1e-6 and second < 1.5 * first + 1e-7,
    }  # fmt: skip


def layouts(count: int) -> dict[str, Any]:
    """Weights between random layouts: SHA-256 of every tensor of every destination, against that of the whole weights."""
    tensors, wrong, begin = 0, 0, time.monotonic()
    for number in range(count):
        generator = random.Random(f"pair {number}")
        names = ["bias", "scalar", "square", "stack", "vocabulary"][: generator.randint(1, 5)]
        dims = {"bias": 1, "scalar": 0, "square": 2, "stack": 3, "vocabulary": 2}
        shapes = {name: tuple(generator.randint(1, 9) for _ in range(dims[name])) for name in names}
        whole = {
            name: torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number)) for name, shape in shapes.items()
        }
        sources = random_layout(shapes, generator, 0)
        destinations = random_layout(shapes, generator, generator.choice((0, 3, 64)))
        for shard, value, expected in carried(plan_refit(sources, destinations), whole, sources, destinations):
            tensors += 1
            wrong += _digest(value) != _digest(expected) or not shard.name
    return {
        "part": "layouts",
        "pairs": count,
        "tensors": tensors,
        "wrong": wrong,
        "seconds": _round(time.monotonic() - begin),
        "ok": not wrong,
    }


def packing(count: int) -> dict[str, Any]:
    """Share of the places of bins that are filled, of log-normal lengths."""
    shares: dict[str, list[float]] = {}
    for seed in range(count):
        generator = random.Random(seed)
        lengths = [min(8192, max(1, int(generator.lognormvariate(6.5, 0.9)))) for _ in range(2048)]
        for algorithm in ("first_fit_decreasing", "best_fit_decreasing", "next_fit"):
            bins = PackingConfig(bin_size=8192, algorithm=algorithm).bins(lengths)
            shares.setdefault(algorithm, []).append(sum(lengths) / (8192 * len(bins)))
    least = {name: _round(min(values)) for name, values in shares.items()}
    return {
        "part": "packing",
        "draws": count,
        "sequences": 2048,
        "bin_size": 8192,
        "least": least,
        "ok": least["first_fit_decreasing"] > 0.97,
    }


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def _round(value: float) -> float:
    return round(value, 4)


def campaign(parts: Sequence[str], share: float) -> Iterator[dict[str, Any]]:
    """A row of each part; ``share`` of the full numbers."""

    def number(full: int) -> int:
        return max(1, round(full * share))

    run: dict[str, Callable[[], dict[str, Any]]] = {
        "stragglers": lambda: stragglers(number(50)),
        "crashes": lambda: crashes(number(100)),
        "conversations": lambda: conversations(number(100)),
        "refits": lambda: killed_refits(number(100)),
        "resumes": lambda: resumes(number(45)),
        "drift": lambda: drift(number(200)),
        "layouts": lambda: layouts(number(500)),
        "packing": lambda: packing(number(50)),
    }
    for part in parts:
        yield run[part]()


_PARTS = ("stragglers", "crashes", "conversations", "refits", "resumes", "drift", "layouts", "packing")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign, write its figures; 1 where something was lost, doubled or told too late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--share", type=float, default=1.0, help="of the full number of trials")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    for row in campaign(options.parts, options.share):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.output:
            record(options.output, {"work": "what goes wrong in reinforcement learning, on CPU cores", "rows": rows})
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
