# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows of one rank in the order of its experts, and back: nothing waits for the device."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api
from mcore_moe.dispatch._places import gather_sum, place_rows, place_tokens, spread_rows

# T tokens, K experts a token, N experts, D model, C capacity of an expert. R rows: T * K, one a pick, or with padding to capacity N * C.


@experimental_api
@dataclass(frozen=True)
class LocalPicks:
    """Rows for this rank's experts, in expert order."""

    rows_RD: Tensor
    """Behind those of the last expert there may be anything."""
    ends_N: Tensor
    """int32, rows of each of the N experts and of all before it."""
    weights_R: Tensor
    """Of the rows' results."""
    places_TK: Tensor
    """int32 row of each pick; -1 where it is not this rank's."""
    padded: bool = False
    """Whether rows of zeros fill the experts up."""


@experimental_api
@dataclass(frozen=True)
class PlacedPicks:
    """The order of the rows for this rank's experts, for GEMMs that gather them; as of ``mcore_parallel.backends.RowOrder``."""

    tokens_R: Tensor
    """int32; behind those of the last expert there may be anything."""
    ends_N: Tensor
    """As of `LocalPicks`."""
    weights_R: Tensor
    """Of the rows' results."""
    places_TK: Tensor
    """As of `LocalPicks`."""
    padded: bool = False
    """No rows of zeros fill the experts up."""

    def gather(self, x_TD: Tensor) -> Tensor:
        """[R, D], each token at its rows."""
        return spread_rows(x_TD, None, self.places_TK, len(self.tokens_R))[0]

    def sum(self, rows_RD: Tensor) -> Tensor:
        """[T, D], each token's rows added up in the order of its picks."""
        return gather_sum(rows_RD, self.places_TK)


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

    def place(self, routing: Routing) -> PlacedPicks:
        """The order alone, of a routing without a capacity; differentiable in the weights."""
        with torch.no_grad():
            places_TK, ends_N = place_rows(routing.destinations(self.num_local_experts).to(torch.int32), 0, self.num_local_experts)
        tokens_R, weights_R = _Place.apply(routing.probs_TK, places_TK)
        return PlacedPicks(tokens_R, ends_N, weights_R, places_TK)

    def combine(self, rows_RD: Tensor, picks: LocalPicks | PlacedPicks, routing: Routing) -> Tensor:
        """The sums of each token, [T, D]; the order of each sum is fixed."""
        return sum_rows(rows_RD, picks)


def sort_picks(x_TD: Tensor, routing: Routing, experts_TK: Tensor, num_experts: int, capacity: int | None = None) -> LocalPicks:
    """A row for each pick, differentiable in tokens and weights.

    Args:
        x_TD: tokens.
        routing: whose weights the rows get.
        experts_TK: integers from 0 to N, distinct within a row below N; N for picks that are not this rank's.
        num_experts: N.
        capacity: rows of each expert, which has no more picks: those in the order of their tokens, then zeros with weight 0. None for
            ``routing.capacity``, and for a row a pick if that is None.
    """
    capacity = routing.capacity if capacity is None else capacity
    with torch.no_grad():
        places_TK, ends_N = place_rows(experts_TK.to(torch.int32), 0, num_experts)
        num_rows = places_TK.numel()
        if capacity is not None:
            num_rows = num_experts * capacity
            # No shape depends on the routing.
            first_N = torch.arange(num_experts + 1, dtype=torch.int32, device=x_TD.device) * capacity
            moved_N = first_N - F.pad(ends_N, (1, 0))
            places_TK = torch.where(places_TK >= 0, places_TK + moved_N[experts_TK.long()], -1)
            ends_N = first_N[1:]
    rows_RD, weights_R = _Spread.apply(x_TD, routing.probs_TK, places_TK, num_rows, capacity is not None)
    return LocalPicks(rows_RD, ends_N, weights_R, places_TK, padded=capacity is not None)


def sum_rows(rows_RD: Tensor, picks: LocalPicks | PlacedPicks) -> Tensor:
    """[T, D]: each token's rows added up in the order of its experts, in float32 or wider."""
    return sum_places(rows_RD, picks.places_TK, picks.padded)


def sum_places(rows_RD: Tensor, places_TK: Tensor, padded: bool) -> Tensor:
    """``sum_rows`` for who has these parts of the picks only."""
    return _Sum.apply(rows_RD, places_TK, padded)


class _Spread(torch.autograd.Function):
    """Tokens and weights in the order of the rows."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, probs_TK: Tensor, places_TK: Tensor, num_rows: int, padded: bool) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(places_TK)
        return spread_rows(x_TD, probs_TK, places_TK, num_rows, padded=padded)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places_TK,) = ctx.saved_tensors
        grad_x_TD = gather_sum(grads[0].contiguous(), places_TK) if ctx.needs_input_grad[0] else None
        grad_probs_TK = _at_places(grads[1], places_TK) if ctx.needs_input_grad[1] else None
        return grad_x_TD, grad_probs_TK, None, None, None


class _Place(torch.autograd.Function):
    """Token and weight of each row."""

    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, places_TK: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places_TK)
        tokens_R, weights_R = place_tokens(probs_TK, places_TK, places_TK.numel())
        ctx.mark_non_differentiable(tokens_R)
        return tokens_R, weights_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places_TK,) = ctx.saved_tensors
        return _at_places(grads[1], places_TK), None


def _at_places(grad_R: Tensor, places_TK: Tensor) -> Tensor:
    """Gradients of the picks' weights; behind the experts' rows there may be anything."""
    return torch.where(places_TK >= 0, grad_R[places_TK.clamp(min=0).long()], 0)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, places_TK: Tensor, padded: bool) -> Tensor:
        ctx.save_for_backward(places_TK)
        ctx.num_rows, ctx.padded = len(rows_RD), padded
        return gather_sum(rows_RD.contiguous(), places_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (places_TK,) = ctx.saved_tensors
        return spread_rows(grads[0], None, places_TK, ctx.num_rows, padded=ctx.padded)[0], None, None
