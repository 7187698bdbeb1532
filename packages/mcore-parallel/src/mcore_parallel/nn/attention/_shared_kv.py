# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Queries, keys and values when more tensor-parallel ranks than key-value heads share the work."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import copy_to_tensor_model_parallel_region, gather, gather_from_sequence_parallel_region
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.tensor_parallel import normal_shard_


# T tokens, D model, A heads and K key-value heads (global), d width of a head, R = (A / K + 2) d rows of a key-value group.
@internal_api
class SharedKVProjection(nn.Module):
    """``x W^T + b`` for the query heads of this rank and the one key-value head they read; tp is a multiple of K.

    The weight [K, R, D] is the one that fewer ranks cut by key-value head, under the same name and with the same values, but it
    lies cut along its rows: each rank keeps 1 / tp of it, and a checkpoint of any tp fits. A forward gathers it and picks the rows of
    the rank; the backward adds up what the ranks that share a key-value head found for it, and cuts the sum again.

    Args:
        hidden_size: D.
        num_heads: A.
        num_kv_heads: K.
        head_dim: d.
        groups: tp is used.
        bias: add a bias [K, R], stored like the weight.
        dtype: of the parameters.
        device: of the parameters.
        init: as in the linear layers.

    Raises:
        ValueError: tp that is no multiple of K, or that does not divide A or R.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        groups: ProcessGroups,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        super().__init__()
        tp = groups.tp.size
        if tp % num_kv_heads:
            raise ValueError(
                f"tp={tp} must divide num_query_groups={num_kv_heads} (key-value heads) or be a multiple of it; "
                "change tp or num_query_groups"
            )
        if num_heads % tp:
            raise ValueError(f"tp={tp} must divide num_attention_heads={num_heads}; lower tp")
        self.groups = groups
        self.head_dim, self.heads = head_dim, num_heads // tp
        self.place = groups.tp.rank // (tp // num_kv_heads)
        self.first_head = self.heads * (groups.tp.rank % (tp // num_kv_heads))
        shape = (num_kv_heads, (num_heads // num_kv_heads + 2) * head_dim)
        self._specs = {"weight": ShardSpec(shape=(*shape, hidden_size), shards={"tp": 1})}
        if bias:
            self._specs["bias"] = ShardSpec(shape=shape, shards={"tp": 1})
        self.weight = nn.Parameter(torch.empty(self._specs["weight"].local_shape(groups), dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(self._specs["bias"].local_shape(groups), dtype=dtype, device=device)) if bias else None
        if init:
            normal_shard_(self.weight, self._specs["weight"], groups, std=hidden_size**-0.5, seed=0)
            if self.bias is not None:
                nn.init.zeros_(self.bias)

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return self._specs

    def forward(self, x: Tensor) -> Tensor:
        """[T or T / tp, D] -> [T, (A / tp + 2) d]: the rank's query heads, their key, their value."""
        tp = self.groups.tp
        region = gather_from_sequence_parallel_region if self.groups.sequence_parallel else copy_to_tensor_model_parallel_region
        bias = None if self.bias is None else self._rows(self.bias)
        return F.linear(region(x, tp), self._rows(self.weight), bias)

    def _rows(self, stored: Tensor) -> Tensor:
        rows = gather(stored, self.groups.tp, 1, output_grad_differs=True)[self.place]
        first, count = self.first_head * self.head_dim, self.heads * self.head_dim
        return torch.cat((rows[first : first + count], rows[-2 * self.head_dim :]))
