# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention to a part of the keys, in such a form that parts can be merged: plain torch, on any device."""

from typing import Protocol

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.context_parallel._tiles import Tile, Window


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
            scores = _scores(_grouped(q_NiAd, k.shape[1]), _wide(k_NjKd), tile.window, scale)
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
            p = (_scores(q_, k_, tile.window, scale) - lse_[..., None]).exp()
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


def _scores(q_Nikgd: Tensor, k_Njkd: Tensor, window: Window, scale: float) -> Tensor:
    scores = torch.einsum("nikgd,njkd->nkgij", q_Nikgd, k_Njkd) * scale
    if window == (-1, -1):
        return scores
    return scores.masked_fill_(~allowed(scores.shape[-2], scores.shape[-1], window, scores.device), float("-inf"))


def _grouped(x_NiAd: Tensor, heads: int) -> Tensor:
    return _wide(x_NiAd).unflatten(2, (heads, -1))


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
