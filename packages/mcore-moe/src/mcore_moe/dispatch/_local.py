# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows of one rank in the order of its experts, and back: nothing waits for the device."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_moe._capacity import places_in_experts
from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api

# T tokens, K experts a token, P = T * K picks, N experts, D model, C capacity of an expert.
# R rows: P, one a pick, or with padding to capacity N * C.


@experimental_api
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
    """The pick of each row; -1 for a row of zeros that fills an expert up."""
    places_TK: Tensor
    """int32 row of each pick; -1 where it is not this rank's."""
    padded: bool = False
    """Whether ``order_R`` has rows that fill experts up."""


@experimental_api
class LocalTokenDispatcher:
    """For ranks that hold all experts: nothing is exchanged.

    Args:
        num_experts: E.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_local_experts = num_experts

    def dispatch(self, x_TD: Tensor, routing: Routing) -> LocalPicks:
        """Every pick; differentiable in ``x_TD`` and the weights."""
        return sort_picks(x_TD, routing, routing.destinations(self.num_local_experts), self.num_local_experts)

    def combine(self, rows_RD: Tensor, picks: LocalPicks, routing: Routing) -> Tensor:
        """The sums of each token, [T, D]; the order of each sum is fixed."""
        return sum_rows(rows_RD, picks)


def sort_picks(x_TD: Tensor, routing: Routing, experts_TK: Tensor, num_experts: int, capacity: int | None = None) -> LocalPicks:
    """A row for each pick, differentiable in tokens and weights.

    Args:
        x_TD: tokens.
        routing: whose weights the rows get.
        experts_TK: int64, from 0 to N; N for picks that are not this rank's.
        num_experts: N.
        capacity: rows of each expert, which has no more picks; None for ``routing.capacity``, and for a row a pick if that is None.
    """
    capacity = routing.capacity if capacity is None else capacity
    if capacity is not None:
        return _fill_experts(x_TD, routing, experts_TK, num_experts, capacity)
    with torch.no_grad():
        keys_P = experts_TK.flatten().to(torch.int32)
        order_R = keys_P.argsort(stable=True)
        ends_N = keys_P.new_zeros(num_experts + 1).scatter_add_(0, keys_P.long(), torch.ones_like(keys_P))[:-1].cumsum(0).to(torch.int32)
        rows_P = torch.arange(len(order_R), dtype=torch.int32, device=x_TD.device)
        places_P = torch.empty_like(rows_P).scatter_(0, order_R, rows_P)
        places_TK = torch.where(experts_TK < num_experts, places_P.view_as(experts_TK), -1)
    rows_RD, weights_R = _Spread.apply(x_TD, routing.probs_TK, order_R, places_TK, False)
    return LocalPicks(rows_RD, ends_N, weights_R, order_R, places_TK)


def _fill_experts(x_TD: Tensor, routing: Routing, experts_TK: Tensor, num_experts: int, capacity: int) -> LocalPicks:
    """``capacity`` rows an expert: its picks in the order of their tokens, then zeros with weight 0. No shape depends on the routing."""
    with torch.no_grad():
        keys_P, num_rows = experts_TK.flatten(), num_experts * capacity
        places_P = keys_P * capacity + places_in_experts(keys_P, keys_P.argsort(stable=True), num_experts)
        places_P = torch.where(keys_P < num_experts, places_P, num_rows)
        picks_P = torch.arange(len(keys_P), device=x_TD.device)
        order_R = picks_P.new_full((num_rows + 1,), -1).scatter_(0, places_P, picks_P)[:-1]
        places_TK = torch.where(places_P < num_rows, places_P, -1).to(torch.int32).view_as(experts_TK)
        ends_N = torch.arange(1, num_experts + 1, dtype=torch.int32, device=x_TD.device) * capacity
    rows_RD, weights_R = _Spread.apply(x_TD, routing.probs_TK, order_R, places_TK, True)
    return LocalPicks(rows_RD, ends_N, weights_R, order_R, places_TK, padded=True)


def sum_rows(rows_RD: Tensor, picks: LocalPicks) -> Tensor:
    """[T, D]: each token's rows added up in the order of its experts, in float32 or wider."""
    return sum_places(rows_RD, picks.order_R, picks.places_TK, picks.padded)


def sum_places(rows_RD: Tensor, order_R: Tensor, places_TK: Tensor, padded: bool) -> Tensor:
    """``sum_rows`` for who has these parts of the picks only."""
    return _Sum.apply(rows_RD, order_R, places_TK, padded)


class _Spread(torch.autograd.Function):
    """Tokens and weights in the order of the rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, probs_TK: Tensor, order_R: Tensor, places_TK: Tensor, padded: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places_TK)
        return _rows_of(x_TD, order_R, probs_TK.shape[1], padded), _rows_of(probs_TK.flatten(), order_R, 1, padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places_TK,) = ctx.saved_tensors
        grad_x_TD = _gather_sum(grads[0].contiguous(), places_TK) if ctx.needs_input_grad[0] else None
        grad_probs_TK = None
        if ctx.needs_input_grad[1]:
            # Behind the experts' rows there may be anything.
            grad_probs_TK = torch.where(places_TK >= 0, grads[1][places_TK.clamp(min=0).long()], 0)
        return grad_x_TD, grad_probs_TK, None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, order_R: Tensor, places_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.topk, ctx.padded = places_TK.shape[1], padded
        return _gather_sum(rows_RD.contiguous(), places_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (order_R,) = ctx.saved_tensors
        return _rows_of(grads[0], order_R, ctx.topk, ctx.padded), None, None, None


def _rows_of(x: Tensor, order_R: Tensor, topk: int, padded: bool) -> Tensor:
    """[R, ...], for each pick the row of its token (of ``topk`` picks); zeros for picks below 0, which only padded ones have."""
    if not padded:
        return x.index_select(0, order_R // topk)
    if not len(x):
        return x.new_zeros(len(order_R), *x.shape[1:])
    rows = x.index_select(0, order_R.clamp(min=0) // topk)
    return rows.masked_fill_((order_R < 0).view(-1, *[1] * (x.dim() - 1)), 0)


def _gather_sum(rows_RD: Tensor, places_TK: Tensor) -> Tensor:
    """[T, D], the rows at the places of each token; places below 0 add nothing."""
    if rows_RD.is_cuda and rows_RD.dtype != torch.float64:
        from mcore_moe.dispatch._triton import gather_sum

        return gather_sum(rows_RD, places_TK)
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    y_TD = torch.zeros((places_TK.shape[0], rows_RD.shape[1]), dtype=wide, device=rows_RD.device)
    # Where no pick has a row there is none to look at.
    for places_T in places_TK.unbind(1) if len(rows_RD) else ():
        y_TD += torch.where(places_T[:, None] >= 0, rows_RD[places_T.clamp(min=0).long()].to(wide), 0)
    return y_TD.to(rows_RD.dtype)
