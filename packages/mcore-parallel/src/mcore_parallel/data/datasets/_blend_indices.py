# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which dataset gives sample k of a blend, so that shares hold at every k."""

# n datasets, k position in the blend

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BlendIndices = tuple[NDArray[np.int16], NDArray[np.int64]]

_BLOCK = 4096


def blend_by_weight(weights: Sequence[float], size: int) -> BlendIndices:
    """Greedy interleave: sample k comes from the dataset that lags its share most, ``argmax_i w_i * max(k, 1) - count_i``.

    Weights sum to 1; ties go to the first. Counts stay within two samples of their share at every k.

    Returns:
        (dataset number [size], sample number within that dataset [size]).
    """
    dataset_index = np.empty(size, dtype=np.int16)
    weights_n = np.asarray(weights, dtype=np.float64)
    counts = [0] * weights_n.size
    for start in range(0, size, _BLOCK):
        stop = min(size, start + _BLOCK)
        positions = np.maximum(np.arange(start, stop), 1).astype(np.float64)
        dataset_index[start:stop] = _advance((positions[:, None] * weights_n).tolist(), counts)
    return dataset_index, _sample_numbers(dataset_index, weights_n.size)


def blend_exhaustively(sizes: Sequence[int]) -> BlendIndices:
    """Every sample of every dataset once, interleaved by size with the rule of `blend_by_weight` among those not yet used up."""
    total = sum(sizes)
    dataset_index = np.empty(total, dtype=np.int16)
    left = list(sizes)
    active = [number for number, size in enumerate(left) if size]
    counts = [0] * len(left)
    weights_n = np.asarray(left, dtype=np.float64) / total
    at = 0
    while at < total:
        # No dataset can run dry before as many samples as the smallest remainder.
        stop = min(total, at + min(_BLOCK, min(left[number] - counts[number] for number in active)))
        positions = np.maximum(np.arange(at, stop), 1).astype(np.float64)
        part = [counts[number] for number in active]
        chosen = _advance((positions[:, None] * weights_n[active]).tolist(), part)
        dataset_index[at:stop] = np.asarray(active, dtype=np.int16)[chosen]
        for number, count in zip(active, part, strict=True):
            counts[number] = count
        active = [number for number in active if counts[number] < left[number]]
        at = stop
    return dataset_index, _sample_numbers(dataset_index, len(left))


def _advance(rows: list[list[float]], counts: list[int]) -> list[int]:
    """One choice a row of due counts; ``counts`` moves along."""
    chosen = []
    for due in rows:
        best, most = 0, due[0] - counts[0]
        for number in range(1, len(due)):
            lag = due[number] - counts[number]
            if lag > most:
                best, most = number, lag
        counts[best] += 1
        chosen.append(best)
    return chosen


def _sample_numbers(dataset_index: NDArray[np.int16], num_datasets: int) -> NDArray[np.int64]:
    """How many earlier entries name the same dataset."""
    numbers = np.empty(dataset_index.size, dtype=np.int64)
    for dataset in range(num_datasets):
        where = np.flatnonzero(dataset_index == dataset)
        numbers[where] = np.arange(where.size)
    return numbers
