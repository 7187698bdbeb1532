# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows of one rank in the order of its experts, and back: nothing waits for the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_moe._routing import Routing

# T tokens, K experts a token, P = T * K picks, N experts, D model. R = P rows, one a pick.


@dataclass(frozen=True)
class LocalPicks:
    """Rows for this rank's experts, in expert order."""

    rows_RD: Tensor
    """Those of picks that are not this rank's come last, and belong to no expert."""
    ends_N: Tensor
    """int32, rows of each of the N experts and of all before it."""
    weights_R: Tensor
    """Of the rows' results."""
    order_R: Tensor
    """The pick of each row."""
    places_TK: Tensor
    """int32 row of each pick; -1 where it is not this rank's."""


class LocalTokenDispatcher:
    """For ranks that hold all experts: nothing is exchanged.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_local_experts = num_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> LocalPicks:
        """Every pick; differentiable in ``x_TD`` and the weights."""
        experts_TK = routing.experts_TK
        if routing.valid_T is not None:
            experts_TK = experts_TK.masked_fill(~routing.valid_T[:, None], self.num_local_experts)
        return sort_picks(x_TD, routing, experts_TK, self.num_local_experts)

    def combine(self, rows_RD: Tensor, picks: LocalPicks, routing: Routing) -> Tensor:
        """The sums of each token, [T, D]; the order of each sum is fixed."""
        return sum_rows(rows_RD, picks)


def sort_picks(x_TD: Tensor, routing: Routing, experts_TK: Tensor, num_experts: int) -> LocalPicks:
    """A row for each pick, differentiable in tokens and weights.

    Args:
        x_TD: tokens.
        routing: whose weights the rows get.
        experts_TK: int64, from 0 to N; N for picks that are not this rank's.
        num_experts: N.
    """
    with torch.no_grad():
        keys_P = experts_TK.flatten().to(torch.int32)
        order_R = keys_P.argsort(stable=True)
        ends_N = keys_P.new_zeros(num_experts + 1).scatter_add_(0, keys_P.long(), torch.ones_like(keys_P))[:-1].cumsum(0).to(torch.int32)
        rows_P = torch.arange(len(order_R), dtype=torch.int32, device=x_TD.device)
        places_P = torch.empty_like(rows_P).scatter_(0, order_R, rows_P)
        places_TK = torch.where(experts_TK < num_experts, places_P.view_as(experts_TK), -1)
    rows_RD, weights_R = _Spread.apply(x_TD, routing.probs_TK, order_R, places_TK)
    return LocalPicks(rows_RD, ends_N, weights_R, order_R, places_TK)


def sum_rows(rows_RD: Tensor, picks: LocalPicks) -> Tensor:
    """[T, D]: each token's rows added up in the order of its experts, in float32 or wider."""
    return _Sum.apply(rows_RD, picks.order_R, picks.places_TK)


class _Spread(torch.autograd.Function):
    """Tokens and weights in the order of the rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, probs_TK: Tensor, order_R: Tensor, places_TK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places_TK)
        return x_TD.index_select(0, order_R // probs_TK.shape[1]), probs_TK.flatten().index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places_TK,) = ctx.saved_tensors
        grad_x_TD = _gather_sum(grads[0].contiguous(), places_TK) if ctx.needs_input_grad[0] else None
        grad_probs_TK = None
        if ctx.needs_input_grad[1]:
            # Behind the experts' rows there may be anything.
            grad_probs_TK = torch.where(places_TK >= 0, grads[1][places_TK.clamp(min=0).long()], 0)
        return grad_x_TD, grad_probs_TK, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, places_TK: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.topk = places_TK.shape[1]
        return _gather_sum(rows_RD.contiguous(), places_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order_R,) = ctx.saved_tensors
        return grads[0].index_select(0, order_R // ctx.topk), None, None


def _gather_sum(rows_RD: Tensor, places_TK: Tensor) -> Tensor:
    """[T, D], the rows at the places of each token; places below 0 add nothing."""
    if rows_RD.is_cuda and rows_RD.dtype != torch.float64:
        from mcore_moe.dispatch._triton import gather_sum

        return gather_sum(rows_RD, places_TK)
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    y_TD = torch.zeros((places_TK.shape[0], rows_RD.shape[1]), dtype=wide, device=rows_RD.device)
    for places_T in places_TK.unbind(1):
        y_TD += torch.where(places_T[:, None] >= 0, rows_RD[places_T.clamp(min=0).long()].to(wide), 0)
    return y_TD.to(rows_RD.dtype)
