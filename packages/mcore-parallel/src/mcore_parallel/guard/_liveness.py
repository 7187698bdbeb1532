# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which ranks live: by their processes on this machine, by their heartbeats on others."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mcore_parallel._stability import internal_api
from mcore_parallel.guard._store import TimedStore


@internal_api
@dataclass(frozen=True, kw_only=True)
class ProcessMark:
    """A process that no later one is taken for."""

    host: str
    """Machine, boot and space of process numbers; empty where the system does not tell."""
    pid: int
    started: str
    """When, in the system's ticks since the boot."""

    @classmethod
    def own(cls) -> "ProcessMark":
        """Of this process."""
        pid = os.getpid()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            host = f"{boot}-{os.readlink('/proc/self/ns/pid').strip('pid:[]')}"
        except OSError:
            host = ""
        _, started = _state(pid)
        return cls(host=host if started else "", pid=pid, started=started)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "ProcessMark":
        return cls(**json.loads(text))

    def state(self) -> str:
        """``running``, ``stopped`` or ``gone``; to be asked on its own host only."""
        letter, started = _state(self.pid)
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter in "Tt" else "running"


def _state(pid: int) -> tuple[str, str]:
    """The system's letter for the state of a process, and when it started; empty when there is none."""
    try:
        # The name of the program, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


FINISHED = "finished"
CUT_OFF = "lost the connection to others"
"""How a rank ended that another one's end took along."""

_GONE = "dead, its process is gone"


class Liveness:
    """Signs of life of this rank, and a look at those of others.

    A process that dies is seen at once by the ranks of its machine, and they tell the others. Where a machine is gone with all its ranks,
    their heartbeats are missed. Clocks of other machines are not compared: a heartbeat is old once it has been the same here for
    ``dead_after_s``.

    Args:
        store: of the run.
        rank: of this process.
        world_size: number of ranks.
        dead_after_s: silence that counts as death.
    """

    def __init__(self, store: TimedStore, rank: int, world_size: int, dead_after_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._dead_after_s = store, dead_after_s
        self._own = ProcessMark.own()
        self._count = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._neighbours: dict[int, ProcessMark] = {}
        self._arrivals, self._deaths = _Log(store, f"host/{self._own.host}"), _Log(store, "deaths")
        self._fallen: list[int] = []
        self._dead: set[int] = set()

    def enter(self) -> None:
        """Make this rank known to those of its machine, with a first sign of life."""
        self.beat()
        if self._own.host:
            self._arrivals.append(json.dumps([self.rank, self._own.to_json()]))

    def beat(self, end: str = "") -> None:
        """Sign of life; ``end`` says how this rank left."""
        self._count += 1
        self._store.set(f"beat/{self.rank}", json.dumps([self._count, end]))

    def fallen_neighbours(self) -> list[int]:
        """Ranks of this machine whose processes are gone though they never said how they left; all ranks learn of them."""
        if self._own.host:
            arrived = {rank: ProcessMark.from_json(text) for rank, text in map(json.loads, self._arrivals.news())}
            self._neighbours |= {rank: mark for rank, mark in arrived.items() if rank != self.rank}
        gone = [rank for rank, mark in self._neighbours.items() if mark.state() == "gone"]
        ends = self._beats(gone)
        for rank in gone:
            del self._neighbours[rank]
            if not ends.get(rank, (0, ""))[1]:
                self._fallen.append(rank)
                self._deaths.append(str(rank))
        return self._fallen

    def gone(self, ranks: Iterable[int]) -> dict[int, str]:
        """Rank -> what became of it, for those that ended or are dead; call it again and again."""
        ranks = list(ranks)
        self.fallen_neighbours()
        self._dead |= set(map(int, self._deaths.news()))
        beats, now = self._beats(ranks), time.monotonic()
        gone = {}
        for rank in ranks:
            count, end = beats.get(rank, (-1, ""))
            if end:
                gone[rank] = f"has {end}"
            elif rank in self._dead:
                gone[rank] = _GONE
            elif rank not in self._seen or self._seen[rank][0] != count:
                self._seen[rank] = count, now
            elif now - self._seen[rank][1] > self._dead_after_s and (what := self._silence(rank, count)):
                gone[rank] = what
        return gone

    def _silence(self, rank: int, count: int) -> str:
        """What stands behind a silence; empty for a process of this machine that runs: its interpreter is held."""
        if count < 0:
            return "never started its watchdog"
        if rank not in self._neighbours:
            return f"dead, no sign of life for {self._dead_after_s:g} s"
        return "stopped by a signal or a debugger" if self._neighbours[rank].state() == "stopped" else ""

    def _beats(self, ranks: list[int]) -> dict[int, tuple[int, str]]:
        """Rank -> count and end, for the ranks that have ever beaten."""
        known = ranks
        if ranks and not self._store.check([f"beat/{rank}" for rank in ranks]):
            known = [rank for rank in ranks if self._store.check([f"beat/{rank}"])]
        texts = self._store.multi_get([f"beat/{rank}" for rank in known])
        return {rank: (count, end) for rank, (count, end) in zip(known, map(json.loads, texts), strict=True)}


class _Log:
    """Entries that any rank appends and every rank reads once."""

    def __init__(self, store: TimedStore, name: str) -> None:
        self._store, self._name = store, name
        self._size, self._open = 0, list[int]()

    def append(self, text: str) -> None:
        self._store.set(f"{self._name}/{self._store.add(f'{self._name}/size', 1)}", text)

    def news(self) -> list[str]:
        """The entries since the last time; one whose writer has its number but has not written yet comes later."""
        size = self._store.add(f"{self._name}/size", 0)
        self._open += range(self._size + 1, size + 1)
        self._size = size
        written = [number for number in self._open if self._store.check([f"{self._name}/{number}"])]
        self._open = [number for number in self._open if number not in written]
        return [text.decode() for text in self._store.multi_get([f"{self._name}/{number}" for number in written])]
