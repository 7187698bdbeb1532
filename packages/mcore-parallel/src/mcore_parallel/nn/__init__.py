# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The layers of a model: normalisation, attention and its cores, feed-forward, activations."""

from mcore_parallel.nn._activations import (
    ACTIVATIONS,
    Activation,
    geglu,
    quick_geglu,
    quick_gelu,
    squared_relu,
    swiglu,
    weighted_quick_geglu,
    weighted_swiglu,
)
from mcore_parallel.nn._attention import SelfAttention
from mcore_parallel.nn._attention_spec import AttentionSpec
from mcore_parallel.nn._cores import AttentionCore, AttentionCoreBuilder, SinkAttentionCore, causal_attention, default_attention
from mcore_parallel.nn._delta_net import GatedDeltaNet
from mcore_parallel.nn._deterministic import check_deterministic
from mcore_parallel.nn._factory import LayerFactory, TorchLayers
from mcore_parallel.nn._latent import LatentCore, LatentSelfAttention
from mcore_parallel.nn._latent_cache import LatentCache
from mcore_parallel.nn._latent_config import LatentAttentionConfig
from mcore_parallel.nn._linear_mixer import LinearMixer, RecurrentState
from mcore_parallel.nn._mamba import MambaMixer
from mcore_parallel.nn._mamba_config import GatedDeltaNetConfig, MambaConfig
from mcore_parallel.nn._masked import MaskedAttention
from mcore_parallel.nn._memory import LayerMemory, ManagedCore
from mcore_parallel.nn._mlp import MLP
from mcore_parallel.nn._norm import LayerNorm, RMSNorm
from mcore_parallel.nn._offload import EXPERT_PARTS, ActivationOffloader, OffloadConfig
from mcore_parallel.nn._positions import LearnedPositions, RotaryConfig, RotaryEmbedding, YarnRotaryEmbedding, rotary_width
from mcore_parallel.nn._qk_clip import ClipReport, LogitTracker, QKClipped, clip_qk, shared_key_factors, track_max_logits
from mcore_parallel.nn._recompute import RecomputeConfig, discard_output, recompute
from mcore_parallel.nn._reference_attention import reference_attention
from mcore_parallel.nn._registry import (
    AttentionCapability,
    ContextParallelBuilder,
    attention_capabilities,
    choose_attention,
    select_attention,
)
from mcore_parallel.nn._rope import apply_rotary, rotary_frequencies, rotary_tables, split_rotary
from mcore_parallel.nn._rope_scaling import Llama3Scaling, YarnScaling
from mcore_parallel.nn._scale_mask_softmax import FusedScaleMaskSoftmax
from mcore_parallel.nn._shared_kv import SharedKVProjection
from mcore_parallel.nn._softmax import SoftmaxOne
from mcore_parallel.nn._step import Step
from mcore_parallel.nn._windows import get_sliding_window_causal_mask, is_layer_window_attention

__all__ = [
    "ACTIVATIONS",
    "EXPERT_PARTS",
    "MLP",
    "Activation",
    "ActivationOffloader",
    "AttentionCapability",
    "AttentionCore",
    "AttentionCoreBuilder",
    "AttentionSpec",
    "ClipReport",
    "ContextParallelBuilder",
    "FusedScaleMaskSoftmax",
    "GatedDeltaNet",
    "GatedDeltaNetConfig",
    "LatentAttentionConfig",
    "LatentCache",
    "LatentCore",
    "LatentSelfAttention",
    "LayerFactory",
    "LayerMemory",
    "LayerNorm",
    "LearnedPositions",
    "LinearMixer",
    "Llama3Scaling",
    "LogitTracker",
    "MambaConfig",
    "MambaMixer",
    "ManagedCore",
    "MaskedAttention",
    "OffloadConfig",
    "QKClipped",
    "RMSNorm",
    "RecomputeConfig",
    "RecurrentState",
    "RotaryConfig",
    "RotaryEmbedding",
    "SelfAttention",
    "SharedKVProjection",
    "SinkAttentionCore",
    "SoftmaxOne",
    "Step",
    "TorchLayers",
    "YarnRotaryEmbedding",
    "YarnScaling",
    "apply_rotary",
    "attention_capabilities",
    "causal_attention",
    "check_deterministic",
    "choose_attention",
    "clip_qk",
    "default_attention",
    "discard_output",
    "geglu",
    "get_sliding_window_causal_mask",
    "is_layer_window_attention",
    "quick_geglu",
    "quick_gelu",
    "recompute",
    "reference_attention",
    "rotary_frequencies",
    "rotary_tables",
    "rotary_width",
    "select_attention",
    "shared_key_factors",
    "split_rotary",
    "squared_relu",
    "swiglu",
    "track_max_logits",
    "weighted_quick_geglu",
    "weighted_swiglu",
]
