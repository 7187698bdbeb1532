# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Writer of tokenised corpora."""

import contextlib
import os
import shutil
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mcore_parallel.data._errors import IndexedDatasetError, reason_of
from mcore_parallel.data._files import atomic_file, commit, partial_name
from mcore_parallel.data.corpus._index_file import as_token_dtype, read_index, write_index


class IndexedDatasetBuilder:
    """Collects sequences into a .bin and, at `finalize`, its .idx.

    Both grow under temporary names in the same folder and take their names at the end, the index last: a builder
    that fails or is killed leaves no dataset behind, never half of one. Use it as a context manager, or call
    `finalize` or `abort`.

    Args:
        bin_path: the .bin to be.
        dtype: stored token type; `token_dtype(vocab_size)` chooses one.
        multimodal: store a mode with each sequence.

    Example:
        >>> with IndexedDatasetBuilder("corpus.bin", dtype="u2") as builder:   # doctest: +SKIP
        ...     builder.add_document([5, 6, 7], [3])
        ...     builder.finalize()
    """

    def __init__(self, bin_path: str | os.PathLike[str], dtype: DTypeLike = np.int32, multimodal: bool = False) -> None:
        self.dtype = as_token_dtype(dtype)
        self.multimodal = multimodal
        self._bin_path = os.fspath(bin_path)
        self._partial = partial_name(self._bin_path)
        try:
            self._file: BinaryIO = open(self._partial, "xb", buffering=1 << 20)  # noqa: SIM115 - closed by finalize or abort
        except OSError as error:
            raise IndexedDatasetError(f"cannot write {self._bin_path}: {reason_of(error)}; name a writable folder") from error
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b")
        self._cleanup = weakref.finalize(self, _discard, self._file, self._partial)

    def __enter__(self) -> "IndexedDatasetBuilder":
        return self

    def __exit__(self, *exc: object) -> None:
        self.abort()  # does nothing after finalize

    @property
    def num_sequences(self) -> int:
        """Sequences added so far."""
        return len(self._lengths)

    def add_item(self, tensor: ArrayLike, mode: int = 0) -> None:
        """Append one sequence [n] to the open document; `end_document` closes it.

        Raises:
            IndexedDatasetError: a token does not fit the dtype.
        """
        tokens = np.asarray(tensor)
        self._append(tokens, [tokens.size], [mode])

    def end_document(self) -> None:
        """Close the open document (an empty one if nothing was added since the last)."""
        self._documents.append(len(self._lengths))

    def add_document(self, tensor: ArrayLike, lengths: Sequence[int], modes: Sequence[int] | None = None) -> None:
        """Append one document of ``len(lengths)`` sequences lying back to back in ``tensor`` [sum(lengths)].

        Raises:
            IndexedDatasetError: a token does not fit the dtype, or the lengths do not add up.
        """
        self._append(np.asarray(tensor), list(lengths), modes)
        self.end_document()

    def add_documents(self, tensor: ArrayLike, lengths: NDArray[np.integer] | Sequence[int]) -> None:
        """Append many documents of one sequence each, back to back in ``tensor`` [sum(lengths)]: the fast way for bulk work."""
        first = len(self._lengths)
        sizes = np.asarray(lengths, dtype=np.int64)
        self._append(np.asarray(tensor), sizes, None)
        self._documents.frombytes(np.arange(first + 1, first + 1 + sizes.size, dtype=np.int64).tobytes())

    def add_index(self, path_prefix: str | os.PathLike[str]) -> None:
        """Append a whole finished dataset.

        Raises:
            IndexedDatasetError: the shard is damaged, or its dtype or modes differ from this builder's.
        """
        prefix = os.fspath(path_prefix)
        shard = read_index(prefix + ".idx", multimodal=self.multimodal)
        if shard.dtype != self.dtype:
            raise IndexedDatasetError(f"{prefix} holds {shard.dtype} tokens, the output {self.dtype}; merge shards of one dtype")
        try:
            with open(prefix + ".bin", "rb") as source, self._writing():
                _copy(source, self._file, shard.num_bytes)
        except OSError as error:
            raise IndexedDatasetError(f"cannot open {prefix}.bin: {reason_of(error)}; its index exists: copy the .bin beside it") from error
        self._documents.frombytes((shard.documents_D[1:].astype(np.int64) + len(self._lengths)).tobytes())
        self._lengths.frombytes(shard.lengths_S.astype(np.intc).tobytes())
        if shard.modes_S is not None:
            self._modes.frombytes(shard.modes_S.tobytes())

    def finalize(self, idx_path: str | os.PathLike[str] | None = None) -> None:
        """Put both files in place; ``idx_path`` defaults to the .bin's name with the ending .idx."""
        if not self._cleanup.alive:
            raise IndexedDatasetError(f"builder of {self._bin_path} is already finished; make a new one")
        index = os.fspath(idx_path) if idx_path is not None else os.path.splitext(self._bin_path)[0] + ".idx"
        with self._writing():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        with self._writing(), atomic_file(index) as file:
            write_index(
                file,
                dtype=self.dtype,
                lengths_S=np.array(self._lengths, dtype=np.int32),
                documents_D=np.array(self._documents, dtype=np.int64),
                modes_S=np.array(self._modes, dtype=np.int8) if self.multimodal else None,
            )
            # An older index must not be seen beside the new .bin, even for the instant between two renames.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(index)
            commit(self._partial, self._bin_path)
        self._cleanup.detach()

    def abort(self) -> None:
        """Forget everything added and remove the temporary file."""
        self._cleanup()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise IndexedDatasetError(f"cannot write {self._bin_path}: {reason_of(error)}; make room, or name another folder") from error

    def _append(self, tokens: NDArray[Any], lengths: Sequence[int] | NDArray[np.int64], modes: Sequence[int] | None) -> None:
        sizes = np.asarray(lengths, dtype=np.int64)
        if tokens.ndim != 1 or sizes.sum() != tokens.size or (sizes < 0).any():
            raise IndexedDatasetError(f"lengths sum to {sizes.sum()}, tokens have shape {tokens.shape}; give 1-D tokens and their lengths")
        if sizes.size and sizes.max() > np.iinfo(np.int32).max:
            raise IndexedDatasetError(f"a sequence of {sizes.max()} tokens exceeds the format's 2**31 - 1; cut it")
        if modes is not None and not self.multimodal:
            if any(modes):
                raise IndexedDatasetError(f"modes={list(modes)[:4]} given to a text dataset; pass multimodal=True")
        elif modes is not None and len(modes) != sizes.size:
            raise IndexedDatasetError(f"{len(modes)} modes for {sizes.size} sequences; give one a sequence")
        stored = _as_stored(tokens, self.dtype, self._bin_path)
        kinds = array("b", modes if modes is not None else bytes(sizes.size)) if self.multimodal else array("b")
        with self._writing():
            self._file.write(stored.view(np.uint8).data if stored.size else b"")
        self._lengths.frombytes(sizes.astype(np.intc).tobytes())
        self._modes.extend(kinds)


