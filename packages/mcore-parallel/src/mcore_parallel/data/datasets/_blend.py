# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files, weights and splits of a blend of corpora; and several datasets read as one, whose shares hold at every sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._array_cache import cached_arrays, describe

Blend = tuple[list[str], list[float] | None]


class Split(Enum):
    """Parts of a corpus, in file order."""

    train = 0
    valid = 1
    test = 2


@dataclass(frozen=True, kw_only=True)
class BlendedMegatronDatasetConfig:
    """Corpora, shares and splits; `GPTDatasetConfig` adds how samples are cut.

    Raises:
        DataError: fields contradict each other or leave their range.
    """

    random_seed: int
    """Seed of every order; the same seed gives the same order on any machine."""
    sequence_length: int
    """S, tokens of a sample."""
    blend: Blend | None = None
    """(path prefixes, weights); weights None reads every corpus whole."""
    blend_per_split: list[Blend | None] | None = None
    """A blend for each of train, valid, test; excludes ``blend`` and ``split``."""
    split: str | None = None
    """Shares of train, valid, test as in "99,1,0"; they need not sum to anything. Goes with ``blend``."""
    num_dataset_builder_threads: int = 1
    """Corpora whose indices are built at the same time."""
    path_to_cache: str | None = None
    """Folder of built indices; None puts them beside each corpus and keeps blends in memory."""
    mmap_bin_files: bool = True
    """Map .bin files rather than read them call by call."""
    tokenizer: Any = None
    """Gives eod and pad ids and enters the cache's name; None when neither matters."""
    mid_level_dataset_surplus: float = 0.005
    """Extra share of samples built for each corpus of a blend, so that rounding never runs one dry."""

    def __post_init__(self) -> None:
        _require(self.sequence_length > 0, f"sequence_length={self.sequence_length} must be positive")
        _require(0 <= self.random_seed < 2**32, f"random_seed={self.random_seed} must lie in 0..2**32 - 1")
        _require(self.num_dataset_builder_threads > 0, f"num_dataset_builder_threads={self.num_dataset_builder_threads} must be positive")
        _require(self.mid_level_dataset_surplus >= 0, f"mid_level_dataset_surplus={self.mid_level_dataset_surplus} must not be negative")
        if self.blend_per_split is not None:
            _require(self.blend is None and self.split is None, "blend_per_split excludes blend and split; set one kind")
            _require(len(self.blend_per_split) == len(Split), f"blend_per_split needs train, valid, test; got {len(self.blend_per_split)}")
        elif self.blend is not None:
            _require(self.split is not None, 'blend needs split; set for instance split="99,1,0"')
        for blend in (self.blend, *(self.blend_per_split or ())):
            if blend is not None:
                _check_blend(blend)
        if self.split is not None:
            parse_split(self.split)

    @property
    def split_matrix(self) -> list[tuple[float, float] | None]:
        """Begin and end share of each split, None for an empty one."""
        if self.split is None:
            return [(0.0, 1.0)] * len(Split)
        return parse_split(self.split)


def parse_split(split: str) -> list[tuple[float, float] | None]:
    """Begin and end share of train, valid and test.

    Example:
        >>> parse_split("3,1")
        [(0.0, 0.75), (0.75, 1.0), None]
    """
    remedy = f'split={split!r} must be up to three non-negative numbers, not all 0, such as "99,1,0"'
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError as error:
        raise DataError(remedy) from error
    _require(0 < len(shares) <= len(Split) and min(shares) >= 0 and 0 < sum(shares) < float("inf"), remedy)
    shares += [0.0] * (len(Split) - len(shares))
    total, begin, matrix = sum(shares), 0.0, []
    for number, share in enumerate(shares):
        # The last bookend is exactly 1, so that rounding loses no document.
        end = begin + share / total if any(shares[number + 1 :]) else 1.0
        matrix.append((begin, end) if share > 0 else None)
        begin = end if share > 0 else begin
    return matrix


