# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Process grids, parallel layers, models, data, optimizers and the training loop."""

from mcore_parallel._backward import in_backward
from mcore_parallel._field_types import check_field_types
from mcore_parallel._stability import deprecated, experimental_api, internal_api
from mcore_parallel.groups import (
    CommunicatorOptions,
    Group,
    HyperCommGrid,
    NamedBuffer,
    NamedShard,
    ParallelPlan,
    Piece,
    ProcessGroups,
    ShardedModule,
    ShardSpec,
    load_communicator_options,
    named_buffer_shards,
    named_shards,
)

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
    "check_field_types",
    "deprecated",
    "experimental_api",
    "in_backward",
    "internal_api",
    "load_communicator_options",
    "named_buffer_shards",
    "named_shards",
]
