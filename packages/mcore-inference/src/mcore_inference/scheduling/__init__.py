# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the next step computes: a pure function of the requests and the free blocks."""

from mcore_inference.scheduling._batch_dimensions import InferenceBatchDimensions, match_graph_config
from mcore_inference.scheduling._drafts import plan_drafts
from mcore_inference.scheduling._graph_dimensions import CUDAGraphBatchDimensionBuilder
from mcore_inference.scheduling._scheduler import Limits, RequestView, StepPlan, Work, first_chunk, plan_step

__all__ = [
    "CUDAGraphBatchDimensionBuilder",
    "InferenceBatchDimensions",
    "Limits",
    "RequestView",
    "StepPlan",
    "Work",
    "first_chunk",
    "match_graph_config",
    "plan_drafts",
    "plan_step",
]
