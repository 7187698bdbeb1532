# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Multi-head latent attention: keys and values are projected from one low-rank latent per token."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn

from mcore_parallel._field_types import check_field_types
from mcore_parallel.comm import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._factory import LayerFactory, TorchLayers
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import AttentionCore, AttentionSpec, causal_attention, check_device_bounds, check_prefixes
from mcore_parallel.nn.attention._qk_clip import LogitTracker
from mcore_parallel.nn.positions import apply_rotary
from mcore_parallel.tensor_parallel import BatchInvariantProducts, ReplicatedLinear


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Queries, keys and values through low ranks; rotary embedding on channels of their own (DeepSeek-V2, 2024).

    Raises:
        ValueError: a size below 1, an odd qk_rope_head_dim, a norm_epsilon that is not above 0.

    Example:
        >>> LatentAttentionConfig(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128).qk_head_dim
        192
    """

    q_lora_rank: int | None = None
    """Rank of the query projection; None for a full one."""
    kv_lora_rank: int
    """Rank of the projection that keys and values share; what a cache holds, with the rotary key."""
    qk_nope_head_dim: int
    """Channels of a query or key head without rotary embedding."""
    qk_rope_head_dim: int
    """Channels of a query or key head with it; the key's are shared by all heads."""
    v_head_dim: int
    """Channels of a value head."""
    norm_epsilon: float | None = None
    """Of the norms of the latents; None for that of the layer's norms."""

    def __post_init__(self) -> None:
        check_field_types(self)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "norm_epsilon" and value is not None and value < 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
        if self.norm_epsilon is not None and not self.norm_epsilon > 0.0:
            raise ValueError(f"norm_epsilon={self.norm_epsilon} must be above 0; leave it at None for that of the layer's norms")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim={self.qk_rope_head_dim} must be even: channels turn in pairs")

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_width(self) -> int:
        """Channels of a token's entry in a latent cache, whatever the number of heads."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@runtime_checkable
class LatentCore(Protocol):
    """Attention to a cache of latent entries, in place of keys and values of every head."""

    def attend_latent(self, queries: Tensor, entries: Tensor, scale: float, layer: int, step: Step) -> Tensor:
        """queries [T, A, C + R] and the entries [T, C + R] of the same tokens -> [T, A, C], sums of the first C channels of entries.

        Sums of further channels may follow; they are not read. The core remembers the entries for later calls; a token attends to those
        of its sequence up to its own.
        """
        ...


@runtime_checkable
class _StoredWeight(Protocol):
    """Products of a layer whose weight is kept in another format, with scales."""

    def widened(self, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
        """What it stands for, in ``dtype``."""
        ...


# T tokens, D model, A heads of this tp rank; C rank of keys and values, N channels of a query or key head without rotary embedding,
# R with it, V of a value head.
class LatentSelfAttention(nn.Module):
    """Attention whose keys and values are expanded from a latent of ``kv_lora_rank`` channels (DeepSeek-V2, 2024).

    Down projections ``q_down`` [q_lora_rank, D] and ``kv_down`` [C + R, D] are whole on every tp rank and see the tokens that are here,
    so that under sequence parallelism the narrow latents are gathered, not the hidden states. Up projections ``q_up`` [A, N + R,
    q_lora_rank] and ``kv_up`` [A, N + V, C] are cut by head. The last R channels of ``kv_down`` are the key's rotary part, which all
    heads share. Without ``q_lora_rank`` one projection ``q`` [A, N + R, D] takes the place of ``q_down``, ``q_norm`` and ``q_up``.

    A core that is a ``LatentCore`` gets the latents themselves and queries that have been taken through ``kv_up``'s key part
    ("absorbed"): the result is the same, the cache C + R channels a token, whatever the number of heads. It gets keys and values of
    every head where ``spec`` asks for batch-invariant bits, which are those of the plain form.

    Args:
        hidden_size: D.
        num_heads: of all tp ranks.
        latent: the other sizes.
        groups: tp is used.
        layer: number among the layers of this stage, handed to the core.
        core: attention itself, with ``softmax_scale`` in it; values may be of another width than keys.
        softmax_scale: factor of the scores when the core is a ``LatentCore``; None for 1 / sqrt(N + R).
        norm_epsilon: of the norms of the latents.
        rotary: whether the step's tables turn the R channels.
        rotary_interleaved: channel 2 i pairs with 2 i + 1, as in DeepSeek's weights, in place of i + R / 2.
        out_bias: add a bias behind the last projection.
        spec: what the core computes, for those who watch it; None for causal attention.
        layers: builds norms and the cut projections.
        dtype: of the weights.
        device: of the weights.
        init: as in the linear layers.

    Raises:
        ValueError: sizes below 1, an odd R, tp that does not divide the heads.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        latent: LatentAttentionConfig,
        groups: ProcessGroups,
        *,
        layer: int = 0,
        core: AttentionCore | LatentCore = causal_attention,
        softmax_scale: float | None = None,
        norm_epsilon: float = 1e-6,
        rotary: bool = True,
        rotary_interleaved: bool = False,
        out_bias: bool = False,
        spec: AttentionSpec | None = None,
        layers: LayerFactory | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        super().__init__()
        if num_heads % groups.tp.size:
            raise ValueError(f"tp={groups.tp.size} must divide num_attention_heads={num_heads}; lower tp or change the heads")
        layers = TorchLayers() if layers is None else layers
        self.latent, self.groups, self.layer, self.core = latent, groups, layer, core
        self.softmax_scale = latent.qk_head_dim**-0.5 if softmax_scale is None else softmax_scale
        self.rotary, self.rotary_interleaved = rotary, rotary_interleaved
        self.local_heads = num_heads // groups.tp.size
        self.spec = spec or AttentionSpec(
            num_heads=self.local_heads,
            num_kv_heads=self.local_heads,
            head_dim=latent.qk_head_dim,
            value_dim=latent.v_head_dim,
            softmax_scale=self.softmax_scale,
        )
        self.logits: LogitTracker | None = None
        """Set by ``track_max_logits``."""
        q_rank, rank, turned = latent.q_lora_rank, latent.kv_lora_rank, latent.qk_rope_head_dim
        place = {"dtype": dtype, "device": device}
        norm = {"epsilon": norm_epsilon, "partial": ("tp",) if groups.sequence_parallel else ()}
        self.q_down = self.q_norm = self.q_up = self.q = None
        if q_rank is None:
            self.q = layers.column_linear(hidden_size, (num_heads, latent.qk_head_dim), groups, init=init, **place)
        else:
            self.q_down = ReplicatedLinear(hidden_size, q_rank, groups, init=init, products=self._products(), **place)
            self.q_norm = layers.norm(q_rank, **norm, **place)
            self.q_up = layers.column_linear(q_rank, (num_heads, latent.qk_head_dim), groups, init=init, **place)
        self.kv_down = ReplicatedLinear(hidden_size, rank + turned, groups, init=init, products=self._products(), **place)
        self.kv_norm = layers.norm(rank, **norm, **place)
        self.kv_up = layers.column_linear(rank, (num_heads, latent.qk_nope_head_dim + latent.v_head_dim), groups, init=init, **place)
        self.out = layers.row_linear(num_heads * latent.v_head_dim, hidden_size, groups, bias=out_bias, init=init, **place)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """[T or T / tp, D] -> the same."""
        if step.prefixes is not None:
            check_prefixes(self.core)
        if step.max_seqlen is not None:
            check_device_bounds(self.core)
        q_nope, q_rope = self._queries(x, step)
        latent, k_rope = self._latents(x)
        if isinstance(self.core, LatentCore) and not self.spec.batch_invariant:
            entries = torch.cat((self._gathered(latent), self._turned(self._gathered(k_rope)[:, None], step)[:, 0]), dim=-1)
            out = self.core.attend_latent(self._absorb(q_nope, q_rope), entries, self.softmax_scale, self.layer, step)
            return self.out(self._expand(out[..., : self.latent.kv_lora_rank]).flatten(1))
        kv = self.kv_up(latent).unflatten(-1, (self.local_heads, -1))
        k_nope, v = kv.split((self.latent.qk_nope_head_dim, self.latent.v_head_dim), dim=-1)
        k_rope = self._turned(self._gathered(k_rope)[:, None], step)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, self.local_heads, -1)), dim=-1)
        if self.logits is not None and self.training:
            self.logits.see(q, k, step)
        return self.out(cast(AttentionCore, self.core)(q, k, v, self.layer, step).flatten(1))

    def qk_clip_factors(self, gamma: Tensor, alpha: float) -> Mapping[str, Tensor]:
        """By what the rows of queries and keys are to be multiplied so that each head's logits shrink by its ``gamma`` [A].

        The rotary part of the key belongs to all heads and stays; that of the queries takes the whole factor.
        """
        nope, rope, value = (getattr(self.latent, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        keep = torch.ones_like(gamma)
        queries = torch.cat(((gamma**alpha)[:, None].expand(-1, nope), gamma[:, None].expand(-1, rope)), dim=1)
        keys = torch.cat(((gamma ** (1 - alpha))[:, None].expand(-1, nope), keep[:, None].expand(-1, value)), dim=1)
        return {"q.weight" if self.q_up is None else "q_up.weight": queries[..., None], "kv_up.weight": keys[..., None]}

    def _products(self) -> BatchInvariantProducts | None:
        return BatchInvariantProducts() if self.spec.batch_invariant else None

    def _queries(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """[T, A, N] and [T, A, R], turned."""
        if self.q is not None:
            q = self.q(x)
        else:
            assert self.q_down is not None and self.q_norm is not None and self.q_up is not None
            q = self.q_up(self.q_norm(self.q_down(x)))
        q_nope, q_rope = q.unflatten(-1, (self.local_heads, -1)).split((self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim), -1)
        return q_nope, self._turned(q_rope, step)

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tokens that are here: [.., C] normalised and [.., R] not yet turned."""
        latent, k_rope = self.kv_down(x).split((self.latent.kv_lora_rank, self.latent.qk_rope_head_dim), dim=-1)
        return self.kv_norm(latent), k_rope

    def _gathered(self, x: Tensor) -> Tensor:
        """What is the same for all heads, for this rank's heads: all tokens, and a gradient that is summed over tp."""
        if self.groups.sequence_parallel:
            return gather_from_sequence_parallel_region(x, self.groups.tp)
        return copy_to_tensor_model_parallel_region(x, self.groups.tp)

    def _turned(self, x: Tensor, step: Step) -> Tensor:
        """[T, heads, R] by the step's tables."""
        if not self.rotary or step.rotary is None:
            return x
        return apply_rotary(x, step.rotary, interleaved=self.rotary_interleaved)

    def _absorb(self, q_nope: Tensor, q_rope: Tensor) -> Tensor:
        """Queries [T, A, C + R] whose products with entries are those of the heads' queries with their keys."""
        keys_ANC = self._up_weight(q_nope.dtype)[:, : self.latent.qk_nope_head_dim]
        return torch.cat((torch.einsum("tan,anc->tac", q_nope, keys_ANC), q_rope), dim=-1)

    def _expand(self, sums_TAC: Tensor) -> Tensor:
        """Values [T, A, V] of sums of latents."""
        values_AVC = self._up_weight(sums_TAC.dtype)[:, self.latent.qk_nope_head_dim :]
        return torch.einsum("tac,avc->tav", sums_TAC, values_AVC)

    def _up_weight(self, dtype: torch.dtype) -> Tensor:
        """[A, N + V, C] in ``dtype`` where it is kept in another format, with what an adapter adds to it."""
        weight, adapter = self.get_parameter("kv_up.weight"), getattr(self.kv_up, "lora", None)
        products = getattr(self.kv_up, "products", None)
        if products is not None and isinstance(products, _StoredWeight):
            weight = products.widened(weight.flatten(0, -2), dtype).view(weight.shape)
        if adapter is None:
            return weight
        if torch.is_grad_enabled() and adapter.A.requires_grad:
            raise RuntimeError("kv_up.lora gets no gradient through absorbed queries; train without a LatentCore, or call under no_grad")
        delta = adapter.delta()
        return (weight.to(delta.dtype) + delta).to(weight.dtype)


# T new tokens, B sequences, S new tokens a sequence, M tokens a sequence may have, A heads, W = C + R channels of an entry.
class LatentCache:
    """Entries of all layers; conforms to ``LatentCore``.

    The tokens of a step go to their ``positions`` and attend to all positions up to their own, so a prompt may come in parts, and a
    step at a position that is taken replaces what follows.

    Args:
        latent: sizes of an entry.
        num_layers: of the stage.
        batch_size: B, of every step.
        max_length: M.
        dtype: of the entries.
        device: of the entries.

    Example:
        >>> sizes = LatentAttentionConfig(kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)
        >>> LatentCache(sizes, num_layers=2, batch_size=1, max_length=8).entries.shape
        torch.Size([2, 1, 8, 6])
    """

    def __init__(
        self,
        latent: LatentAttentionConfig,
        *,
        num_layers: int,
        batch_size: int,
        max_length: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.rank = latent.kv_lora_rank
        self.entries = torch.zeros(num_layers, batch_size, max_length, latent.cache_width, dtype=dtype, device=device)

    def attend_latent(self, queries: Tensor, entries: Tensor, scale: float, layer: int, step: Step) -> Tensor:
        """queries [T, A, W], entries [T, W] -> [T, A, C]; softmax in float32 (float64 for float64).

        Raises:
            ValueError: a step of another number of sequences, of packed sequences, or longer than the cache.
        """
        sequences, length = self.entries.shape[1:3]
        if step.cu_seqlens is not None or step.batch_size != sequences:
            raise ValueError(f"a step of batch_size={step.batch_size} must have the {sequences} sequences of the cache, not packed")
        if step.seq_len > length:
            raise ValueError(f"seq_len={step.seq_len} exceeds max_length={length} of the cache; make a longer one")
        positions_BS = step.positions.unflatten(0, (sequences, -1))
        cache_BMW = self.entries[layer]
        cache_BMW.scatter_(
            1, positions_BS[..., None].expand(-1, -1, cache_BMW.shape[-1]), entries.to(cache_BMW.dtype).unflatten(0, (sequences, -1))
        )
        cache_BMW = cache_BMW.to(queries.dtype)
        scores = torch.einsum("bsaw,bmw->basm", queries.unflatten(0, (sequences, -1)), cache_BMW) * scale
        hidden = torch.arange(length, device=scores.device) > positions_BS[:, None, :, None]
        wide = torch.float64 if scores.dtype == torch.float64 else torch.float32
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1, dtype=wide).to(scores.dtype)
        return torch.einsum("basm,bmc->bsac", weights, cache_BMW[..., : self.rank]).flatten(0, 1)
