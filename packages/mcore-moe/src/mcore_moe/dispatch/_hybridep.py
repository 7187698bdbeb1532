# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""HybridEP behind the flex dispatcher: the only file that imports its ``HybridEPBuffer``, and imported only by who chose it.

Written against the documented interface of the branch hybrid-ep of DeepEP, and run with its kernels within a host.
"""

# pyright: reportMissingImports=false

import inspect
import os
from typing import Any

import deep_ep
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_moe.dispatch._arrival import gather_numbers
from mcore_moe.dispatch._flex import FlexPicks
from mcore_parallel import Group
from mcore_parallel.comm import all_reduce

# T tokens of this rank, M tokens of every rank after padding, K experts a token, V experts of all ranks, R rows, N experts of this
# rank, D model.

_STEP = 128
"""Tokens in multiples of which a buffer grows: kernels move chunks of so many, and do not compile for another room."""
_RANKS_OF_HOST = "NUM_OF_RANKS_PER_NVLINK_DOMAIN"
_NO_PADDING = 1
"""Rows of an expert are a multiple of it; where it is left out, kernels divide by zero."""


def obstacle(num_ranks: int) -> str | None:
    """Why the installed version makes no buffer for a group, and the remedy; None where it may."""
    if "num_of_ranks_per_nvlink_domain" not in inspect.signature(deep_ep.HybridEPBuffer).parameters:
        # Later ones find out themselves.
        return None
    near = int(os.environ.get(_RANKS_OF_HOST, "8"))
    if num_ranks % near:
        return f"this version takes {near} of ep * etp = {num_ranks} ranks for those of a host; set {_RANKS_OF_HOST} to how many it has"
    return None


class HybridEPExchange:
    """Tokens by ``deep_ep.HybridEPBuffer``, which also sorts the rows by expert; conforms to ``TokenExchange``.

    All ranks take part with as many tokens as the busiest one, in multiples of 128; those that are no tokens go to no expert. The
    buffer is made at the first exchange, and again when more tokens come than it holds.

    Args:
        group: ranks that exchange.
        num_local_experts: N.
        width: of the tokens that travel.
        num_sms: of the kernels of dispatch and of combine.
        timeout_s: how long to wait for the other ranks of each exchange.
    """

    def __init__(self, group: Group, num_local_experts: int, width: int, *, num_sms: int, timeout_s: float) -> None:
        self._group, self._num_local_experts, self._width = group, num_local_experts, width
        self._num_sms, self._timeout_s = num_sms, timeout_s
        self._buffer: Any = None
        self._room = 0

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> FlexPicks:
        """As of ``TokenExchange``."""
        purpose = "the dispatch of tokens by HybridEP"
        num_tokens = len(x_TD)
        sizes = gather_numbers([num_tokens], self._group, device=x_TD.device, timeout_s=self._timeout_s, purpose=purpose)
        most = max(max(sizes)[0] + _STEP - 1, _STEP) // _STEP * _STEP
        self._make_room(most)
        num_experts = self._group.size * self._num_local_experts
        columns_TK = torch.where(experts_TK < 0, num_experts, experts_TK)
        wide = torch.promote_types(torch.float32, x_TD.dtype)
        blank_MV = torch.zeros(most, num_experts + 1, dtype=wide, device=x_TD.device)
        columns_MK = F.pad(columns_TK, (0, 0, 0, most - num_tokens), value=num_experts)
        weights_MV = blank_MV.scatter(1, columns_MK, F.pad(weights_TK.to(wide), (0, 0, 0, most - num_tokens)))[:, :-1]
        map_MV = torch.zeros_like(blank_MV, dtype=torch.bool).scatter_(1, columns_MK, True)[:, :-1].contiguous()
        x_MD = F.pad(x_TD, (0, 0, 0, most - num_tokens))
        rows_RD, weights_R, ends_N, handle = _Dispatch.apply(x_MD, weights_MV, map_MV, self)
        return FlexPicks(rows_RD, ends_N, weights_R, handle, num_tokens)

    def combine(self, rows_RD: Tensor, picks: FlexPicks) -> Tensor:
        """As of ``TokenExchange``."""
        return _Combine.apply(rows_RD, picks.handle, self)[: picks.num_tokens]

    def send(self, x_MD: Tensor, weights_MV: Tensor, map_MV: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Rows in expert order, their weights, the ends of the experts, and the layout."""
        rows_RD, weights_R, _, rows_per_expert, handle = self._buffer.dispatch_with_permute(
            hidden=x_MD.contiguous(), routing_map=map_MV, probs=weights_MV.contiguous(), pad_multiple=_NO_PADDING
        )
        return rows_RD, weights_R, rows_per_expert.cumsum(0).to(x_MD.device, torch.int32, non_blocking=True), handle

    def send_again(self, x_MD: Tensor, num_rows: int, handle: Any) -> Tensor:
        """Other values of the same tokens, by the same layout; the host waits for nothing."""
        self._meet(x_MD)
        return self._buffer.dispatch_with_permute(
            hidden=x_MD.contiguous(), handle=handle, num_permuted_tokens=num_rows, pad_multiple=_NO_PADDING
        )[0]

    def add_up(self, rows_RD: Tensor, weights_R: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """Each token's sum over its rows, and the weights of each token and expert."""
        self._meet(rows_RD)
        weights_R = None if weights_R is None else weights_R.contiguous()
        return self._buffer.combine_with_unpermute(hidden=rows_RD.contiguous(), probs=weights_R, handle=handle, pad_multiple=_NO_PADDING)

    def _meet(self, like: Tensor) -> None:
        """Ranks on the device, before a kernel of the library writes where another rank may still read: all kernels share a buffer,
        and some of its versions wait for others on one side of a kernel alone."""
        all_reduce(like.new_zeros(1), self._group)

    def _make_room(self, num_tokens: int) -> None:
        """Every rank comes to the same decision, for all know the greatest number."""
        if num_tokens <= self._room:
            return
        try:
            self._buffer = deep_ep.HybridEPBuffer(
                group=self._group.pg,
                hidden_dim=self._width,
                max_num_of_tokens_per_rank=num_tokens,
                num_local_experts=self._num_local_experts,
                use_fp8=False,
                num_sms_dispatch_api=self._num_sms,
                num_sms_combine_api=self._num_sms,
            )
        except AssertionError as error:
            raise ValueError(
                f"moe_flex_dispatcher_backend='hybridep' makes no buffer of {num_tokens} tokens, {self._width} elements each, and "
                f"{self._num_local_experts} experts a rank for {self._group.size} ranks: {error}; set moe_token_dispatcher_type='alltoall'"
            ) from error
        self._room = num_tokens


class _Dispatch(torch.autograd.Function):
    """Its gradient is a sum over the rows of a token."""

    @staticmethod
    def forward(
        ctx: Any, x_MD: Tensor, weights_MV: Tensor, map_MV: Tensor, exchange: HybridEPExchange
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        rows_RD, weights_R, ends_N, handle = exchange.send(x_MD, weights_MV, map_MV)
        ctx.mark_non_differentiable(ends_N)
        ctx.exchange, ctx.handle = exchange, handle
        return rows_RD, weights_R, ends_N, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *ctx.exchange.add_up(grads[0], grads[1], ctx.handle), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, handle: Any, exchange: HybridEPExchange) -> Tensor:
        ctx.exchange, ctx.handle, ctx.num_rows = exchange, handle, len(rows_RD)
        return exchange.add_up(rows_RD, None, handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.send_again(grads[0], ctx.num_rows, ctx.handle), None, None
