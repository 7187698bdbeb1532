# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which ranks work together, and which shard of each parameter they hold."""

from mcore_parallel.groups._communicator import CommunicatorOptions, Group, connect, load_communicator_options, uses_nccl
from mcore_parallel.groups._grid import HyperCommGrid
from mcore_parallel.groups._groups import ProcessGroups
from mcore_parallel.groups._plan import ParallelPlan
from mcore_parallel.groups._shards import NamedBuffer, NamedShard, Piece, ShardedModule, ShardSpec, boxes, named_buffer_shards, named_shards

__all__ = [
    "CommunicatorOptions",
    "Group",
    "HyperCommGrid",
    "NamedBuffer",
    "NamedShard",
    "ParallelPlan",
    "Piece",
    "ProcessGroups",
    "ShardSpec",
    "ShardedModule",
    "boxes",
    "connect",
    "load_communicator_options",
    "named_buffer_shards",
    "named_shards",
    "uses_nccl",
]
