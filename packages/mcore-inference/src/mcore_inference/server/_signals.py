# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""SIGTERM and SIGINT as something to look at, in place of the end of the process."""

import signal
import threading
from types import FrameType
from typing import Any

from mcore_inference._stability import experimental_api

_STOPPING = (signal.SIGTERM, signal.SIGINT)


@experimental_api
class StopSignals:
    """A context manager that counts the signals that ask the process to end, and restores what handled them before.

    Outside of the main thread, where Python allows no handlers, it counts nothing.

    Example:
        >>> with StopSignals() as signals:
        ...     signals.count
        0
    """

    def __init__(self) -> None:
        self.count = 0
        """How many came."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A handler may run anywhere in the main thread, so it takes no lock.
        self.count += 1
