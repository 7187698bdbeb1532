# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A polite end on signals."""

import signal
import time
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

STOPPED_EXIT_CODE = 128 + signal.SIGTERM
"""Of a run that was asked to stop, and saved: what a shell reports of a process that the signal ended."""


class StopSignals:
    """While its block runs, a signal only sets a mark; give the object to ``Trainer`` as ``stop``.

    The ranks agree at the end of the step, so that it is enough if one of them was told. A signal that comes when the first one is
    ``again_after_s`` old acts as it did before the block; until then it is taken for the same, since a scheduler and the launcher
    both pass it on. Enter it in the main thread.

    Args:
        signals: that are caught.
        again_after_s: patience with the run.

    Example:
        >>> with StopSignals() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop()
        True
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT), *, again_after_s: float = 5.0) -> None:
        self._signals, self._again_after_s, self._since = tuple(signals), again_after_s, 0.0
        self._before: dict[int, Any] = {}
        self.received: signal.Signals | None = None
        """The first signal that came."""

    def __call__(self) -> bool:
        return self.received is not None

    def __enter__(self) -> "StopSignals":
        self._before = {number: signal.signal(number, self._mark) for number in self._signals}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not installed from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._since = signal.Signals(number), time.monotonic()
        elif time.monotonic() - self._since >= self._again_after_s:
            before = self._before[number]
            signal.signal(number, signal.SIG_DFL if before is None else before)
            signal.raise_signal(number)
