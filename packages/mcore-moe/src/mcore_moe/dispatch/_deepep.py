# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""DeepEP behind the flex dispatcher: the only file that imports its ``Buffer``, and imported only by who chose it.

Written against the documented interface of DeepEP 1.2.1 (its high-throughput kernels), and run with its kernels within a host.
"""

# pyright: reportMissingImports=false

from typing import Any

import deep_ep
import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_moe._routing import Routing
from mcore_moe.dispatch._arrival import gather_numbers
from mcore_moe.dispatch._flex import FlexPicks
from mcore_moe.dispatch._local import sort_picks, sum_rows
from mcore_parallel import Group

# T tokens of this rank, K experts a token, Q tokens received, R = Q * K rows, N experts of this rank, D model.

_RANKS_BY_NVLINK = 8
_QUEUES = 24


class DeepEPExchange:
    """Tokens by ``deep_ep.Buffer``; conforms to ``TokenExchange``.

    A token travels once to each rank that holds some of its experts, its numbers and weights with it. The host waits for the
    number of tokens that come, at most as long as the library does (100 s); ranks that do not even enter are named after ``timeout_s``.

    Args:
        group: ranks that exchange.
        num_local_experts: N.
        width: of the tokens that travel.
        num_sms: of the kernels, an even number.
        timeout_s: how long to wait for the other ranks of each exchange.

    Raises:
        ValueError: a number of ranks that the library has no configuration for.
    """

    def __init__(self, group: Group, num_local_experts: int, width: int, *, num_sms: int, timeout_s: float) -> None:
        self._group, self._num_local_experts, self._timeout_s = group, num_local_experts, timeout_s
        before = deep_ep.Buffer.num_sms
        # The library keeps this number for the process; the configurations carry it.
        deep_ep.Buffer.set_num_sms(num_sms)
        try:
            self._configs = deep_ep.Buffer.get_dispatch_config(group.size), deep_ep.Buffer.get_combine_config(group.size)
        except AssertionError as error:
            raise ValueError(
                f"moe_flex_dispatcher_backend='deepep' has no configuration for ep * etp = {group.size} ranks; change ep, or set "
                "moe_token_dispatcher_type='alltoall'"
            ) from error
        finally:
            deep_ep.Buffer.set_num_sms(before)
        size = width * torch.bfloat16.itemsize
        near = max(config.get_nvl_buffer_size_hint(size, group.size) for config in self._configs)
        far = 0
        if group.size > _RANKS_BY_NVLINK:
            far = max(config.get_rdma_buffer_size_hint(size, group.size) for config in self._configs)
        self._buffer: Any = deep_ep.Buffer(group.pg, near, far, num_qps_per_rank=max(_QUEUES, num_sms))

    def dispatch(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> FlexPicks:
        """As of ``TokenExchange``."""
        num_tokens = len(x_TD)
        gather_numbers([num_tokens], self._group, device=x_TD.device, timeout_s=self._timeout_s, purpose="the dispatch of tokens by DeepEP")
        wide = torch.promote_types(torch.float32, x_TD.dtype)
        if not num_tokens:
            # The kernels get one token at least; this one goes nowhere.
            x_TD, weights_TK = (F.pad(values, (0, 0, 0, 1)) for values in (x_TD, weights_TK))
            experts_TK = F.pad(experts_TK, (0, 0, 0, 1), value=-1)
        x_QD, weights_QK, experts_QK, handle = _Dispatch.apply(x_TD, weights_TK.to(wide), experts_TK, self)
        N = self._num_local_experts
        local_QK = torch.where(experts_QK < 0, N, experts_QK)
        picks = sort_picks(x_QD, Routing(experts_QK, weights_QK), local_QK, N)
        return FlexPicks(picks.rows_RD, picks.ends_N, picks.weights_R, handle, num_tokens, picks)

    def combine(self, rows_RD: Tensor, picks: FlexPicks) -> Tensor:
        """As of ``TokenExchange``."""
        assert picks.received is not None
        return _Combine.apply(sum_rows(rows_RD, picks.received), picks.handle, self)[: picks.num_tokens]

    def send(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Tokens, weights and local numbers (-1 for experts of other ranks) of those that came, and the layout."""
        # Builds without the name take 64 bits.
        experts_TK = experts_TK.to(getattr(deep_ep, "topk_idx_t", torch.int64)).contiguous()
        by_rank, by_node, by_expert, in_rank, _ = self._buffer.get_dispatch_layout(experts_TK, self._group.size * self._num_local_experts)
        x_QD, experts_QK, weights_QK, _, handle, _ = self._buffer.dispatch(
            x_TD.contiguous(),
            num_tokens_per_rank=by_rank,
            num_tokens_per_rdma_rank=by_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=by_expert,
            topk_idx=experts_TK,
            topk_weights=weights_TK.contiguous(),
            config=self._configs[0],
        )
        return x_QD, weights_QK, experts_QK.long(), handle

    def send_again(self, x_TD: Tensor, handle: Any) -> Tensor:
        """Other values of the same tokens, by the same layout."""
        return self._buffer.dispatch(x_TD.contiguous(), handle=handle, config=self._configs[0])[0]

    def add_up(self, x_QD: Tensor, weights_QK: Tensor | None, handle: Any) -> tuple[Tensor, Tensor | None]:
        """Each token's sum over the ranks that it was sent to, and that of its weights."""
        weights_QK = None if weights_QK is None else weights_QK.contiguous()
        sums_TD, weights_TK, _ = self._buffer.combine(x_QD.contiguous(), handle, topk_weights=weights_QK, config=self._configs[1])
        return sums_TD, weights_TK


class _Dispatch(torch.autograd.Function):
    """Its gradient is a sum over the ranks that a token was sent to."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, exchange: DeepEPExchange
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        x_QD, weights_QK, experts_QK, handle = exchange.send(x_TD, experts_TK, weights_TK)
        ctx.mark_non_differentiable(experts_QK)
        ctx.exchange, ctx.handle = exchange, handle
        return x_QD, weights_QK, experts_QK, handle

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *ctx.exchange.add_up(grads[0], grads[1], ctx.handle), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_QD: Tensor, handle: Any, exchange: DeepEPExchange) -> Tensor:
        ctx.exchange, ctx.handle = exchange, handle
        return exchange.add_up(x_QD, None, handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.exchange.send_again(grads[0], ctx.handle), None, None
