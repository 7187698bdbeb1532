# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""CUDA graphs: blocks, or whole iterations, that are launched as one."""

from mcore_parallel.graphs._capture import Capture, CaptureError, CudaCapture
from mcore_parallel.graphs._collection import collection_paused
from mcore_parallel.graphs._iteration import IterationGraph
from mcore_parallel.graphs._module import CudaGraphConfig, GraphReport, ModuleGraphs
from mcore_parallel.graphs._select import GraphableMegatronModule, GraphedModel, graph_modules

__all__ = [
    "Capture",
    "CaptureError",
    "CudaCapture",
    "CudaGraphConfig",
    "GraphReport",
    "GraphableMegatronModule",
    "GraphedModel",
    "IterationGraph",
    "ModuleGraphs",
    "collection_paused",
    "graph_modules",
]
