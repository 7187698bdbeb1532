# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decode steps as CUDA graphs: one recording for each number of rows."""

import bisect
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from mcore_inference.context import HostStep, StepBuilder, StepInputs
from mcore_inference.scheduling import CUDAGraphBatchDimensionBuilder

__all__ = ["DecodeGraphs", "graph_sizes"]

_WARM_UP_RUNS = 2


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


class DecodeGraphs:
    """Recordings of a model's decode step, made when they are first needed, in one pool of memory.

    The weights, the cache and the tensors of the step stay where they are; new weights are copied into the old ones.

    Args:
        compute: logits [R, V] of the step's rows; it neither waits for the device nor reads from it.
        builder: of the steps.
        sizes: numbers of rows, rising.
    """

    def __init__(self, compute: Callable[[StepInputs], Tensor], builder: StepBuilder, sizes: list[int]) -> None:
        self._compute, self._builder, self._sizes = compute, builder, sizes
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self.request_counts: Counter[int] = Counter()
        """Recorded number of rows to how often it was replayed."""

    def run(self, host: HostStep) -> Tensor | None:
        """Logits [R, V] of a step of R rows of one token each, overwritten by the next run; None for more rows than any recording has."""
        real = len(host.lengths_R)
        place = bisect.bisect_left(self._sizes, real)
        if place == len(self._sizes):
            return None
        size = self._sizes[place]
        if size not in self._recorded:
            self.record(size)
        graph, logits = self._recorded[size]
        self._builder.send_decode(host, size)
        graph.replay()
        self.request_counts[size] += 1
        return logits[:real]

    def record(self, size: int) -> None:
        """Record the step of ``size`` rows of padding."""
        # Here, for an import that is faster where nothing is recorded.
        from mcore_parallel.graphs import collection_paused

        nothing = np.zeros(0, dtype=np.int64)
        tables = np.zeros((0, self._builder.max_blocks), dtype=np.int64)
        padding = HostStep(tokens_T=nothing, lengths_R=nothing, cached_R=nothing, tables_RB=tables, lines_R=nothing)
        self._builder.send_decode(padding, size)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_RUNS):
                self._compute(self._builder.decode_inputs(size))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, NCCL's watchdog and those of a server, go on; a collection here would free recordings of an engine that is gone.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"), collection_paused():
            logits = self._compute(self._builder.decode_inputs(size))
        self._recorded[size] = graph, logits

    def clear(self) -> None:
        """Forget the recordings, and give their memory back: the cache moves."""
        self._recorded.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def record_all(self) -> None:
        """Record every size, the largest first: smaller ones fit into its memory."""
        for size in reversed(self._sizes):
            if size not in self._recorded:
                self.record(size)
