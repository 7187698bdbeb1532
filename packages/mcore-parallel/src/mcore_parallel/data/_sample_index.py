# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the datasets that cut a corpus into samples have in common: their indices in the cache, and the number of a sample."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._array_cache import Arrays, cache_folder, cached_arrays, describe
from mcore_parallel.data._blend_config import BlendedMegatronDatasetConfig, Split


def sample_indices(
    name: str,
    config: BlendedMegatronDatasetConfig,
    split: Split,
    build: Callable[[], Arrays],
    *,
    dataset_path: str | None,
    num_samples: int | None,
    facts: Mapping[str, Any],
    folder: str | None = None,
) -> tuple[str, dict[str, NDArray[Any]]]:
    """Indices of one split of one corpus, from the cache or built.

    Args:
        name: of the dataset's class.
        config: gives the seed, the length of samples and the cache.
        split: which split this is.
        build: makes the arrays.
        dataset_path: path prefix of the corpus; None keeps the arrays in memory unless the config names a cache.
        num_samples: samples wanted.
        facts: everything else that the arrays follow from.
        folder: whose folder beside the corpus is shared; None for one of its own.

    Returns:
        (description, arrays).
    """
    common = {
        "class": name,
        "dataset_path": dataset_path,
        "num_samples": num_samples,
        "index_split": split.name,
        "random_seed": config.random_seed,
        "sequence_length": config.sequence_length,
    }
    description = describe({**common, **facts})
    place = cache_folder(config.path_to_cache, dataset_path, folder or name)
    arrays = cached_arrays(place, f"{name}-{split.name}", description, build)
    # Plain views: indexing the subclass that maps a file is several times slower.
    return description, {key: np.asarray(array) for key, array in arrays.items()}


def sample_number(idx: int | None, count: int) -> int:
    """``idx`` counted from the start, 0 for None.

    Raises:
        IndexError: there is no such sample.
    """
    if idx is not None and not -count <= idx < count:
        raise IndexError(f"sample {idx} of a dataset of {count}; ask the builder for more samples")
    return 0 if idx is None else idx % count
