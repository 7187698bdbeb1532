# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One tensor as the zip archive that torch keeps it in, and files of such archives back to back."""

import io
import math
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats._records import Call, Name, Persistent, decode_records, encode_records
from mcore_ckpt._storage import FileRecord, StoredFile, TensorSlot, bytes_as_tensor, dtype_code, dtype_of, tensor_bytes, write_hashed

__all__ = ["DistcpFile", "bytes_of", "check_reach", "describe", "open_window", "read_stream", "write_distcp"]

_ALIGNMENT = 64
_MAX_RECORD_BYTES = 2**20
_MAX_DIMS = 64
_LITTLE = b"little"
_KEY = re.compile(r"([0-9]{1,18}):([0-9]{1,18})")
_TYPED = MappingProxyType(
    {
        "BOOL": "Bool",
        "U8": "Byte",
        "I8": "Char",
        "I16": "Short",
        "I32": "Int",
        "I64": "Long",
        "F16": "Half",
        "BF16": "BFloat16",
        "F32": "Float",
        "F64": "Double",
        "C64": "ComplexFloat",
    }
)
"""Element types with a storage class of their own; the others name theirs beside untyped bytes."""
_CODES = MappingProxyType({f"torch.{name}Storage": code for code, name in _TYPED.items()})


class _Sink(io.RawIOBase):
    """Collects what a zip writer writes, without copying it."""

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.length = 0

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.pieces.append(piece)
        self.length += len(piece)
        return len(piece)


def write_distcp(
    file: StoredFile, tensors: Sequence[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]]
) -> tuple[FileRecord, dict[str, str]]:
    """Write tensors, one archive each, into a new file; see `write_safetensors` for the arguments.

    Returns:
        Length and SHA-256, and for each key the place of its archive, ``begin:length``.
    """
    places: dict[str, str] = {}

    def parts() -> Iterator[bytes | memoryview]:
        begin = 0
        for key, code, shape, read in tensors:
            tensor = read().detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype_of(code):
                raise CheckpointingException(f"{key} changed to {tensor.dtype} {tuple(tensor.shape)} while it was being written")
            sink = _pack(tensor, code, begin)
            yield from sink.pieces
            places[key] = f"{begin}:{sink.length}"
            begin += sink.length
            # Not two tensors at a time.
            del tensor, sink

    return write_hashed(file, parts()), places


def _pack(tensor: Tensor, code: str, base: int) -> _Sink:
    """The archive of one tensor that will begin at byte ``base`` of its file; its data are aligned in the file."""
    hooks = Call("collections.OrderedDict")
    typed = code in _TYPED
    storage = Name(f"torch.{_TYPED[code]}Storage" if typed else "torch.storage.UntypedStorage")
    reference = Persistent(("storage", storage, "0", "cpu", tensor.numel() if typed else tensor.nbytes))
    arguments = (reference, 0, tuple(tensor.shape), tuple(tensor.stride()), False, hooks)
    if typed:
        record = Call("torch._utils._rebuild_tensor_v2", arguments)
    else:
        record = Call("torch._utils._rebuild_tensor_v3", (*arguments, Name(str(tensor.dtype))))
    sink = _Sink()
    with zipfile.ZipFile(sink, "w") as archive:
        entries: list[tuple[str, bytes | memoryview]] = [
            ("data.pkl", encode_records(record)),
            ("byteorder", _LITTLE),
            ("data/0", tensor_bytes(tensor)),
            ("version", b"3\n"),
        ]
        for name, content in entries:
            entry = zipfile.ZipInfo(f"archive/{name}")
            large = len(content) >= 2**31
            if name == "data/0":
                # A field that readers skip moves the data to an aligned place.
                start = base + sink.length + 30 + len(entry.filename) + 4 + 20 * large
                entry.extra = b"FB" + struct.pack("<H", -start % _ALIGNMENT) + bytes(-start % _ALIGNMENT)
            with archive.open(entry, "w", force_zip64=large) as stream:
                stream.write(content)
    return sink


