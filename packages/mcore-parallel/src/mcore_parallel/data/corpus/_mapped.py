# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A local file mapped into memory, which says when it became shorter."""

import os
import weakref

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._errors import IndexedDatasetError


class MappedFile:
    """The bytes of a file as an array. Touching bytes that the file has lost kills a process, so `check` comes before each use.

    Args:
        path: a file on a disk; it may be empty.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb", buffering=0) as file:
            self.size = os.fstat(file.fileno()).st_size
            # numpy cannot map an empty file
            mapped = np.memmap(file, dtype=np.uint8, mode="r") if self.size else np.empty(0, np.uint8)
            self._handle = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._handle)
        # Indexing the subclass that maps a file is several times slower.
        self.bytes: NDArray[np.uint8] = np.asarray(mapped)

    def check(self) -> None:
        """Look at the length of the file again.

        Raises:
            IndexedDatasetError: it became shorter.
        """
        size = os.fstat(self._handle).st_size
        if size < self.size:
            raise IndexedDatasetError(
                f"{self.path} has {size} bytes, it had {self.size} when it was opened: it shrank during the run; "
                "restore it and start again from the last checkpoint"
            )
