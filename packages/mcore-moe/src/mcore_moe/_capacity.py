# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A bound on the tokens of an expert: which picks it keeps, and which rows fill it up."""

import dataclasses
import math

import torch
from torch import Tensor

from mcore_moe._limits import check_above_zero, check_drop_policy, check_not_negative, check_shape, check_topk
from mcore_moe._routing import Routing
from mcore_moe._stability import experimental_api

# T tokens of this rank, K experts a token, P = T * K picks, E experts, C capacity of an expert.


@experimental_api
def get_capacity(num_tokens: int, num_experts: int, capacity_factor: float, min_capacity: int | None = None) -> int:
    """Picks an expert keeps: its even share times the factor, rounded up, and ``min_capacity`` at least.

    Args:
        num_tokens: picks of all tokens, T * K.
        num_experts: E.
        capacity_factor: 1 for the even share.
        min_capacity: None for none.

    Raises:
        ValueError: no expert, negative numbers, or a factor that is not above 0 and finite.

    Example:
        >>> get_capacity(2 * 16, 8, 1.25)
        5
    """
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts} must be at least 1")
    check_above_zero("capacity_factor", capacity_factor, "drop nothing where there is no bound")
    check_not_negative("num_tokens", num_tokens, "count the picks of all tokens")
    if min_capacity is not None:
        check_not_negative("min_capacity", min_capacity, "leave it out for none")
    return max(math.ceil(num_tokens / num_experts * capacity_factor), min_capacity or 0)


def expert_capacity(num_tokens: int, topk: int, num_experts: int, capacity_factor: float) -> int:
    """C of T tokens; an expert never has more than all of them."""
    return min(get_capacity(num_tokens * topk, num_experts, capacity_factor), num_tokens)


def limit_to_capacity(routing: Routing, num_experts: int, capacity: int, drop_policy: str, *, pad: bool) -> Routing:
    """The routing with ``kept_TK``: each expert keeps ``capacity`` picks of valid tokens at most.

    Args:
        routing: before the drop.
        num_experts: E.
        capacity: C.
        drop_policy: "probs" keeps the greatest weights, of equal ones the first tokens; "position" the first tokens.
        pad: whether each expert gets C rows, however few it keeps.
    """
    with torch.no_grad():
        keys_P = routing.destinations(num_experts).flatten()
        order_P = keys_P.argsort(stable=True)
        if drop_policy == "probs":
            by_weight_P = routing.probs_TK.flatten().argsort(descending=True, stable=True)
            order_P = by_weight_P[keys_P[by_weight_P].argsort(stable=True)]
        places_P = places_in_experts(keys_P, order_P, num_experts)
        kept_P = (places_P < capacity) & (keys_P < num_experts)
    return dataclasses.replace(routing, kept_TK=kept_P.view_as(routing.experts_TK), capacity=capacity if pad else None)


def places_in_experts(keys_P: Tensor, order_P: Tensor, num_experts: int) -> Tensor:
    """[P] int64, how many picks of the same expert come before each pick in ``order_P``, which is sorted by expert."""
    counts = keys_P.new_zeros(num_experts + 1).scatter_add_(0, keys_P, torch.ones_like(keys_P))
    starts = counts.cumsum(0) - counts
    sorted_P = torch.arange(len(keys_P), device=keys_P.device) - starts[keys_P[order_P]]
    return torch.empty_like(sorted_P).scatter_(0, order_P, sorted_P)


@experimental_api
def apply_router_token_dropping(
    routing_probs: Tensor,
    routing_map: Tensor,
    router_topk: int,
    capacity_factor: float,
    drop_policy: str = "probs",
    pad_to_capacity: bool = False,
) -> tuple[Tensor, Tensor]:
    """The same drop in dense form. Weights are not renormalised.

    Args:
        routing_probs: [T, E] weights, zero where unrouted.
        routing_map: [T, E] bool.
        router_topk: K.
        capacity_factor: of ``get_capacity``; the capacity is T at most.
        drop_policy: "probs" keeps the greatest weights of each expert, of equal ones the first tokens; "position" the first tokens.
        pad_to_capacity: mark other tokens, with weight 0, until each expert has as many as its capacity. Experts start to look for
            them at different tokens.

    Returns:
        The weights and the map that are left; a dropped weight is 0 and has no gradient.

    Raises:
        ValueError: an unknown policy, tensors of other shapes or a map that is not bool, more experts a token than there are, or a factor
            as of `get_capacity`.
    """
    check_drop_policy("drop_policy", drop_policy)
    if routing_map.dim() != 2 or routing_map.dtype != torch.bool:
        raise ValueError(f"routing_map has shape {list(routing_map.shape)} of {routing_map.dtype}, must be [tokens, experts] of torch.bool")
    T, E = routing_map.shape
    check_shape("routing_probs", routing_probs.shape, routing_map.shape, "that of routing_map")
    check_topk(E, router_topk, prefix="router_")
    capacity = expert_capacity(T, router_topk, E, capacity_factor)
    with torch.no_grad():
        if drop_policy == "probs":
            order_TE = routing_probs.masked_fill(~routing_map, float("-inf")).argsort(dim=0, descending=True, stable=True)
            kept_TE = torch.zeros_like(routing_map).scatter_(0, order_TE[:capacity], True) & routing_map
        else:
            kept_TE = routing_map & (routing_map.cumsum(0) <= capacity)
        map_TE = kept_TE | _fillers(routing_map, capacity) if pad_to_capacity and T else kept_TE
    return torch.where(kept_TE, routing_probs, 0), map_TE


def _fillers(routing_map: Tensor, capacity: int) -> Tensor:
    """[T, E] bool, unrouted tokens that fill each expert up to its capacity, expert e's from token e * C on."""
    T, E = routing_map.shape
    free_TE = (~routing_map).long()
    before_TE = free_TE.cumsum(0) - free_TE
    start_E = torch.arange(E, device=routing_map.device) * capacity % T
    free_E = free_TE.sum(0)
    rank_TE = (before_TE - before_TE.gather(0, start_E.unsqueeze(0))).remainder(free_E.clamp(min=1))
    return (free_TE > 0) & (rank_TE < capacity - (T - free_E))
