# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The formats of a checkpoint's files, and the metadata that other readers want beside them."""

from mcore_ckpt._formats._archive import DistcpFile
from mcore_ckpt._formats._layout import (
    BACKEND_NAME,
    FORMATS,
    ShardFile,
    asset_file,
    open_shard,
    own_file,
    shard_name,
    side_files,
    write_shard,
)
from mcore_ckpt._formats._objects import Foreign, StoredTensor, read_objects, write_objects
from mcore_ckpt._formats._torch_dist import METADATA_NAME, Place, read_metadata, read_places, write_metadata

__all__ = [
    "BACKEND_NAME",
    "FORMATS",
    "METADATA_NAME",
    "DistcpFile",
    "Foreign",
    "Place",
    "ShardFile",
    "StoredTensor",
    "asset_file",
    "open_shard",
    "own_file",
    "read_metadata",
    "read_objects",
    "read_places",
    "shard_name",
    "side_files",
    "write_metadata",
    "write_objects",
    "write_shard",
]
