# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whether the main thread of this process gets on, is at work, or stands still; and where its threads are."""

import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from mcore_parallel.guard._report import collectives, progress

# A thread whose innermost Python frame, torch's calls of operators aside, belongs to one of these communicates.
_COMMUNICATION = (
    "torch.distributed",
    "mcore_parallel.comm",
    "mcore_parallel.data_parallel",
    "mcore_parallel.pipeline",
    "megatron_fsdp._collectives",
    "megatron_fsdp._gradients",
    "megatron_fsdp._group",
    "megatron_fsdp._lane",
)
# What the backends write into errors of theirs, which may come out of any wait and any backward.
_BACKENDS = ("/gloo/", "nccl", "processgroup", "connection closed by peer", "connection reset by peer")
_MAX_FRAMES = 40


def thread_stacks() -> dict[str, list[str]]:
    """Thread name -> its frames as ``file:line in function: source``, outermost first; the main thread first, without the caller's."""
    frames = sys._current_frames()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not threading.main_thread())
    here = threading.get_ident()
    return {
        thread.name: [f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in _frames(frames[thread.ident])]
        for thread in threads
        if thread.ident is not None and thread.ident != here and thread.ident in frames
    }


def waits_for_ranks() -> bool:
    """Whether the main thread is inside a call that communicates, as far as its Python frames tell."""
    return _communicates(_main_frame())


def position() -> int:
    """Changes, almost always, when the main thread runs Python between two calls."""
    place, frame = [], _main_frame()
    while frame is not None:
        place.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(place))


def broke_in_communication(error: BaseException) -> bool:
    """Whether the error, or one that led to it, came out of a call that communicates."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if _is_broken_link(link):
            return True
        link = link.__cause__ or link.__context__
    return False


def _is_broken_link(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError) or any(word in str(error).lower() for word in _BACKENDS):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _communicates(trace.tb_frame)


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def _communicates(frame: FrameType | None) -> bool:
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_COMMUNICATION):
            return True
        # torch's own calls of operators lie below the function that communicates.
        if module.partition(".")[0] != "torch":
            return False
        frame = frame.f_back
    return False


def _frames(frame: FrameType) -> list[traceback.FrameSummary]:
    return list(traceback.extract_stack(frame))[-_MAX_FRAMES:]


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