def merge_indexed(path_prefixes: Iterable[str | os.PathLike[str]], output_prefix: str | os.PathLike[str], multimodal: bool = False) -> None:
    """Write the concatenation of finished datasets, as if they had been built at once.

    Raises:
        IndexedDatasetError: none were given, one is damaged, or dtypes differ.
    """
    prefixes = [os.fspath(prefix) for prefix in path_prefixes]
    if not prefixes:
        raise IndexedDatasetError("path_prefixes is empty; name at least one dataset to merge")
    dtype = read_index(prefixes[0] + ".idx", multimodal=multimodal).dtype
    with IndexedDatasetBuilder(os.fspath(output_prefix) + ".bin", dtype=dtype, multimodal=multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
        builder.finalize(os.fspath(output_prefix) + ".idx")


def _as_stored(tokens: NDArray[Any], dtype: np.dtype, path: str) -> NDArray[Any]:
    if tokens.dtype == dtype or not tokens.size:
        return np.ascontiguousarray(tokens, dtype=dtype)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        if tokens.dtype.kind not in "iub":
            raise IndexedDatasetError(f"{path}: {tokens.dtype} tokens given to a dataset of {dtype}; convert them or choose a float dtype")
        low, high = int(tokens.min()), int(tokens.max())
        if low < info.min or high > info.max:
            bad = low if low < info.min else high
            raise IndexedDatasetError(f"{path}: token {bad} does not fit {dtype} ({info.min}..{info.max}); build with a wider dtype")
    return np.ascontiguousarray(tokens, dtype=dtype)


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    """Copy exactly ``num_bytes``; bytes after them belong to no sequence."""
    size = os.fstat(source.fileno()).st_size
    if size < num_bytes:
        raise IndexedDatasetError(f"{source.name} has {size} bytes, its index describes {num_bytes}: truncated; copy it again")
    if size == num_bytes:
        shutil.copyfileobj(source, target, 1 << 22)
        return
    while num_bytes:
        chunk = source.read(min(num_bytes, 1 << 22))
        target.write(chunk)
        num_bytes -= len(chunk)


def _discard(file: BinaryIO, partial: str) -> None:
    file.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(partial)
