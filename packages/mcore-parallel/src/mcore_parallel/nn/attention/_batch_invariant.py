# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention whose bits for one token depend on its own sequence only."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import AttentionSpec
from mcore_parallel.nn.attention._reference import reference_attention
from mcore_parallel.nn.kernels import attention_gradient_kernels, fixed_attention_kernels
from mcore_parallel.tensor_parallel import aligned_rows, has_row_kernels

_BLOCK_SIZE = 64
"""Tokens of a block of keys that lie in the step."""
_MOST_SCORES = 1 << 26
"""Scores that a backward holds at a time."""
_WIDEST_HEAD = 256
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


# T tokens, A heads, K key-value heads of G query heads each, d width of a head, w of values, L keys that a token sees, R sequences.
@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Where the sequences of a step and their tiles of queries lie, on the device."""

    bounds: tuple[int, ...]
    tables_RB: Tensor
    starts_R: Tensor
    contexts_R: Tensor
    tiles: tuple[Tensor, Tensor]
    tile_tokens: int


class BatchInvariantAttention:
    """Causal attention whose sums have one order for each token, whatever stands beside it.

    On a CPU every token is computed alone, by calls whose shapes follow from its position; the maths is float32, or float64 for float64
    inputs. On a GPU one kernel takes the keys of a sequence in tiles that begin at fixed positions, also where they lie in the blocks of
    a cache (``attend_blocks``). The backward is that of the definition: on a CPU in float32 or wider, for a block of queries after the
    other, on a GPU by kernels that compute the scores again. It adds nothing atomically.

    Args:
        spec: what is asked for; causal.
        groups: without context parallelism.

    Raises:
        ValueError: heads or a dtype for which the kernel is not made.
    """

    def __init__(self, spec: AttentionSpec, groups: ProcessGroups) -> None:
        if spec.device == "cuda":
            dtype = str(spec.dtype).removeprefix("torch.")
            refused = {
                f"head_dim={spec.head_dim}": spec.head_dim > _WIDEST_HEAD,
                f"value_dim={spec.width}": spec.width > _WIDEST_HEAD,
                f"dtype={dtype}": spec.dtype not in _KERNEL_DTYPES,
            }
            for what, wrong in refused.items():
                if wrong:
                    raise ValueError(
                        f"attention_backend='batch_invariant' has no kernel for {what} on a GPU; use heads of up to {_WIDEST_HEAD} "
                        "channels in 16 or 32 bits, or leave batch_invariant out"
                    )
        self.spec = spec
        self._tiles: dict[int, _Tiles] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        """q [T, A, d], k [T, K, d], v [T, K, w], sink [A] -> [T, A, w]."""
        return _Alone.apply(q, k, v, sink, self, _bounds(step))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], sink: Tensor | None) -> Tensor:
        """The forward over sequences that begin at ``bounds``, the last of which is T."""
        if has_row_kernels(q):
            return self._attend_tiles(q, k, v, bounds, sink)
        sink, left = self._sink(q, sink), self.spec.bounds[0]
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for start, end in itertools.pairwise(bounds):
            for token in range(start, end):
                first = start if left < 0 else max(start, token - left)
                out[token] = self.attend_token(q[token], k[first : token + 1], v[first : token + 1], sink)
        return out

    def attend_token(self, q_Ad: Tensor, k_LKd: Tensor, v_LKw: Tensor, sink_A: Tensor | None) -> Tensor:
        """[A, w] of a token that sees these keys."""
        wide = torch.promote_types(q_Ad.dtype, torch.float32)
        # Memory of their own: also the alignment is then the same everywhere.
        q_KGd = q_Ad.to(wide, copy=True).unflatten(0, (k_LKd.shape[1], -1))
        k_KLd, v_KLw = (x.transpose(0, 1).to(wide).clone(memory_format=torch.contiguous_format) for x in (k_LKd, v_LKw))
        scores_KGL = (q_KGd @ k_KLd.transpose(1, 2)) * self.spec.scale
        if sink_A is not None:
            extra_KG1 = sink_A.to(wide).view(*scores_KGL.shape[:2], 1)
            scores_KGL = torch.cat((scores_KGL, extra_KG1), dim=-1)
        weights_KGL = scores_KGL.softmax(dim=-1)[..., : k_KLd.shape[1]].contiguous()
        return (weights_KGL @ v_KLw).flatten(0, 1).to(q_Ad.dtype)

    def attend_blocks(self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, sink: Tensor | None, **where: Any) -> None:
        """On a GPU, the results of some tiles of queries over keys and values that lie in blocks, into ``out``.

        Args:
            q: [T, A, d].
            keys: [slots, K, d].
            values: [slots, K, w].
            out: [T, A, w], contiguous.
            sink: [A] or None.
            where: ``tables_RB``, ``starts_R``, ``contexts_R``, ``tiles``, ``tile_tokens``, ``block_size`` and ``in_step`` of
                ``attend_fixed``.
        """
        sink_A = self._sink(q, sink)
        sink_A = None if sink_A is None else aligned_rows(sink_A)
        options = {"sink_A": sink_A, "scale": self.spec.scale, "window": self.spec.bounds[0]}
        fixed_attention_kernels().attend_fixed(aligned_rows(q), keys, values, out, **options, **where)

    def gradients(
        self,
        inputs: Sequence[Tensor | None],
        out: Tensor | None,
        bounds: tuple[int, ...],
        grad_TAw: Tensor,
        wanted: Sequence[bool],
    ) -> list[Tensor | None]:
        """Of q, k, v and the sink, in their dtypes, where they are wanted; ``out`` [T, A, w] of the forward on a GPU."""
        if out is not None:
            return self._gradients_of_tiles(inputs, out, bounds, grad_TAw, wanted)
        wide = torch.promote_types(grad_TAw.dtype, torch.float32)
        sums = [None if x is None or not needed else torch.zeros_like(x, dtype=wide) for x, needed in zip(inputs, wanted, strict=True)]
        left, heads = self.spec.bounds[0], grad_TAw.shape[1]
        for start, end in itertools.pairwise(bounds):
            size = max(16, _MOST_SCORES // (heads * (end - start))) if end > start else 1
            for first in range(start, end, size):
                last = min(first + size, end)
                low = start if left < 0 else max(start, first - left)
                ranges = (slice(first, last), slice(low, last), slice(low, last), slice(None))
                parts = [None if x is None else x[place].detach().to(wide) for x, place in zip(inputs, ranges, strict=True)]
                used = [part.requires_grad_() for part, total in zip(parts, sums, strict=True) if part is not None and total is not None]
                q, k, v, sink = parts
                assert q is not None and k is not None and v is not None
                with torch.enable_grad():
                    window, scale = self.spec.bounds, self.spec.softmax_scale
                    y = reference_attention(q, k, v, causal=False, window=window, sink=self._sink(q, sink), scale=scale)
                gradients = iter(torch.autograd.grad(y, used, grad_TAw[first:last].to(wide)))
                for total, place in zip(sums, ranges, strict=True):
                    if total is not None:
                        total[place] += next(gradients)
        return [None if total is None or x is None else total.to(x.dtype) for total, x in zip(sums, inputs, strict=True)]

    def _gradients_of_tiles(
        self, inputs: Sequence[Tensor | None], out: Tensor, bounds: tuple[int, ...], grad_TAw: Tensor, wanted: Sequence[bool]
    ) -> list[Tensor | None]:
        kernels = attention_gradient_kernels()
        q, k, v, sink = inputs
        assert q is not None and k is not None and v is not None
        tokens = kernels.gradient_tiles(q.shape[1] // k.shape[1], (q.shape[2], v.shape[2]), q.dtype)
        of_queries, of_keys = (self._tiles_of(bounds, number, q.device) for number in tokens)
        sink_A = self._sink(q, sink)
        *found, of_sink = kernels.attention_gradients(
            (q.contiguous(), k.contiguous(), v.contiguous()),
            out,
            grad_TAw.to(q.dtype).contiguous(),
            None if sink_A is None else sink_A.contiguous(),
            starts_R=of_queries.starts_R,
            query_tiles=of_queries.tiles,
            key_tiles=of_keys.tiles,
            scale=self.spec.scale,
            window=self.spec.bounds[0],
        )
        of_sink = None if sink is None or of_sink is None else of_sink.to(sink.dtype)
        return [gradient if needed else None for gradient, needed in zip((*found, of_sink), wanted, strict=True)]

    def _tiles_of(self, bounds: tuple[int, ...], tile_tokens: int, device: torch.device) -> _Tiles:
        """All layers ask for the same."""
        if any(plan.bounds != bounds or plan.starts_R.device != device for plan in self._tiles.values()):
            self._tiles.clear()
        if tile_tokens not in self._tiles:
            self._tiles[tile_tokens] = _plan(bounds, tile_tokens, device)
        return self._tiles[tile_tokens]

    def _sink(self, q: Tensor, sink: Tensor | None) -> Tensor | None:
        return q.new_zeros(q.shape[1]) if sink is None and self.spec.softmax_type == "off-by-one" else sink

    def _attend_tiles(self, q: Tensor, k: Tensor, v: Tensor, bounds: tuple[int, ...], sink: Tensor | None) -> Tensor:
        plan = self._tiles_of(bounds, fixed_attention_kernels().fixed_tile_tokens(q.shape[1] // k.shape[1], q.dtype), q.device)
        out = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=q.dtype, device=q.device)
        where = {"tables_RB": plan.tables_RB, "starts_R": plan.starts_R, "contexts_R": plan.contexts_R, "tiles": plan.tiles}
        where |= {"tile_tokens": plan.tile_tokens, "block_size": _BLOCK_SIZE, "in_step": True}
        self.attend_blocks(q, aligned_rows(k), aligned_rows(v), out, sink=sink, **where)
        return out


def _bounds(step: Step) -> tuple[int, ...]:
    if step.cu_seqlens is None:
        return tuple(range(0, step.batch_size * step.seq_len + 1, step.seq_len)) if step.seq_len else (0,)
    return tuple(step.cu_seqlens.tolist())


def _plan(bounds: tuple[int, ...], tile_tokens: int, device: torch.device) -> _Tiles:
    lengths = np.diff(np.array(bounds))
    counts = -(-lengths // tile_tokens)
    rows = np.repeat(np.arange(len(lengths)), counts)
    firsts = (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_tokens
    blocks = np.arange(-(-int(lengths.max(initial=1)) // _BLOCK_SIZE))
    words = torch.from_numpy(np.concatenate([np.array(bounds), lengths, rows, firsts, blocks]).astype(np.int32))
    words = words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words
    starts, contexts, rows_P, firsts_P, table = words.split([len(bounds), len(lengths), len(rows), len(rows), len(blocks)])
    return _Tiles(
        bounds=bounds,
        tables_RB=table.expand(max(1, len(lengths)), -1),
        starts_R=starts,
        contexts_R=contexts,
        tiles=(rows_P, firsts_P),
        tile_tokens=tile_tokens,
    )


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, core: BatchInvariantAttention, bounds: tuple[int, ...]
    ) -> Tensor:
        out = core.attend(q, k, v, bounds, sink)
        ctx.save_for_backward(q, k, v, sink, out if has_row_kernels(q) else None)
        ctx.core, ctx.bounds = core, bounds
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *inputs, out = ctx.saved_tensors
        return *ctx.core.gradients(inputs, out, ctx.bounds, grads[0], ctx.needs_input_grad[:4]), None, None
