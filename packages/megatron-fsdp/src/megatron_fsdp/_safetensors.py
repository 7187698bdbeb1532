# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Writing tensors that come one by one into a safetensors file, without holding more than one."""

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron_fsdp._layout import Shape

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def header(entries: Sequence[tuple[str, torch.dtype, Shape]]) -> bytes:
    """What the file begins with: the length of a JSON text in 8 bytes, little end first, and the text, padded to 8 bytes.

    Raises:
        ValueError: a dtype that the format lacks.
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, dtype, shape in entries:
        if dtype not in _NAMES:
            raise ValueError(f"{name!r} has dtype {dtype}, which safetensors lacks; give a dtype of {sorted(map(str, _NAMES))}")
        end = begin + torch.Size(shape).numel() * dtype.itemsize
        table[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(path: Path, entries: Sequence[tuple[str, torch.dtype, Shape]], tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write ``tensors`` (on the CPU, as ``entries`` announce them, in their order); the file appears when it is complete."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(header(entries))
        for (name, tensor), (announced, dtype, shape) in zip(tensors, entries, strict=True):
            assert (name, tensor.dtype, tuple(tensor.shape)) == (announced, dtype, tuple(shape)), "the stream follows its announcement"
            tensor = tensor.contiguous()
            # The memory itself: numpy may be missing, and lacks some dtypes.
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.numel() else b"")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