def parse_blend(words: list[str]) -> Blend:
    """Blend of a command line: prefixes alone, or weight and prefix in turn.

    Example:
        >>> parse_blend(["3", "wiki", "1", "code"])
        (['wiki', 'code'], [3.0, 1.0])
        >>> parse_blend(["wiki", "code"])
        (['wiki', 'code'], None)
    """
    _require(len(words) > 0, "the blend is empty; name at least one path prefix")
    weights = [_number(word) for word in words[0::2]]
    if len(words) % 2 or None in weights:
        return list(words), None
    return list(words[1::2]), [weight for weight in weights if weight is not None]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _check_blend(blend: Blend) -> None:
    prefixes, weights = blend
    _require(len(prefixes) > 0, "blend names no path prefix; give at least one")
    if weights is not None:
        _require(len(weights) == len(prefixes), f"blend has {len(prefixes)} prefixes and {len(weights)} weights; give one weight a prefix")
        for prefix, weight in zip(prefixes, weights, strict=True):
            _require(0 < weight < float("inf"), f"weight={weight} of {prefix} must be positive; remove the corpus to leave it out")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise DataError(message)


# n datasets, k position in the blend


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


_MAX_DATASETS = int(np.iinfo(np.int16).max)


class SampleSource(Protocol):
    """What a blend needs of its parts."""

    def __len__(self) -> int: ...
    def __getitem__(self, idx: int, /) -> dict[str, Tensor]: ...


class BlendedDataset(Dataset[dict[str, Tensor]]):
    """Samples of several datasets interleaved so that shares hold at every point, not only at the end.

    Args:
        datasets: parts, each with a length; a part with ``description`` (as `GPTDataset` has) lets the index be cached.
        weights: one positive share a part; with ``size`` None they are whole numbers, the samples to take of each.
        size: samples of the blend; None takes every part to the number in ``weights``.
        config: gives ``path_to_cache``; None caches nothing.

    Raises:
        DataError: weights do not match the parts.
        IndexError: the blend asks a part for more samples than it has.
    """

    def __init__(
        self,
        datasets: Sequence[SampleSource],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig | None = None,
    ) -> None:
        if not 0 < len(datasets) < _MAX_DATASETS:
            raise DataError(f"{len(datasets)} datasets in one blend; give 1 to {_MAX_DATASETS - 1}, or merge small corpora")
        if len(weights) != len(datasets):
            raise DataError(f"{len(weights)} weights for {len(datasets)} datasets; give one each")
        for number, weight in enumerate(weights):
            if not 0 < weight < float("inf"):
                raise DataError(f"weight={weight} of dataset {number} must be positive; leave the dataset out")
            if size is None and weight != int(weight):
                raise DataError(f"weight={weight} of dataset {number} must be a whole number of samples when size is None; set size")
        if size is not None and size < 0:
            raise DataError(f"size={size} must not be negative")
        self.datasets = list(datasets)
        self.size = int(sum(weights)) if size is None else size
        self._check_lengths([int(weight) for weight in weights] if size is None else [0] * len(datasets))

        def build() -> dict[str, NDArray[Any]]:
            if size is None:
                dataset_index, sample_index = blend_exhaustively([int(weight) for weight in weights])
            else:
                total = float(sum(weights))
                dataset_index, sample_index = blend_by_weight([weight / total for weight in weights], size)
            return {"dataset_index": dataset_index, "dataset_sample_index": sample_index}

        folder = config.path_to_cache if config is not None else None
        parts = [getattr(dataset, "description", len(dataset)) for dataset in self.datasets]
        self.description = describe({"class": type(self).__name__, "datasets": parts, "weights": [float(w) for w in weights], "size": size})
        arrays = cached_arrays(folder, type(self).__name__, self.description, build)
        self.dataset_index = arrays["dataset_index"]
        self.dataset_sample_index = arrays["dataset_sample_index"]
        self._check_lengths(np.bincount(self.dataset_index, minlength=len(self.datasets)).tolist())

    def _check_lengths(self, wanted: list[int]) -> None:
        for number, (dataset, count) in enumerate(zip(self.datasets, wanted, strict=True)):
            if count > len(dataset):
                raise IndexError(
                    f"dataset {number} of the blend has {len(dataset)} samples, {count} are asked of it; "
                    "raise mid_level_dataset_surplus, lower its weight, or ask for fewer samples"
                )

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, idx: int) -> dict[str, Tensor]:
        """The sample of the part, plus ``dataset_id`` (int64 scalar), the part's number."""
        if not -self.size <= idx < self.size:
            raise IndexError(f"sample {idx} of a blend of {self.size}; ask for a larger size")
        number = int(self.dataset_index[idx])
        return {"dataset_id": torch.tensor(number), **self.datasets[number][int(self.dataset_sample_index[idx])]}
