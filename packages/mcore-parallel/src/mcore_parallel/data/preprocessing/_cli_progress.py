# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How far a long command is, on standard error."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_QUIET_S = 2.0
"""Lines follow one another no faster."""


@contextmanager
def progress(choice: str) -> Iterator[Callable[[int, int, float], None] | None]:
    """What draws documents, tokens, documents a second and the time left, or None where nothing is to be drawn.

    A bar if rich is installed and standard error is a terminal, else a line every few seconds.

    Args:
        choice: "on", "off", or "auto", which is on where standard error is a terminal.
    """
    if choice == "off" or (choice == "auto" and not sys.stderr.isatty()):
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield _Lines()
        return
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tokenise", total=1.0)

        def show(documents: int, tokens: int, share: float) -> None:
            bar.update(task, completed=share, description=_count(documents, tokens, bar.tasks[0].elapsed or 0.0))

        yield show


def _count(documents: int, tokens: int, elapsed_s: float) -> str:
    rate = f", {documents / elapsed_s:,.0f} documents/s" if elapsed_s else ""
    return f"{documents:,} documents, {tokens:,} tokens{rate}"


class _Lines:
    """Progress as lines of text: the first batch, then one every few seconds."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last = float("-inf")

    def __call__(self, documents: int, tokens: int, share: float) -> None:
        now = time.monotonic()
        if now - self._last < _QUIET_S and share < 1.0:
            return
        self._last, elapsed = now, now - self._start
        left = f", {elapsed * (1.0 - share) / share:.0f} s left" if share else ""
        print(f"{share:4.0%} {_count(documents, tokens, elapsed)}{left}", file=sys.stderr, flush=True)
