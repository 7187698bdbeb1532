# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the datasets that cut one corpus into samples have in common: a constructor, indices in the cache, the number of a sample."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from mcore_parallel.data.corpus import IndexedDataset
from mcore_parallel.data.datasets._array_cache import Arrays, cache_folder, cached_arrays, describe
from mcore_parallel.data.datasets._blend import BlendedMegatronDatasetConfig, Split

NO_PAD = -1
"""Stands for padding inside a sample when no token id can; never leaves a dataset."""


def pad_id(tokenizer: Any, *, allow_ambiguous: bool, pad: int | None = None, others: Mapping[str, int] | None = None) -> int:
    """The tokenizer's pad id, or `NO_PAD` when it has none or when text uses that id for something else too; warns of the latter.

    Args:
        tokenizer: its special tokens are compared; None has no pad.
        allow_ambiguous: use the id all the same; real tokens of that id then lose their loss.
        pad: stands in the place of the tokenizer's own.
        others: further special tokens by name.
    """
    pad = getattr(tokenizer, "pad", None) if pad is None else pad
    if pad is None or pad < 0:
        return NO_PAD
    specials = {name: getattr(tokenizer, name, None) for name in ("eod", "eos", "bos", "unk", "cls", "sep", "mask")}
    specials |= {**getattr(tokenizer, "special_tokens_dict", {}), **(others or {})}
    same = sorted(name for name, token in specials.items() if token == pad and name != "pad")
    if not same:
        return pad
    if allow_ambiguous:
        warnings.warn(
            f"pad id {pad} is also {', '.join(same)}: every such token loses its loss; set allow_ambiguous_pad_tokens=False to keep it",
            stacklevel=4,
        )
        return pad
    warnings.warn(f"pad id {pad} is also {', '.join(same)}; padding is marked apart, real tokens keep their loss", stacklevel=4)
    return NO_PAD


C = TypeVar("C", bound=BlendedMegatronDatasetConfig)


class CorpusDataset(Dataset[dict[str, Tensor]], ABC, Generic[C]):
    """Samples of one split of one corpus, found by indices that are built once and kept; a subclass says what the samples are.

    Args:
        indexed_dataset: the corpus.
        dataset_path: its path prefix; None keeps the indices in memory unless ``path_to_cache`` is set.
        indexed_indices: numbers that belong to this split, of what ``numel_low_level_dataset`` counts.
        num_samples: samples wanted; None is one epoch.
        index_split: which split this is.
        config: gives the seed, the length of samples and the cache.
    """

    _cache_name: ClassVar[str | None] = None
    """Name of the folder of indices beside the corpus; None is that of the class."""

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | None,
        indexed_indices: NDArray[np.integer],
        num_samples: int | None,
        index_split: Split,
        config: C,
    ) -> None:
        self.dataset, self.config, self.index_split = indexed_dataset, config, index_split
        build, facts = self._plan(np.asarray(indexed_indices), num_samples)
        name = type(self).__name__
        common = {
            "class": name,
            "dataset_path": dataset_path,
            "num_samples": num_samples,
            "index_split": index_split.name,
            "random_seed": config.random_seed,
            "sequence_length": config.sequence_length,
        }
        self.description = describe({**common, **facts})
        place = cache_folder(config.path_to_cache, dataset_path, self._cache_name or name)
        for key, array in cached_arrays(place, f"{name}-{index_split.name}", self.description, build).items():
            # Plain views: indexing the subclass that maps a file is several times slower.
            setattr(self, key, np.asarray(array))

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> IndexedDataset:
        """Open the corpus that samples are cut from."""
        return IndexedDataset(dataset_path, multimodal=False, mmap=config.mmap_bin_files)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Sequences that splits are counted in."""
        return len(low_level_dataset)

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def _plan(self, documents: NDArray[np.integer], num_samples: int | None) -> tuple[Callable[[], Arrays], Mapping[str, Any]]:
        """What makes the indices, by the names of the attributes they become, and all they follow from beside what every dataset has."""

    def _number(self, idx: int | None) -> int:
        """``idx`` counted from the start, 0 for None.

        Raises:
            IndexError: there is no such sample.
        """
        count = len(self)
        if idx is not None and not -count <= idx < count:
            raise IndexError(f"sample {idx} of a dataset of {count}; ask the builder for more samples")
        return 0 if idx is None else idx % count
