# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The memory that all recordings of an engine share."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from mcore_parallel.graphs import Capture

__all__ = ["Recording", "RecordingPool"]

_WARM_UP_RUNS = 2

Recording = tuple[Callable[[], None], Tensor]
"""What replays a computation, from the tensors that it read, and where each replay leaves its result."""


def _cuda_capture() -> "Capture":
    # Here, for an import that is faster where nothing is recorded.
    from mcore_parallel.graphs import CudaCapture

    # The cache of an engine may take what is left of a device.
    return CudaCapture(empty_cache=True)


class RecordingPool:
    """Records computations in one pool of memory: each replay overwrites the results of all others.

    Args:
        make_capture: who records, made when it is first needed.
    """

    def __init__(self, make_capture: "Callable[[], Capture]" = _cuda_capture) -> None:
        self._make_capture = make_capture
        self._capture: Capture | None = None
        self._pool: Any = None

    def record(self, compute: Callable[[], Tensor]) -> Recording:
        """Record a computation; it runs twice before.

        Raises:
            mcore_parallel.graphs.CaptureError: it waits for the device, or reads from it.
            torch.OutOfMemoryError: the device has too little memory.
        """
        if self._capture is None:
            self._capture = self._make_capture()
        if self._pool is None:
            self._pool = self._capture.pool()
        for _ in range(_WARM_UP_RUNS):
            self._capture.warm(compute)
        result, replay = self._capture.record(compute, self._pool)
        return replay, result

    def clear(self) -> None:
        """Begin a new pool; the memory of this one comes back when its last recording is gone."""
        self._pool = None
