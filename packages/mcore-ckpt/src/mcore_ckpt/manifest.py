# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The manifest of a checkpoint: its tensors, their chunks, its files and their digests."""

from mcore_ckpt._core import Chunk, Manifest, TensorRecord, is_checkpoint, read_manifest
from mcore_ckpt._storage import FileRecord

__all__ = ["Chunk", "FileRecord", "Manifest", "TensorRecord", "is_checkpoint", "read_manifest"]
