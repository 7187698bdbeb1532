# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Loads of weights of a runner whose engine shares experts: all ranks begin one together, or none does."""

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from mcore_inference.engine._engine import DynamicInferenceEngine
from mcore_inference.engine._expert_peers import ExpertPeers
from mcore_inference.engine._lockstep import LockstepLeader
from mcore_inference.engine._stream import call_in, settle
from mcore_inference.engine._weights import WeightChunk, WeightLoadError, WeightPolicy


@dataclass(eq=False)
class SharedLoad:
    """One call of ``load_weights``."""

    chunks: Iterable[WeightChunk]
    version: int | None
    in_flight: WeightPolicy
    loop: asyncio.AbstractEventLoop
    done: "asyncio.Future[None]"
    announced_at: float | None = None
    error: Exception | None = None
    loaded_in_round: int | None = None
    """The round whose decision it followed."""

    def finish(self, error: Exception | None) -> None:
        """Answer the caller."""
        call_in(self.loop, settle, self.done, None, error)


class SharedLoads:
    """Loads one after the other, in the thread of an engine; nothing here waits.

    A load is announced in the votes of its rank. Once all ranks announce the same version and policy, and with ``drain`` no request is in
    flight anywhere, each loads its part before the next step. Until then steps go on with the old weights.

    Args:
        peers: of the engine.
        calls: the engine, or who leads its ranks.
        patience_s: that other ranks get to call ``load_weights`` too.
    """

    def __init__(self, peers: ExpertPeers, calls: DynamicInferenceEngine | LockstepLeader, patience_s: float) -> None:
        self._peers, self._calls, self.patience_s = peers, calls, patience_s
        self._loads: deque[SharedLoad] = deque()

    def add(self, load: SharedLoad, next_version: int) -> None:
        """Queue a load."""
        if load.version is None:
            waiting = (each.version + 1 for each in self._loads if each.version is not None)
            load.version = max(next_version, *waiting, 0)
        self._loads.append(load)
        self._announce()

    def follow(self) -> None:
        """After a step or a vote: do what was decided."""
        if not self._loads:
            return
        load, decision = self._loads[0], self._peers.last
        if load.loaded_in_round is not None:
            if self._peers.num_rounds > load.loaded_in_round:
                unequal = None if decision.unequal is None else WeightLoadError(f"not every rank has loaded: {decision.unequal}")
                self._end(load, load.error or unequal)
        elif decision.load_error is not None:
            self._end(load, WeightLoadError(decision.load_error))
        elif decision.loads:
            self._run(load)

    def check_late(self, load: SharedLoad) -> None:
        """Give a load up for which others did not come."""
        announced = load.announced_at
        if announced is None or load.loaded_in_round is not None or time.monotonic() - announced < self.patience_s:
            return
        if self._peers.last.missing:
            ranks = list(self._peers.last.missing)
            self._end(
                load,
                WeightLoadError(
                    f"ep ranks {ranks} did not call load_weights(version={load.version}) within {self.patience_s:g} s; all have their old "
                    "weights: repeat it on every rank"
                ),
            )

    def withdraw(self, load: SharedLoad) -> None:
        """Nobody waits for a load any more; one that has begun goes on."""
        if load in self._loads and load.loaded_in_round is None:
            self._end(load, None)

    def refuse_all(self, error: Exception) -> None:
        """The runner ends."""
        while self._loads:
            self._loads.popleft().finish(error)

    def _announce(self) -> None:
        load = self._loads[0]
        if load.announced_at is None:
            load.announced_at = time.monotonic()
            self._calls.announce_load(load.version, load.in_flight)

    def _run(self, load: SharedLoad) -> None:
        load.loaded_in_round = self._peers.num_rounds
        try:
            # Whatever was to be drained has ended.
            self._calls.load_weights(load.chunks, load.version, in_flight="recompute" if load.in_flight == "drain" else load.in_flight)
        except Exception as error:
            load.error = error
        self._calls.announce_load(None)

    def _end(self, load: SharedLoad, error: Exception | None) -> None:
        self._loads.remove(load)
        self._calls.announce_load(None)
        load.finish(error)
        if self._loads:
            self._announce()
