# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recording of work on a device, to be launched as one later."""

import contextlib
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from mcore_parallel.graphs._collection import collection_paused

_R = TypeVar("_R")


class CaptureError(RuntimeError):
    """Work that cannot be recorded."""


class Capture(Protocol):
    """How work is recorded; the memory that it touches stays where it is until the recording is dropped."""

    def pool(self) -> Any:
        """A pool of memory. Recordings that share one must be replayed so that none overwrites what another still needs."""
        ...

    def warm(self, work: Callable[[], _R]) -> _R:
        """Run work as it will be recorded, so that everything that is made once is made."""
        ...

    def record(self, work: Callable[[], _R], pool: Any) -> tuple[_R, Callable[[], None]]:
        """Record work without running it: its results, whose memory a replay fills, and the replay.

        Raises:
            CaptureError: something in it waits for the device, allocates outside the pool, or is otherwise refused.
        """
        ...


class CudaCapture:
    """Recording by CUDA graphs; conforms to ``Capture``.

    Args:
        freeze_gc: as of ``collection_paused``.

    Raises:
        CaptureError: there is no CUDA device.
    """

    def __init__(self, freeze_gc: bool | None = None) -> None:
        self._freeze_gc = freeze_gc
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
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would wait for the whole device, and so for transfers of a pipeline that another rank, which may wait in
        # the same place, has yet to send.
        self._stream.wait_stream(torch.cuda.current_stream())
        try:
            with collection_paused(self._freeze_gc), torch.cuda.stream(self._stream):
                # Other threads (NCCL's watchdog, a loader) may go on using the device.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    result = work()
                except BaseException:
                    with contextlib.suppress(RuntimeError):
                        graph.capture_end()
                    raise
                graph.capture_end()
        except RuntimeError as error:
            raise CaptureError(
                f"the work cannot be captured: {error}; look for reads of device values on the host, random states that are copied "
                "(RecomputeConfig.preserve_rng_state), and packed sequences"
            ) from error
        return result, graph.replay


def why_not() -> str:
    """Why nothing can be captured here; empty when it can."""
    return "" if torch.cuda.is_available() else "there is no CUDA device"
