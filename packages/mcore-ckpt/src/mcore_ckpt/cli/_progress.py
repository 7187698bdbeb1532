# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How far a long command is, on standard error."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["progress"]

_QUIET_S = 2.0
"""What is over sooner says nothing; lines follow one another no faster."""


@contextlib.contextmanager
def progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that is told of bytes as they pass; ``total`` are expected.

    A bar where standard error is a terminal and rich is installed, else a line every few seconds.
    """
    if sys.stderr.isatty():
        try:
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        except ImportError:
            pass
        else:
            from rich.console import Console

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn(), TimeRemainingColumn())
            with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(text, total=total)
                yield lambda count: bar.advance(task, count)
            return
    yield _Lines(text, total)


class _Lines:
    """Progress as lines of text."""

    def __init__(self, text: str, total: int) -> None:
        self._text, self._total, self._done = text, total, 0
        self._start = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._last >= _QUIET_S:
            self._last = now
            share = min(100, 100 * self._done // max(1, self._total))
            rate = self._done / 2**20 / (now - self._start)
            print(f"{self._text}: {share}% of {self._total / 2**20:.0f} MiB, {rate:.0f} MiB/s", file=sys.stderr, flush=True)
