# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reader of tokenised corpora: a .bin of raw tokens beside a .idx that says where each sequence lies."""

import os
from collections.abc import Mapping
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from mcore_parallel.data._errors import IndexedDatasetError, reason_of
from mcore_parallel.data._files import RemoteFile, is_url
from mcore_parallel.data.corpus._index_file import IndexArrays, MappedFile, read_index

_VERIFIED_AT_ONCE = 2**20
"""Entries of the index."""


class IndexedDataset:
    """Sequences of tokens, by number, straight from disk.

    Opening costs a header read whatever the corpus size. Arrays handed out are read-only and, when mapped, share the
    page cache; a file that becomes shorter meanwhile is an error at the next access.

    The object can be sent to worker processes; they map the files again. Behind a URL the index is read into
    memory and each access to tokens is one request for their bytes; nothing is copied to a disk.

    Args:
        path_prefix: path of both files without ``.bin`` and ``.idx``, or a URL that fsspec understands, such as
            ``s3://bucket/corpus`` (extra ``s3``).
        multimodal: the index carries one mode (int8) per sequence, and items are ``(tokens, mode)``.
        mmap: map the .bin; otherwise, and behind a URL, each access is one checked read.
        storage_options: of the file system behind a URL, such as ``endpoint_url``.

    Raises:
        IndexedDatasetError: a file is missing or damaged, or the .bin is shorter than the index says.

    Example:
        >>> corpus = IndexedDataset("corpus")                # doctest: +SKIP
        >>> len(corpus), corpus[0], corpus.get(0, offset=2, length=3)   # doctest: +SKIP
    """

    def __init__(
        self,
        path_prefix: str | os.PathLike[str],
        multimodal: bool = False,
        mmap: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.path_prefix = os.fspath(path_prefix)
        self.multimodal = multimodal
        self.mmap = mmap
        self.storage_options = storage_options
        self._bin_path = self.path_prefix + ".bin"
        self._index: IndexArrays = read_index(self.path_prefix + ".idx", multimodal=multimodal, storage_options=storage_options)
        needed = self._index.num_bytes
        self._remote = RemoteFile(self._bin_path, storage_options or {}) if is_url(self._bin_path) else None
        try:
            size = os.path.getsize(self._bin_path) if self._remote is None else self._remote.size()
        except OSError as error:
            raise IndexedDatasetError(
                f"cannot open {self._bin_path}: {reason_of(error)}; its index exists and describes {needed} bytes: copy the .bin beside it"
            ) from error
        self._bin_size = size
        if size < needed:
            raise IndexedDatasetError(
                f"{self._bin_path} has {size} bytes, its index describes {needed}: truncated or paired with another .idx; "
                "copy both again or write them again"
            )
        self._bin = MappedFile(self._bin_path) if mmap and self._remote is None else None
        self._mapped = [file for file in (self._index.file, self._bin) if file is not None]

    def __reduce__(self) -> tuple[Any, ...]:
        return IndexedDataset, (self.path_prefix, self.multimodal, self.mmap, self.storage_options)

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Whether both files are there."""
        paths = [os.fspath(path_prefix) + end for end in (".idx", ".bin")]
        return all(RemoteFile(path, {}).exists() if is_url(path) else os.path.exists(path) for path in paths)

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
            IndexedDatasetError: a file became shorter.
        """
        index = self._check(index)
        self._check_files()
        total = int(self._index.lengths_S[index])
        length = total - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > total:
            raise ValueError(f"offset={offset} length={length} leaves sequence {index} of {total} tokens; shorten the range")
        begin = int(self._index.pointers_S[index]) + offset * self.dtype.itemsize
        tokens = self._read(begin, length)
        return tokens if self._index.modes_S is None else (tokens, int(self._index.modes_S[index]))

    def gather(self, indices: NDArray[np.integer], begin: int, end: int, out: NDArray[Any]) -> int:
        """Copy sequences back to back to the start of ``out``: the first from its token ``begin``, the last up to its token ``end``.

        Behind a URL all of them are asked for at once.

        Args:
            indices: [n] sequence numbers, none negative.
            begin: token offset into the first.
            end: token offset into the last, which is left out.
            out: where they go, of any dtype that holds them.

        Returns:
            How many tokens were copied.

        Raises:
            ValueError: an offset leaves its sequence, or ``out`` is too short.
            IndexedDatasetError: a file became shorter.
        """
        self._check_files()
        counts, starts = self._index.lengths_S[indices].tolist(), self._index.pointers_S[indices].tolist()
        if not 0 <= begin <= counts[0] or not 0 <= end <= counts[-1]:
            raise ValueError(f"begin={begin} or end={end} leaves its sequence of {counts[0]} or {counts[-1]} tokens; shorten the range")
        counts[-1] = end
        counts[0] -= begin
        starts[0] += begin * self.dtype.itemsize
        total = sum(counts)
        if counts[0] < 0 or total > out.size:
            raise ValueError(f"begin={begin}, end={end} give {total} tokens, out holds {out.size}; shorten the range")
        places = [place for place in zip(starts, counts, strict=True) if place[1]]
        source, dtype = self._bin, self.dtype
        if source is not None:
            parts = [np.frombuffer(source.bytes, dtype, count, start) for start, count in places]
        elif self._remote is not None:
            contents = self._remote.read_many([(start, start + count * dtype.itemsize) for start, count in places])
            parts = [np.frombuffer(data, dtype) for data in contents]
        else:
            parts = [self._read(start, count) for start, count in places]
        if parts:
            np.concatenate(parts, out=out[:total], casting="same_kind")
        return total

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
        """Check the whole index, which opening does not: lengths, pointers, document boundaries and the length of the .bin agree.

        Reads the index once, in little memory. What has no second witness, such as tokens and boundaries in ascending order, is believed.

        Raises:
            IndexedDatasetError: naming the first entry that is wrong.
        """
        self._check_files()
        index, num_bytes = self._index, 0
        for start in range(0, len(self), _VERIFIED_AT_ONCE):
            lengths = index.lengths_S[start : start + _VERIFIED_AT_ONCE].astype(np.int64)
            self._refuse("sequence length is negative", np.flatnonzero(lengths < 0), start)
            ends = num_bytes + np.cumsum(lengths) * self.dtype.itemsize
            pointers = index.pointers_S[start : start + _VERIFIED_AT_ONCE]
            wrong = np.flatnonzero(ends - lengths * self.dtype.itemsize != pointers)
            self._refuse("pointer differs from the sum of the lengths before it", wrong, start)
            num_bytes = int(ends[-1])
        last = 0
        for start in range(0, index.documents_D.size, _VERIFIED_AT_ONCE):
            bounds = index.documents_D[start : start + _VERIFIED_AT_ONCE]
            self._refuse("document boundary is lower than the one before it", np.flatnonzero(np.diff(bounds, prepend=last) < 0), start)
            self._refuse("document boundary lies outside", np.flatnonzero(bounds > len(self)), start)
            last = int(bounds[-1])
        if index.documents_D.size and (index.documents_D[0] != 0 or last != len(self)):
            first = int(index.documents_D[0])
            raise self._damage(f"documents reach from sequence {first} to {last}, expected 0 to {len(self)}")
        if self._bin_size != num_bytes:
            raise self._damage(f"its lengths add up to {num_bytes} bytes, {self._bin_path} has {self._bin_size}")

    def _refuse(self, what: str, wrong: NDArray[np.integer], start: int) -> None:
        if wrong.size:
            raise self._damage(f"{what} at entry {start + int(wrong[0])}")

    def _damage(self, what: str) -> IndexedDatasetError:
        return IndexedDatasetError(f"{self.path_prefix}.idx: {what}; copy both files again or write the dataset again")

    def _check(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {self.path_prefix}, which has {len(self)}")
        return index % len(self)

    def _check_files(self) -> None:
        for file in self._mapped:
            file.check()

    def _range(self, start: int, stop: int) -> list[Any]:
        if start == stop:
            return []
        self._check_files()
        lengths = self._index.lengths_S[start:stop].astype(np.int64)
        tokens = self._read(int(self._index.pointers_S[start]), int(lengths.sum()))
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        return parts if self._index.modes_S is None else list(zip(parts, self._index.modes_S[start:stop].tolist(), strict=True))

    def _read(self, begin: int, count: int) -> NDArray[Any]:
        if self._bin is not None:
            return np.frombuffer(self._bin.bytes, self.dtype, count, begin) if count else np.frombuffer(b"", self.dtype)
        num_bytes = count * self.dtype.itemsize
        if self._remote is not None:
            return np.frombuffer(self._remote.read(begin, begin + num_bytes), self.dtype)
        with open(self._bin_path, "rb") as file:
            file.seek(begin)
            data = file.read(num_bytes)
        if len(data) != num_bytes:
            raise IndexedDatasetError(f"{self._bin_path} gave {len(data)} of {num_bytes} bytes at {begin}: it shrank; restore it")
        return np.frombuffer(data, self.dtype)
