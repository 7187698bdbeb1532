# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The formats of a checkpoint's files, and the metadata that other readers want beside them."""

from mcore_ckpt._formats._archive import DistcpFile
from mcore_ckpt._formats._layout import FORMATS, ShardFile, open_shard, own_file, shard_name, side_files, write_shard
from mcore_ckpt._formats._torch_dist import METADATA_NAME, read_metadata, write_metadata

__all__ = [
    "FORMATS",
    "METADATA_NAME",
    "DistcpFile",
    "ShardFile",
    "open_shard",
    "own_file",
    "read_metadata",
    "shard_name",
    "side_files",
    "write_metadata",
    "write_shard",
]
