# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention: self-attention, multi-head latent attention, the cores they run on, and the choice among cores."""

from mcore_parallel.nn.attention._cores import (
    AttentionCore,
    AttentionCoreBuilder,
    AttentionSpec,
    DeviceBoundsCore,
    PrefixAttentionCore,
    SinkAttentionCore,
    causal_attention,
    check_device_bounds,
    check_prefixes,
    default_attention,
    follows_prefixes,
    takes_device_bounds,
)
from mcore_parallel.nn.attention._cross import CrossAttention
from mcore_parallel.nn.attention._latent import LatentAttentionConfig, LatentCache, LatentCore, LatentSelfAttention
from mcore_parallel.nn.attention._masked import MaskedAttention
from mcore_parallel.nn.attention._packed import HeadNorms, PackedAttentionCore, PackedHeads
from mcore_parallel.nn.attention._qk_clip import ClipReport, LogitTracker, QKClipped, clip_qk, shared_key_factors, track_max_logits
from mcore_parallel.nn.attention._reference import reference_attention
from mcore_parallel.nn.attention._registry import (
    AttentionCapability,
    ContextParallelBuilder,
    attention_capabilities,
    choose_attention,
    select_attention,
)
from mcore_parallel.nn.attention._self_attention import AttentionConfig, SelfAttention
from mcore_parallel.nn.attention._shared_kv import SharedKVProjection
from mcore_parallel.nn.attention._softmax import FusedScaleMaskSoftmax, SoftmaxOne, soft_cap
from mcore_parallel.nn.attention._windows import get_sliding_window_causal_mask, is_layer_window_attention

__all__ = [
    "AttentionCapability",
    "AttentionConfig",
    "AttentionCore",
    "AttentionCoreBuilder",
    "AttentionSpec",
    "ClipReport",
    "ContextParallelBuilder",
    "CrossAttention",
    "DeviceBoundsCore",
    "FusedScaleMaskSoftmax",
    "HeadNorms",
    "LatentAttentionConfig",
    "LatentCache",
    "LatentCore",
    "LatentSelfAttention",
    "LogitTracker",
    "MaskedAttention",
    "PackedAttentionCore",
    "PackedHeads",
    "PrefixAttentionCore",
    "QKClipped",
    "SelfAttention",
    "SharedKVProjection",
    "SinkAttentionCore",
    "SoftmaxOne",
    "attention_capabilities",
    "causal_attention",
    "check_device_bounds",
    "check_prefixes",
    "choose_attention",
    "clip_qk",
    "default_attention",
    "follows_prefixes",
    "get_sliding_window_causal_mask",
    "is_layer_window_attention",
    "reference_attention",
    "select_attention",
    "shared_key_factors",
    "soft_cap",
    "takes_device_bounds",
    "track_max_logits",
]
