# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Votes of ranks that share experts: all step together or none, whatever the order in which work, pauses and calls arrive."""

import itertools
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mcore_inference import LockstepConfig
from mcore_inference.engine._expert_peers import ExpertPeers
from mcore_inference.engine._expert_votes import Decision, Vote, decide
from mcore_inference.requests import RankFailedError
from mcore_parallel import ParallelPlan, ProcessGroups

MISMATCH = "ep rank 1 has weight_version=2 and ep rank 0 3; load the same weights on all"
AGAIN = "ep rank {} has not loaded weight_version=3 again, as others have; load the same weights on all"
HALF = "ep rank 1 has weights of a load that failed half-way; repeat it"


@pytest.mark.parametrize(
    ("votes", "decision"),
    [
        ([Vote(False, None, 3), Vote(False, None, 3)], Decision(False)),
        ([Vote(False, None, 3), Vote(True, None, 3)], Decision(True)),
        ([Vote(True, None, 3), Vote(False, "is paused", 3)], Decision(False, "ep rank 1 is paused")),
        ([Vote(True, None, 3), Vote(False, "is paused", 2)], Decision(False, "ep rank 1 is paused", unequal=MISMATCH)),
        (
            [Vote(True, None, 3), Vote(True, None, 2)],
            Decision(False, MISMATCH, unequal=MISMATCH),
        ),
        ([Vote(True, None, 3), Vote(False, None, -1)], Decision(False, HALF, unequal=HALF)),
        ([Vote(True, None, 3, is_home=True), Vote(False, None, 3, is_home=True)], Decision(True)),
        ([Vote(True, None, 3, is_home=True), Vote(False, None, 3)], Decision(False, AGAIN.format(1), unequal=AGAIN.format(1))),
        ([Vote(True, None, 3), Vote(False, None, 3, is_home=True)], Decision(False, AGAIN.format(0), unequal=AGAIN.format(0))),
        # The shortest patience, and the longest work.
        ([Vote(True, None, 3, max_steps=20, num_left=4), Vote(True, None, 3, max_steps=9, num_left=7)], Decision(True, num_steps=7)),
        ([Vote(True, None, 3, max_steps=20, num_left=40), Vote(False, None, 3, max_steps=9, num_left=90)], Decision(True, num_steps=9)),
        # The recording that holds the most rows of any rank, or none where a rank has none of that size, or another step.
        (
            [Vote(True, None, 3, graph_rows=4, max_graph_rows=8), Vote(False, None, 3, graph_rows=1, max_graph_rows=8)],
            Decision(True, graph_rows=4),
        ),
        ([Vote(False, None, 3, graph_rows=1, max_graph_rows=4), Vote(True, None, 3, graph_rows=8, max_graph_rows=8)], Decision(True)),
        ([Vote(True, None, 3, graph_rows=4, max_graph_rows=8), Vote(True, None, 3, max_graph_rows=8)], Decision(True)),
        ([Vote(False, None, 3, graph_rows=1, max_graph_rows=8), Vote(False, None, 3, graph_rows=1, max_graph_rows=8)], Decision(False)),
        # Steps go on until all are to load.
        ([Vote(True, None, 3, 4, "keep"), Vote(False, None, 3)], Decision(True, missing=(1,))),
        ([Vote(True, None, 3, 4, "keep"), Vote(False, "is paused", 2, 4, "keep")], Decision(False, loads=True)),
        (
            [Vote(True, None, 3, 4, "keep"), Vote(True, None, 3, 4, "drain")],
            Decision(
                False,
                load_error="ep rank 1 calls load_weights(version=4, in_flight='drain') and ep rank 0 calls "
                "load_weights(version=4, in_flight='keep'); make one call on all",
            ),
        ),
        ([Vote(True, None, 3, 4, "drain"), Vote(False, None, 3, 4, "drain")], Decision(True)),
        ([Vote(False, None, 3, 4, "drain"), Vote(False, "is paused", 3, 4, "drain")], Decision(False, loads=True)),
        (
            [Vote(True, None, 3, 4, "drain"), Vote(False, "is paused", 3, 4, "drain")],
            Decision(False, load_error="in_flight='drain' needs steps, and ep rank 1 is paused; end that, or choose recompute or keep"),
        ),
    ],
)
def test_all_step_where_one_has_work_and_none_is_held(votes: list[Vote], decision: Decision) -> None:
    assert decide(votes) == decision


