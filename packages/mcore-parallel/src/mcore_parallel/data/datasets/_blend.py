# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Several datasets read as one, in given shares."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.datasets._array_cache import cached_arrays, describe
from mcore_parallel.data.datasets._blend_config import BlendedMegatronDatasetConfig
from mcore_parallel.data.datasets._blend_indices import blend_by_weight, blend_exhaustively

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
