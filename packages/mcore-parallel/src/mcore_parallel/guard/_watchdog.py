# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A thread beside the training loop that notices when the run is stalled, asks around, says why, and ends it."""

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TypeVar

from torch._C._distributed_c10d import Store

from mcore_parallel.guard._activity import Activity, broke_in_communication, thread_stacks, waits
from mcore_parallel.guard._liveness import CUT_OFF, FINISHED, Liveness
from mcore_parallel.guard._report import Collective, RankStatus, collectives, compose, group_ranks, rank_list
from mcore_parallel.guard._store import StatusStore, StoreSilentError, TimedStore


class StallInvestigation:
    """Gathers one incident on one rank: ``look`` again and again until it returns the report.

    Args:
        board: where the statuses come.
        liveness: who lives.
        incident: number.
        dead_after_s: living ranks have twice this time to answer.
        limit_s: after this time without progress a rank is stuck even if others are at work.
    """

    def __init__(self, status_store: StatusStore, liveness: Liveness, incident: int, *, dead_after_s: float, limit_s: float) -> None:
        self._status_store, self._liveness, self._incident, self._limit_s = status_store, liveness, incident, limit_s
        self._statuses: dict[int, RankStatus] = {}
        # Living ranks that never answer must not hold it up.
        self._deadline = time.monotonic() + 2 * dead_after_s

    def look(self) -> str | None:
        """The report once every rank has answered, ended or died, empty when the run is only slow; None before."""
        silent = [rank for rank in range(self._status_store.world_size) if rank not in self._statuses]
        answers = {rank: self._status_store.status(self._incident, rank) for rank in silent}
        self._statuses |= {rank: status for rank, status in answers.items() if status is not None}
        silent = [rank for rank in silent if rank not in self._statuses]
        gone = self._liveness.gone(silent) if silent else {}
        if len(gone) < len(silent) and time.monotonic() < self._deadline:
            return None
        answered = len(gone) == len(silent) and all(what == f"has {FINISHED}" for what in gone.values())
        statuses = self._statuses.values()
        if answered and any(status.at_work for status in statuses) and all(status.idle_s < self._limit_s for status in statuses):
            return ""
        return compose(statuses, gone, self._status_store.world_size)


T = TypeVar("T")

STALLED_EXIT_CODE = 75
# After a death the main thread has this long to notice by itself: connections of hosts break, and their error says more.
_GRACE_S = 2.0
_LOOK_AGAIN_S = 0.1


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """Patience.

    Raises:
        ValueError: a time that is no positive number, or heartbeats too rare to tell the living from the dead.
    """

    stall_timeout_s: float = 60.0
    """A rank that waits for others, or that owes a step, stands still for no longer than this."""
    slow_allowance_s: float = 240.0
    """Added until the first step has ended (loading, compilation, graphs), and later as long as a rank that others wait for is seen at
    work, as in an evaluation or a save; 0 for none."""
    heartbeat_s: float = 1.0
    """Between two signs of life, and two looks."""
    dead_after_s: float = 6.0
    """A rank of another machine without a sign of life for this long, while others ask for it, is dead; the limit of a request to the
    store, too."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{name}={value!r} must be a number of seconds")
            if value < 0 or (value == 0 and name != "slow_allowance_s"):
                raise ValueError(f"{name}={value} must be positive")
        if self.dead_after_s < 3 * self.heartbeat_s:
            raise ValueError(f"dead_after_s={self.dead_after_s} must be at least three heartbeats of heartbeat_s={self.heartbeat_s}")

    @property
    def limit_s(self) -> float:
        """The longest that a rank may be without a step or a collective. Process groups need a longer time-out: a backend that ends the
        process first leaves no report."""
        return self.stall_timeout_s + self.slow_allowance_s

    def build(self, store: Store, *, rank: int, world_size: int) -> "Watchdog":
        return Watchdog(store, rank=rank, world_size=world_size, config=self)


@dataclass(frozen=True, kw_only=True)
class StallReport:
    """What every rank's ``on_stall`` is given."""

    text: str
    """The same on every rank that could read it."""
    is_author: bool
    """True on the one rank that should print it."""


def exit_process(report: StallReport) -> None:
    """Print the report on one rank and end every rank with ``STALLED_EXIT_CODE``; the main thread, stuck, is not asked."""
    if report.is_author:
        print(report.text, file=sys.stderr, flush=True)
    os._exit(STALLED_EXIT_CODE)


