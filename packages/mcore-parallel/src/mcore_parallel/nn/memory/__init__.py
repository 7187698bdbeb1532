# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Activation memory: recomputation and offloading."""

from mcore_parallel.nn.memory._layer_memory import LayerMemory, ManagedCore
from mcore_parallel.nn.memory._offload import EXPERT_PARTS, ActivationOffloader, OffloadConfig
from mcore_parallel.nn.memory._recompute import DrawsNoise, RecomputeConfig, discard_output, recompute

__all__ = [
    "EXPERT_PARTS",
    "ActivationOffloader",
    "DrawsNoise",
    "LayerMemory",
    "ManagedCore",
    "OffloadConfig",
    "RecomputeConfig",
    "discard_output",
    "recompute",
]
