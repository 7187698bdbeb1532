# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""All-to-all between a share of the tokens with all heads and all tokens with a share of the heads."""

import math
from typing import Any

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import all_to_all_autograd
from mcore_parallel.context_parallel._errors import HeadSplitError
from mcore_parallel.groups import Group


# T tokens of a rank, c ranks, H heads, A query heads, K key-value heads, d width of a head, X channels of a rank's heads.
@internal_api
def split_heads(x: Tensor, group: Group, order: Tensor, places: Tensor) -> Tensor:
    """[T, c, X], of this rank's tokens what each rank is to get -> [c T, X], this rank's part of all tokens.

    Args:
        x: tokens of this rank.
        group: c ranks.
        order: [c T] for each place the number of its token among those of all ranks in rank order.
        places: [c T] inverse of ``order``.
    """
    return permute_rows(all_to_all_autograd(x.transpose(0, 1).flatten(0, 1), None, None, group), order, places)


@internal_api
def join_heads(x: Tensor, group: Group, order: Tensor, places: Tensor) -> Tensor:
    """The way back of what was computed: [c T, H / c, d] -> [T, H, d].

    Args:
        x: this rank's heads of all tokens.
        group: c ranks.
        order: as of ``split_heads``.
        places: as of ``split_heads``.
    """
    blocks = all_to_all_autograd(permute_rows(x, places, order), None, None, group)
    return blocks.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)


def permute_rows(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """``x[order]``; the gradient is read by the inverse ``places`` instead of being added row by row."""
    return _Permute.apply(x, order, places)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.places = places
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.places), None, None


def repeated_kv_heads(heads: int, kv_heads: int, size: int) -> int:
    """How often each key-value head must stand so that every rank of an all-to-all gets those of its query heads.

    Args:
        heads: A of a tp rank.
        kv_heads: K of a tp rank.
        size: ranks of the all-to-all.

    Raises:
        HeadSplitError: ``size`` does not divide A.
    """
    if heads % size:
        raise HeadSplitError(
            f"{heads} query heads of a tp rank must be a multiple of the all-to-all degree {size}; "
            'use cp_comm_type "p2p" or "all_gather", or "a2a+p2p" with a smaller first size'
        )
    # It divides A / K whenever size divides A.
    return size // math.gcd(kv_heads, size)
