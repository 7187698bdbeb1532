# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decode steps as CUDA graphs: one recording for each number of rows."""

import bisect
from collections import Counter
from collections.abc import Callable

import numpy as np
from torch import Tensor

from mcore_inference.context import HostStep, StepBuilder, StepInputs
from mcore_inference.engine._recording_pool import Recording, RecordingPool
from mcore_inference.scheduling import CUDAGraphBatchDimensionBuilder

__all__ = ["DecodeGraphs", "graph_sizes", "padding_step"]


def graph_sizes(max_requests: int, num_graphs: int | None = None) -> list[int]:
    """Numbers of rows that are recorded, rising: close together where few rows are served, since padding is computed too.

    Args:
        max_requests: the last of them.
        num_graphs: at most so many, each half of the next; None for about 25 and more.

    Example:
        >>> graph_sizes(70, 4)
        [10, 18, 36, 70]
        >>> graph_sizes(70)
        [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 70]
    """
    if num_graphs is not None:
        builder = CUDAGraphBatchDimensionBuilder(
            max_requests=max_requests, max_tokens=max_requests, max_sequence_length=1, num_cuda_graphs=num_graphs
        )
        return builder.token_counts(max_requests)[::-1]
    steps = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_requests + 1, 32)]
    return [*(size for size in steps if size < max_requests), max_requests]


def padding_step(builder: StepBuilder) -> HostStep:
    """A step without rows."""
    nothing = np.zeros(0, dtype=np.int64)
    tables = np.zeros((0, builder.max_blocks), dtype=np.int64)
    return HostStep(tokens_T=nothing, lengths_R=nothing, cached_R=nothing, tables_RB=tables, lines_R=nothing)


class DecodeGraphs:
    """Recordings of a model's decode step, made when they are first needed.

    The weights, the cache and the tensors of the step stay where they are; new weights are copied into the old ones.

    Args:
        compute: logits [R, V] of the step's rows, and the draws of ``StepInputs``; it neither waits for the device nor reads from it.
        builder: of the steps.
        sizes: numbers of rows, rising.
        pool: of the engine's recordings.
        is_shared: whether other ranks exchange tokens in these steps, and so record when this one does: an engine with adapters records all
            steps with them then. Else those without are recordings of their own.
    """

    def __init__(
        self,
        compute: Callable[[StepInputs], Tensor],
        builder: StepBuilder,
        sizes: list[int],
        pool: RecordingPool,
        *,
        is_shared: bool = False,
    ) -> None:
        self._compute, self._builder, self._sizes, self._pool, self._is_shared = compute, builder, sizes, pool, is_shared
        self._recorded: dict[int, Recording] = {}
        self._adapted: dict[int, Recording] = {}
        """Of steps in which rows may have adapters."""
        self.request_counts: Counter[int] = Counter()
        """Recorded number of rows to how often it was replayed for requests."""

    @property
    def max_rows(self) -> int:
        """Rows of the largest recording."""
        return self._sizes[-1]

    def padded(self, num_rows: int) -> int | None:
        """Rows of the smallest recording that holds so many; None where none does."""
        place = bisect.bisect_left(self._sizes, num_rows)
        return None if place == len(self._sizes) else self._sizes[place]

    def run(self, host: HostStep, size: int) -> Tensor:
        """Logits [R, V] of a step of R rows of one token each, overwritten by the next replay.

        Args:
            host: the step.
            size: rows of the recording, at least R, as of ``padded``.
        """
        logits_RV = self._replay(host, size)
        self.request_counts[size] += 1
        return logits_RV[: len(host.lengths_R)]

    def run_padding(self, size: int) -> None:
        """Replay the recording of so many rows with nothing but padding, for ranks that exchange tokens with this one."""
        self._replay(padding_step(self._builder), size)

    def record_all(self) -> None:
        """Record the sizes that are not recorded yet, the largest first."""
        for size in reversed(self._sizes):
            for adapts in (True, False) if self._has_both else (self._builder.has_adapters,):
                if size not in self._of(adapts):
                    self.record(size, adapts=adapts)

    def record(self, size: int, *, adapts: bool = False) -> None:
        """Record the step of ``size`` rows of padding.

        Args:
            size: number of rows.
            adapts: whether rows may have adapters.
        """
        self._builder.send_decode(padding_step(self._builder), size)
        self._of(adapts)[size] = self._pool.record(lambda: self._compute(self._builder.decode_inputs(size, adapts=adapts)))

    def clear(self) -> None:
        """Forget the recordings: the cache moves. Their memory comes back with that of the pool."""
        self._recorded.clear()
        self._adapted.clear()

    @property
    def _has_both(self) -> bool:
        """Whether steps with adapters and without have recordings of their own."""
        return self._builder.has_adapters and not self._is_shared

    def _of(self, adapts: bool) -> dict[int, Recording]:
        return self._adapted if adapts else self._recorded

    def _replay(self, host: HostStep, size: int) -> Tensor:
        adapts = self._builder.adapts(host) if self._has_both else self._builder.has_adapters
        recorded = self._of(adapts)
        if size not in recorded:
            self.record(size, adapts=adapts)
        replay, logits_RV = recorded[size]
        self._builder.send_decode(host, size)
        replay()
        return logits_RV