class _Window(io.RawIOBase):
    """A range of a stored file, for a zip reader."""

    def __init__(self, file: StoredFile, begin: int, length: int) -> None:
        self._file, self._begin, self._length, self._position = file, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._length)[whence])
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        end = self._length if size is None or size < 0 else min(self._position + size, self._length)
        begin, self._position = self._position, max(end, self._position)
        return bytes(self._file.read(self._begin + begin, self._begin + end)) if begin < end else b""


def open_window(file: StoredFile, begin: int, length: int) -> BinaryIO:
    """Bytes ``begin`` to ``begin + length`` of a file, as a file for a zip reader."""
    return cast(BinaryIO, _Window(file, begin, length))


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies in its file; bytes of a slot that is not contiguous are those of its whole storage."""

    slot: TensorSlot
    stride: tuple[int, ...]
    first: int
    """Element of the storage at which the tensor begins, where it is not contiguous."""

    @property
    def contiguous(self) -> bool:
        """Whether its elements follow one another."""
        expected = 1
        for size, step in zip(reversed(self.slot.shape), reversed(self.stride), strict=True):
            if size > 1 and step != expected:
                return False
            expected *= size
        return True


class DistcpFile:
    """A file of archives opened for reading; the key of a tensor is the place of its archive, ``begin:length``.

    Only the layout of an archive is read, as data, and then the bytes of the tensor from where they lie. Archives lie one after the other:
    places that together are longer than the file are refused, so that reading all of them costs no more than the file is long.

    Raises:
        CheckpointingException: there is no such file.
    """

    def __init__(self, file: StoredFile) -> None:
        self.file = file
        self._found: dict[str, _Place] = {}
        try:
            self._bytes_left = file.size()
        except OSError as error:
            raise CheckpointingException(f"{file}: {error}") from error

    def slot(self, key: str) -> TensorSlot | None:
        """Type and shape of the tensor at ``key``; None where the key is no place in the file.

        Raises:
            CheckpointingException: what lies there is not the archive of one dense tensor; names file and place.
        """
        match = _KEY.fullmatch(key)
        if match is None:
            return None
        if key not in self._found:
            begin, length = int(match[1]), int(match[2])
            try:
                if begin + length > self.file.size():
                    raise ValueError(f"the file has {self.file.size()} bytes")
                if length > self._bytes_left:
                    raise ValueError("it overlaps other tensors")
                self._bytes_left -= length
                self._found[key] = _locate(self.file, begin, length)
            except (ValueError, OSError, zipfile.BadZipFile, RuntimeError, struct.error) as error:
                raise CheckpointingException(f"{self.file}: no sound tensor at {key}: {error}") from error
        return self._found[key].slot

    def begin(self, key: str) -> int | None:
        """First byte in the file of a tensor whose elements follow one another there; None where they do not.

        Raises:
            CheckpointingException: see `slot`.
        """
        slot = self.slot(key)
        return slot.begin if slot is not None and self._found[key].contiguous else None

    def tensor(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """See `SafetensorsFile.tensor`."""
        slot = self.slot(key)
        if slot is None:
            raise CheckpointingException(f"{self.file}: {key!r} is no place in it")
        shape, dtype, place = slot.shape, dtype_of(slot.dtype), self._found[key]
        begin, end = slot.begin, slot.end
        if not place.contiguous:
            storage = bytes_as_tensor(self.file.read(begin, end), dtype, ((end - begin) // dtype.itemsize,))
            whole = storage.as_strided(shape, place.stride, place.first)
            return whole if rows is None else whole[rows[0] : rows[1]]
        if rows is not None and shape:
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            shape, begin, end = (rows[1] - rows[0], *shape[1:]), begin + rows[0] * row_bytes, begin + rows[1] * row_bytes
        return bytes_as_tensor(self.file.read(begin, end), dtype, shape)


def _locate(file: StoredFile, begin: int, length: int) -> _Place:
    """The one tensor of an archive; its bytes are counted from the start of the file."""
    with zipfile.ZipFile(open_window(file, begin, length)) as archive:
        entries = {name.partition("/")[2]: entry for name, entry in archive.NameToInfo.items()}
        record = decode_records(read_stream(archive, entries, min(_MAX_RECORD_BYTES, length)))
    code, shape, stride, first, storage, storage_bytes = describe(record)
    data, width = bytes_of(file, begin, length, entries.get(f"data/{storage}"), storage_bytes), dtype_of(code).itemsize
    check_reach(code, shape, stride, first, storage_bytes)
    place = _Place(TensorSlot(code, shape, data, data + storage_bytes), stride, first)
    if place.contiguous:
        data += first * width if math.prod(shape) else 0
        return _Place(TensorSlot(code, shape, data, data + math.prod(shape) * width), stride, 0)
    return place


def read_stream(archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo], max_bytes: int) -> bytes:
    """The object stream of an archive of torch, whose tensors are little-endian. Nothing is inflated: torch stores every entry as it is.

    Raises:
        ValueError: there is none of at most ``max_bytes``, or the tensors are of another byte order.
    """
    stream, order = entries.get("data.pkl"), entries.get("byteorder")
    if stream is None or stream.compress_type or stream.file_size > max_bytes:
        raise ValueError("no description of what it holds")
    if order is not None and (order.compress_type or order.file_size != len(_LITTLE) or archive.read(order) != _LITTLE):
        raise ValueError("not little-endian")
    return archive.read(stream)


def bytes_of(file: StoredFile, begin: int, length: int, entry: zipfile.ZipInfo | None, num_bytes: int) -> int:
    """Where the bytes of a storage begin, counted from the start of the file; they lie there as they are."""
    if entry is None or entry.compress_type or entry.file_size != num_bytes:
        raise ValueError(f"no storage of {num_bytes} bytes")
    header = bytes(file.read(begin + entry.header_offset, begin + min(entry.header_offset + 30, length)))
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    start = entry.header_offset + 30 + name_length + extra_length
    if start + entry.file_size > length:
        raise ValueError("the data reach outside the archive")
    return begin + start


def check_reach(code: str, shape: tuple[int, ...], stride: tuple[int, ...], first: int, storage_bytes: int) -> None:
    """Check that a tensor stays inside its storage.

    Raises:
        ValueError: it does not.
    """
    last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and (last + 1) * dtype_of(code).itemsize > storage_bytes:
        raise ValueError(f"no bytes for a tensor of {code} {list(shape)}")


def describe(record: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], int, str, int]:
    """Of the record of a tensor: element type, shape, stride, first element in the storage, name of the storage, bytes of the storage.

    Raises:
        ValueError: it is no record of a tensor.
    """
    try:
        return _describe(record)
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a plain tensor: {type(error).__name__} {error}") from error


def _describe(record: Any) -> tuple[str, tuple[int, ...], tuple[int, ...], int, str, int]:
    if isinstance(record, Call) and record.name == "torch._utils._rebuild_parameter" and record.arguments:
        record = record.arguments[0]
    if not isinstance(record, Call) or record.name not in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
        raise ValueError("not a plain tensor")
    reference, offset, size, stride, *more = record.arguments
    shape: Any = size.arguments[0] if isinstance(size, Call) and size.name == "torch.Size" else size
    _, storage, key, _, numel = reference.value
    code = _CODES.get(storage.text)
    if record.name.endswith("v3"):
        code = dtype_code(getattr(torch, more[2].text.removeprefix("torch."), torch.float32))
    numbers = [offset, numel, *shape, *stride]
    if (
        code is None
        or len(shape) > _MAX_DIMS
        or len(shape) != len(stride)
        or not all(type(number) is int and 0 <= number < 2**62 for number in numbers)
    ):
        raise ValueError(f"a tensor in {storage.text[:100]} of {len(shape)} dims")
    width = 1 if record.name.endswith("v3") else dtype_of(code).itemsize
    return code, tuple(shape), tuple(stride), offset, str(key), numel * width
