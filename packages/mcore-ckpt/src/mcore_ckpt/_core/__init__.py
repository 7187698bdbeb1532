# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Plan, save, load and commit: what every format and every command builds on."""

from mcore_ckpt._core._assets import asset_sources, extract_assets, read_asset
from mcore_ckpt._core._async import AsyncRequest, SaveProgress
from mcore_ckpt._core._control import Background, Control, LostContact, threads_each
from mcore_ckpt._core._load import find_mismatches, load, load_as, read_tensor
from mcore_ckpt._core._load_plan import Mismatches, Strictness, slabs
from mcore_ckpt._core._manager import CheckpointManager
from mcore_ckpt._core._manifest import (
    AssetRecord,
    Chunk,
    Manifest,
    TensorRecord,
    check_extra,
    check_json_value,
    check_side_files,
    is_checkpoint,
    read_manifest,
)
from mcore_ckpt._core._nested import VALUES, FlatState, check_values, flatten_state, with_values
from mcore_ckpt._core._read import SLAB_BYTES, CheckpointReader, check_files
from mcore_ckpt._core._save import DEFAULT_FILE_BYTES, SaveOptions, check_format, run_save, save
from mcore_ckpt._core._save_plan import ShardRecord, Write, encode_layout
from mcore_ckpt._core._sharded import DeferredTensor, ShardedTensor, ShardLike, as_parts, as_sharded, entries
from mcore_ckpt._core._staging import Staging
from mcore_ckpt._core._worker import Worker, WorkerFolder

__all__ = [
    "DEFAULT_FILE_BYTES",
    "SLAB_BYTES",
    "VALUES",
    "AssetRecord",
    "AsyncRequest",
    "Background",
    "CheckpointManager",
    "CheckpointReader",
    "Chunk",
    "Control",
    "DeferredTensor",
    "FlatState",
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
    "check_json_value",
    "check_side_files",
    "check_values",
    "encode_layout",
    "entries",
    "extract_assets",
    "find_mismatches",
    "flatten_state",
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
    "with_values",
]
