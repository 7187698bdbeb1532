# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention of a head that goes on from each token of a sequence by itself, for all tokens at once."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_parallel.context_parallel import (
    HEAD_DIM_MULTIPLE,
    FlashAttention,
    PartialAttention,
    Tile,
    TorchAttention,
    flash_can_run,
    plan_tiles,
    segments,
    sequence_lengths,
)
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn import AttentionCore, AttentionSpec, Step, choose_attention


class DraftRows:
    """Keys and values of the passes of one unrolling, by layer; ``Step.attention`` of each of its passes."""

    def __init__(self) -> None:
        self.layers: dict[int, list[tuple[Tensor, Tensor]]] = {}


# T tokens, A heads, K key-value heads, g = A / K, d width of a head, n passes before this one less the first.
class UnrolledAttention:
    """Builds cores for the passes of an unrolling, whose steps carry ``DraftRows``; other steps get causal attention.

    In the first pass a token sees the tokens up to itself. In pass j its row stands for the token j places later, drafted by itself: it
    sees what the first pass saw, and of the passes after that the keys of its own row only (the training-time test of EAGLE-3).

    Args:
        backend: of the first pass, as of ``choose_attention``.
    """

    def __init__(self, backend: str = "auto") -> None:
        self.backend = backend

    def build_core(self, spec: AttentionSpec, groups: ProcessGroups, layer: int) -> AttentionCore:
        """The core of a layer."""
        plain = choose_attention(spec, groups, self.backend)

        def core(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
            if not isinstance(step.attention, DraftRows):
                return plain(q, k, v, layer, step)
            passes = step.attention.layers.setdefault(layer, [])
            passes.append((k, v))
            if len(passes) == 1:
                return plain(q, k, v, layer, dataclasses.replace(step, attention=None))
            lengths = (step.seq_len,) * step.batch_size if step.cu_seqlens is None else sequence_lengths(step.cu_seqlens)
            flash = flash_can_run(q, k, v) and q.shape[-1] % HEAD_DIM_MULTIPLE == 0
            kernel = FlashAttention() if flash else TorchAttention()
            return _Unrolled.apply(q, kernel, _tiles(lengths), spec.scale, *(x for pair in passes for x in pair))

        return core


@functools.lru_cache(maxsize=64)
def _tiles(lengths: tuple[int, ...]) -> tuple[Tile, ...]:
    held = segments(lengths, 1, 0)
    return tuple(plan_tiles(held, held, (-1, 0)))


class _Unrolled(torch.autograd.Function):
    """Softmax over the causal scores of the first pass and one score of each later pass; nothing of the size of all scores is kept."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kernel: PartialAttention, tiles: tuple[Tile, ...], scale: float, *pairs: Tensor) -> Tensor:
        first = torch.zeros_like(q, dtype=_maths(q))
        norm_TA = torch.empty(q.shape[:2], dtype=_maths(q), device=q.device)
        for tile in tiles:
            out, norm = kernel.forward(q, pairs[0], pairs[1], tile, scale)
            rows = tile.queries.rows(q.device)
            first[rows], norm_TA[rows] = out.to(first.dtype), norm.to(norm_TA.dtype)
        scores_nTA = torch.stack([_dot(q, k) * scale for k in pairs[2::2]])
        lse_TA = torch.cat((norm_TA[None], scores_nTA)).logsumexp(0)
        out = first * (norm_TA - lse_TA).exp()[..., None]
        for score_TA, v in zip(scores_nTA, pairs[3::2], strict=True):
            out += (_heads((score_TA - lse_TA).exp()[..., None], v) * _maths_of(v)[:, :, None]).flatten(1, 2)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, out, lse_TA, *pairs)
        ctx.kernel, ctx.tiles, ctx.scale = kernel, tiles, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, out, lse_TA, *pairs = ctx.saved_tensors
        kernel, tiles, scale = ctx.kernel, ctx.tiles, ctx.scale
        grad = grads[0].contiguous()
        dq = torch.zeros_like(q, dtype=_maths(q))
        dfirst = [torch.zeros_like(pairs[0], dtype=_maths(q)) for _ in range(2)]
        for tile in tiles:
            grads = kernel.backward(grad, q, pairs[0], pairs[1], out, lse_TA, tile, scale)
            sides = (tile.queries, tile.keys, tile.keys)
            for whole, part, spans in zip((dq, *dfirst), grads, sides, strict=True):
                whole.index_add_(0, spans.rows(q.device), part.to(whole.dtype))
        mean_TA = (grad.to(dq.dtype) * out).sum(-1)
        later: list[Tensor] = []
        for k, v in zip(pairs[2::2], pairs[3::2], strict=True):
            p_TA = (_dot(q, k) * scale - lse_TA).exp()
            ds_TA = p_TA * (_dot(grad, v) - mean_TA) * scale
            dq += (_heads(ds_TA[..., None], k) * _maths_of(k)[:, :, None]).flatten(1, 2)
            later += [_heads(x_TA[..., None] * y, k).sum(2).to(k.dtype) for x_TA, y in ((ds_TA, q), (p_TA, grad))]
        firsts = [x.to(pairs[0].dtype) for x in dfirst]
        return dq.to(q.dtype), None, None, None, *firsts, *later


def _maths(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _maths_of(x: Tensor) -> Tensor:
    return x.to(_maths(x))


def _heads(x_TAd: Tensor, k_TKd: Tensor) -> Tensor:
    """[T, A, .] -> [T, K, g, .]."""
    return x_TAd.unflatten(1, (k_TKd.shape[1], -1))


def _dot(q_TAd: Tensor, k_TKd: Tensor) -> Tensor:
    """Products of each token's heads with its own key-value heads, [T, A]."""
    return (_heads(_maths_of(q_TAd), k_TKd) * _maths_of(k_TKd)[:, :, None]).sum(-1).flatten(1)
