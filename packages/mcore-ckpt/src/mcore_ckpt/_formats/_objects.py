# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What ``torch.save`` writes, as plain values and tensors: nothing in it is imported, and nothing is called."""

import io
import math
import struct
import sys
import zipfile
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats._archive import bytes_of, check_reach, describe, open_window, read_stream
from mcore_ckpt._formats._records import Call, Name, Persistent, Table, decode_records, encode_records
from mcore_ckpt._storage import StoredFile, bytes_as_tensor, dtype_of

__all__ = ["Foreign", "StoredTensor", "read_objects", "write_objects"]

_MAX_RECORD_BYTES = 2**30
_MAX_SHARING = 16
_SMALL_BYTES = 2**24
"""The tensors of a file of n bytes may have ``_MAX_SHARING * n + _SMALL_BYTES``: some share memory, and some are expanded."""
_TENSORS = frozenset({"torch._utils._rebuild_parameter", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"})
_NAMESPACES = frozenset({"argparse.Namespace", "types.SimpleNamespace"})


@dataclass(frozen=True, eq=False)
class Foreign:
    """An object that is no plain value: the name of what would make it, with what, and the state it would be given. It was not made."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor that was not read; its elements lie one after the other."""

    file: StoredFile
    place: int
    """First byte."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, begin: int, end: int) -> Tensor:
        """Elements from the first number to the second, flat; a view of the file where that is possible."""
        if not 0 <= begin <= end <= math.prod(self.shape):
            raise ValueError(f"elements {begin} to {end} of a tensor {list(self.shape)}")
        width = self.dtype.itemsize
        return bytes_as_tensor(self.file.read(self.place + begin * width, self.place + end * width), self.dtype, (end - begin,))


def read_objects(file: StoredFile, begin: int = 0, length: int | None = None, *, deferred: bool = False) -> Any:
    """The value in a file of ``torch.save``, or in a part of a file.

    None, bool, int, float, str, bytes, list, tuple and dict come as they are, ordered dicts and namespaces as dict, tensors as views of the
    file (copy what you keep), anything else as `Foreign`. ``deferred``: contiguous tensors as `StoredTensor`.

    Raises:
        CheckpointingException: it is not such a file, or a damaged one; names it.
    """
    try:
        size = file.size()
        length = size - begin if length is None else length
        if begin + length > size:
            raise ValueError(f"bytes {begin} to {begin + length} of {size}")
        with zipfile.ZipFile(open_window(file, begin, length)) as archive:
            entries = {name.partition("/")[2]: entry for name, entry in archive.NameToInfo.items()}
            record = decode_records(read_stream(archive, entries, min(_MAX_RECORD_BYTES, length)))
        return _Reading(file, begin, length, entries, deferred).value(record)
    except (ValueError, TypeError, AttributeError, OSError, RecursionError, zipfile.BadZipFile, RuntimeError, struct.error) as error:
        raise CheckpointingException(f"{file}: not a sound file of torch.save: {error}") from error


def write_objects(value: Any) -> bytes:
    """A file of ``torch.save`` that holds plain values without tensors.

    Args:
        value: None, bool, int, float, str, and lists, tuples, dicts and ``argparse.Namespace`` of them.

    Raises:
        ValueError: another value.
    """
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        for name, content in (("data.pkl", encode_records(value)), ("byteorder", b"little"), ("version", b"3\n")):
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return sink.getvalue()


class _Reading:
    """One file's records turned into values; what was shared stays shared, so no value grows by being referred to often."""

    def __init__(self, file: StoredFile, begin: int, length: int, entries: dict[str, zipfile.ZipInfo], deferred: bool) -> None:
        self._file, self._begin, self._length, self._entries, self._deferred = file, begin, length, entries, deferred
        self._made: dict[int, Any] = {}
        self._storages: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._bytes_left = _MAX_SHARING * length + _SMALL_BYTES

    def value(self, record: Any) -> Any:
        if isinstance(record, Table | Call | list | tuple):
            if id(record) not in self._made:
                self._made[id(record)] = self._make(record)
            return self._made[id(record)]
        if isinstance(record, Name):
            return Foreign(record.text)
        return Foreign("storage") if isinstance(record, Persistent) else record

    def _make(self, record: Any) -> Any:
        if isinstance(record, tuple | list):
            return type(record)(self.value(item) for item in record)
        if isinstance(record, Table):
            return self._dict(record.pairs)
        if record.name in _TENSORS:
            return self._tensor(record)
        if record.name == "collections.OrderedDict":
            return self._dict(record.pairs)
        if record.name in _NAMESPACES and isinstance(record.state, Table):
            return self._dict(record.state.pairs)
        if record.name == "torch.Size":
            return tuple(self.value(record.arguments[0]))
        return Foreign(record.name, self.value(record.arguments), self.value(record.state))

    def _dict(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        return {self.value(_checked(key)): self.value(item) for key, item in pairs}

    def _tensor(self, record: Call) -> Tensor | StoredTensor:
        code, shape, stride, first, storage, num_bytes = describe(record)
        check_reach(code, shape, stride, first, num_bytes)
        begin = bytes_of(self._file, self._begin, self._length, self._entries.get(f"data/{storage}"), num_bytes)
        dtype = dtype_of(code)
        self._bytes_left -= math.prod(shape) * dtype.itemsize
        if self._bytes_left < 0:
            raise ValueError(f"its tensors have more than {_MAX_SHARING} times its bytes, by sharing memory")
        if self._deferred and all(step == math.prod(shape[dim + 1 :]) for dim, step in enumerate(stride)):
            return StoredTensor(self._file, begin + first * dtype.itemsize, dtype, shape)
        storage_key = (begin, num_bytes, dtype)
        if storage_key not in self._storages:
            content = self._file.read(begin, begin + num_bytes)
            self._storages[storage_key] = bytes_as_tensor(content, dtype, (num_bytes // dtype.itemsize,))
        return self._storages[storage_key].as_strided(shape, stride, first)


def _checked(key: Any) -> Any:
    """A key of a dict. Integers that are equal modulo this prime have one hash: a dict of many takes the square of their number."""
    if type(key) is int and abs(key) >= sys.hash_info.modulus:
        raise ValueError("a key that is too large an integer")
    if isinstance(key, tuple):
        for item in key:
            _checked(item)
    return key
