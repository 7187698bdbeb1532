# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Names of element types in safetensors files."""

from types import MappingProxyType

import torch

__all__ = ["dtype_code", "dtype_of", "itemsize"]

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
