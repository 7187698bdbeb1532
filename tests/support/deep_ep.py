# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A fake of DeepEP 1.2.1 and of its branch hybrid-ep: the documented calls, the same exchange over gloo, on any dtype.

What the documentation asks of arguments is asserted, so that an adapter that calls it otherwise fails.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.comm import all_gather, all_to_all


def install() -> ModuleType:
    """Put the fake where ``import deep_ep`` and a search for the libraries find it, in this process."""
    fake: Any = ModuleType("deep_ep")
    fake.Buffer, fake.HybridEPBuffer, fake.topk_idx_t = Buffer, HybridEPBuffer, torch.int64
    for name in ("deep_ep", "deep_ep_cpp", "hybrid_ep_cpp"):
        module = fake if name == "deep_ep" else ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module
    return fake


class _Config:
    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        raise AssertionError("asked for by more than 8 ranks only")


class Buffer:
    num_sms = 20

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, *, num_qps_per_rank: int = 24) -> None:
        assert num_nvl_bytes > 0 and num_rdma_bytes == 0 and num_qps_per_rank >= 24
        self.group = Group.of(group)
        self.used_sms: set[int] = set()

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        assert num_ranks in (2, 4, 8), f"Unsupported number of EP ranks: {num_ranks}"
        return _Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == torch.int64 and topk_idx.is_contiguous() and num_experts % self.group.size == 0
        ranks = topk_idx.div(num_experts // self.group.size, rounding_mode="floor")
        in_rank = torch.stack([(ranks == rank).any(-1) for rank in range(self.group.size)], -1)
        by_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, by_expert, in_rank, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        *,
        config: _Config,
    ) -> tuple[Any, ...]:
        self.used_sms.add(config.num_sms)
        assert x.dim() == 2 and x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            tokens, sent, received, _ = handle
            return all_to_all(x[tokens], received, sent, self.group), None, None, None, None, None
        assert len(x) > 0 and topk_idx is not None and topk_weights is not None and is_token_in_rank is not None
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None and num_tokens_per_rdma_rank is None
        assert topk_weights.is_contiguous() and topk_weights.dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
        sent = num_tokens_per_rank.tolist()
        received = all_to_all(torch.tensor(sent), [1] * len(sent), [1] * len(sent), self.group).tolist()
        tokens = torch.cat([column.nonzero().flatten() for column in is_token_in_rank.unbind(-1)])
        local = len(num_tokens_per_expert) // self.group.size
        x, ids, weights = (all_to_all(part[tokens], received, sent, self.group) for part in (x, topk_idx, topk_weights))
        ids = ids - self.group.rank * local
        mine = (ids >= 0) & (ids < local)
        ids, weights = torch.where(mine, ids, -1), torch.where(mine, weights, 0)
        counts = torch.bincount(ids[mine], minlength=local).tolist()
        return x, ids, weights, counts, (tokens, sent, received, len(is_token_in_rank)), None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, *, config: _Config) -> tuple[Any, ...]:
        self.used_sms.add(config.num_sms)
        tokens, sent, received, num_tokens = handle
        assert len(x) == sum(received) and x.is_contiguous() and (topk_weights is None or topk_weights.is_contiguous())
        sums = [
            None
            if part is None
            else part.new_zeros(num_tokens, part.shape[1]).index_add(0, tokens, all_to_all(part, sent, received, self.group))
            for part in (x, topk_weights)
        ]
        return *sums, None


class HybridEPBuffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
    ) -> None:
        self.group, self.width, self.room, self.local = Group.of(group), hidden_dim, max_num_of_tokens_per_rank, num_local_experts
        assert self.group.size > 1 and not use_fp8
        assert self.room % 128 == 0, "kernels move chunks of 128 tokens"
        self.sms = num_sms_dispatch_api, num_sms_combine_api

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        handle: Any = None,
        pad_multiple: int | None = None,
    ) -> tuple[Any, ...]:
        assert pad_multiple == 1
        assert len(hidden) <= self.room and hidden.shape[1] == self.width and hidden.is_contiguous()
        everyone = all_gather(hidden, self.group)
        assert len(everyone) == self.group.size * len(hidden), "every rank has as many tokens"
        weights = None
        if handle is None:
            assert routing_map is not None and routing_map.dtype == torch.bool and probs is not None
            mine = all_gather(routing_map.to(torch.uint8), self.group).unflatten(1, (-1, self.local))[:, self.group.rank].bool()
            expert, token = mine.t().nonzero().unbind(1)
            handle = (token, expert, mine.sum(0), len(hidden))
            weights = all_gather(probs, self.group).unflatten(1, (-1, self.local))[:, self.group.rank][token, expert]
        token, _, counts, _ = handle
        assert num_permuted_tokens in (None, len(token))
        return everyone[token], weights, None, counts, handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None = None, handle: Any, pad_multiple: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert pad_multiple == 1
        token, expert, _, num_tokens = handle
        assert len(hidden) == len(token) and hidden.is_contiguous()
        ranks, rank = self.group.size, self.group.rank
        sums = self._sum(hidden.new_zeros(ranks * num_tokens, self.width).index_add(0, token, hidden))
        if probs is None:
            return sums, None
        weights = probs.new_zeros(ranks * num_tokens, ranks * self.local)
        weights[token, rank * self.local + expert] = probs
        return sums, self._sum(weights)

    def _sum(self, values: Tensor) -> Tensor:
        parts = all_to_all(
            values, [len(values) // self.group.size] * self.group.size, [len(values) // self.group.size] * self.group.size, self.group
        )
        return parts.unflatten(0, (self.group.size, -1)).sum(0)
