# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Replicas of a model that sum their gradients."""

from mcore_parallel.data_parallel._config import DistributedDataParallelConfig
from mcore_parallel.data_parallel._ddp import DistributedDataParallel
from mcore_parallel.data_parallel._gather import finish_param_gathers
from mcore_parallel.data_parallel._layout import BucketRange, SlicedLayout, lay_out_buckets, lay_out_slices
from mcore_parallel.groups import Piece, boxes

__all__ = [
    "BucketRange",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "Piece",
    "SlicedLayout",
    "boxes",
    "finish_param_gathers",
    "lay_out_buckets",
    "lay_out_slices",
]
