# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention to a part of the keys by the flash kernels of torch, on a GPU."""

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.context_parallel._tiles import Spans, Tile

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8


@internal_api
def flash_can_run(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take such heads (once their widths are padded to one multiple of 8)."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and max(q.shape[-1], v.shape[-1]) <= MAX_HEAD_DIM


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
        return (out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)) if tile.is_even else (out, lse.transpose(0, 1))

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
        dq, dk, dv = (x.flatten(0, 1) if tile.is_even else x for x in grads)
        return dq, dk, dv


def _bounds(tile: Tile, device: torch.device) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Where the blocks begin and end (nothing for a batch of equal ones), and their greatest lengths."""
    longest = max(tile.queries.lengths), max(tile.keys.lengths)
    return (None, None, *longest) if tile.is_even else (tile.queries.bounds(device), tile.keys.bounds(device), *longest)


def _take(x: Tensor, spans: Spans, tile: Tile) -> Tensor:
    return spans.view(x) if tile.is_even else x.index_select(0, spans.rows(x.device))
