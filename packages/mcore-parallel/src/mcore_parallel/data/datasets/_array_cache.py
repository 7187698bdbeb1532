# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Arrays kept on disk under a hash of what they were made from, safe for any number of writers."""

import hashlib
import json
import os
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._errors import reason_of
from mcore_parallel.data._files import atomic_file, is_url

Arrays = Mapping[str, NDArray[Any]]


def describe(facts: Mapping[str, Any]) -> str:
    """Canonical JSON of ``facts``; what the hash is taken of and what the cache keeps to be read by people."""
    return json.dumps(facts, indent=4, default=lambda value: getattr(value, "unique_identifiers", str(value)))


def as_run(numbers: NDArray[np.integer]) -> slice | NDArray[np.integer]:
    """``numbers`` as a slice where each is one more than that before it, which spares a copy of what it selects."""
    if not numbers.size or numbers[-1] - numbers[0] != numbers.size - 1 or not (numbers[1:] > numbers[:-1]).all():
        return numbers
    return slice(int(numbers[0]), int(numbers[-1]) + 1)


def fingerprint(numbers: NDArray[np.integer] | slice) -> list[int]:
    """Count and checksum, or the ends of a run: a corpus rewritten under the same name must not meet old arrays."""
    if isinstance(numbers, slice):
        return [numbers.stop - numbers.start, numbers.start, numbers.stop]
    return [numbers.size, zlib.crc32(np.ascontiguousarray(numbers, dtype=np.int32).view(np.uint8).data)]


def cache_folder(path_to_cache: str | None, dataset_path: str | None, name: str) -> str | None:
    """The folder asked for, else one beside the corpus, or none where there is no place on a disk."""
    if path_to_cache is not None or dataset_path is None or is_url(dataset_path):
        return path_to_cache
    return os.path.join(os.path.dirname(dataset_path) or ".", "cache", f"{name}_indices")


def cached_arrays(folder: str | None, label: str, description: str, build: Callable[[], Arrays]) -> Arrays:
    """Arrays of ``build()``, from ``folder`` when they are there.

    Files are ``<md5>-<label>-<name>.npy`` and ``-description.txt``. Every process may build at once: each file takes its
    name by a rename, the description last, and all writers write the same bytes. Without a folder, or when it cannot be
    written, arrays stay in memory. Damaged files are built again.
    """
    if folder is None:
        return build()
    # md5 names files here and protects nothing
    digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
    stem = os.path.join(folder, f"{digest}-{label}-")
    cached = _load(stem, description)
    if cached is not None:
        return cached
    arrays = build()
    try:
        os.makedirs(folder, exist_ok=True)
        for name, array in arrays.items():
            with atomic_file(f"{stem}{name}.npy") as file:
                np.save(file, array, allow_pickle=False)
        with atomic_file(f"{stem}description.txt") as file:
            file.write(json.dumps({"arrays": _shapes(arrays)}).encode() + b"\n" + description.encode())
    except OSError as error:
        warnings.warn(f"index cache {folder} cannot be written ({reason_of(error)}); set path_to_cache to a writable folder", stacklevel=2)
        return arrays
    return arrays


def _shapes(arrays: Arrays) -> dict[str, list[Any]]:
    return {name: [array.dtype.str, *array.shape] for name, array in arrays.items()}


def _load(stem: str, description: str) -> Arrays | None:
    try:
        with open(f"{stem}description.txt", encoding="utf-8") as file:
            head, body = file.readline(), file.read()
        if body != description:
            return None
        shapes = json.loads(head)["arrays"]
        arrays = {name: np.load(f"{stem}{name}.npy", mmap_mode="r", allow_pickle=False) for name in shapes}
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None  # not there, or damaged: building again repairs both
    return arrays if _shapes(arrays) == shapes else None
