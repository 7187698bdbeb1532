# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Collectives over a ``Group``, with and without autograd, and point-to-point transfers."""

from mcore_parallel.comm._bridge import BridgeCommunicator
from mcore_parallel.comm._bridge_plan import BridgeBatch, BridgeEnd, RowTransfer, plan_rows, plan_spread
from mcore_parallel.comm._collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    local_slice,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    wait,
)
from mcore_parallel.comm._p2p import Arrival, P2PCommunicator, TensorSpec, recv, send
from mcore_parallel.comm._reduce_scatter import Pending, start_all_reduce_in_place, start_gather_into, start_reduce_scatter_into
from mcore_parallel.comm._regions import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all_autograd,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    copy_to_tensor_model_parallel_region,
    gather,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from mcore_parallel.comm._registered import NCCL_ALLOCATOR, RegisteredMemory
from mcore_parallel.comm._rows_under_way import RowsUnderWay
from mcore_parallel.comm._symmetric import SymmetricBuffer

__all__ = [
    "NCCL_ALLOCATOR",
    "Arrival",
    "BridgeBatch",
    "BridgeCommunicator",
    "BridgeEnd",
    "P2PCommunicator",
    "Pending",
    "RegisteredMemory",
    "RowTransfer",
    "RowsUnderWay",
    "SymmetricBuffer",
    "TensorSpec",
    "all_gather",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_reduce",
    "all_to_all",
    "all_to_all_autograd",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "local_slice",
    "plan_rows",
    "plan_spread",
    "recv",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "send",
    "start_all_gather",
    "start_all_reduce",
    "start_all_reduce_in_place",
    "start_gather_into",
    "start_reduce_scatter",
    "start_reduce_scatter_into",
    "wait",
]
