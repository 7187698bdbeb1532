# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention to a part of the keys by cuDNN's kernels, the fastest ones from Hopper on."""

import torch
from torch import Tensor

from mcore_parallel.context_parallel._flash import FlashAttention
from mcore_parallel.context_parallel._tiles import Spans, Tile

MAX_HEAD_DIM = 128
SHORTEST = 128
"""Tokens of a block; shorter ones are no work that a kernel could speed up."""


def cudnn_can_run(q: Tensor) -> bool:
    """Whether the kernels take heads that the flash kernels take; their gradients are added in no fixed order."""
    modern = torch.backends.cudnn.is_available() and torch.cuda.get_device_capability(q.device) >= (9, 0)
    return modern and q.shape[-1] <= MAX_HEAD_DIM and not torch.are_deterministic_algorithms_enabled()


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
    if not tile.is_even or min(tile.queries.lengths[0], tile.keys.lengths[0]) < SHORTEST:
        return False
    # The kernels count from the first query and key, tiles from the last: where there are equally many, that is the same.
    return tile.window == (-1, -1) or (tile.window == (-1, 0) and tile.queries.lengths[0] == tile.keys.lengths[0])


def _heads_first(x: Tensor, spans: Spans) -> Tensor:
    return spans.view(x).transpose(1, 2)


def _rows(x_NALd: Tensor) -> Tensor:
    return x_NALd.transpose(1, 2).flatten(0, 1)
