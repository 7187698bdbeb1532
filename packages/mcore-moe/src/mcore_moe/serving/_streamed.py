# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture's forward over the residual stream: three launches for few tokens, five for a large decode batch."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mcore_moe._experts import GroupedMLP
from mcore_moe._router import TopKRouter
from mcore_moe._stability import experimental_api
from mcore_parallel.backends import Scaled, grouped_matmul, has_widening_kernel
from mcore_parallel.nn import NormedStream, StreamNorm

if TYPE_CHECKING:
    from mcore_moe.serving._triton_route import Gate

_COUNTERS = 64
_MOST_EXPERTS = 1024
"""One program chooses among them."""
_GROUPED_ROWS = 64
"""Rows an expert from which on grouped GEMMs of rows in the order of the experts are the faster ones."""


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

        That is a plain choice by logits in float32, and SwiGLU experts in bfloat16 on a GPU, without biases, adapters and capacity;
        their weights may be in fp8 (``store_in_fp8``) where the device has it.
        """
        config, activation = router.config, experts.activation
        chooses = config.moe_router_load_balancing_type != "sinkhorn" and config.moe_router_num_groups is None
        chooses = chooses and not config.moe_router_force_load_balancing and config.moe_router_dtype == "fp32"
        chooses = chooses and config.moe_expert_capacity_factor is None and not config.moe_apply_probs_on_input
        chooses = chooses and not (config.moe_input_jitter_eps and router.training) and config.num_moe_experts <= _MOST_EXPERTS
        gated = activation.name == "swiglu" and not activation.offset and activation.clamp is None
        plain = experts.up_bias is None and not experts.has_lora
        plain = plain and not experts.is_quantized and not experts.is_batch_invariant
        held = {torch.bfloat16} if not experts.fp8 else {torch.float8_e4m3fn}
        dtypes = router.weight.dtype == experts.dtype == torch.bfloat16 and {experts.up.dtype, experts.down.dtype} == held
        here = experts.up.is_cuda and (not experts.fp8 or has_widening_kernel(experts.up.device, experts.dtype))
        return chooses and gated and plain and dtypes and here

    def stream_few(self, x: NormedStream, norm: StreamNorm) -> NormedStream:
        """As of the protocol."""
        from mcore_moe.serving._triton_experts import down_few, up_few
        from mcore_moe.serving._triton_route import route_few

        picks = route_few(x, self._gate(), self._arrived)
        h_SRF = up_few(x, self._weight("up"), picks)
        return down_few(h_SRF, self._weight("down"), picks, x.x, norm)

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
            x = self._multiplied("up", normed_TD, num_picks)
            up, down = many_tiles(num_picks / num_experts, fp8=bool(experts.fp8), narrow=isinstance(x, Scaled))
            h_PF = up_many(x, self._weight("up"), order_P, ends_E, picks.weights_TK, up, dtype=normed_TD.dtype)
            h = self._multiplied("down", h_PF, num_picks)
            return add_rows(down_many(h, self._weight("down"), order_P, ends_E, down, dtype=h_PF.dtype), None, x_TD, norm)
        rows_PD = normed_TD.index_select(0, order_P // picks.weights_TK.shape[1])
        weights_P = picks.weights_TK.flatten().index_select(0, order_P)
        h_PF = experts.activation(self._multiply("up", rows_PD, ends_E), weights=weights_P)
        return add_rows(self._multiply("down", h_PF, ends_E), places_P, x_TD, norm)

    def _weight(self, name: str) -> Tensor | Scaled:
        """One of the stacks as the kernels read it: up [E, 2 F, D], down [E, D, F]."""
        weight, stack = getattr(self._experts, name), self._experts.fp8.get(name)
        return weight.flatten(1, -2) if stack is None else stack.scaled(weight)

    def _multiplied(self, name: str, rows: Tensor, num_rows: int) -> Tensor | Scaled:
        """Rows as one of the stacks multiplies them."""
        stack = self._experts.fp8.get(name)
        return rows if stack is None else stack.multiplied(rows, getattr(self._experts, name), num_rows)

    def _multiply(self, name: str, rows_PI: Tensor, ends_E: Tensor) -> Tensor:
        weight, stack = getattr(self._experts, name).flatten(1, -2), self._experts.fp8.get(name)
        return grouped_matmul(rows_PI, weight, ends_E) if stack is None else stack.matmul(rows_PI, weight, ends_E)

    def _gate(self) -> "Gate":
        from mcore_moe._triton_router import SCORES
        from mcore_moe.serving._triton_route import Gate

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
