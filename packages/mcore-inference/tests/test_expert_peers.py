# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Votes of ranks that share experts: all step together or none, whatever the order in which work, pauses and calls arrive."""

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mcore_inference import LockstepConfig
from mcore_inference.engine._expert_peers import Decision, ExpertPeers, Vote, decide
from mcore_parallel import ParallelPlan, ProcessGroups


@pytest.mark.parametrize(
    ("votes", "decision"),
    [
        ([Vote(False, None, 3), Vote(False, None, 3)], Decision(False)),
        ([Vote(False, None, 3), Vote(True, None, 3)], Decision(True)),
        ([Vote(True, None, 3), Vote(False, "is paused", 2)], Decision(False, "ep rank 1 is paused")),
        (
            [Vote(True, None, 3), Vote(True, None, 2)],
            Decision(False, "ep rank 1 has weight_version=2 and ep rank 0 3; load the same weights on all"),
        ),
    ],
)
def test_all_step_where_one_has_work_and_none_is_held(votes: list[Vote], decision: Decision) -> None:
    assert decide(votes) == decision


def vote_at_random(seed: int, seconds: float) -> tuple[int, list[Exception]]:
    """Work, pauses and weights come at random times, until all work is done: the steps of this rank."""
    groups = ProcessGroups.build(ParallelPlan(dp=3, ep=3))
    peers = ExpertPeers(SimpleNamespace(groups=groups))  # type: ignore[arg-type]
    chance = random.Random(seed * 10 + dist.get_rank())
    failures: list[Exception] = []
    called, all_done = threading.Event(), threading.Event()
    peers.open(LockstepConfig(join_timeout_s=20, silence_timeout_s=20), failures.append, called.set)
    num_steps = work = 0
    hold: str | None = None
    end = time.monotonic() + seconds

    def vote() -> None:
        nonlocal num_steps, work
        own = Vote(work > 0, hold, 0)
        if not peers.wants_round(own):
            called.wait(0.002 * chance.random())
            called.clear()
        elif peers.decide(own).steps:
            assert hold is None
            num_steps, work = num_steps + 1, max(0, work - 1)

    while work or time.monotonic() < end:
        is_open = time.monotonic() < end
        work += chance.randrange(3) if is_open and chance.random() < 0.2 else 0
        if not is_open or chance.random() < 0.1:
            hold = None if hold or not is_open else "is paused"
        vote()
        if chance.random() < 0.3:
            time.sleep(0.002 * chance.random())
    # Others may still have work, for which this rank steps too.
    threading.Thread(target=lambda: (dist.barrier(), all_done.set())).start()
    while not all_done.is_set() or peers.last.steps:
        vote()
    return num_steps, failures


@pytest.mark.world(3)
@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_pause_and_work_at_random_make_equally_many_steps(world: Callable[..., list[Any]], seed: int) -> None:
    one, two, three = world(vote_at_random, seed=seed, seconds=1.0)
    assert one == two == three
    assert one[0] > 20 and not one[1]
