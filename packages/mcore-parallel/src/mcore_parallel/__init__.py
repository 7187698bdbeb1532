# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The trunk: process grids, parallel layers, models, data, optimizers and the training loop."""

from mcore_parallel._grid import HyperCommGrid
from mcore_parallel._groups import Group, ProcessGroups
from mcore_parallel._plan import ParallelPlan
from mcore_parallel._shards import NamedShard, ShardedModule, ShardSpec, named_shards
from mcore_parallel._stability import deprecated, experimental_api, internal_api

__all__ = [
    "Group",
    "HyperCommGrid",
    "NamedShard",
    "ParallelPlan",
    "ProcessGroups",
    "ShardSpec",
    "ShardedModule",
    "deprecated",
    "experimental_api",
    "internal_api",
    "named_shards",
]