class Watchdog:
    """Watches this rank while its block runs; every rank of the world has one over the same store.

    A rank is stuck when for ``stall_timeout_s`` it has started no collective, ended none and told no step, and its main thread stands
    still, while it owes a step or waits for other ranks. The first stuck rank asks all others for their status: what they wait in (by
    torch's flight recorder), their last collective of each group, their Python stacks. One rank makes a report of them, and ``on_stall``
    gets it on every rank. A rank whose heartbeat has stopped is named dead; one that left the block with an error is named with it.
    While a rank is at work, the others are patient for ``slow_allowance_s`` more.

    A process that dies is seen by the ranks of its machine within a heartbeat; where no connection breaks, as under kernels of a GPU, the
    same report follows within seconds. When the block ends with an error out of communication, as a broken connection raises, one rank
    finds out who died and adds a note. Nothing here waits without a limit: when the store is out of reach, each stuck rank reports what
    it knows alone.

    Args:
        store: reached by all ranks, best one that outlives them (as torchrun's or a launcher's does).
        rank: of this process.
        world_size: number of ranks.
        config: patience.
        on_stall: called in the watchdog's thread, on every rank; the thread ends after it.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        config: WatchdogConfig | None = None,
        on_stall: Callable[[StallReport], None] = exit_process,
    ) -> None:
        self.config = config or WatchdogConfig()
        self._store, self._rank, self._world_size, self._on_stall = store, rank, world_size, on_stall
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mcore-watchdog", daemon=True)
        # Written by the main thread, read by the other: the step, None while no step is owed, its phase, and how often they changed.
        self._told: tuple[int | None, str, int] = (None, "", 0)
        # How long a step may wait for something else than ranks.
        self._wait_s = 0.0
        # The other thread's own: what the main thread does, when a death was seen, the incident, since when it is under way.
        self._activity = Activity()
        self._entered = False
        self._death_seen: float | None = None
        self._incident = 0
        self._since: float | None = None
        self._complained = False
        self._investigation: StallInvestigation | None = None

    def beat(self, step: int, phase: str = "") -> None:
        """Tell that a step begins; from now on the next call is owed within ``stall_timeout_s``."""
        self._told = (step, phase, self._told[2] + 1)

    def rest(self) -> None:
        """No step is owed any more; waiting for other ranks stays watched."""
        self._told = (None, "", self._told[2] + 1)
        self._wait_s = 0.0

    def watch(self, steps: Iterable[T], start: int = 1, *, wait_s: float = 0.0) -> Iterator[T]:
        """The items, with a beat before each is fetched, and a rest at the end.

        Args:
            steps: one item a step.
            start: number of the first step.
            wait_s: a step may go without a collective for as long, where that is longer than the patience of ``config``, while it waits
                for something with a limit of its own, as for answers of an engine. Waiting for other ranks stays watched as it was.
        """
        self._wait_s = wait_s
        source = iter(steps)
        step = start
        try:
            while True:
                self.beat(step)
                try:
                    item = next(source)
                except StopIteration:
                    return
                yield item
                step += 1
        finally:
            self.rest()

    def __enter__(self) -> "Watchdog":
        store = TimedStore(self._store, "mcore/watchdog", self.config.dead_after_s)
        self._status_store = StatusStore(store, self._rank, self._world_size)
        self._liveness = Liveness(store, self._rank, self._world_size, self.config.dead_after_s)
        # A store that is slow now is tried again by the thread.
        with contextlib.suppress(StoreSilentError):
            self._enter()
        self._thread.start()
        return self

    def _enter(self) -> None:
        self._liveness.enter()
        self._entered = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        broken = error is not None and broke_in_communication(error)
        if broken and self._since is not None:
            # Another rank may just have ended for a report that this one is about to read.
            self._thread.join(self.config.dead_after_s)
        self._stop.set()
        # It may be in a request that comes to its limit.
        self._thread.join(2 * self.config.dead_after_s)
        # The store may have gone with the rank that kept it; what counts is how the block itself ended.
        with contextlib.suppress(RuntimeError):
            self._liveness.beat(_end(error, broken))
            if error is not None and broken and self._status_store.claim("post-mortem"):
                for rank, what in self._fallen().items():
                    error.add_note(f"rank {rank}: {what}")

    def _fallen(self) -> dict[int, str]:
        """The ranks that an error out of communication comes from; waits for ``dead_after_s`` to know."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        deadline = time.monotonic() + self.config.dead_after_s + 2 * self.config.heartbeat_s
        while True:
            ended = self._liveness.gone(others)
            causes = {rank: what for rank, what in ended.items() if what != f"has {FINISHED}" and not what.startswith(f"has {CUT_OFF}")}
            if causes or time.monotonic() > deadline:
                return causes or {rank: what for rank, what in ended.items() if what == f"has {FINISHED}"}
            time.sleep(_LOOK_AGAIN_S)

    def _run(self) -> None:
        while not self._stop.wait(self.config.heartbeat_s):
            try:
                report = self._look()
            except RuntimeError as error:
                report = self._local(f"the store does not answer ({error})") if self._complaint() else None
            if report is not None:
                self._on_stall(report)
                return

    def _look(self) -> StallReport | None:
        """One sign of life and one look; a report when the run is to end."""
        if not self._entered:
            self._enter()
        self._liveness.beat()
        stuck = self._complaint()
        complaint = self._death() or stuck
        if self._since is None:
            if complaint or self._status_store.alarmed(self._incident):
                self._since = time.monotonic()
                self._status_store.tell(self._incident, self._status(complaint))
                if self._status_store.claim(f"incident {self._incident}"):
                    self._investigation = StallInvestigation(
                        self._status_store,
                        self._liveness,
                        self._incident,
                        dead_after_s=self.config.dead_after_s,
                        limit_s=self.config.limit_s,
                    )
                    self._complained = bool(complaint)
            return None
        return self._follow(complaint, self._since)

    def _follow(self, complaint: str, since: float) -> StallReport | None:
        """An incident under way: gather, when that is this rank's duty, and wait for the verdict."""
        author = self._investigation is not None
        report = self._investigation.look() if self._investigation is not None else None
        if report is not None:
            # A rank that complained and has got on since was only slow.
            self._status_store.decide(self._incident, "" if self._complained and not complaint else report)
        verdict = self._status_store.verdict(self._incident)
        if verdict is None:
            patience_s = 4 * self.config.dead_after_s
            return self._local("the rank that gathers the reports is gone") if time.monotonic() - since > patience_s else None
        self._incident, self._since, self._investigation = self._incident + 1, None, None
        self._activity.forgive()
        return StallReport(text=verdict, is_author=author) if verdict else None

    def _complaint(self) -> str:
        """Why this rank is stuck; empty if it is not."""
        activity, config = self._activity, self.config
        activity.look(self._told)
        (step, _, num_told), patience_s = self._told, config.stall_timeout_s
        if num_told < 2:
            # The first step is under way, or what comes before it.
            patience_s = config.limit_s
        owes = step is not None
        # Without steps to go by, a main thread that runs Python is at work, whatever it has still to wait for.
        if activity.still_s >= patience_s:
            for_ranks = waits()
            patience_s = patience_s if for_ranks else max(patience_s, self._wait_s)
            if activity.still_s >= patience_s and (owes or for_ranks):
                return f"stalled for {patience_s:g} s"
        limit_s = max(config.limit_s, self._wait_s)
        if owes and activity.idle_s >= limit_s:
            return f"no step and no collective for {limit_s:g} s"
        return ""

    def _death(self) -> str:
        """Which ranks of this machine died and took no connection of the main thread along; empty if none did."""
        fallen = self._liveness.fallen_neighbours()
        if not fallen:
            return ""
        now = time.monotonic()
        self._death_seen = self._death_seen or now
        return f"{rank_list(fallen)} died" if now - self._death_seen >= _GRACE_S else ""

    def _status(self, complaint: str) -> RankStatus:
        waiting: dict[tuple[str, bool], Collective] = {}
        newest: dict[str, Collective] = {}
        for entry in collectives():
            if not entry.finished:
                waiting.setdefault((entry.group, entry.is_p2p), entry)
            if not entry.is_p2p:
                newest[entry.group] = entry
        step, phase, _ = self._told
        return RankStatus(
            rank=self._rank,
            step=step,
            phase=phase,
            waiting=list(waiting.values()),
            newest=newest,
            members={group: group_ranks(group) for group, _ in waiting},
            stacks=thread_stacks(),
            complaint=complaint,
            at_work=self._activity.still_s < max(self.config.stall_timeout_s / 2, 2 * self.config.heartbeat_s) and not waits(),
            idle_s=self._activity.idle_s,
        )

    def _local(self, reason: str) -> StallReport:
        """What this rank knows alone."""
        others = dict.fromkeys(range(self._world_size), f"unknown, {reason}")
        return StallReport(text=compose([self._status(reason)], others, self._world_size), is_author=True)


def _end(error: BaseException | None, broken: bool) -> str:
    """How a rank left, as others read it."""
    if error is None:
        return FINISHED
    return f"{CUT_OFF if broken else 'raised'} {type(error).__name__}: {error}"
