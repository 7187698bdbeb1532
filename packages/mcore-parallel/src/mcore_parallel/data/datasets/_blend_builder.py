# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From a config to the train, valid and test datasets of a run."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mcore_parallel.data._errors import DataError
from mcore_parallel.data.corpus import IndexedDataset
from mcore_parallel.data.datasets._blend import Blend, BlendedDataset, BlendedMegatronDatasetConfig, Split

Range = tuple[float, float]


class BlendedMegatronDatasetBuilder:
    """Builds the datasets a config describes, on every process that wants them, without a barrier.

    Indices are found in the cache or built, whichever process comes first; all processes reach the same arrays.

    Args:
        cls: dataset class with the constructor and the two static methods of `GPTDataset`.
        sizes: samples wanted of train, valid, test; None is one epoch.
        is_built_on_rank: whether this process reads data; where it does not, `build` gives None three times.
        config: corpora, shares and splits.
        is_verified_on_rank: whether this process checks each whole index before anything is built, see `IndexedDataset.verify`; one process
            of a run is enough.

    Example:
        >>> blend = (["wiki", "code"], [0.7, 0.3])
        >>> config = GPTDatasetConfig(random_seed=1, sequence_length=4096, blend=blend, split="99,1,0")  # doctest: +SKIP
        >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, [10**6, 100, None], lambda: True, config)  # doctest: +SKIP
        >>> train, valid, test = builder.build()  # doctest: +SKIP
    """

    def __init__(
        self,
        cls: type[Any],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
        *,
        is_verified_on_rank: Callable[[], bool] = lambda: True,
    ) -> None:
        if len(sizes) != len(Split):
            raise DataError(f"sizes has {len(sizes)} entries; give one for each of train, valid, test")
        if any(size is not None and size < 0 for size in sizes):
            raise DataError(f"sizes={list(sizes)} must not be negative")
        if config.blend is None and config.blend_per_split is None:
            raise DataError("config names no data; set blend and split, or blend_per_split")
        self.cls, self.sizes, self.config = cls, list(sizes), config
        self.is_built_on_rank, self.is_verified_on_rank = is_built_on_rank, is_verified_on_rank

    def build(self) -> list[Any]:
        """[train, valid, test]; None where the split is empty or this process reads no data.

        Raises:
            DataError: a split has too few tokens for one sample.
            IndexedDatasetError: a corpus is missing or damaged.
        """
        if not self.is_built_on_rank():
            return [None] * len(Split)
        if self.is_verified_on_rank():
            self._verify()
        if self.config.blend_per_split is not None:
            return [
                None if blend is None else self._split(blend, (0.0, 1.0), split, self.sizes[split.value])
                for split, blend in zip(Split, self.config.blend_per_split, strict=True)
            ]
        assert self.config.blend is not None
        ranges = self.config.split_matrix
        return [
            None if part is None else self._split(self.config.blend, part, split, self.sizes[split.value])
            for split, part in zip(Split, ranges, strict=True)
        ]

    def _verify(self) -> None:
        """Check the index of each corpus once, in however many splits it is."""
        blends = self.config.blend_per_split or [self.config.blend]
        for prefix in dict.fromkeys(prefix for blend in blends if blend is not None for prefix in blend[0]):
            low_level = self.cls.build_low_level_dataset(prefix, self.config)
            if isinstance(low_level, IndexedDataset):
                low_level.verify()

    def _split(self, blend: Blend, part: Range, split: Split, size: int | None) -> Any:
        prefixes, weights = blend
        if len(prefixes) == 1:
            return self._corpus(prefixes[0], part, split, size)
        # Without weights every corpus is read to its end, once.
        wanted: list[int | None] = [None] * len(prefixes)
        if weights is not None and size is not None:
            wanted = _shares(weights, size, self.config.mid_level_dataset_surplus)
        jobs = [(prefix, part, split, count) for prefix, count in zip(prefixes, wanted, strict=True)]
        with ThreadPoolExecutor(min(self.config.num_dataset_builder_threads, len(jobs))) as pool:
            datasets = list(pool.map(lambda job: self._corpus(*job), jobs))
        present = [number for number, dataset in enumerate(datasets) if dataset is not None]
        if not present:
            return None
        datasets = [datasets[number] for number in present]
        if weights is None or size is None:
            lengths = [len(dataset) for dataset in datasets]
            total = sum(lengths)
            if size is not None and size > total:
                raise DataError(f"split {split.name} asks for {size} samples, its corpora hold {total}; give weights to repeat them")
            return BlendedDataset(datasets, lengths, None if size in (None, total) else size, self.config)
        if len(present) < len(prefixes):
            missing = sorted(set(prefixes) - {prefixes[number] for number in present})
            raise DataError(f"split {split.name} of {missing[0]} holds no document, its weight cannot be met; widen the split")
        return BlendedDataset(datasets, weights, size, self.config)

    def _corpus(self, prefix: str, part: Range, split: Split, size: int | None) -> Any:
        """Dataset of one split of one corpus; None when no document falls into it."""
        low_level = self.cls.build_low_level_dataset(prefix, self.config)
        total = self.cls.numel_low_level_dataset(low_level)
        begin, end = (round(bookend * total) for bookend in part)
        if begin == end:
            return None
        try:
            return self.cls(low_level, prefix, np.arange(begin, end, dtype=np.int32), size, split, self.config)
        except DataError as error:
            raise DataError(f"split {split.name} of {prefix}: {error}") from error


def _shares(weights: Sequence[float], size: int, surplus: float) -> list[int | None]:
    """Samples to build of each corpus: its share of the request, rounded up, and a little more."""
    total = sum(weights)
    return [math.ceil(math.ceil(size * weight / total) * (1 + surplus)) for weight in weights]
