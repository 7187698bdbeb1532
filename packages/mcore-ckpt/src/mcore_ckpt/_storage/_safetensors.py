# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The safetensors container: 8 bytes of header length, a JSON header, raw little-endian tensors back to back.

Read and written here directly, so that a shard is hashed while it is written, one tensor at a time leaves the device, a
load maps the file and touches only the pages it needs, and a foreign header is checked in full before it is believed.
"""

import ctypes
import json
import math
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage._folder import FileRecord, StoredFile, write_hashed
from mcore_ckpt._storage._open import as_file

__all__ = [
    "SafetensorsFile",
    "TensorSlot",
    "bytes_as_tensor",
    "dtype_code",
    "dtype_of",
    "itemsize",
    "read_header",
    "tensor_bytes",
    "write_safetensors",
]

_TYPES = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "U16": torch.uint16,
        "I16": torch.int16,
        "U32": torch.uint32,
        "I32": torch.int32,
        "U64": torch.uint64,
        "I64": torch.int64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F32": torch.float32,
        "F64": torch.float64,
        "C64": torch.complex64,
    }
)
_CODES = MappingProxyType({dtype: code for code, dtype in _TYPES.items()})


def dtype_code(dtype: torch.dtype) -> str:
    """Name of ``dtype`` in a file.

    Raises:
        ValueError: the container has no such type.
    """
    if dtype not in _CODES:
        raise ValueError(f"dtype {dtype} cannot be stored; convert it to one of {', '.join(str(known) for known in _CODES)}")
    return _CODES[dtype]


def dtype_of(code: str) -> torch.dtype:
    """Inverse of `dtype_code`.

    Raises:
        ValueError: an unknown name.
    """
    if code not in _TYPES:
        raise ValueError(f"unknown element type {code!r}; known are {', '.join(_TYPES)}")
    return _TYPES[code]


def itemsize(code: str) -> int:
    """Bytes of one element of type ``code``."""
    return dtype_of(code).itemsize


_MAX_HEADER_BYTES = 100 * 2**20
_MAX_DIMS = 64
_MAX_SIZE = 2**63 - 1


@dataclass(frozen=True)
class TensorSlot:
    """Where one tensor lies in a file: type, shape and bytes counted from the start of the data."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def write_safetensors(
    path: Path | StoredFile,
    tensors: Sequence[tuple[str, str, tuple[int, ...], Callable[[], Tensor]]],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write a new file and return its length and SHA-256.

    Args:
        path: must not exist.
        tensors: (key, dtype code, shape, function that returns the tensor); each function is called once, when its turn comes,
            so that no more than one tensor is in memory twice.
        metadata: strings for the header.
    """
    # Wide elements first: with an 8-byte aligned header every tensor is then aligned to its own element size.
    ordered = sorted(tensors, key=lambda entry: -itemsize(entry[1]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for key, code, shape, _ in ordered:
        if key in header or key == "__metadata__":
            raise CheckpointingException(f"{path.name}: tensor {key!r} is given twice or is a reserved name")
        end = position + math.prod(shape) * itemsize(code)
        header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def parts() -> Iterator[bytes | memoryview]:
        yield struct.pack("<Q", len(text)) + text
        for key, code, shape, read in ordered:
            tensor = read().detach().to("cpu").resolve_conj().resolve_neg().contiguous()
            if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype_of(code):
                raise CheckpointingException(f"{key} changed to {tensor.dtype} {tuple(tensor.shape)} while it was being written")
            yield tensor_bytes(tensor)
            # Not two tensors at a time.
            del tensor

    return write_hashed(as_file(path), parts())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous host tensor, without a copy; keeps it alive."""
    if sys.byteorder != "little":
        raise CheckpointingException("checkpoints are little-endian and this machine is not")
    if tensor.numel() == 0:
        return memoryview(b"")
    buffer = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    # The view keeps the array alive, and the array must keep the storage alive.
    buffer._tensor = tensor  # type: ignore[attr-defined]
    return memoryview(buffer).cast("B")


