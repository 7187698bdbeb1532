# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recording of work on a device, to be launched as one later; Python's garbage collector rests during it."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any, Protocol, TypeVar

import torch

from mcore_parallel._stability import internal_api

FREEZE_GC_MAX_TORCH_VERSION = "2.9.0a0"
"""From this version on torch collects at a capture only if ``torch.compiler.config.force_cudagraph_gc`` asks for it."""
CUDA_GRAPH_CAPTURE_FREEZE_GC = "CUDA_GRAPH_CAPTURE_FREEZE_GC"
"""Environment variable: 0 freezes nothing. Applications read it, by ``freeze_gc_choice``."""


def freeze_gc_choice(environment: Mapping[str, str]) -> bool | None:
    """What the environment says of ``CudaGraphConfig.freeze_gc``: False for "0", else None.

    Example:
        >>> freeze_gc_choice({CUDA_GRAPH_CAPTURE_FREEZE_GC: "0"})
        False
    """
    return False if environment.get(CUDA_GRAPH_CAPTURE_FREEZE_GC) == "0" else None


def _torch_collects() -> bool:
    return torch.__version__ < FREEZE_GC_MAX_TORCH_VERSION or bool(torch.compiler.config.force_cudagraph_gc)


class _Pauses:
    """Those in progress, in all threads. Python has one switch: a thread that puts back what it found turns collections on for others, or
    off for good."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count, self._was_enabled = 0, False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_enabled:
                gc.enable()


_PAUSES = _Pauses()
"""Of the process, as the switch is."""


@contextlib.contextmanager
def collection_paused(freeze: bool | None = None) -> Iterator[None]:
    """No automatic collection inside: one that frees a tensor, an event or a graph in the middle of a capture breaks it.

    Where torch itself collects at every capture, what exists already is frozen, so that each of these collections looks at the new objects
    only. Afterwards everything is as before; where several threads pause, behind the last of them.

    Args:
        freeze: freeze what exists; None for where torch collects: before ``FREEZE_GC_MAX_TORCH_VERSION``, and with
            ``torch.compiler.config.force_cudagraph_gc``.
    """
    # What is frozen already was frozen by somebody else, who thaws it.
    freeze = (_torch_collects() if freeze is None else freeze) and not gc.get_freeze_count()
    _PAUSES.begin()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        if freeze:
            gc.unfreeze()
        _PAUSES.end()


_R = TypeVar("_R")


class CaptureError(RuntimeError):
    """Work that cannot be recorded."""


@internal_api
class Recording:
    """A CUDA graph that is being recorded, or has been. It lives as long as its replay; nobody keeps one that failed."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    @contextlib.contextmanager
    def begun(self, pool: Any) -> Iterator[None]:
        """What is launched inside on the present stream is recorded."""
        # Other threads (NCCL's watchdog, a loader) may go on using the device.
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        _UNDER_WAY.add(self)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            raise
        finally:
            _UNDER_WAY.remove(self)
        self._graph.capture_end()

    def replay(self) -> None:
        self._graph.replay()


_UNDER_WAY: set[Recording] = set()
"""Of the process: a backward is recorded in threads of autograd."""


@internal_api
def recordings_under_way() -> Set[Recording]:
    """Those of ``CudaCapture`` in all threads. Whoever keeps memory for their replays refers to them weakly."""
    return frozenset(_UNDER_WAY)


class Capture(Protocol):
    """How work is recorded; the memory that it touches stays where it is until the recording is dropped."""

    def pool(self) -> Any:
        """A pool of memory. Of recordings that share one, a replay overwrites what the others left in it, results included, so none may run
        beside another."""
        ...

    def warm(self, work: Callable[[], _R]) -> _R:
        """Run work as it will be recorded, so that everything that is made once is made."""
        ...

    def record(self, work: Callable[[], _R], pool: Any) -> tuple[_R, Callable[[], None]]:
        """Record work without running it: its results, whose memory a replay fills, and the replay.

        Raises:
            CaptureError: something in it waits for the device, allocates outside the pool, or is otherwise refused.
            torch.OutOfMemoryError: the device has too little memory for it.
        """
        ...


class CudaCapture:
    """Recording by CUDA graphs; conforms to ``Capture``.

    Args:
        freeze_gc: as of ``collection_paused``.
        empty_cache: give what torch holds unused back to the device before each recording, which cannot take it: for whoever leaves little
            memory free. It waits for the device, and so may not stand where ranks record while others have yet to send.

    Raises:
        CaptureError: there is no CUDA device.
    """

    def __init__(self, freeze_gc: bool | None = None, *, empty_cache: bool = False) -> None:
        self._freeze_gc, self._empty_cache = freeze_gc, empty_cache
        if reason := why_not():
            raise CaptureError(reason)
        self._stream = torch.cuda.Stream()

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def warm(self, work: Callable[[], _R]) -> _R:
        # On the stream of the recording: nodes of autograd stay with the stream that they were made on.
        here = torch.cuda.current_stream()
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            result = work()
        here.wait_stream(self._stream)
        return result

    def record(self, work: Callable[[], _R], pool: Any) -> tuple[_R, Callable[[], None]]:
        recording = Recording()
        if self._empty_cache:
            torch.cuda.empty_cache()
        # torch.cuda.graph would wait for the whole device, and so for transfers of a pipeline that another rank, which may wait in
        # the same place, has yet to send.
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with collection_paused(self._freeze_gc), torch.cuda.stream(self._stream), recording.begun(pool):
                result = work()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(
                f"the work cannot be captured: {error}; look for reads of device values on the host, random states that are copied "
                "(RecomputeConfig.preserve_rng_state), and packed sequences"
            ) from error
        return result, recording.replay


def why_not() -> str:
    """Why nothing can be captured here; empty when it can."""
    return "" if torch.cuda.is_available() else "there is no CUDA device"
