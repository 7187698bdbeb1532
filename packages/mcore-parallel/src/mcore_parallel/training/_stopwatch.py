# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Stop watches: by the host's clock, by events of a device, and one that does nothing."""

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mcore_parallel.groups import Group

_MAX_PENDING = 64
"""Pairs of events from which on those that are complete are added up without waiting."""


class Timer(Protocol):
    """A stop watch; also a context that starts and stops it. Times are in seconds."""

    def start(self, barrier: bool = False) -> None: ...
    def stop(self, barrier: bool = False) -> None: ...
    def reset(self) -> None: ...
    def elapsed(self, reset: bool = True, barrier: bool = False) -> float: ...
    def set_elapsed(self, seconds: float) -> None: ...
    def active_time(self) -> float: ...
    def __enter__(self) -> "Timer": ...
    def __exit__(self, *_: object) -> None: ...


class HostTimer:
    """A timer by the host's clock."""

    def __init__(self, name: str, group: Group, device: torch.device | None) -> None:
        self.name, self.group, self.device = name, group, device
        self._elapsed = self._active = 0.0
        self._running = False
        self._begin = 0.0

    def start(self, barrier: bool = False) -> None:
        if self._running:
            raise RuntimeError(f"timer {self.name!r} runs already; stop it first, or give the inner part a name of its own")
        self._wait(barrier)
        self._running = True
        self._mark_start()

    def stop(self, barrier: bool = False) -> None:
        if not self._running:
            raise RuntimeError(f"timer {self.name!r} does not run; start it first")
        self._wait(barrier)
        self._mark_stop()
        self._running = False

    def reset(self) -> None:
        self._settle()
        self._elapsed = 0.0

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        was_running = self._running
        if was_running:
            self.stop(barrier)
        self._settle()
        elapsed = self._elapsed
        if reset:
            self._elapsed = 0.0
        if was_running:
            self.start(barrier)
        return elapsed

    def set_elapsed(self, seconds: float) -> None:
        self._settle()
        self._elapsed = float(seconds)

    def active_time(self) -> float:
        self._settle()
        return self._active

    def __enter__(self) -> "HostTimer":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _add(self, seconds: float) -> None:
        self._elapsed += seconds
        self._active += seconds

    def _mark_start(self) -> None:
        self._begin = time.perf_counter()

    def _mark_stop(self) -> None:
        self._add(time.perf_counter() - self._begin)

    def _settle(self) -> None:
        """Have all finished spans added up."""

    def _wait(self, barrier: bool) -> None:
        """For the other ranks, and for the device that is timed."""
        if not barrier:
            return
        if self.group.size > 1 and self.group.pg is not None:
            dist.barrier(self.group.pg)
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class DeviceTimer(HostTimer):
    """A timer by events of the current stream; only reading it waits, for the last event."""

    def __init__(self, name: str, group: Group, device: torch.device | None) -> None:
        super().__init__(name, group, device)
        self._open: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._spare: list[Any] = []

    def _mark_start(self) -> None:
        self._open = self._event()

    def _mark_stop(self) -> None:
        self._pairs.append((self._open, self._event()))
        self._open = None
        while len(self._pairs) > _MAX_PENDING and self._pairs[0][1].query():
            self._take()

    def _settle(self) -> None:
        if self._pairs:
            self._pairs[-1][1].synchronize()
        while self._pairs:
            self._take()

    def _take(self) -> None:
        begin, end = self._pairs.pop(0)
        end.synchronize()
        self._add(begin.elapsed_time(end) / 1e3)
        self._spare += (begin, end)

    def _event(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _NoTimer:
    """What a timer above the level is: it has the whole interface and does nothing."""

    def start(self, barrier: bool = False) -> None: ...

    def stop(self, barrier: bool = False) -> None: ...

    def reset(self) -> None: ...

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        return 0.0

    def set_elapsed(self, seconds: float) -> None: ...

    def active_time(self) -> float:
        return 0.0

    def __enter__(self) -> "_NoTimer":
        return self

    def __exit__(self, *_: object) -> None: ...


NO_TIMER: Timer = _NoTimer()
