# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the main thread of this process gets on, is at work, or stands still."""

import time
from pathlib import Path

from mcore_parallel.guard._collective import collectives, progress
from mcore_parallel.guard._stack import position, waits_for_ranks

_BLOCK = 2**20
"""Less than this in read and written bytes is no work: a log line is written by whoever waits, too."""


class Activity:
    """Two clocks: since the run got on (steps, collectives), and since the main thread was last seen to run Python or to use files."""

    def __init__(self) -> None:
        self._steps: object = None
        self._work: object = None
        self._moved = self._worked = time.monotonic()

    @property
    def idle_s(self) -> float:
        """Since the last step or collective began or ended."""
        return time.monotonic() - self._moved

    @property
    def still_s(self) -> float:
        """Since the main thread last did anything."""
        return time.monotonic() - self._worked

    def look(self, steps: object) -> None:
        """Look at the process, now and then; ``steps`` changes with what the trainer tells."""
        now = time.monotonic()
        state, work = (steps, progress()), (position(), _transferred() // _BLOCK)
        if state != self._steps:
            self._steps, self._moved, self._worked = state, now, now
        if work != self._work:
            self._work, self._worked = work, now

    def forgive(self) -> None:
        """The main thread stands still from now on only."""
        self._worked = time.monotonic()


def waits() -> bool:
    """Whether this rank waits for others, as far as its stack and torch's flight recorder tell."""
    return waits_for_ranks() or any(not entry.finished for entry in collectives())


def _transferred() -> int:
    """Bytes that this process has read from and written to files; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.partition(":")[2]) for line in lines if line.startswith(("rchar", "wchar")))
