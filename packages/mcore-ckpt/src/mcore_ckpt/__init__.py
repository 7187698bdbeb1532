# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sharded save and load of training state that survives any change of layout and any crash."""

from mcore_ckpt._core import (
    AsyncRequest,
    CheckpointManager,
    Mismatches,
    SaveProgress,
    ShardedTensor,
    ShardLike,
    Strictness,
    find_mismatches,
    load,
    read_tensor,
    save,
)
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._local import LocalCheckpoints, PersistentSteps

__all__ = [
    "AsyncRequest",
    "CheckpointManager",
    "CheckpointingException",
    "LocalCheckpoints",
    "Mismatches",
    "PersistentSteps",
    "SaveProgress",
    "ShardLike",
    "ShardedTensor",
    "Strictness",
    "find_mismatches",
    "load",
    "read_tensor",
    "save",
]
