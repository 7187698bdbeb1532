# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention to a part of the keys, in such a form that parts can be merged: by plain torch on any device, by torch's flash kernels,
and by cuDNN's, the fastest ones from Hopper on."""

from typing import Protocol

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.context_parallel._tiles import Spans, Tile, Window, sequence_of_tokens


# N blocks of a tile, i queries and j keys of a block, T rows of all, A heads, K key-value heads, g = A / K, d width of a head.
class PartialAttention(Protocol):
    """Computes one tile. Outputs are normalised over the tile's keys and come with the log of what they were divided by."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        """q [T, A, d], k and v [T', K, d] -> the rows of the tile's queries in its order: [t, A, d] and [t, A] log-sum-exp."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the tile's rows of q, k and v, in its order; ``out`` [T, A, d] and ``lse`` [T, A] are of all keys together."""
        ...


@internal_api
class TorchAttention:
    """The plain formula, in float32 (float64 for float64 inputs); holds the scores of a tile at once."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        outs, norms = [], []
        for q_NiAd, k_NjKd, v_NjKd in _batches(tile, (q, "queries"), (k, "keys"), (v, "keys")):
            scores = _scores(_grouped(q_NiAd, k.shape[1]), _wide(k_NjKd), tile, scale)
            lse = scores.logsumexp(-1)
            out = torch.einsum("nkgij,njkd->nikgd", (scores - lse[..., None]).exp(), _wide(v_NjKd))
            outs.append(out.flatten(2, 3).flatten(0, 1))
            norms.append(lse.permute(0, 3, 1, 2).flatten(2, 3).flatten(0, 1))
        return torch.cat(outs), torch.cat(norms)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        heads = k.shape[1]
        rows = ((q, "queries"), (grad, "queries"), (out, "queries"), (lse, "queries"), (k, "keys"), (v, "keys"))
        for q_NiAd, grad_NiAd, out_NiAd, lse_NiA, k_NjKd, v_NjKd in _batches(tile, *rows):
            q_, grad_, out_ = (_grouped(x, heads) for x in (q_NiAd, grad_NiAd, out_NiAd))
            k_, v_ = _wide(k_NjKd), _wide(v_NjKd)
            lse_ = _wide(lse_NiA).unflatten(2, (heads, -1)).permute(0, 2, 3, 1)
            p = (_scores(q_, k_, tile, scale) - lse_[..., None]).exp()
            mean = (grad_ * out_).sum(-1).permute(0, 2, 3, 1)
            ds = p * (torch.einsum("nikgd,njkd->nkgij", grad_, v_) - mean[..., None]) * scale
            grads[0].append(torch.einsum("nkgij,njkd->nikgd", ds, k_).flatten(2, 3).flatten(0, 1))
            grads[1].append(torch.einsum("nkgij,nikgd->njkd", ds, q_).flatten(0, 1))
            grads[2].append(torch.einsum("nkgij,nikgd->njkd", p, grad_).flatten(0, 1))
        return torch.cat(grads[0]), torch.cat(grads[1]), torch.cat(grads[2])


@internal_api
def allowed(queries: int, keys: int, window: Window, device: torch.device) -> Tensor:
    """[queries, keys] bool: key j is seen by query i when -left <= j - i - (keys - queries) <= right."""
    distance = torch.arange(keys, device=device) - torch.arange(queries, device=device)[:, None] - (keys - queries)
    seen = torch.ones_like(distance, dtype=torch.bool)
    left, right = window
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def _batches(tile: Tile, *rows: tuple[Tensor, str]) -> list[tuple[Tensor, ...]]:
    """The tile's rows of each tensor as [N, L, ...]: one batch of all blocks where they are alike, else one a block."""
    if tile.is_even:
        return [tuple(getattr(tile, side).view(x) for x, side in rows)]
    batches = []
    for number in range(len(tile.queries.starts)):
        spans = {side: (getattr(tile, side).starts[number], getattr(tile, side).lengths[number]) for _, side in rows}
        batches.append(tuple(x.narrow(0, *spans[side])[None] for x, side in rows))
    return batches


def _scores(q_Nikgd: Tensor, k_Njkd: Tensor, tile: Tile, scale: float) -> Tensor:
    scores = torch.einsum("nikgd,njkd->nkgij", q_Nikgd, k_Njkd) * scale
    if tile.window != (-1, -1):
        scores.masked_fill_(~allowed(scores.shape[-2], scores.shape[-1], tile.window, scores.device), float("-inf"))
    return scores if tile.within is None else scores.masked_fill_(~together(tile.within.cu_seqlens, scores.shape[-1]), float("-inf"))


@internal_api
def together(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T, T] bool: whether two tokens lie in one packed sequence; arguments as of ``sequence_of_tokens``."""
    sequences = sequence_of_tokens(cu_seqlens, num_tokens)
    return sequences == sequences[:, None]


def _grouped(x_NiAd: Tensor, heads: int) -> Tensor:
    return _wide(x_NiAd).unflatten(2, (heads, -1))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


_FLASH_MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8


@internal_api
def flash_can_run(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take such heads (once their widths are padded to one multiple of 8)."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and max(q.shape[-1], v.shape[-1]) <= _FLASH_MAX_HEAD_DIM


@internal_api
class FlashAttention:
    """Flash attention with its log-sum-exp; blocks of different lengths go to the kernel in one call.

    Key-value heads are shared inside the kernel, which also knows the window: nothing of the size of the scores is held.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        q_, k_, v_ = (_take(x, spans, tile) for x, spans in ((q, tile.queries), (k, tile.keys), (v, tile.keys)))
        left, right = tile.window
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_, k_, v_, *_bounds(tile, q.device), 0.0, False, False, scale=scale, window_size_left=left, window_size_right=right
        )
        # [N, A, i] of a batch, [A, t] of blocks behind one another.
        return (out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)) if _is_batch(tile) else (out, lse.transpose(0, 1))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_, grad_, out_, lse_ = (_take(x, tile.queries, tile) for x in (q, grad, out, lse))
        k_, v_ = _take(k, tile.keys, tile), _take(v, tile.keys, tile)
        left, right = tile.window
        # Without dropout the kernel reads no random state.
        random = torch.empty(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            grad_.contiguous(),
            q_,
            k_,
            v_,
            out_.contiguous(),
            lse_.transpose(-1, -2).contiguous(),
            *_bounds(tile, q.device),
            0.0,
            False,
            random,
            unused,
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        dq, dk, dv = (x.flatten(0, 1) if _is_batch(tile) else x for x in grads)
        return dq, dk, dv


def _is_batch(tile: Tile) -> bool:
    return tile.is_even and tile.within is None


def _bounds(tile: Tile, device: torch.device) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Where the blocks begin and end (nothing for a batch of equal ones), and their greatest lengths."""
    if (within := tile.within) is not None:
        return within.cu_seqlens, within.cu_seqlens, within.max_seqlen, within.max_seqlen
    longest = max(tile.queries.lengths), max(tile.keys.lengths)
    return (None, None, *longest) if tile.is_even else (tile.queries.bounds(device), tile.keys.bounds(device), *longest)


def _take(x: Tensor, spans: Spans, tile: Tile) -> Tensor:
    if tile.within is not None:
        return x
    return spans.view(x) if tile.is_even else x.index_select(0, spans.rows(x.device))


_CUDNN_MAX_HEAD_DIM = 128
SHORTEST = 128
"""Tokens of a block; shorter ones are no work that a kernel could speed up."""


def cudnn_can_run(q: Tensor) -> bool:
    """Whether the kernels take heads that the flash kernels take; their gradients are added in no fixed order."""
    modern = torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(q.device) >= (9, 0)
    return modern and q.shape[-1] <= _CUDNN_MAX_HEAD_DIM and not torch.are_deterministic_algorithms_enabled()


class CudnnAttention:
    """Blocks of one shape under the whole causal mask, or none, by cuDNN; others by torch's flash kernels."""

    def __init__(self) -> None:
        self._others = FlashAttention()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
        if not _has_its_mask(tile):
            return self._others.forward(q, k, v, tile, scale)
        q_NAid, k_NKjd, v_NKjd = (_heads_first(x, spans) for x, spans in ((q, tile.queries), (k, tile.keys), (v, tile.keys)))
        out_NAid, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q_NAid, k_NKjd, v_NKjd, None, True, 0.0, tile.window[1] == 0, False, scale=scale
        )
        return _rows(out_NAid), lse.reshape(out_NAid.shape[:-1]).transpose(1, 2).flatten(0, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tile: Tile, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not _has_its_mask(tile):
            return self._others.backward(grad, q, k, v, out, lse, tile, scale)
        q_, grad_, out_ = (_heads_first(x, tile.queries) for x in (q, grad, out))
        k_, v_ = _heads_first(k, tile.keys), _heads_first(v, tile.keys)
        lse_NAi1 = tile.queries.view(lse).transpose(1, 2).contiguous()[..., None]
        # Without dropout the kernel reads no random state, and blocks of one shape have no bounds.
        random = torch.empty((), dtype=torch.int64, device=q.device)
        lengths = tile.queries.lengths[0], tile.keys.lengths[0]
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad_, q_, k_, v_, out_, lse_NAi1, random, random, None, None, None, *lengths, 0.0, tile.window[1] == 0, scale=scale
        )
        dq, dk, dv = (_rows(x) for x in grads)
        return dq, dk, dv


def _has_its_mask(tile: Tile) -> bool:
    if not _is_batch(tile) or min(tile.queries.lengths[0], tile.keys.lengths[0]) < SHORTEST:
        return False
    # The kernels count from the first query and key, tiles from the last: where there are equally many, that is the same.
    return tile.window == (-1, -1) or (tile.window == (-1, 0) and tile.queries.lengths[0] == tile.keys.lengths[0])


def _heads_first(x: Tensor, spans: Spans) -> Tensor:
    return spans.view(x).transpose(1, 2)


def _rows(x_NALd: Tensor) -> Tensor:
    return x_NALd.transpose(1, 2).flatten(0, 1)
