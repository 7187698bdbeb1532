# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The .idx half of an indexed dataset: header, lengths, pointers, document boundaries, modes; and files mapped into memory."""

import os
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mcore_parallel.data._errors import IndexedDatasetError, reason_of
from mcore_parallel.data._files import RemoteFile, is_url


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


# S sequences, D document boundaries (documents + 1)


MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
HAS_LOSS = 1
"""Mode of sequences whose tokens have a loss; 0 marks prompts."""

_HEADER = struct.Struct("<9sQBQQ")
_REBUILD = "write it again with IndexedDatasetBuilder or mcore-preprocess"


@dataclass(frozen=True, kw_only=True)
class IndexArrays:
    """What a .idx file says; the arrays may be views of the mapped file."""

    dtype: np.dtype
    lengths_S: NDArray[np.int32]
    pointers_S: NDArray[np.int64]
    documents_D: NDArray[np.int64]
    modes_S: NDArray[np.int8] | None
    file: MappedFile | None = None
    """What the arrays are views of; None where they lie in memory."""

    @property
    def num_bytes(self) -> int:
        """Bytes the .bin file must have at least."""
        return int(self.pointers_S[-1]) + int(self.lengths_S[-1]) * self.dtype.itemsize if self.lengths_S.size else 0


def as_token_dtype(dtype: DTypeLike) -> np.dtype:
    """The stored form of ``dtype``.

    Raises:
        IndexedDatasetError: the format has no code for it.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    if stored not in CODE_OF_DTYPE:
        names = ", ".join(str(known) for known in CODE_OF_DTYPE)
        raise IndexedDatasetError(f"dtype={np.dtype(dtype)} has no code in the indexed format; choose one of {names}")
    return stored


def token_dtype(vocab_size: int | None) -> np.dtype:
    """Smallest customary dtype for ids below ``vocab_size``: uint16 under 65500 entries, else int32 (also when None, unknown)."""
    return DTYPE_OF_CODE[8] if vocab_size is not None and vocab_size < 65500 else DTYPE_OF_CODE[4]


def write_index(
    file: BinaryIO, *, dtype: np.dtype, lengths_S: NDArray[np.int32], documents_D: NDArray[np.int64], modes_S: NDArray[np.int8] | None
) -> None:
    """Write a whole .idx; pointers follow from the lengths."""
    pointers_S = np.zeros(lengths_S.size, dtype="<i8")
    np.cumsum(lengths_S[:-1], dtype=np.int64, out=pointers_S[1:])
    pointers_S *= dtype.itemsize
    file.write(_HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[dtype], lengths_S.size, documents_D.size))
    file.write(lengths_S.astype("<i4", copy=False).tobytes())
    file.write(pointers_S.tobytes())
    file.write(documents_D.astype("<i8", copy=False).tobytes())
    if modes_S is not None:
        file.write(modes_S.astype("i1", copy=False).tobytes())


def read_index(path: str, *, multimodal: bool, storage_options: Mapping[str, Any] | None = None) -> IndexArrays:
    """Map a .idx file; the cost does not depend on its size. One behind a URL comes as a whole.

    Raises:
        IndexedDatasetError: the file is missing, empty, cut short, of another format, version or dtype, or lacks modes.
    """
    file = None if is_url(path) else _mapped(path)
    raw = _fetched(RemoteFile(path, storage_options or {})) if file is None else file.bytes
    size, head = raw.size, raw[: _HEADER.size].tobytes()
    if size == 0:
        raise IndexedDatasetError(f"{path} is empty, expected at least {_HEADER.size} bytes of header; {_REBUILD}")
    if head[: len(MAGIC)] != MAGIC[: len(head)]:
        raise IndexedDatasetError(f"{path} begins with {head[: len(MAGIC)]!r}, expected {MAGIC!r}: not an index of this format; {_REBUILD}")
    if len(head) < _HEADER.size:
        raise IndexedDatasetError(f"{path} has {size} bytes, its header alone needs {_HEADER.size}: truncated; copy it again or {_REBUILD}")
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(head)
    if version != VERSION:
        raise IndexedDatasetError(f"{path} has format version {version}, expected {VERSION}; {_REBUILD}")
    if code not in DTYPE_OF_CODE:
        raise IndexedDatasetError(f"{path} has token dtype code {code}, expected one of 1..{max(DTYPE_OF_CODE)}; {_REBUILD}")
    plain = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
    expected = plain + (num_sequences if multimodal else 0)
    if multimodal and size == plain:
        raise IndexedDatasetError(f"{path} holds no modes ({size} bytes, {expected} with modes); open it with multimodal=False")
    # An index with modes may be read without them; any other length is damage.
    if size != expected and size != plain + num_sequences:
        state = "truncated" if size < expected else "followed by foreign bytes"
        raise IndexedDatasetError(
            f"{path} has {size} bytes, expected {expected} for {num_sequences} sequences and {num_boundaries} document boundaries: "
            f"{state}; copy it again or {_REBUILD}"
        )
    at_pointers = _HEADER.size + 4 * num_sequences
    at_documents = at_pointers + 8 * num_sequences
    arrays = IndexArrays(
        dtype=DTYPE_OF_CODE[code],
        lengths_S=np.frombuffer(raw, "<i4", num_sequences, _HEADER.size),
        pointers_S=np.frombuffer(raw, "<i8", num_sequences, at_pointers),
        documents_D=np.frombuffer(raw, "<i8", num_boundaries, at_documents),
        modes_S=np.frombuffer(raw, "i1", num_sequences, plain) if multimodal else None,
        file=file,
    )
    if num_sequences and (arrays.pointers_S[0] != 0 or arrays.pointers_S[-1] < 0 or arrays.lengths_S[-1] < 0):
        ends = f"first {arrays.pointers_S[0]}, last {arrays.pointers_S[-1]}"
        raise IndexedDatasetError(f"{path} points outside of its .bin ({ends}); {_REBUILD}")
    return arrays


def _mapped(path: str) -> MappedFile:
    try:
        return MappedFile(path)
    except OSError as error:
        raise IndexedDatasetError(f"cannot open {path}: {reason_of(error)}; give the path prefix without .idx, or {_REBUILD}") from error


def _fetched(file: RemoteFile) -> NDArray[np.uint8]:
    return np.frombuffer(file.read(0, file.size()), np.uint8)
