# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Self-attention over tensor-parallel heads."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel._shards import ShardSpec
from mcore_parallel.nn._cores import AttentionCore, SinkAttentionCore, causal_attention
from mcore_parallel.nn._fused import fused_split_rotary, has_kernel
from mcore_parallel.nn._rope import apply_rotary
from mcore_parallel.nn._step import Step
from mcore_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear


# T tokens, D model, A heads and K key-value heads (global), d width of a head.
class SelfAttention(nn.Module):
    """Projection to queries, keys and values, rotary embedding, core, projection back.

    ``qkv.weight`` is [K, (A / K + 2) d, D], cut over tp by key-value head: row block k holds the query heads that read
    key-value head k, then its key, then its value.

    Args:
        hidden_size: D.
        num_heads: A.
        num_kv_heads: K.
        head_dim: d.
        groups: tp is used.
        layer: number among the layers of this stage, handed to the core.
        core: attention itself; causal by default.
        softmax_type: "vanilla", or "learnable" for a sink a head: ``softmax_offset`` [A], cut over tp. The core must then
            conform to ``SinkAttentionCore``, as those of ``context_parallel_attention`` do.
        dtype: of the weights.
        device: of the weights.
        init: as in the linear layers.

    Raises:
        ValueError: tp does not divide K, an unknown softmax_type.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        groups: ProcessGroups,
        *,
        layer: int = 0,
        core: AttentionCore | SinkAttentionCore = causal_attention,
        softmax_type: str = "vanilla",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        super().__init__()
        if num_kv_heads % groups.tp.size:
            raise ValueError(
                f"tp={groups.tp.size} must divide num_query_groups={num_kv_heads} (key-value heads); lower tp or raise num_query_groups"
            )
        if softmax_type not in ("vanilla", "learnable"):
            raise ValueError(f'softmax_type={softmax_type!r} must be "vanilla" or "learnable"; off-by-one is a choice of the core')
        self.layer = layer
        self.core = core
        self.head_dim = head_dim
        self.local_kv_heads = num_kv_heads // groups.tp.size
        rows = (num_heads // num_kv_heads + 2) * head_dim
        self.qkv = ColumnParallelLinear(hidden_size, (num_kv_heads, rows), groups, shard_dim=0, dtype=dtype, device=device, init=init)
        self.out = RowParallelLinear(num_heads * head_dim, hidden_size, groups, dtype=dtype, device=device, init=init)
        self._sinks = ShardSpec(shape=(num_heads,), shards={"tp": 0})
        self.softmax_offset: nn.Parameter | None = None
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(self._sinks.local_shape(groups), dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {} if self.softmax_offset is None else {"softmax_offset": self._sinks}

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T or T / tp, D] -> the same; rotary embedding is applied when the step carries its tables."""
        qkv = self.qkv(x).unflatten(-1, (self.local_kv_heads, -1, self.head_dim))
        if step.rotary is not None and has_kernel(qkv):
            q, k, v = fused_split_rotary(qkv, step.rotary)
            return self.out(self._attend(q, k, v, step).flatten(1))
        q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
        if step.rotary is not None:
            q, k = apply_rotary(q, step.rotary), apply_rotary(k, step.rotary)
        return self.out(self._attend(q, k, v, step).flatten(1))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        if self.softmax_offset is None:
            return self.core(q, k, v, self.layer, step)
        return cast(SinkAttentionCore, self.core)(q, k, v, self.layer, step, sink=self.softmax_offset)
