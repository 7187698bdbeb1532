# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture's forward over the residual stream: three launches for few tokens, five for a large decode batch."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_moe._experts import GroupedMLP
from mcore_moe._router import TopKRouter
from mcore_moe._stability import experimental_api
from mcore_parallel.backends import grouped_matmul
from mcore_parallel.nn import NormedStream, StreamNorm

if TYPE_CHECKING:
    from mcore_moe.serving._triton_route import Gate

_COUNTERS = 64
_MOST_EXPERTS = 1024
"""One program chooses among them."""
_GROUPED_ROWS = 64
"""Rows an expert from which on torch's grouped GEMMs are the faster ones."""


# T tokens, D model, E experts, F width of an expert.
@experimental_api
class StreamedExperts:
    """Router and experts of one rank by Triton kernels; conforms to ``mcore_parallel.nn.StreamedFeedForward``.

    Args:
        router: one that ``fits``.
        experts: the same.
    """

    def __init__(self, router: TopKRouter, experts: GroupedMLP) -> None:
        self._router, self._experts = router, experts
        self._arrived = torch.zeros(_COUNTERS, dtype=torch.int32, device=experts.up.device)

    @staticmethod
    def fits(router: TopKRouter, experts: GroupedMLP) -> bool:
        """Whether the kernels compute what these do.

        That is a plain choice by logits in float32, and SwiGLU experts in bfloat16 on a GPU, without biases, adapters and capacity.
        """
        config, activation = router.config, experts.activation
        chooses = config.moe_router_load_balancing_type != "sinkhorn" and config.moe_router_num_groups is None
        chooses = chooses and not config.moe_router_force_load_balancing and config.moe_router_dtype == "fp32"
        chooses = chooses and config.moe_expert_capacity_factor is None and not config.moe_apply_probs_on_input
        chooses = chooses and not (config.moe_input_jitter_eps and router.training) and config.num_moe_experts <= _MOST_EXPERTS
        gated = activation.name == "swiglu" and not activation.offset and activation.clamp is None
        plain = experts.up_bias is None and not experts.has_lora and not experts.is_quantized
        dtypes = {router.weight.dtype, experts.up.dtype, experts.down.dtype}
        return chooses and gated and plain and dtypes == {torch.bfloat16} and experts.up.is_cuda

    def stream_few(self, x: NormedStream, norm: StreamNorm) -> NormedStream:
        """As of the protocol."""
        from mcore_moe.serving._triton_experts import down_few, up_few
        from mcore_moe.serving._triton_route import route_few

        picks = route_few(x, self._gate(), self._arrived)
        h_SRF = up_few(x, self._experts.up, picks)
        return down_few(h_SRF, self._experts.down, picks, x.x, norm)

    def stream_many(self, x_TD: Tensor, normed_TD: Tensor, norm: StreamNorm) -> Tensor:
        """As of the protocol."""
        from mcore_moe.serving._triton_experts import add_rows, down_many, many_tiles, up_many
        from mcore_moe.serving._triton_route import order, route_many

        experts, num_experts = self._experts, self._router.config.num_moe_experts
        picks = route_many(normed_TD, self._gate(), self._arrived)
        num_picks = picks.experts_TK.numel()
        grouped = num_picks > _GROUPED_ROWS * num_experts
        order_P, ends_E, places_P = order(picks.experts_TK, num_experts, places=grouped)
        if not grouped:
            up, down = many_tiles(num_picks / num_experts)
            h_PF = up_many(normed_TD, experts.up, order_P, ends_E, picks.weights_TK, up)
            return add_rows(down_many(h_PF, experts.down, order_P, ends_E, down), None, x_TD, norm)
        rows_PD = normed_TD.index_select(0, order_P // picks.weights_TK.shape[1])
        weights_P = picks.weights_TK.flatten().index_select(0, order_P)
        h_PF = experts.activation(grouped_matmul(rows_PD, experts.up.flatten(1, 2), ends_E), weights=weights_P)
        return add_rows(grouped_matmul(h_PF, experts.down, ends_E), places_P, x_TD, norm)

    def _gate(self) -> "Gate":
        from mcore_moe.serving._triton_route import SCORES, Gate

        router, config = self._router, self._router.config
        return Gate(
            weight=router.weight,
            bias=router.bias,
            expert_bias=router.expert_bias,
            topk=config.moe_router_topk,
            score=SCORES[config.moe_router_score_function],
            pre_softmax=config.moe_router_pre_softmax,
            scaling=1.0 if config.moe_router_topk_scaling_factor is None else config.moe_router_topk_scaling_factor,
        )
