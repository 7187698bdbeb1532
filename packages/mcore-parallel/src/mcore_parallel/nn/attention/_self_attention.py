# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Self-attention over tensor-parallel heads."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.nn._factory import LayerFactory, TorchLayers
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import AttentionCore, AttentionSpec, SinkAttentionCore, causal_attention
from mcore_parallel.nn.attention._qk_clip import LogitTracker, shared_key_factors
from mcore_parallel.nn.attention._shared_kv import SharedKVProjection
from mcore_parallel.nn.positions import apply_rotary, split_rotary
from mcore_parallel.tensor_parallel import normal_shard_


# T tokens, D model, A heads and K key-value heads (global), d width of a head.
class SelfAttention(nn.Module):
    """Projection to queries, keys and values, rotary embedding, core, projection back.

    ``qkv.weight`` is [K, (A / K + 2) d, D], cut over tp by key-value head: row block k holds the query heads that read
    key-value head k, then its key, then its value. With more tp ranks than key-value heads it has the same shape, and
    ``SharedKVProjection`` says how it lies.

    Args:
        hidden_size: D.
        num_heads: A.
        num_kv_heads: K.
        head_dim: d.
        groups: tp is used.
        layer: number among the layers of this stage, handed to the core.
        core: attention itself; causal by default.
        softmax_type: "vanilla", or "learnable" for a sink a head: ``softmax_offset`` [A], cut over tp. The core must then
            conform to ``SinkAttentionCore``, as those of ``choose_attention`` do when they are asked to.
        rotary: which tables of the step turn queries and keys: "default", "window" (``Step.rotary_window``, or the default ones where
            there are none), or None.
        rotary_interleaved: the tables are of neighbouring channels.
        qk_norm: normalise each query and key head (``q_norm``, ``k_norm``: [d]) before it turns.
        normalization: of those norms.
        norm_zero_centered: their weights are stored less 1.
        norm_epsilon: of those norms.
        qkv_bias: biases of queries, keys and values, ``qkv.bias`` [K, (A / K + 2) d].
        out_bias: bias of the projection back, ``out.bias`` [D].
        output_gate: multiply what the core gives by the sigmoid of ``gate.weight`` [A d, D] times the input.
        input_size: width of the input where it is another than D; None for D.
        spec: what the core computes, for those who watch it; None for causal attention with scores over sqrt(d).
        layers: builds the projections and norms.
        dtype: of the weights.
        device: of the weights.
        init: as in the linear layers.

    Raises:
        ValueError: tp neither divides K nor is a multiple of it, or does not divide A; an unknown softmax_type or rotary.
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
        rotary: str | None = "default",
        rotary_interleaved: bool = False,
        qk_norm: bool = False,
        normalization: str = "RMSNorm",
        norm_zero_centered: bool = False,
        norm_epsilon: float = 1e-5,
        qkv_bias: bool = False,
        out_bias: bool = False,
        output_gate: bool = False,
        input_size: int | None = None,
        spec: AttentionSpec | None = None,
        layers: LayerFactory | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        super().__init__()
        tp = groups.tp
        if softmax_type not in ("vanilla", "learnable"):
            raise ValueError(f'softmax_type={softmax_type!r} must be "vanilla" or "learnable"; off-by-one is a choice of the core')
        if rotary not in ("default", "window", None):
            raise ValueError(f'rotary={rotary!r} must be "default", "window" or None')
        if num_heads % num_kv_heads:
            raise ValueError(f"num_query_groups={num_kv_heads} must divide num_attention_heads={num_heads}")
        layers = TorchLayers() if layers is None else layers
        self.layer, self.core, self.groups = layer, core, groups
        self.head_dim, self.kv_heads = head_dim, num_kv_heads
        self.local_kv_heads = max(1, num_kv_heads // tp.size)
        self.spec = spec or AttentionSpec(num_heads=num_heads // tp.size, num_kv_heads=self.local_kv_heads, head_dim=head_dim)
        self.rotary, self.rotary_interleaved = rotary, rotary_interleaved
        place = {"dtype": dtype, "device": device}
        read = hidden_size if input_size is None else input_size
        if num_kv_heads % tp.size:
            self.qkv = SharedKVProjection(read, num_heads, num_kv_heads, head_dim, groups, bias=qkv_bias, init=init, **place)
        else:
            rows = (num_heads // num_kv_heads + 2) * head_dim
            self.qkv = layers.column_linear(read, (num_kv_heads, rows), groups, shard_dim=0, bias=qkv_bias, init=init, **place)
        width = num_heads * head_dim
        self.gate = layers.column_linear(read, width, groups, init=init, **place) if output_gate else None
        self.out = layers.row_linear(width, hidden_size, groups, bias=out_bias, init=init, **place)

        def head_norm() -> nn.Module | None:
            # A rank sees its share of the heads.
            kind = {"normalization": normalization, "zero_centered": norm_zero_centered, "epsilon": norm_epsilon}
            return layers.norm(head_dim, partial=("tp",), **kind, **place) if qk_norm else None

        self.q_norm, self.k_norm = head_norm(), head_norm()
        self._sinks = ShardSpec(shape=(num_heads,), shards={"tp": 0})
        self.softmax_offset: nn.Parameter | None = None
        if softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(self._sinks.local_shape(groups), **place))
            if init:
                normal_shard_(self.softmax_offset, self._sinks, groups, std=0.02, seed=0)
        self.logits: LogitTracker | None = None
        """Set by ``track_max_logits``."""

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {} if self.softmax_offset is None else {"softmax_offset": self._sinks}

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T or T / tp, D] -> the same; rotary embedding is applied when the step carries its tables."""
        qkv = self.qkv(x).unflatten(-1, (self.local_kv_heads, -1, self.head_dim))
        q, k, v = self._heads(qkv, self._tables(step))
        if self.logits is not None:
            self.logits.see(q, k, step)
        y = self._attend(q, k, v, step).flatten(1)
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))
        return self.out(y)

    def qk_clip_factors(self, gamma: Tensor, alpha: float) -> dict[str, Tensor]:
        """By what the rows of queries and keys are to be multiplied so that each head's logits shrink by its ``gamma`` [A].

        Raises:
            ValueError: heads are normalised behind the projection, which undoes any factor.
        """
        if self.q_norm is not None:
            raise ValueError(
                "qk_layernorm=True normalises queries and keys behind their projection; QK-clip has no effect, leave one of them out"
            )
        queries, keys = shared_key_factors(gamma, self.kv_heads, alpha)
        factors = torch.cat((queries, keys[:, None], torch.ones_like(keys)[:, None]), dim=1).repeat_interleave(self.head_dim, dim=1)
        return {"qkv.weight": factors[..., None]} | ({} if self.qkv.bias is None else {"qkv.bias": factors})

    def _tables(self, step: Step) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None:
            return None
        return step.rotary if self.rotary == "default" or step.rotary_window is None else step.rotary_window

    def _heads(self, qkv: Tensor, tables: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """[T, K, A / K + 2, d] of this rank -> queries [T, A, d], keys and values [T, K, d]."""
        if tables is not None and self.q_norm is None:
            return split_rotary(qkv, tables, interleaved=self.rotary_interleaved)
        q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if tables is not None:
            q, k = (apply_rotary(x, tables, interleaved=self.rotary_interleaved) for x in (q, k))
        return q, k, v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
        if self.softmax_offset is None:
            return self.core(q, k, v, self.layer, step)
        return cast(SinkAttentionCore, self.core)(q, k, v, self.layer, step, sink=self.softmax_offset)
