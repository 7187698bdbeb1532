# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows in the order of the experts: the place of each pick, rows at places, and sums over places; nothing waits for the device."""

import torch
import torch.nn.functional as F
from torch import Tensor

# T tokens, K experts a token, N experts, R rows, D model.


def place_rows(experts_TK: Tensor, first_expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """The row of each pick, sorted by expert and then by token; no size depends on the routing.

    Args:
        experts_TK: int32, distinct within a row but for those that are not of the N experts.
        first_expert: of the N experts.
        num_experts: N.

    Returns:
        int32 [T, K], -1 for other picks, and int32 [N], the rows of each expert and of all before it.

    Example:
        >>> place_rows(torch.tensor([[3, 2], [0, 2], [-1, -1]]), 2, 2)
        (tensor([[ 2,  0],
                [-1,  1],
                [-1, -1]], dtype=torch.int32), tensor([2, 3], dtype=torch.int32))
    """
    if experts_TK.is_cuda:
        from mcore_moe.dispatch import _triton

        return _triton.place_rows(experts_TK.contiguous(), first_expert, num_experts)
    local_TK = experts_TK.long() - first_expert
    mine_TK = (local_TK >= 0) & (local_TK < num_experts)
    local_KT = torch.where(mine_TK, local_TK, num_experts).T
    # Line N takes the others; each token has one pick of an expert at most, so no two meet.
    picked_NT = torch.zeros((num_experts + 1, len(experts_TK)), dtype=torch.int32, device=experts_TK.device).scatter_(0, local_KT, 1)
    order_NT = picked_NT.cumsum(1, dtype=torch.int32)
    ends_N = picked_NT[:num_experts].sum(1).cumsum(0, dtype=torch.int32)
    starts_N = F.pad(ends_N, (1, 0))
    rows_KT = starts_N[local_KT] + order_NT.gather(0, local_KT) - 1
    return torch.where(mine_TK, rows_KT.T, -1).to(torch.int32), ends_N


def spread_rows(
    x_TD: Tensor, weights_TK: Tensor | None, places_TK: Tensor, num_rows: int, *, padded: bool = False
) -> tuple[Tensor, Tensor | None]:
    """[R, D], each token at the places of its picks, and their weights [R] unless there are none.

    Args:
        x_TD: tokens.
        weights_TK: of the picks.
        places_TK: int32, distinct, -1 for a pick without a row.
        num_rows: R.
        padded: whether rows of no pick are zeros; else they hold anything.
    """
    if x_TD.is_cuda and x_TD.dtype != torch.float64:
        from mcore_moe.dispatch import _triton

        return _triton.spread_rows(x_TD, weights_TK, places_TK, num_rows, padded=padded)
    has_row_P, row_P = (places_TK >= 0).flatten(), places_TK.clamp(min=0).long().flatten()

    def spread(values_P: Tensor) -> Tensor:
        # No two picks share a row, so nothing is added to a value.
        values_P = torch.where(has_row_P.view(-1, *[1] * (values_P.dim() - 1)), values_P, 0)
        rows_R = values_P.new_zeros(num_rows, *values_P.shape[1:])
        return rows_R.index_add_(0, row_P, values_P) if num_rows else rows_R

    rows_RD = spread(x_TD.repeat_interleave(places_TK.shape[1], 0))
    return rows_RD, None if weights_TK is None else spread(weights_TK.flatten())


def place_tokens(weights_TK: Tensor, places_TK: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """int32 [R], the token of each row, and its weight [R]; of rows of no pick they are any numbers.

    Args:
        weights_TK: of the picks.
        places_TK: int32, distinct, -1 for a pick without a row.
        num_rows: R.

    Example:
        >>> place_tokens(torch.tensor([[0.5, 0.25], [1.0, 2.0]]), torch.tensor([[2, 0], [-1, 1]]), 3)
        (tensor([0, 1, 0], dtype=torch.int32), tensor([0.2500, 2.0000, 0.5000]))
    """
    if weights_TK.is_cuda and weights_TK.dtype != torch.float64:
        from mcore_moe.dispatch import _triton

        return _triton.place_tokens(weights_TK.contiguous(), places_TK, num_rows)
    tokens_T1 = torch.arange(len(places_TK), dtype=torch.int32, device=places_TK.device).unsqueeze(1)
    tokens_R1, weights_R = spread_rows(tokens_T1, weights_TK, places_TK, num_rows)
    assert weights_R is not None
    return tokens_R1.squeeze(1), weights_R


def gather_sum(rows_RD: Tensor, places_TK: Tensor) -> Tensor:
    """[T, D], the rows at the places of each token, added up in the order of its picks in float32 or wider; places below 0 add nothing."""
    if rows_RD.is_cuda and rows_RD.dtype != torch.float64:
        from mcore_moe.dispatch import _triton

        return _triton.gather_sum(rows_RD, places_TK)
    wide = torch.promote_types(rows_RD.dtype, torch.float32)
    y_TD = torch.zeros((places_TK.shape[0], rows_RD.shape[1]), dtype=wide, device=rows_RD.device)
    # Where no pick has a row there is none to look at.
    for places_T in places_TK.unbind(1) if len(rows_RD) else ():
        y_TD += torch.where(places_T[:, None] >= 0, rows_RD[places_T.clamp(min=0).long()].to(wide), 0)
    return y_TD.to(rows_RD.dtype)
