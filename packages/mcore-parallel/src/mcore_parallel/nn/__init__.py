# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The layers of a model: normalisation, attention and its cores, feed-forward, activations."""

from mcore_parallel.nn._activations import geglu, quick_geglu, quick_gelu, squared_relu, swiglu, weighted_quick_geglu
from mcore_parallel.nn._attention import SelfAttention
from mcore_parallel.nn._cores import AttentionCore, SinkAttentionCore, causal_attention, default_attention
from mcore_parallel.nn._deterministic import check_deterministic
from mcore_parallel.nn._memory import LayerMemory, ManagedCore
from mcore_parallel.nn._mlp import GatedMLP
from mcore_parallel.nn._norm import RMSNorm
from mcore_parallel.nn._offload import ActivationOffloader, OffloadConfig
from mcore_parallel.nn._recompute import RecomputeConfig, discard_output, recompute
from mcore_parallel.nn._rope import apply_rotary, rotary_frequencies, rotary_tables
from mcore_parallel.nn._step import Step

__all__ = [
    "ActivationOffloader",
    "AttentionCore",
    "GatedMLP",
    "LayerMemory",
    "ManagedCore",
    "OffloadConfig",
    "RMSNorm",
    "RecomputeConfig",
    "SelfAttention",
    "SinkAttentionCore",
    "Step",
    "apply_rotary",
    "causal_attention",
    "check_deterministic",
    "default_attention",
    "discard_output",
    "geglu",
    "quick_geglu",
    "quick_gelu",
    "recompute",
    "rotary_frequencies",
    "rotary_tables",
    "squared_relu",
    "swiglu",
    "weighted_quick_geglu",
]
