# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reader of tokenised corpora: a .bin of raw tokens beside a .idx that says where each sequence lies."""

import os
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._errors import IndexedDatasetError
from mcore_parallel.data._index_file import IndexArrays, read_index


class IndexedDataset:
    """Sequences of tokens, by number, straight from disk.

    Opening costs a header read whatever the corpus size. Arrays handed out are read-only and, when mapped, share the
    page cache. The object can be sent to worker processes; they map the files again.

    Args:
        path_prefix: path of both files without ``.bin`` and ``.idx``.
        multimodal: the index carries one mode (int8) per sequence, and items are ``(tokens, mode)``.
        mmap: map the .bin; otherwise each access is one checked read through a fresh handle.

    Raises:
        IndexedDatasetError: a file is missing or damaged, or the .bin is shorter than the index says.

    Example:
        >>> corpus = IndexedDataset("corpus")                # doctest: +SKIP
        >>> len(corpus), corpus[0], corpus.get(0, offset=2, length=3)   # doctest: +SKIP
    """

    def __init__(self, path_prefix: str | os.PathLike[str], multimodal: bool = False, mmap: bool = True) -> None:
        self.path_prefix = os.fspath(path_prefix)
        self.multimodal = multimodal
        self.mmap = mmap
        self._bin_path = self.path_prefix + ".bin"
        self._index: IndexArrays = read_index(self.path_prefix + ".idx", multimodal=multimodal)
        needed = self._index.num_bytes
        try:
            size = os.path.getsize(self._bin_path)
        except OSError as error:
            raise IndexedDatasetError(
                f"cannot open {self._bin_path}: {error.strerror}; its index exists and describes {needed} bytes: copy the .bin beside it"
            ) from error
        if size < needed:
            raise IndexedDatasetError(
                f"{self._bin_path} has {size} bytes, its index describes {needed}: truncated or paired with another .idx; "
                "copy both again or write them again"
            )
        # numpy cannot map an empty file
        self._bin: NDArray[np.uint8] | None = None
        if mmap:
            self._bin = np.memmap(self._bin_path, dtype=np.uint8, mode="r") if size else np.empty(0, np.uint8)

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.path_prefix, self.multimodal, self.mmap)

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Whether both files are there."""
        return all(os.path.exists(os.fspath(path_prefix) + end) for end in (".idx", ".bin"))

    def __len__(self) -> int:
        return self._index.lengths_S.size

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        """Sequence ``index`` as a 1-D array of `dtype`, or a list of them for a slice of step 1; pairs with modes if multimodal."""
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"slice step={step} is not supported; take step 1 and stride over the list")
            return self._range(start, max(start, stop))
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> Any:
        """Tokens ``[offset, offset + length)`` of one sequence (to its end when length is None), ``(tokens, mode)`` if multimodal.

        Raises:
            IndexError: no such sequence.
            ValueError: the range leaves the sequence.
        """
        index = self._check(index)
        total = int(self._index.lengths_S[index])
        length = total - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > total:
            raise ValueError(f"offset={offset} length={length} leaves sequence {index} of {total} tokens; shorten the range")
        begin = int(self._index.pointers_S[index]) + offset * self.dtype.itemsize
        tokens = self._read(begin, length)
        return tokens if self._index.modes_S is None else (tokens, int(self._index.modes_S[index]))

    @property
    def dtype(self) -> np.dtype:
        """Token dtype, little-endian."""
        return self._index.dtype

    @property
    def sequence_lengths(self) -> NDArray[np.int32]:
        """[S] tokens of each sequence."""
        return self._index.lengths_S

    @property
    def sequence_modes(self) -> NDArray[np.int8] | None:
        """[S] modes, None unless multimodal."""
        return self._index.modes_S

    @property
    def document_indices(self) -> NDArray[np.int64]:
        """[D] sequence number at which each document starts, then S."""
        return self._index.documents_D

    def get_document_indices(self) -> NDArray[np.int64]:
        """Same as `document_indices`, the spelling other code knows."""
        return self._index.documents_D

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self._index.lengths_S.sum(dtype=np.int64))

    def verify(self) -> None:
        """Check the whole index, which opening does not: lengths, pointers and document boundaries agree.

        Raises:
            IndexedDatasetError: naming the first entry that is wrong.
        """
        lengths = self._index.lengths_S.astype(np.int64)
        pointers = np.cumsum(lengths) - lengths
        pointers *= self.dtype.itemsize
        bounds = self._index.documents_D
        checks = (
            ("sequence length is negative", np.flatnonzero(lengths < 0)),
            ("pointer differs from the sum of the lengths before it", np.flatnonzero(pointers != self._index.pointers_S)),
            ("document boundary is lower than the one before it", np.flatnonzero(np.diff(bounds, prepend=0) < 0)),
            ("document boundary lies outside", np.flatnonzero(bounds > len(self))),
        )
        for what, wrong in checks:
            if wrong.size:
                raise IndexedDatasetError(f"{self.path_prefix}.idx: {what} at entry {wrong[0]}; write the dataset again")

    def _check(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self.path_prefix}, which has {len(self)}")
        return index % len(self)

    def _range(self, start: int, stop: int) -> list[Any]:
        if start == stop:
            return []
        lengths = self._index.lengths_S[start:stop].astype(np.int64)
        tokens = self._read(int(self._index.pointers_S[start]), int(lengths.sum()))
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        return parts if self._index.modes_S is None else list(zip(parts, self._index.modes_S[start:stop].tolist(), strict=True))

    def _read(self, begin: int, count: int) -> NDArray[Any]:
        if self._bin is not None:
            return np.frombuffer(self._bin, self.dtype, count, begin) if count else np.frombuffer(b"", self.dtype)
        num_bytes = count * self.dtype.itemsize
        with open(self._bin_path, "rb") as file:
            file.seek(begin)
            data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise IndexedDatasetError(f"{self._bin_path} gave {len(data)} of {num_bytes} bytes at {begin}: it shrank; restore it")
        return np.frombuffer(data, self.dtype)
