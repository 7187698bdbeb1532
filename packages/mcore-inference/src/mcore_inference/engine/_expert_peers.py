# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines that share the experts of one model: each serves its own requests, and all of them step together."""

import dataclasses
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from mcore_inference._capability import peers_of
from mcore_inference.engine._expert_votes import Decision, Vote, decide
from mcore_inference.engine._lockstep_config import LockstepConfig
from mcore_inference.engine._rank_link import RankLink
from mcore_inference.requests import RankFailedError
from mcore_parallel.groups import connect
from mcore_parallel.models import GPTModel

_VERDICT_S = 3.0
"""That the links get to name a lost rank, when an exchange with it breaks."""
_SPAN_S = 0.05
"""Between two votes, at most, by the duration of the steps before: how long a pause, or a prompt that is in no graph, may wait."""


class ExpertPeers:
    """The ranks that exchange tokens in every step of a mixture, of which this is one.

    A round is one vote of every rank and the decision of the first. Whoever has work begins one, and the others are called; after the
    steps of a decision comes another round, so that all are idle only when none has work. A decision is about several steps where whoever
    drives the ranks allows that: the exchanges of the mixtures keep them together meanwhile, and a rank without work, or that is held,
    makes dummy steps. Votes and decisions travel over gloo, beside the device.

    Args:
        model: of this rank.
    """

    def __init__(self, model: GPTModel) -> None:
        group = peers_of(model)
        self.rank, self._ranks = group.rank, group.ranks
        self._pg: dist.ProcessGroup | None = None
        self.num_steps = 0
        """Of all decisions, the same on every rank."""
        self._changed = threading.Condition()
        self._forget()

    def _forget(self) -> None:
        """Be as before the first round."""
        self.hold: str | None = None
        """Why whoever drives this rank wants no step."""
        self.load: tuple[int, str] | None = None
        """Version and policy of the weights that this rank is to load with all others."""
        self.spans_steps = False
        """Whether whoever drives this rank steps until ``num_left`` is 0, whatever happens: then one vote may do for several steps."""
        self.last = Decision(False)
        """Of the last round."""
        self.num_left = 0
        """Steps of the last decision that this rank has not begun."""
        self._step_s = 1.0
        """Duration of a step."""
        self._decided = 0.0
        """When the last decision came."""
        self._config = LockstepConfig()
        self._links: dict[int, RankLink] = {}
        self._on_failure: Callable[[RankFailedError], None] = lambda _: None
        self._on_call: Callable[[], None] = lambda: None
        self._failure: RankFailedError | None = None
        self.num_rounds = 0
        self._own: Vote | None = None
        """This rank's vote of the present round."""
        self._own_before = Vote(False, None, 0)
        self._called_round = -1
        """The last one that another rank began."""
        self._is_broken = False
        # Of the first rank:
        self._votes: dict[int, Vote] = {}
        self._votes_before: dict[int, Vote] = {}
        self._began: float | None = None
        """When the missing votes were first waited for."""

    def open(
        self, config: LockstepConfig, on_failure: Callable[[RankFailedError], None] | None = None, on_call: Callable[[], None] | None = None
    ) -> None:
        """Connect to the others, which all call this; a step does it with the defaults where nobody did.

        Args:
            config: time-outs.
            on_failure: called once, in another thread, when a rank is lost or late.
            on_call: called in another thread when this rank is to vote.

        Raises:
            TimeoutError: not all ranks came.
        """
        if self._links:
            raise ValueError("the ranks of this engine are connected already; close its runner before you make another")
        self._config = config
        self._on_failure, self._on_call = on_failure or self._on_failure, on_call or self._on_call
        try:
            pg = self._connected(config.join_timeout_s)
        except RuntimeError as error:
            others = [rank for rank in range(len(self._ranks)) if rank != self.rank]
            raise TimeoutError(
                f"ep ranks {others} did not all come within join_timeout_s={config.join_timeout_s:g}; every rank makes its engine, and "
                "then its runner"
            ) from error
        peers = range(1, len(self._ranks)) if self.rank == 0 else (0,)
        with self._changed:
            for peer in peers:
                self._links[peer] = RankLink(pg, peer, silence_s=config.silence_timeout_s, on_message=self._receive, on_lost=self._lose)

    def _connected(self, timeout_s: float) -> dist.ProcessGroup:
        """The gloo group of these ranks, when all are there."""
        if self._pg is not None:
            # One does for all runners of the engine.
            work: Any = dist.barrier(self._pg, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
            return self._pg
        me = self._ranks[self.rank]
        self._pg = connect(self._ranks, me, backend="gloo", timeout_s=timeout_s, name="mcore-experts", local=True).pg
        assert self._pg is not None, "this rank is one of them"
        return self._pg

    # -- rounds ------------------------------------------------------------------------------------------------------

    def wants_round(self, vote: Vote) -> bool:
        """Whether this rank is to vote now, or to make a step that was decided.

        Args:
            vote: what it would say.
        """
        with self._changed:
            if self._failure is not None:
                return vote.has_work
            if self._own is not None:
                return False
            if self.num_left or self._called_round >= self.num_rounds or self.last.steps or self.last.loads:
                return True
            before = self._own_before
            if (vote.load_version, vote.load_policy) != (before.load_version, before.load_policy):
                return True
            if self.last.hold is None:
                return vote.has_work
            return (vote.hold, vote.weight_version) != (before.hold, before.weight_version)

    @property
    def are_stepping(self) -> bool:
        """Whether steps were decided last, for the work of any rank, and none has left since; or all are held, which may have work."""
        with self._changed:
            return self._failure is None and (self.num_left > 0 or self.last.steps or self.last.hold is not None)

    @property
    def max_steps(self) -> int:
        """Steps that this rank allows between two votes."""
        if not self.spans_steps:
            return 1
        with self._changed:
            return max(1, min(self._config.vote_interval_steps, int(_SPAN_S / self._step_s)))

    def decide(self, vote: Vote) -> Decision:
        """Vote and wait for the others; or say again what was decided, while steps of it are left.

        Raises:
            RankFailedError: a rank is lost, late, failed in a step, or is closed while this one has work.
            TimeoutError: not all ranks came to the first round.
        """
        if not self._links:
            self.open(LockstepConfig())
        with self._changed:
            self._check(vote)
            if self._failure is not None:
                return Decision(False)
            if self.num_left:
                self.num_left -= 1
                return self.last
            now = time.monotonic()
            if self.last.steps:
                # A pause of the caller between two steps counts too: it makes votes come sooner.
                self._step_s = 0.5 * self._step_s + 0.5 * (now - self._decided) / self.last.num_steps
            self._own = self._own_before = vote
        if self.rank == 0:
            self._count(0, vote)
        else:
            self._links[0].send({"vote": dataclasses.asdict(vote)})
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or self._own is None)
            self._check(vote)
            if self._failure is not None:
                return Decision(False)
            self.num_left = self.last.num_steps - 1 if self.last.steps else 0
            self.num_steps += self.last.num_steps if self.last.steps else 0
            self._decided = time.monotonic()
            return self.last

    def fail(self, error: Exception) -> RankFailedError:
        """After an error in the middle of a step, whose exchanges the others wait for: what ended the ranks.

        An exchange breaks where another rank is lost, which its link then says.
        """
        if isinstance(error, RuntimeError):
            with self._changed:
                self._changed.wait_for(lambda: self._failure is not None, _VERDICT_S)
        if self._failure is None:
            self._fail(self._failed(self.rank, f"failed in a step: {type(error).__name__}: {error}"[:1000]))
        assert self._failure is not None
        return self._failure

    def close(self) -> None:
        """Leave; the others cannot step any more. When all have left they may connect again, unless one failed."""
        with self._changed:
            for link in self._links.values():
                link.end()
        if not self._is_broken:
            for link in self._links.values():
                link.join(self._config.silence_timeout_s)
            self._forget()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check(self, vote: Vote) -> None:
        """A rank without work may be the last one that is not closed."""
        if self._failure is not None and (self._is_broken or vote.has_work):
            raise self._failure

    def _failed(self, rank: int, what: str) -> RankFailedError:
        return RankFailedError(rank, what, f"ep rank {rank}")

    def _receive(self, rank: int, message: dict[str, Any]) -> None:
        """In a thread of a link."""
        if "vote" in message:
            self._count(rank, Vote(**message["vote"]))
        elif "decision" in message:
            self._take(Decision(**message["decision"]))
            self._on_call()
        elif "call" in message:
            self._be_called(message["call"])
        elif "failed" in message:
            self._fail(self._failed(message["failed"], message["what"]), tells=message["tells"])
        elif "end" in message:
            self._leave(rank)
        elif self.rank == 0:
            self._check_late()

    def _count(self, rank: int, vote: Vote) -> None:
        """On the first rank."""
        with self._changed:
            self._votes[rank] = vote
            number = self.num_rounds
            calls = len(self._votes) == 1 and not (self.last.steps or self.last.loads)
            decision = None
            if len(self._votes) == len(self._ranks):
                decision = decide([self._votes[peer] for peer in range(len(self._ranks))])
                self._votes_before, self._votes = self._votes, {}
                # Steps are answered by a vote.
                self._began = time.monotonic() if decision.steps else None
                # Before anybody can vote again.
                self._take(decision)
            elif self._began is None:
                self._began = time.monotonic()
        if decision is not None:
            self._broadcast({"decision": dataclasses.asdict(decision)})
            self._on_call()
        elif calls:
            for peer, link in self._links.items():
                if peer != rank:
                    link.send({"call": number})
            self._be_called(number)

    def _be_called(self, number: int) -> None:
        with self._changed:
            # It may come behind the decision that it led to, or before the one that precedes it.
            self._called_round = max(self._called_round, number)
        self._on_call()

    def _take(self, decision: Decision) -> None:
        with self._changed:
            self.last, self._own = decision, None
            self.num_rounds += 1
            self._changed.notify_all()

    def _check_late(self) -> None:
        """On the first rank. One that said that it cannot step may be busy with that."""
        limit = self._config.step_timeout_s
        with self._changed:
            if self._began is None or time.monotonic() - self._began < limit:
                return
            before = self._votes_before
            missing = [
                rank
                for rank in range(len(self._ranks))
                if rank not in self._votes and not (rank in before and before[rank].hold is not None)
            ]
        if missing:
            more = f" (and ranks {missing[1:]})" if missing[1:] else ""
            self._fail(self._failed(missing[0], f"did not come to the next step within {limit:g} s{more}"))

    def _lose(self, rank: int, what: str) -> None:
        self._fail(self._failed(rank, what))

    def _leave(self, rank: int) -> None:
        """Another rank was closed: that is a failure for who still has work."""
        self._links[rank].end()
        self._fail(self._failed(rank, "was closed"), tells=False)

    def _fail(self, failure: RankFailedError, *, tells: bool = True) -> None:
        with self._changed:
            if self._failure is not None:
                return
            # Nobody makes the steps that were decided.
            self._failure, self._is_broken, self.num_left = failure, tells, 0
            # Before anybody here sees it and closes, of which the others would hear first.
            what = str(failure).removeprefix(f"ep rank {failure.rank} ")
            self._broadcast({"failed": failure.rank, "what": what, "tells": tells})
            for link in self._links.values():
                link.end()
            self._changed.notify_all()
        if tells:
            self._on_failure(failure)
        self._on_call()

    def _broadcast(self, message: dict[str, Any]) -> None:
        for link in self._links.values():
            link.send(message)
