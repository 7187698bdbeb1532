# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Plan, save, load and commit: what every format and every command builds on."""

from mcore_ckpt._core._asset import AssetRecord
from mcore_ckpt._core._asset_reader import asset_sources, extract_assets, read_asset
from mcore_ckpt._core._async import AsyncRequest, SaveProgress
from mcore_ckpt._core._background import Background
from mcore_ckpt._core._control import Control, LostContact, threads_each
from mcore_ckpt._core._load import check_files, find_mismatches, load, load_as, read_tensor
from mcore_ckpt._core._manager import CheckpointManager
from mcore_ckpt._core._manifest import Chunk, Manifest, TensorRecord, check_extra, check_side_files, is_checkpoint, read_manifest
from mcore_ckpt._core._plan import ShardRecord, Write, encode_layout, slabs
from mcore_ckpt._core._reader import SLAB_BYTES, CheckpointReader
from mcore_ckpt._core._save import DEFAULT_FILE_BYTES, SaveOptions, check_format, run_save, save
from mcore_ckpt._core._sharded import DeferredTensor, ShardedTensor, ShardLike, as_parts, as_sharded, entries
from mcore_ckpt._core._staging import Staging
from mcore_ckpt._core._strictness import Mismatches, Strictness
from mcore_ckpt._core._worker import Worker, WorkerFolder

__all__ = [
    "DEFAULT_FILE_BYTES",
    "SLAB_BYTES",
    "AssetRecord",
    "AsyncRequest",
    "Background",
    "CheckpointManager",
    "CheckpointReader",
    "Chunk",
    "Control",
    "DeferredTensor",
    "LostContact",
    "Manifest",
    "Mismatches",
    "SaveOptions",
    "SaveProgress",
    "ShardLike",
    "ShardRecord",
    "ShardedTensor",
    "Staging",
    "Strictness",
    "TensorRecord",
    "Worker",
    "WorkerFolder",
    "Write",
    "as_parts",
    "as_sharded",
    "asset_sources",
    "check_extra",
    "check_files",
    "check_format",
    "check_side_files",
    "encode_layout",
    "entries",
    "extract_assets",
    "find_mismatches",
    "is_checkpoint",
    "load",
    "load_as",
    "read_asset",
    "read_manifest",
    "read_tensor",
    "run_save",
    "save",
    "slabs",
    "threads_each",
]
