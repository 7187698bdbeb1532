# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A thread beside the training loop that notices when the run does not get on, says why, and ends it."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TypeVar

from torch._C._distributed_c10d import Store

from mcore_parallel.guard._board import Board
from mcore_parallel.guard._collective import Collective, collectives, group_ranks, progress
from mcore_parallel.guard._inquiry import FINISHED, Inquiry, Pulse
from mcore_parallel.guard._report import RankStatus, compose
from mcore_parallel.guard._stack import broke_in_communication, position, thread_stacks, waits_for_ranks

T = TypeVar("T")

STALLED_EXIT_CODE = 75


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """Patience.

    Raises:
        ValueError: a time that is not positive, or heartbeats too rare to tell the living from the dead.
    """

    stall_timeout_s: float = 300.0
    """A rank that waits for others, or that tells steps, must get on within this; keep it below the time-out of the process groups."""
    heartbeat_s: float = 2.0
    """Between two signs of life, and two looks."""
    dead_after_s: float = 20.0
    """A rank without a sign of life for this long, while others ask for it, is dead."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name}={value} must be positive")
        if self.dead_after_s < 3 * self.heartbeat_s:
            raise ValueError(f"dead_after_s={self.dead_after_s} must be at least three heartbeats of heartbeat_s={self.heartbeat_s}")

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

    A rank is stuck when for ``stall_timeout_s`` it has started no collective, ended none and told no step, while it owes a step, or
    while its main thread stands still and waits for other ranks. The first stuck rank asks all others for their status: what they wait
    in (by torch's flight recorder), their last collective of each group, their Python stacks. One rank makes a report of them, and
    ``on_stall`` gets it on every rank. A rank whose heartbeat has stopped is named dead; one that left the block with an error is named
    with it.

    When the block ends with an error out of a collective, as a broken connection raises, one rank finds out who died and adds a note.

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
        # The other thread's own: heartbeats so far, the last state that was new and when, the incident, since when it is under way.
        self._count = 0
        self._state: object = None
        self._moved = time.monotonic()
        self._incident = 0
        self._since: float | None = None
        self._complained = False
        self._inquiry: Inquiry | None = None

    def beat(self, step: int, phase: str = "") -> None:
        """Tell that a step begins; from now on the next call is owed within ``stall_timeout_s``."""
        self._told = (step, phase, self._told[2] + 1)

    def rest(self) -> None:
        """No step is owed any more; waiting for other ranks stays watched."""
        self._told = (None, "", self._told[2] + 1)

    def watch(self, steps: Iterable[T], start: int = 1) -> Iterator[T]:
        """The items, with a beat before each is fetched, and a rest at the end.

        Args:
            steps: one item a step.
            start: number of the first step.
        """
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
        self._board = Board(self._store, self._rank, self._world_size, self.config.dead_after_s)
        self._board.beat(0)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        broken = error is not None and broke_in_communication(error)
        if broken and self._since is not None:
            # Another rank may just have ended for a report that this one is about to read.
            self._thread.join(self.config.dead_after_s)
        self._stop.set()
        self._thread.join()
        # The store may have gone with the rank that kept it; what counts is how the block itself ended.
        with contextlib.suppress(RuntimeError):
            self._board.beat(self._count, FINISHED if error is None else f"raised {type(error).__name__}: {error}")
            if error is not None and broken and self._board.claim("post-mortem"):
                for rank, what in self._fallen().items():
                    error.add_note(f"rank {rank}: {what}")

    def _fallen(self) -> dict[int, str]:
        """Ranks that died; waits for ``dead_after_s`` to know."""
        pulse = Pulse(self._board, self.config.dead_after_s)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        deadline = time.monotonic() + self.config.dead_after_s + 2 * self.config.heartbeat_s
        while time.monotonic() < deadline:
            dead = {rank: what for rank, what in pulse.gone(others).items() if not what.startswith("has ")}
            if dead:
                return dead
            time.sleep(self.config.heartbeat_s)
        return {}

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
        self._count += 1
        self._board.beat(self._count)
        complaint = self._complaint()
        if self._since is None:
            if complaint or self._board.alarmed(self._incident):
                self._since = time.monotonic()
                self._board.tell(self._incident, self._status(complaint))
                if self._board.claim(f"incident {self._incident}"):
                    self._inquiry = Inquiry(self._board, self._incident, self.config.dead_after_s)
                    self._complained = bool(complaint)
            return None
        return self._follow(complaint, self._since)

    def _follow(self, complaint: str, since: float) -> StallReport | None:
        """An incident under way: gather, when that is this rank's duty, and wait for the verdict."""
        author = self._inquiry is not None
        found = self._inquiry.look() if self._inquiry is not None else None
        if found is not None:
            # A rank that complained and has got on since was only slow.
            self._board.decide(self._incident, "" if self._complained and not complaint else found)
        verdict = self._board.verdict(self._incident)
        if verdict is None:
            patience_s = 4 * self.config.dead_after_s
            return self._local("the rank that gathers the reports is gone") if time.monotonic() - since > patience_s else None
        self._incident, self._since, self._inquiry = self._incident + 1, None, None
        self._moved = time.monotonic()
        return StallReport(text=verdict, is_author=author) if verdict else None

    def _complaint(self) -> str:
        """Why this rank is stuck; empty if it is not."""
        # Without steps to go by, a main thread that runs Python is at work, whatever it has still to wait for.
        owes, now = self._told[0] is not None, time.monotonic()
        state = self._told, progress(), None if owes else position()
        if state != self._state:
            self._state, self._moved = state, now
        if now - self._moved < self.config.stall_timeout_s:
            return ""
        waits = owes or waits_for_ranks() or any(not entry.finished for entry in collectives())
        return f"stalled for {self.config.stall_timeout_s:g} s" if waits else ""

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
        )

    def _local(self, reason: str) -> StallReport:
        """What this rank knows alone."""
        others = dict.fromkeys(range(self._world_size), f"unknown, {reason}")
        return StallReport(text=compose([self._status(reason)], others, self._world_size), is_author=True)
