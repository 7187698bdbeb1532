# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sharded save and load of training state that survives any change of layout and any crash."""

from mcore_ckpt._async import AsyncRequest, SaveProgress
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._load import find_mismatches, load, read_tensor
from mcore_ckpt._manager import CheckpointManager
from mcore_ckpt._node_local import LocalCheckpoints
from mcore_ckpt._save import save
from mcore_ckpt._sharded import ShardedTensor, ShardLike
from mcore_ckpt._strictness import Mismatches, Strictness

__all__ = [
    "AsyncRequest",
    "CheckpointManager",
    "CheckpointingException",
    "LocalCheckpoints",
    "Mismatches",
    "SaveProgress",
    "ShardLike",
    "ShardedTensor",
    "Strictness",
    "find_mismatches",
    "load",
    "read_tensor",
    "save",
]
