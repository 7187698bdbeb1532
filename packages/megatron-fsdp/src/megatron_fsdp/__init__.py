# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fully sharded data parallelism for any torch module, with four sharding strategies."""

from megatron_fsdp._eight_bit import EightBitFormat, Float8Format
from megatron_fsdp._fully_shard import fully_shard, fully_shard_model
from megatron_fsdp._module import MegatronFSDP
from megatron_fsdp._optimizer import fully_shard_optimizer
from megatron_fsdp._parameters import FlatShard
from megatron_fsdp._policy import BlockAtomic, KeepsFloat32, MixedPrecisionPolicy, TensorAtomic

__all__ = [
    "BlockAtomic",
    "EightBitFormat",
    "FlatShard",
    "Float8Format",
    "KeepsFloat32",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "TensorAtomic",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
]
