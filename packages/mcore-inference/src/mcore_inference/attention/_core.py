# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention over keys and values that lie in the blocks of a paged cache."""

from typing import Any

import torch
from torch import Tensor, nn

from mcore_inference._kernels import has_kernels
from mcore_inference._stability import experimental_api
from mcore_inference.attention._backends import LIBRARIES, backend_obstacle, load_library
from mcore_inference.attention._decode_contexts import ContinuedRows
from mcore_inference.attention._gathered import attend_gathered
from mcore_inference.attention._page_format import PageFormat
from mcore_inference.attention._step import GatheredRows, PagedStep, TableRows
from mcore_inference.attention._tiles import fits_packed, tile_tokens
from mcore_inference.cache import LayerSlots
from mcore_parallel import ProcessGroups
from mcore_parallel.nn import AttentionCore, AttentionSpec, PackedHeads, SinkAttentionCore, Step, causal_attention, choose_attention


# T tokens of a step, A heads, K key-value heads (of this tp rank), d width of a head, W width of a latent with its rotary key.
@experimental_api
class PagedAttention(nn.Module):
    """The attention core of a model that an engine drives: writes the new keys and values into their slots, then attends.

    It holds no state of requests; the cache travels in ``step.attention``. Without one (``None``) it is mcore_parallel's own attention over
    the step's sequences, so the same model can be scored or trained. Given to a model, it makes a core for each layer, with that
    layer's window, sink, scale and soft cap; for latent attention it is the ``LatentCore`` of all layers, but for batch-invariant ones,
    which attend to keys and values of every head. In steps of the kernels it is a ``PackedAttentionCore``.

    Args:
        spec: what a layer asks for; None for plain causal attention.
        plain: the core for steps without a cache; None for causal attention.
        backend: "triton" for this package's kernels, "torch" for contexts gathered by torch, "flash_attn_3" or "flashinfer" for these
            libraries, where a layer or a cache that they cannot compute is refused when the engine is made; None for the kernels where
            there are some, and torch elsewhere.

    Raises:
        ValueError: no such backend.
        ModuleNotFoundError: its library is not installed; names the extra.
    """

    def __init__(
        self,
        spec: AttentionSpec | None = None,
        plain: AttentionCore | SinkAttentionCore | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.backend = backend
        self._library = load_library(backend)
        self._plain: Any = causal_attention if plain is None else plain
        self._scale = None if spec is None else spec.softmax_scale
        self._window = -1 if spec is None else spec.bounds[0]
        self._softcap = None if spec is None else spec.softcap
        # Of a model whose bits may not depend on the batch: as the trainer computes it, each token alone or by the trainer's kernel.
        self._invariant = self._plain if spec is not None and spec.batch_invariant else None
        self._off_by_one = spec is not None and spec.softmax_type == "off-by-one"
        self._chosen: dict[AttentionSpec, tuple[ProcessGroups, AttentionCore]] = {}
        """Cores for steps without a cache, which layers alike share, and the layout that they are for."""

    def build_core(self, spec: AttentionSpec, groups: ProcessGroups, layer: int) -> AttentionCore | SinkAttentionCore:
        """The core of one layer; mcore_parallel's own for what no step over a cache computes, by which an engine refuses the model."""
        if spec not in self._chosen or self._chosen[spec][0] is not groups:
            self._chosen[spec] = groups, choose_attention(spec, groups)
        plain = self._chosen[spec][1]
        # Values that are narrower than keys have a place in a cache only where no latents stand for both.
        fits = spec.width == spec.head_dim or (spec.width < spec.head_dim and spec.batch_invariant)
        if not spec.causal or not fits:
            return plain
        core = PagedAttention(spec, plain)
        # One object of a library, with its workspace and plans, for all layers.
        core.backend, core._library = self.backend, self._library
        return core

    def obstacle(self, spec: AttentionSpec, pages: PageFormat) -> str | None:
        """Why its backend cannot compute a layer over a cache; None where it can.

        Args:
            spec: of the layer, in the dtype of its activations.
            pages: of the cache.
        """
        return backend_obstacle(self.backend, self._library, spec, pages)

    @property
    def plans_on_host(self) -> bool:
        """Whether each step is planned on the host, so that no graph can hold one."""
        return self._library is not None and self._library.plans_on_host

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        """[T, A, d], [T, K, d], [T, K, w], sink [A] -> [T, A, w].

        Raises:
            TypeError: ``step.attention`` is data for another core, or another backend.
            RuntimeError: the step asks for a rotation by flashinfer, and its heads come turned.
        """
        paged: Any = step.attention
        if paged is None:
            return self._plain(q, k, v, layer, step) if sink is None else self._plain(q, k, v, layer, step, sink=sink)
        self._check_step(paged)
        if paged.rotation is not None and paged.rotation.required:
            raise RuntimeError(
                "use_flashinfer_fused_rope=True, and the engine runs this model by its own forward, which turns heads itself; "
                "leave it at None"
            )
        cached, rows, sink = paged.cache.layer(layer).of_value_width(v.shape[-1]), paged.rows, self._sink(q, sink)
        if isinstance(rows, TableRows) and self._library is not None:
            self._write(k, v, cached, paged.slots_T)
            return self._library.attend(q, cached, rows, scale=self._scale_of(q), window=self._window)
        if isinstance(rows, TableRows):
            from mcore_inference.attention._triton import append

            append(k, v, cached, paged.slots_T)
            if self._invariant is not None:
                return self._by_tiles(q, cached, rows, sink)
            return self._by_kernels(q, k, v, cached, rows, sink)
        cached.write(paged.slots_T, k, v)
        if self._invariant is not None:
            return self._one_by_one(q, cached, rows, sink)
        return attend_gathered(q, cached, rows, layer=layer, scale=self._scale, window=self._window, sink=sink, softcap=self._softcap)

    def attend_latent(self, queries: Tensor, entries: Tensor, scale: float, layer: int, step: Step) -> Tensor:
        """Attention to latents, of which the cache holds those of all tokens: one key a token, which is its value too.

        Args:
            queries: [T, A, W].
            entries: [T, W], of the same tokens.
            scale: of the scores.
            layer: whose cache is read.
            step: as of ``forward``.

        Returns:
            [T, A, W], sums of entries; [T, A, C] by the kernels, C the channels of the cache that are values.

        Raises:
            TypeError: ``step.attention`` is data for another core.
        """
        paged: Any = step.attention
        if paged is None:
            shared = entries[:, None]
            return causal_attention(queries * (scale * entries.shape[-1] ** 0.5), shared, shared, layer, step)
        self._check_step(paged)
        cached = paged.cache.layer(layer)
        if isinstance(paged.rows, TableRows):
            from mcore_inference.attention._latent import append_scaled, attend_latents
            from mcore_inference.attention._triton import append

            if cached.scales is None:
                append(entries[:, None], entries[:, None], cached, paged.slots_T)
            else:
                append_scaled(entries, cached, paged.slots_T)
            rank = paged.cache.latent_rank
            assert rank is not None, "a cache that does not say which channels are values has no kernel"
            out = queries.new_empty((*queries.shape[:2], rank))
            attend_latents(queries, cached, out, paged.rows, scale=scale, splits=None)
            return out
        cached.write(paged.slots_T, entries[:, None], entries[:, None])
        return attend_gathered(queries, cached, paged.rows, layer=layer, scale=scale, window=-1, sink=None)

    def takes_packed(self, heads: PackedHeads, layer: int, step: Step) -> bool:
        """Whether it is a step of the kernels, whose heads turn whole, by halves or not at all, need no gradient, and are not too wide.

        Raises:
            TypeError: ``step.attention`` is data for another core, or another backend.
        """
        paged: Any = step.attention
        if paged is None:
            return False
        self._check_step(paged)
        rows, qkv = paged.rows, heads.qkv
        # A trainer's bits are those of its own norms and rotation.
        if not isinstance(rows, TableRows) or self._invariant is not None or (torch.is_grad_enabled() and qkv.requires_grad):
            return False
        turns = heads.tables is None or (not heads.interleaved and _fit(heads.tables, qkv.shape[-1]))
        counts = paged.finished is not None or rows.has_prefill or self._library is not None
        whole = qkv.shape[-1] % 2 == 0 and fits_packed(qkv.shape[-1], qkv.dtype.itemsize) and qkv.is_contiguous()
        return turns and counts and whole and has_kernels(qkv.device, qkv.dtype)

    def attend_packed(self, heads: PackedHeads, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        """As ``forward`` from the projection's result, by the kernels or a library: [T, K, A / K + 2, d] -> [T, A, d].

        Args:
            heads: of the step, which ``takes_packed``.
            layer: whose cache is read.
            step: of the kernels.
            sink: [A].
        """
        paged: PagedStep = step.attention
        rows = paged.rows
        assert isinstance(rows, TableRows), "only steps of the kernels come here"
        cached, rotation = paged.cache.layer(layer), paged.rotation
        if rows.has_prefill or self._library is not None or (rotation is not None and rotation.required):
            if rotation is not None and heads.tables is not None and heads.norms is None:
                q, k, v = rotation.rotate(heads)
                self._write(k, v, cached, paged.slots_T)
            else:
                from mcore_inference.attention._rotate import rotate_and_append

                q, k, v = rotate_and_append(heads, cached, paged.slots_T)
            if self._library is not None:
                return self._library.attend(q, cached, rows, scale=self._scale_of(q), window=self._window)
            return self._by_kernels(q, k, v, cached, rows, self._sink(q, sink))
        from mcore_inference.attention._decode import attend_packed

        qkv = heads.qkv
        assert paged.finished is not None, "decode steps of the kernels have counters"
        return attend_packed(
            heads,
            cached,
            paged.slots_T,
            tables_RB=rows.tables_RB,
            contexts_R=rows.contexts_R,
            block_size=rows.block_size,
            scale=self._scale_of(qkv),
            window=self._window,
            sink_A=qkv.new_zeros(qkv.shape[1] * (qkv.shape[2] - 2)) if self._off_by_one else sink,
            softcap=self._softcap,
            splits=self._splits(rows, qkv.shape[1]),
            finished=paged.finished,
        )

    def _one_by_one(self, q: Tensor, cached: LayerSlots, rows: GatheredRows, sink: Tensor | None) -> Tensor:
        """[T, A, w] by the slots of a layer."""
        contexts = []
        assert not isinstance(rows.decode, ContinuedRows), "an engine with batch_invariant copies no contexts"
        if rows.decode is not None:
            contexts += [slots[: last + 1] for slots, last in zip(rows.decode.context_RL, rows.decode.positions_R.tolist(), strict=True)]
        if rows.prefill is not None:
            last_T = rows.prefill.positions_PQ.flatten()[rows.prefill.rows_T].tolist()
            row_T = (rows.prefill.rows_T // rows.prefill.positions_PQ.shape[1]).tolist()
            contexts += [rows.prefill.context_PL[row, : last + 1] for row, last in zip(row_T, last_T, strict=True)]
        if self._window >= 0:
            contexts = [slots[-self._window - 1 :] for slots in contexts]
        assert self._invariant is not None
        parts = [self._invariant.attend_token(row, *cached.read(slots, q.dtype), sink) for row, slots in zip(q, contexts, strict=True)]
        return torch.stack(parts)

    def _by_tiles(self, q: Tensor, cached: LayerSlots, rows: TableRows, sink: Tensor | None) -> Tensor:
        """[T, A, w] by the kernel that the trainer takes too, which reads all keys and values in the cache."""
        assert self._invariant is not None
        out = torch.empty((*q.shape[:-1], cached.values.shape[-1]), dtype=q.dtype, device=q.device)
        where = {"tables_RB": rows.tables_RB, "starts_R": rows.starts_R, "contexts_R": rows.contexts_R}
        where |= {"block_size": rows.block_size, "in_step": False, "sink": sink}
        size = tile_tokens(q.shape[1] // cached.keys.shape[1])
        single = None
        if rows.num_decode:
            numbers = torch.arange(rows.num_decode, dtype=torch.int32, device=q.device)
            single = numbers, torch.zeros_like(numbers)
        for tiles, tokens in ((single, 1), (rows.tiles, size), (rows.whole_tiles, size)):
            if tiles is not None:
                self._invariant.attend_blocks(q, cached.keys, cached.values, out, tiles=tiles, tile_tokens=tokens, **where)
        return out

    def _check_step(self, paged: object) -> None:
        if not isinstance(paged, PagedStep):
            raise TypeError(f"step.attention is a {type(paged).__name__}; PagedAttention reads a PagedStep or None")
        unread = GatheredRows if self.backend == "triton" or self.backend in LIBRARIES else TableRows if self.backend == "torch" else None
        if unread is not None and isinstance(paged.rows, unread):
            raise TypeError(
                f'PagedAttention(backend="{self.backend}") reads no {unread.__name__}; make the context with '
                "DynamicInferenceContext.for_model(model)"
            )

    def _write(self, k: Tensor, v: Tensor, cached: LayerSlots, slots_T: Tensor) -> None:
        """Keys and values [T, K, d] into their slots."""
        if has_kernels(k.device, k.dtype):
            from mcore_inference.attention._triton import append

            append(k, v, cached, slots_T)
        else:
            cached.write(slots_T, k, v)

    def _sink(self, q: Tensor, sink: Tensor | None) -> Tensor | None:
        return q.new_zeros(q.shape[1]) if self._off_by_one else sink

    def _by_kernels(self, q: Tensor, k: Tensor, v: Tensor, cached: LayerSlots, rows: TableRows, sink: Tensor | None) -> Tensor:
        """[T, A, d] for k and v [T, K, d] that lie in their slots of the cache too."""
        from mcore_inference.attention._triton import attend

        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        shared: dict[str, Any] = {
            "tables_RB": rows.tables_RB,
            "starts_R": rows.starts_R,
            "contexts_R": rows.contexts_R,
            "block_size": rows.block_size,
            "scale": self._scale_of(q),
            "window": self._window,
            "sink_A": sink,
            "softcap": self._softcap,
        }
        if rows.num_decode:
            # A power of two: not a kernel for every number of rows.
            splits = 1 << self._splits(rows, k.shape[1]).bit_length() - 1
            attend(q, cached, out, **shared, tiles=None, num_rows=rows.num_decode, splits=splits)
        if rows.tiles is not None:
            attend(q, cached, out, **shared, tiles=rows.tiles, num_rows=0, splits=1)
        if rows.whole_tiles is not None:
            # From the step itself: there is no table to follow.
            attend(q, LayerSlots(keys=k, values=v), out, **shared, tiles=rows.whole_tiles, num_rows=0, splits=1, in_step=True)
        return out

    def _scale_of(self, x: Tensor) -> float:
        return x.shape[-1] ** -0.5 if self._scale is None else self._scale

    def _splits(self, rows: TableRows, kv_heads: int) -> int:
        from mcore_inference.attention._decode import num_splits

        return num_splits(rows.num_decode, kv_heads, rows.longest if self._window < 0 else min(rows.longest, self._window + 1))


def _fit(tables: tuple[Tensor, Tensor], width: int) -> bool:
    """Whether the kernels read them: [T, width], one line as the other."""
    cos, sin = tables
    return cos.shape[-1] == width and cos.stride(-1) == 1 and cos.stride() == sin.stride()
