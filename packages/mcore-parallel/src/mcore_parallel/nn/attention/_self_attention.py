# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Self-attention over tensor-parallel heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from mcore_parallel._stability import experimental_api
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.nn._factory import LayerFactory, TorchLayers
from mcore_parallel.nn._norm import RMSNorm
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import (
    AttentionCore,
    AttentionSpec,
    SinkAttentionCore,
    causal_attention,
    check_device_bounds,
    check_prefixes,
)
from mcore_parallel.nn.attention._norm_across_heads import RMSNormAcrossHeads
from mcore_parallel.nn.attention._packed import HeadNorms, PackedAttentionCore, PackedHeads
from mcore_parallel.nn.attention._qk_clip import LogitTracker, shared_key_factors
from mcore_parallel.nn.attention._shared_kv import SharedKVProjection
from mcore_parallel.nn.positions import apply_rotary, split_rotary
from mcore_parallel.tensor_parallel import each_row, normal_shard_


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Sizes and choices of a ``SelfAttention``.

    Raises:
        ValueError: num_kv_heads that does not divide num_heads; an unknown softmax_type or rotary; qk_norm_across_heads without qk_norm
            or with layer norms.

    Example:
        >>> AttentionConfig(hidden_size=64, num_heads=8, num_kv_heads=2, head_dim=8).qkv_rows
        48
    """

    hidden_size: int
    num_heads: int
    """Query heads of the model, over all tp ranks."""
    num_kv_heads: int
    """Key-value heads of the model, over all tp ranks."""
    head_dim: int
    input_size: int | None = None
    """Width of the input; None for hidden_size."""
    softmax_type: str = "vanilla"
    """"vanilla", or "learnable" for one sink per head (``softmax_offset`` [num_heads], sharded over tp). The core must then conform to
    ``SinkAttentionCore``, as those of ``choose_attention`` do for such a spec."""
    rotary: str | None = "default"
    """Which tables of the step rotate queries and keys: "default", "window" (``Step.rotary_window``, or the default tables if there are
    none), or None."""
    rotary_interleaved: bool = False
    """Channel 2 i pairs with 2 i + 1."""
    qk_norm: bool = False
    """Normalise each query and key head (``q_norm``, ``k_norm``: [head_dim]) before the rotation."""
    qk_norm_across_heads: bool = False
    """These norms go over all query heads, and all key heads, together: ``q_norm`` is [num_heads head_dim], ``k_norm``
    [num_kv_heads head_dim]. RMS norms only."""
    normalization: str = "RMSNorm"
    """Kind of these norms."""
    norm_zero_centered: bool = False
    """Their weights are stored less 1."""
    norm_epsilon: float = 1e-5
    """Epsilon of these norms."""
    qkv_bias: bool = False
    """Biases of queries, keys and values, ``qkv.bias`` [num_kv_heads, qkv_rows]."""
    out_bias: bool = False
    """Bias of the output projection, ``out.bias`` [hidden_size]."""
    output_gate: bool = False
    """Multiply the core's result by the sigmoid of ``gate.weight`` [num_heads head_dim, input_size] times the input."""

    def __post_init__(self) -> None:
        if self.softmax_type not in ("vanilla", "learnable"):
            raise ValueError(f'softmax_type={self.softmax_type!r} must be "vanilla" or "learnable"; off-by-one is a choice of the core')
        if self.rotary not in ("default", "window", None):
            raise ValueError(f'rotary={self.rotary!r} must be "default", "window" or None')
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_query_groups={self.num_kv_heads} must divide num_attention_heads={self.num_heads}")
        if self.qk_norm_across_heads and not (self.qk_norm and self.normalization == "RMSNorm"):
            raise ValueError(
                f"qk_norm_across_heads=True needs qk_norm=True and normalization='RMSNorm', found {self.qk_norm} and {self.normalization!r}"
            )

    @property
    def qkv_rows(self) -> int:
        """Rows of the fused projection per key-value head: its query heads, its key and its value."""
        return (self.num_heads // self.num_kv_heads + 2) * self.head_dim

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.hidden_size if self.input_size is None else self.input_size


# T tokens, D model, A heads and K key-value heads (global), d width of a head.
class SelfAttention(nn.Module):
    """Fused QKV projection, rotary embedding, core, output projection.

    ``qkv.weight`` is [K, (A / K + 2) d, D], sharded over tp by key-value head: row block k holds the query heads that read
    key-value head k, then its key, then its value. With more tp ranks than key-value heads it has the same shape, and
    ``SharedKVProjection`` documents its layout.

    Args:
        config: sizes (D, A, K, d) and choices.
        groups: tp is used.
        layer: number among the layers of this stage, passed to the core.
        core: the attention core; causal by default. One that is a ``PackedAttentionCore`` too may get the projection's result as it is.
        spec: what the core computes, for QK-clip; None for causal attention with scores over sqrt(d).
        layers: builds the projections and norms.
        dtype: of the weights.
        device: of the weights.
        init: as in the linear layers.

    Raises:
        ValueError: tp neither divides K nor is a multiple of it, or does not divide A; norms across heads and tp does not divide K.
    """

    def __init__(
        self,
        config: AttentionConfig,
        groups: ProcessGroups,
        *,
        layer: int = 0,
        core: AttentionCore | SinkAttentionCore = causal_attention,
        spec: AttentionSpec | None = None,
        layers: LayerFactory | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        super().__init__()
        tp, c = groups.tp, config
        layers = TorchLayers() if layers is None else layers
        self.layer, self.core, self.groups = layer, core, groups
        # Asked once, not in every step of a training.
        self._may_pack = isinstance(core, PackedAttentionCore)
        self.head_dim, self.kv_heads = c.head_dim, c.num_kv_heads
        self.local_kv_heads = max(1, c.num_kv_heads // tp.size)
        self.spec = spec or AttentionSpec(num_heads=c.num_heads // tp.size, num_kv_heads=self.local_kv_heads, head_dim=c.head_dim)
        self.rotary, self.rotary_interleaved = c.rotary, c.rotary_interleaved
        place = {"dtype": dtype, "device": device}
        if c.num_kv_heads % tp.size:
            self.qkv = SharedKVProjection(
                c.in_features, c.num_heads, c.num_kv_heads, c.head_dim, groups, bias=c.qkv_bias, init=init, **place
            )
        else:
            shape = (c.num_kv_heads, c.qkv_rows)
            self.qkv = layers.column_linear(c.in_features, shape, groups, shard_dim=0, bias=c.qkv_bias, init=init, **place)
        width = c.num_heads * c.head_dim
        self.gate = layers.column_linear(c.in_features, width, groups, init=init, **place) if c.output_gate else None
        self.out = layers.row_linear(width, c.hidden_size, groups, bias=c.out_bias, init=init, **place)

        if c.qk_norm_across_heads and c.num_kv_heads % tp.size:
            raise ValueError(
                f"tp={tp.size} must divide num_query_groups={c.num_kv_heads} for norms across heads (qk_layernorm_across_heads); lower tp"
            )

        def head_norm(num_heads: int) -> nn.Module | None:
            if not c.qk_norm:
                return None
            if c.qk_norm_across_heads:
                exact = self.spec.batch_invariant
                options = {"epsilon": c.norm_epsilon, "zero_centered": c.norm_zero_centered, "batch_invariant": exact}
                return RMSNormAcrossHeads(num_heads, c.head_dim, groups, **options, **place)
            # A rank sees its share of the heads.
            kind = {"normalization": c.normalization, "zero_centered": c.norm_zero_centered, "epsilon": c.norm_epsilon}
            return layers.norm(c.head_dim, partial=("tp",), **kind, **place)

        self.q_norm, self.k_norm = head_norm(c.num_heads), head_norm(c.num_kv_heads)
        self._sinks = ShardSpec(shape=(c.num_heads,), shards={"tp": 0})
        self.softmax_offset: nn.Parameter | None = None
        if c.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(self._sinks.local_shape(groups), **place))
            if init:
                normal_shard_(self.softmax_offset, self._sinks, groups, std=0.02, seed=0)
        self.logits: LogitTracker | None = None
        """Set by ``track_max_logits``."""

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {} if self.softmax_offset is None else {"softmax_offset": self._sinks}

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T or T / tp, D] -> the same; rotary embedding is applied when the step carries its tables."""
        if step.prefixes is not None:
            check_prefixes(self.core)
        if step.max_seqlen is not None:
            check_device_bounds(self.core)
        qkv = self.qkv(x).unflatten(-1, (self.local_kv_heads, -1, self.head_dim))
        heads = None
        if self._may_pack and step.attention is not None and self.logits is None:
            heads = self.packed_heads(qkv, step)
        if heads is not None and cast(PackedAttentionCore, self.core).takes_packed(heads, self.layer, step):
            y = cast(PackedAttentionCore, self.core).attend_packed(heads, self.layer, step, sink=self.softmax_offset).flatten(1)
        else:
            q, k, v = self._heads(qkv, self._tables(step))
            if self.logits is not None and self.training:
                self.logits.see(q, k, step)
            y = self._attend(q, k, v, step).flatten(1)
        if self.gate is not None:
            gate = self.gate(x)
            alone = self.spec.batch_invariant and not gate.is_cuda
            y = y * (each_row(torch.sigmoid, gate) if alone else torch.sigmoid(gate))
        return self.out(y)

    @experimental_api
    def packed_heads(self, qkv: Tensor, step: Step) -> PackedHeads | None:
        """What a ``PackedAttentionCore`` is asked about and gets; None where norms are no RMS norms of single heads, or batch-invariant.

        Args:
            qkv: [T, K, A / K + 2, d], the projection's result.
            step: with the tables of the rotary embedding.
        """
        norms = None
        if self.q_norm is not None:
            query, key = self.q_norm, self.k_norm
            if type(query) is not RMSNorm or type(key) is not RMSNorm or query.batch_invariant:
                return None
            norms = HeadNorms(query=query.weight, key=key.weight, epsilon=query.epsilon, shift=float(query.zero_centered))
        return PackedHeads(qkv=qkv, tables=self._tables(step), interleaved=self.rotary_interleaved, norms=norms)

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
