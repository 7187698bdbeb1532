# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Mixtures of experts: routers, dispatchers and experts that fit a model's feed-forward slot."""

from mcore_moe._balance import (
    compute_routing_scores_for_aux_loss,
    get_updated_expert_bias,
    sinkhorn,
    switch_load_balancing_loss_func,
    z_loss_func,
)
from mcore_moe._capacity import apply_router_token_dropping, get_capacity
from mcore_moe._config import MoEConfig
from mcore_moe._experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from mcore_moe._gating import RandomSTE, apply_random_logits
from mcore_moe._layer import MoELayer, moe_feed_forward
from mcore_moe._quantize import get_align_size_for_quantization, get_fp4_align_size, get_fp8_align_size, pad_routing_map
from mcore_moe._router import TopKRouter
from mcore_moe._routing import Routing, choose_experts, topk_routing_with_score_function
from mcore_moe._stability import deprecated, experimental_api, internal_api
from mcore_moe._upcycle import upcycle_state_dict
from mcore_moe.dispatch import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher

__all__ = [
    "GroupedMLP",
    "MoEAllGatherTokenDispatcher",
    "MoEAlltoAllTokenDispatcher",
    "MoEConfig",
    "MoEFlexTokenDispatcher",
    "MoELayer",
    "RandomSTE",
    "Routing",
    "SequentialMLP",
    "TEGroupedMLP",
    "TopKRouter",
    "apply_random_logits",
    "apply_router_token_dropping",
    "choose_experts",
    "compute_routing_scores_for_aux_loss",
    "deprecated",
    "experimental_api",
    "get_align_size_for_quantization",
    "get_capacity",
    "get_fp4_align_size",
    "get_fp8_align_size",
    "get_updated_expert_bias",
    "internal_api",
    "moe_feed_forward",
    "pad_routing_map",
    "sinkhorn",
    "switch_load_balancing_loss_func",
    "topk_routing_with_score_function",
    "upcycle_state_dict",
    "z_loss_func",
]