def bytes_as_tensor(content: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor over ``content``, copied only where its memory is not aligned for ``dtype``; keeps it alive."""
    if len(content) == 0:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(content, dtype=torch.uint8)
    return (raw.clone() if raw.data_ptr() % dtype.itemsize else raw).view(dtype).reshape(shape)


def read_header(path: Path | StoredFile) -> tuple[dict[str, TensorSlot], int]:
    """The tensors of a file by key, and the position of its first data byte.

    Every field is checked against the size of the file before anything is mapped or allocated: the tensors must follow
    one another from the first data byte to the last.

    Raises:
        CheckpointingException: not a safetensors file, or a damaged one; names the file.
    """
    file = as_file(path)
    try:
        size = file.size()
        if size < 8:
            raise ValueError(f"only {size} bytes long")
        (length,) = struct.unpack("<Q", file.read(0, 8))
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {size}")
        header = json.loads(bytes(file.read(8, 8 + length)), object_pairs_hook=_distinct)
        return _slots(header, size - 8 - length), 8 + length
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointingException(f"{file}: not a sound safetensors file: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _slots(header: Any, data_bytes: int) -> dict[str, TensorSlot]:
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    slots: dict[str, TensorSlot] = {}
    for key, entry in header.items():
        if key == "__metadata__":
            continue
        if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
            raise ValueError(f"entry {key!r} is malformed")
        numbers = (entry.get("shape"), entry.get("data_offsets"))
        if not all(isinstance(row, list) and all(type(value) is int and value >= 0 for value in row) for row in numbers):
            raise ValueError(f"entry {key!r} is malformed")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if len(shape) > _MAX_DIMS or any(size > _MAX_SIZE for size in shape):
            raise ValueError(f"entry {key!r}: no tensor has {len(shape)} dims of such sizes")
        if len(offsets) != 2 or offsets[1] - offsets[0] != math.prod(shape) * itemsize(entry["dtype"]):
            raise ValueError(f"entry {key!r}: bytes {offsets} do not fit shape {shape} of {entry['dtype']}")
        slots[key] = TensorSlot(entry["dtype"], tuple(shape), offsets[0], offsets[1])
    position = 0
    for key, slot in sorted(slots.items(), key=lambda item: (item[1].begin, item[1].end)):
        if slot.begin != position:
            raise ValueError(f"entry {key!r} begins at byte {slot.begin}, the one before ends at {position}")
        position = slot.end
    if position != data_bytes:
        raise ValueError(f"the tensors end at byte {position}, the file holds {data_bytes}")
    return slots


class SafetensorsFile:
    """A file opened for reading; only the pages or ranges that are touched get read.

    Raises:
        CheckpointingException: see `read_header`.

    Example:
        with SafetensorsFile(path) as file:
            rows = file.tensor("weight")[10:20].clone()
    """

    def __init__(self, path: Path | StoredFile) -> None:
        self.file = as_file(path)
        self.slots, self._start = read_header(self.file)

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nothing to do: what was read lives as long as the tensors over it."""

    def slot(self, key: str) -> TensorSlot | None:
        """Type and shape of the tensor of that key, None where there is none."""
        return self.slots.get(key)

    def begin(self, key: str) -> int | None:
        """First byte of that tensor in the file, None where there is none."""
        return self._start + self.slots[key].begin if key in self.slots else None

    def tensor(self, key: str, rows: tuple[int, int] | None = None) -> Tensor:
        """One tensor in host memory, of a local file a view of its pages; copy what you keep.

        Args:
            rows: the indices of dim 0 that are wanted, first and one past the last; None for the whole tensor.

        Raises:
            CheckpointingException: no such key.
        """
        if key not in self.slots:
            raise CheckpointingException(f"{self.file}: no tensor {key!r}")
        slot = self.slots[key]
        shape, begin, end = slot.shape, self._start + slot.begin, self._start + slot.end
        if rows is not None and shape:
            row_bytes = math.prod(shape[1:]) * itemsize(slot.dtype)
            shape, begin, end = (rows[1] - rows[0], *shape[1:]), begin + rows[0] * row_bytes, begin + rows[1] * row_bytes
        return bytes_as_tensor(self.file.read(begin, end), dtype_of(slot.dtype), shape)
