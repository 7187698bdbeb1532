# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention by torch's FlexAttention: one kernel for windows, packed sequences and sinks, which skips hidden blocks."""

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from mcore_parallel.context_parallel import to_device
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import AttentionSpec
from mcore_parallel.nn.attention._softmax import soft_cap

BLOCK = 128


# B sequences, S tokens a sequence, A heads, K key-value heads, d width of a head, n blocks of a sequence.
class FlexAttention:
    """Attention under a window, in packed sequences, with a sink, of capped scores.

    A sink is a key without a value: what the kernel gives is multiplied by sigmoid(log-sum-exp of the scores - sink). On a GPU torch
    compiles the kernel at its first call, and again where a window comes to packed sequences or a length changes for the first time,
    not for another window; on the CPU it runs an unfused form of it, without a backward.

    Args:
        spec: what is asked for.
        groups: not read.
    """

    def __init__(self, spec: AttentionSpec, groups: ProcessGroups) -> None:
        self.bounds, self.scale, self.sink_is_one = spec.bounds, spec.scale, spec.softmax_type == "off-by-one"
        self._score_mod = None if spec.softcap is None else _capped(spec.softcap)
        # All layers and micro-batches of equal lengths share a mask.
        self._mask = functools.lru_cache(maxsize=8)(functools.partial(block_mask, self.bounds))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        """q [T, A, d], k and v [T, K, d] -> [T, A, width of v]; ``sink`` [A]."""
        B, S = (step.batch_size, step.seq_len) if step.cu_seqlens is None else (1, len(q))
        lengths = (S,) if step.cu_seqlens is None else tuple(b - a for a, b in itertools.pairwise(step.cu_seqlens.tolist()))
        if sink is None and self.sink_is_one:
            sink = q.new_zeros(q.shape[1])
        q, k, v = (x.view(B, S, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        kernel = _kernel() if q.is_cuda else _unfused
        wanted = None if sink is None else AuxRequest(lse=True)
        options = {"block_mask": self._mask(lengths, q.device), "scale": self.scale, "enable_gqa": q.shape[1] != k.shape[1]}
        result = kernel(q, k, v, score_mod=self._score_mod, return_aux=wanted, **options)
        if sink is None:
            return result.transpose(1, 2).flatten(0, 1)
        out, aux = result
        share = torch.sigmoid(aux.lse - sink[:, None].to(aux.lse.dtype))
        return (out * share[..., None]).to(q.dtype).transpose(1, 2).flatten(0, 1)


def block_mask(bounds: tuple[int, int], lengths: tuple[int, ...], device: torch.device) -> BlockMask:
    """Which blocks of scores are seen, in part or as a whole, of sequences behind one another.

    It is worked out for blocks, not for pairs of tokens: a table of all pairs would need memory with the square of the length.

    Args:
        bounds: (left, right) of what a query sees, -1 for no limit.
        lengths: of the sequences.
        device: of the tables.
    """
    S = sum(lengths)
    num_blocks = -(-S // BLOCK)
    starts = torch.arange(num_blocks) * BLOCK
    ends = (starts + BLOCK - 1).clamp(max=S - 1)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    first, last = owner[starts], owner[ends]
    # Of blocks i and j the least and the greatest distance of a key behind a query.
    least, greatest = starts - ends[:, None], ends - starts[:, None]
    seen = (first <= last[:, None]) & (last >= first[:, None])
    whole = (first == last) & (first == first[:, None]) & (last[:, None] == first[:, None])
    left, right = bounds
    if left >= 0:
        seen, whole = seen & (greatest >= -left), whole & (least >= -left)
    if right >= 0:
        seen, whole = seen & (least <= right), whole & (greatest <= right)
    if S % BLOCK:
        # The end of the sequence, which the kernel only looks for in blocks it masks, cuts the last block short.
        whole[-1, :] = False
        whole[:, -1] = False
    # On the device, so that the compiled kernel is that of every window; numbers would be compiled into it.
    before, behind = (None if limit < 0 else to_device(torch.tensor(limit), device) for limit in bounds)
    documents = to_device(owner, device) if len(lengths) > 1 else None

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen_j = j >= 0 if behind is None else j <= i + behind
        if before is not None:
            seen_j = seen_j & (j >= i - before)
        return seen_j if documents is None else seen_j & (documents[i] == documents[j])

    partial = (*_numbered(seen & ~whole, device), *_numbered(whole, device))
    return BlockMask.from_kv_blocks(*partial, BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(S, S))


def _numbered(blocks_nn: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """[1, 1, n] how many blocks of a row there are, and [1, 1, n, n] their numbers first."""
    counts = blocks_nn.sum(-1, dtype=torch.int32)
    order = blocks_nn.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return to_device(counts[None, None], device), to_device(order[None, None].contiguous(), device)


# One function for all layers, so that they share a compiled kernel.
@functools.cache
def _capped(cap: float) -> Callable[..., Tensor]:
    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return soft_cap(score, cap)

    return capped


# Kept, because torch keeps what it compiled with it. As a full graph: what torch would not compile any more, after many shapes, is an
# error and no table of all scores.
@functools.cache
def _kernel() -> Any:
    return torch.compile(flex_attention, fullgraph=True)


def _unfused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(q, k, v, **options)
