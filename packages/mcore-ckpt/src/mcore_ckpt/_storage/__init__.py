# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bytes on disk: durable files with their digests, and the safetensors container."""

from mcore_ckpt._storage._dtypes import dtype_code, dtype_of, itemsize
from mcore_ckpt._storage._files import FileRecord, file_digest, remove_file, replace_file, sync_folder, write_file
from mcore_ckpt._storage._safetensors import SafetensorsFile, TensorSlot, read_header, tensor_bytes, write_safetensors

__all__ = [
    "FileRecord",
    "SafetensorsFile",
    "TensorSlot",
    "dtype_code",
    "dtype_of",
    "file_digest",
    "itemsize",
    "read_header",
    "remove_file",
    "replace_file",
    "sync_folder",
    "tensor_bytes",
    "write_file",
    "write_safetensors",
]
