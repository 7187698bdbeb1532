# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The trunk: process grids, parallel layers, models, data, optimizers and the training loop."""

from mcore_parallel._communicator import CommunicatorOptions, Group, load_communicator_options
from mcore_parallel._field_types import check_field_types
from mcore_parallel._grid import HyperCommGrid
from mcore_parallel._groups import ProcessGroups
from mcore_parallel._plan import ParallelPlan
from mcore_parallel._rng import RandomStreams
from mcore_parallel._shards import NamedShard, Piece, ShardedModule, ShardSpec, named_shards
from mcore_parallel._stability import deprecated, experimental_api, internal_api

__all__ = [
    "CommunicatorOptions",
    "Group",
    "HyperCommGrid",
    "NamedShard",
    "ParallelPlan",
    "Piece",
    "ProcessGroups",
    "RandomStreams",
    "ShardSpec",
    "ShardedModule",
    "check_field_types",
    "deprecated",
    "experimental_api",
    "internal_api",
    "load_communicator_options",
    "named_shards",
]
