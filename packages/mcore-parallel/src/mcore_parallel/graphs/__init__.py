# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""CUDA graphs: blocks, or whole iterations, that are launched as one."""

from mcore_parallel.graphs._capture import (
    CUDA_GRAPH_CAPTURE_FREEZE_GC,
    FREEZE_GC_MAX_TORCH_VERSION,
    Capture,
    CaptureError,
    CudaCapture,
    Recording,
    collection_paused,
    freeze_gc_choice,
    recordings_under_way,
)
from mcore_parallel.graphs._external import ExternalCapture, GraphedCallables
from mcore_parallel.graphs._iteration import IterationGraph
from mcore_parallel.graphs._module import CudaGraphConfig, GraphChecked, GraphReport, ModuleGraphs
from mcore_parallel.graphs._select import GraphableMegatronModule, GraphedModel, graph_modules

__all__ = [
    "CUDA_GRAPH_CAPTURE_FREEZE_GC",
    "FREEZE_GC_MAX_TORCH_VERSION",
    "Capture",
    "CaptureError",
    "CudaCapture",
    "CudaGraphConfig",
    "ExternalCapture",
    "GraphChecked",
    "GraphReport",
    "GraphableMegatronModule",
    "GraphedCallables",
    "GraphedModel",
    "IterationGraph",
    "ModuleGraphs",
    "Recording",
    "collection_paused",
    "freeze_gc_choice",
    "graph_modules",
    "recordings_under_way",
]