def vote_at_random(seed: int, num_turns: int, spans: bool) -> tuple[int, list[int], int, list[Exception]]:
    """Work, pauses and weights come in random turns, until all work is done: steps of this rank, those before each load, and votes."""
    groups = ProcessGroups.build(ParallelPlan(dp=3, ep=3))
    peers = ExpertPeers(SimpleNamespace(groups=groups))  # type: ignore[arg-type]
    chance = random.Random(seed * 10 + dist.get_rank())
    failures: list[Exception] = []
    called, all_done = threading.Event(), threading.Event()
    peers.open(LockstepConfig(join_timeout_s=20, silence_timeout_s=20), failures.append, called.set)
    peers.spans_steps = spans
    num_steps = work = version = 0
    steps_before: list[int] = []
    hold: str | None = None

    def vote() -> None:
        nonlocal num_steps, work, version
        own = Vote(work > 0, hold, version, *(peers.load or (None, None)), peers.max_steps, work)
        if not peers.wants_round(own):
            called.wait(0.002 * chance.random())
            called.clear()
            return
        is_decided = peers.num_left > 0
        decision = peers.decide(own)
        if decision.steps:
            assert hold is None or is_decided
            num_steps, work = num_steps + 1, max(0, work - 1 if hold is None else work)
        elif decision.loads:
            assert peers.load is not None and (peers.load[1] != "drain" or not work)
            version, peers.load = peers.load[0], None
            steps_before.append(num_steps)
        else:
            assert decision.load_error is None or "is paused" in decision.load_error

    for turn in itertools.count():
        # However fast the machine is, as much comes.
        is_open = turn < num_turns
        if not (is_open or work or hold or version < 3):
            break
        work += chance.randrange(9) if is_open and chance.random() < 0.2 and peers.load is None else 0
        if not is_open or chance.random() < 0.1:
            hold = None if hold or not is_open else "is paused"
        if peers.load is None and version < 3 and (not is_open or chance.random() < 0.02):
            peers.load = version + 1, ["keep", "drain", "recompute"][version]
        vote()
        if chance.random() < 0.3:
            time.sleep(0.002 * chance.random())
    # Others may still have work, for which this rank steps too.
    threading.Thread(target=lambda: (dist.barrier(), all_done.set())).start()
    while not all_done.is_set() or peers.last.steps or peers.last.loads:
        vote()
    return num_steps, steps_before, peers.num_rounds, failures


@pytest.mark.world(3)
@pytest.mark.parametrize(("seed", "spans"), [(1, False), (2, True), (3, True)])
def test_ranks_that_pause_work_and_load_at_random_step_equally_often(world: Callable[..., list[Any]], seed: int, spans: bool) -> None:
    one, two, three = world(vote_at_random, seed=seed, num_turns=200, spans=spans)
    assert one == two == three
    num_steps, steps_before, _, failures = one
    assert num_steps > 20 and len(steps_before) == 3 and not failures


class Wire:
    """A link that keeps what goes over it, up to the last message."""

    def __init__(self, is_closed: threading.Event) -> None:
        self.sent: list[dict[str, Any]] = []
        self._is_closed = is_closed

    def send(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            # Whoever may close the ranks meanwhile does.
            self._is_closed.wait(0.3)
        if not any("end" in before for before in self.sent):
            self.sent.append(message)

    def end(self) -> None:
        self.send({"end": None})

    def join(self, _: float) -> None:
        pass


@pytest.mark.parametrize("closes", ["waiter", "on_failure"])
def test_a_rank_that_closes_for_a_lost_one_names_that_to_the_others_first(closes: str) -> None:
    group = SimpleNamespace(rank=0, ranks=(0, 1, 2))
    peers = ExpertPeers(SimpleNamespace(groups=SimpleNamespace(tp_ep_pp=group)))  # type: ignore[arg-type]
    has_voted, is_closed = threading.Event(), threading.Event()
    wires = {rank: Wire(is_closed) for rank in (1, 2)}
    peers._links = wires  # type: ignore[assignment]
    peers._on_call = has_voted.set

    def close(*_: object) -> None:
        peers.close()
        is_closed.set()

    def step() -> None:
        with pytest.raises(RankFailedError, match="ep rank 1 is gone"):
            peers.decide(Vote(True, None, 0))
        close()

    if closes == "on_failure":
        peers._on_failure = close
        peers._lose(1, "is gone")
    else:
        stepping = threading.Thread(target=step, daemon=True)
        stepping.start()
        assert has_voted.wait(60)
        peers._lose(1, "is gone")
        stepping.join(60)
    assert is_closed.is_set()
    messages = [message for message in wires[2].sent if "call" not in message]
    assert messages == [{"failed": 1, "what": "is gone", "tells": True}, {"end": None}]
