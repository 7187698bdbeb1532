# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bytes and where they lie: folders, durable files with their digests, and the safetensors container."""

from mcore_ckpt._storage._folder import (
    BLOCK_BYTES,
    ByteRangeSink,
    FileRecord,
    Folder,
    StoredFile,
    WatchedFolder,
    digest_file,
    num_cores,
    write_hashed,
)
from mcore_ckpt._storage._local import LocalFolder, is_link
from mcore_ckpt._storage._memory import MemoryFolder
from mcore_ckpt._storage._object import ObjectFolder
from mcore_ckpt._storage._open import as_file, file_digest, open_folder, sync_folder, write_file
from mcore_ckpt._storage._safetensors import (
    SafetensorsFile,
    TensorSlot,
    bytes_as_tensor,
    dtype_code,
    dtype_of,
    itemsize,
    read_header,
    tensor_bytes,
    write_safetensors,
)
from mcore_ckpt._storage._stream import PIECE, WRITER_PROGRAM, cut, receive

__all__ = [
    "BLOCK_BYTES",
    "PIECE",
    "WRITER_PROGRAM",
    "ByteRangeSink",
    "FileRecord",
    "Folder",
    "LocalFolder",
    "MemoryFolder",
    "ObjectFolder",
    "SafetensorsFile",
    "StoredFile",
    "TensorSlot",
    "WatchedFolder",
    "as_file",
    "bytes_as_tensor",
    "cut",
    "digest_file",
    "dtype_code",
    "dtype_of",
    "file_digest",
    "is_link",
    "itemsize",
    "num_cores",
    "open_folder",
    "read_header",
    "receive",
    "sync_folder",
    "tensor_bytes",
    "write_file",
    "write_hashed",
    "write_safetensors",
]
