# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention cores whose sequences lie split over the context-parallel ranks, and the all-to-all between tokens and heads."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import all_to_all_autograd, gather_from_sequence_parallel_region
from mcore_parallel.context_parallel._partial import (
    HEAD_DIM_MULTIPLE,
    CudnnAttention,
    FlashAttention,
    TorchAttention,
    cudnn_can_run,
    flash_can_run,
)
from mcore_parallel.context_parallel._prefixes import plan_prefixed, sequence_prefixes
from mcore_parallel.context_parallel._ring import Round, plan_ring, ring_attention
from mcore_parallel.context_parallel._tiles import DeviceBounds, Tile, Window, plan_tiles, to_device
from mcore_parallel.context_parallel._zigzag import (
    HeadSplitError,
    SequenceSplitError,
    inverse_permutation,
    segments,
    sequence_lengths,
    zigzag_indices,
    zigzag_inverse,
)
from mcore_parallel.groups import Group


# T tokens of a rank, c ranks, H heads, A query heads, K key-value heads, d width of a head, X channels of a rank's heads.
@internal_api
def split_heads(x: Tensor, group: Group, order: Tensor, places: Tensor) -> Tensor:
    """[T, c, X], of this rank's tokens what each rank is to get -> [c T, X], this rank's part of all tokens.

    Args:
        x: tokens of this rank.
        group: c ranks.
        order: [c T] for each place the number of its token among those of all ranks in rank order.
        places: [c T] inverse of ``order``.
    """
    return permute_rows(all_to_all_autograd(x.transpose(0, 1).flatten(0, 1), None, None, group), order, places)


@internal_api
def join_heads(x: Tensor, group: Group, order: Tensor, places: Tensor) -> Tensor:
    """The way back of what was computed: [c T, H / c, d] -> [T, H, d].

    Args:
        x: this rank's heads of all tokens.
        group: c ranks.
        order: as of ``split_heads``.
        places: as of ``split_heads``.
    """
    blocks = all_to_all_autograd(permute_rows(x, places, order), None, None, group)
    return blocks.unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)


def permute_rows(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """``x[order]``; the gradient is read by the inverse ``places`` instead of being added row by row."""
    return _Permute.apply(x, order, places)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.places = places
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].index_select(0, ctx.places), None, None


def repeated_kv_heads(heads: int, kv_heads: int, size: int) -> int:
    """How often each key-value head must stand so that every rank of an all-to-all gets those of its query heads.

    Args:
        heads: A of a tp rank.
        kv_heads: K of a tp rank.
        size: ranks of the all-to-all.

    Raises:
        HeadSplitError: ``size`` does not divide A.
    """
    if heads % size:
        raise HeadSplitError(
            f"{heads} query heads of a tp rank must be a multiple of the all-to-all degree {size}; "
            'use cp_comm_type "p2p" or "all_gather", or "a2a+p2p" with a smaller first size'
        )
    # It divides A / K whenever size divides A.
    return size // math.gcd(kv_heads, size)


class SequenceStep(Protocol):
    """What these cores read of a step (``mcore_parallel.nn.Step``)."""

    @property
    def batch_size(self) -> int: ...
    @property
    def seq_len(self) -> int: ...
    @property
    def cu_seqlens(self) -> Tensor | None: ...
    @property
    def max_seqlen(self) -> int | None: ...
    @property
    def prefixes(self) -> Tensor | None: ...


# T tokens of this rank, A heads and K key-value heads of this tp rank, d width of a head.
class ContextParallelAttention:
    """Attention to whole sequences from a rank that holds a share of each, by one way of communication.

    Conforms to ``mcore_parallel.nn.AttentionCore``. It also works on one rank, and is there the way to a window, a sink and packed
    sequences. Scores are computed by cuDNN's or torch's flash kernels for bfloat16 and float16 on a GPU, else by the plain formula in
    float32 or float64, which holds the scores of a block.

    Args:
        gathered: all ranks' keys and values come here at once.
        heads: ranks that exchange tokens for heads.
        ring: ranks around which keys and values travel.
        window: (left, right), how many tokens before and behind it a query sees; -1 for no limit.
        softmax_scale: factor of the scores; None for 1 / sqrt(d).
        sink_is_one: add 1 to the denominator of every softmax.
    """

    def __init__(
        self,
        *,
        gathered: Group,
        heads: Group,
        ring: Group,
        window: Window = (-1, 0),
        softmax_scale: float | None = None,
        sink_is_one: bool = False,
    ) -> None:
        self.gathered, self.heads, self.ring, self.window = gathered, heads, ring, window
        self.softmax_scale, self.sink_is_one = softmax_scale, sink_is_one
        # Plans are the same for all layers and micro-batches of equal lengths.
        self._layout = functools.lru_cache(maxsize=8)(functools.partial(_Layout.plan, gathered, heads, ring, window))

    @property
    def follows_prefixes(self) -> bool:
        """Whether steps may have ``prefixes``: those of sequences that one rank holds."""
        return self.gathered.size == self.heads.size == self.ring.size == 1

    @property
    def takes_device_bounds(self) -> bool:
        """Whether steps may have ``max_seqlen``: as of ``follows_prefixes``."""
        return self.follows_prefixes

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: SequenceStep, *, sink: Tensor | None = None) -> Tensor:
        """q [T, A, d], k and v [T, K, d] -> [T, A, d].

        Args:
            q: queries of this rank's tokens, as ``zigzag_indices`` names them.
            k: keys.
            v: values.
            layer: not read.
            step: T = batch_size * seq_len; ``cu_seqlens`` are the bounds of the whole sequences.
            sink: [A] logit of a key without a value for each head, learnt; its gradient is this rank's part. None for none.

        Raises:
            SequenceSplitError: sequences that cannot be split so, or that have another number of tokens than there are.
            HeadSplitError: heads that cannot be split.
        """
        size = self.gathered.size * self.heads.size * self.ring.size
        if sink is None and self.sink_is_one:
            sink = q.new_zeros(q.shape[1])
        elif sink is not None and sink.shape != q.shape[1:2]:
            raise HeadSplitError(f"sink of shape {tuple(sink.shape)} must have one logit for each of the {q.shape[1]} heads of this rank")
        layout = self._plan(step, q, size)
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        if self.heads.size > 1:
            q, k, v, sink = self._exchange(q, k, v, sink, layout)
        if self.gathered.size > 1:
            kv = gather_from_sequence_parallel_region(torch.cat((k, v), dim=-1), self.gathered)
            k, v = permute_rows(kv, layout.order, layout.places).split((k.shape[-1], v.shape[-1]), dim=-1)
        width = v.shape[-1]
        flash = flash_can_run(q, k, v)
        if flash:
            # Channels of zeros change no score, and give zeros that are cut off again.
            widest = max(q.shape[-1], width)
            even = widest + -widest % HEAD_DIM_MULTIPLE
            q, k, v = (x if x.shape[-1] == even else F.pad(x, (0, even - x.shape[-1])) for x in (q, k, v))
        # cuDNN plans anew for each shape, and the block behind a prefix has another one in nearly every micro-batch.
        fastest = CudnnAttention() if flash and step.prefixes is None and cudnn_can_run(q) else FlashAttention()
        kernel = fastest if flash else TorchAttention()
        out = ring_attention(q, k, v, sink, layout.rounds, self.ring, kernel, scale)
        out = out[..., :width]
        return out if self.heads.size == 1 else join_heads(out, self.heads, layout.order, layout.places)

    def _plan(self, step: SequenceStep, q: Tensor, size: int) -> "_Layout":
        """What is to be computed for a step of ``size`` ranks."""
        if step.max_seqlen is not None:
            return _Layout.on_device(step, q, size, self.window)
        lengths, prefixes = _lengths(step, size)
        if sum(lengths) != q.shape[0] * size:
            raise SequenceSplitError(
                f"cu_seqlens end at {sum(lengths)}, but {size} ranks with {q.shape[0]} tokens each hold {q.shape[0] * size}; "
                "give the bounds of the whole sequences"
            )
        return self._layout(lengths, prefixes, q.device)

    def _exchange(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, layout: "_Layout"
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """All tokens of this rank's share of the heads, in one transfer."""
        group, heads = self.heads, q.shape[1]
        repeat = repeated_kv_heads(heads, k.shape[1], group.size)
        if repeat > 1:
            k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
        # Side by side for each receiving rank: its query, key and value heads; values may have another width.
        own, kv = heads // group.size, k.shape[1] // group.size
        parts = [x.unflatten(1, (group.size, -1)).flatten(2) for x in (q, k, v)]
        mixed = split_heads(torch.cat(parts, dim=-1), group, layout.order, layout.places)
        sizes = (own * q.shape[-1], kv * k.shape[-1], kv * v.shape[-1])
        q, k, v = (x.unflatten(1, (n, -1)) for x, n in zip(mixed.split(sizes, dim=1), (own, kv, kv), strict=True))
        return q, k, v, None if sink is None else sink.unflatten(0, (group.size, -1))[group.rank]


@dataclass(frozen=True)
class _Layout:
    """Where the tokens of sequences of given lengths lie, and what is to be computed."""

    rounds: tuple[Round, ...]
    order: Tensor
    """For each token after the exchange (or gathering) its number among those of the ranks in rank order; empty where tokens stay."""
    places: Tensor
    """The inverse of ``order``."""

    @classmethod
    def on_device(cls, step: SequenceStep, q: Tensor, size: int, window: Window) -> "_Layout":
        """Of sequences whose bounds the host does not read."""
        assert step.max_seqlen is not None and step.cu_seqlens is not None
        if size > 1 or step.prefixes is not None:
            what = f"be split over cp={size} ranks" if size > 1 else "stand behind a prefix"
            raise SequenceSplitError(f"sequences with bounds on the device (max_seqlen={step.max_seqlen}) cannot {what}; give host bounds")
        within = DeviceBounds(step.cu_seqlens.to(q.device, torch.int32), step.max_seqlen)
        return cls((Round(0, (Tile.of_all(len(q), window, within),)),), torch.empty(0), torch.empty(0))

    @classmethod
    def plan(
        cls,
        gathered: Group,
        heads: Group,
        ring: Group,
        window: Window,
        lengths: tuple[int, ...],
        prefixes: tuple[int, ...] | None,
        device: torch.device,
    ) -> "_Layout":
        if prefixes is not None:
            return cls((Round(0, tuple(plan_prefixed(lengths, prefixes, window))),), torch.empty(0), torch.empty(0))
        if gathered.size > 1:
            tiles = plan_tiles(segments(lengths, gathered.size, gathered.rank), segments(lengths, 1, 0), window)
            order = zigzag_inverse(lengths, gathered.size)
            return cls((Round(0, tuple(tiles)),), to_device(order, device), to_device(inverse_permutation(order), device))
        rounds = plan_ring(lengths, ring.size, ring.rank, window)
        if heads.size == 1:
            # No token moves.
            return cls(rounds, torch.empty(0), torch.empty(0))
        # Chunks of neighbours make up one chunk of a ring of fewer ranks: in rising order they are its zigzag.
        size, first = heads.size * ring.size, heads.size * ring.rank
        places = torch.cat([zigzag_indices(lengths, size, first + place) for place in range(heads.size)])
        order = places.argsort()
        return cls(rounds, to_device(order, device), to_device(inverse_permutation(order), device))


def _lengths(step: SequenceStep, size: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Of the whole sequences, and which one stands in front of each."""
    if step.cu_seqlens is None:
        return (step.seq_len * size,) * step.batch_size, None
    lengths = sequence_lengths(step.cu_seqlens)
    if step.prefixes is None:
        return tuple(length for length in lengths if length), None
    if size > 1:
        raise SequenceSplitError(f"sequences behind a prefix cannot be split over cp={size} ranks; pack without prefixes, or set cp=1")
    return lengths, sequence_prefixes(step.prefixes, len(lengths))


class LayeredAttention:
    """A core that hands each layer of a stage to a core of its own.

    Args:
        cores: of the layers of the stage, in order.
    """

    def __init__(self, cores: Sequence[ContextParallelAttention]) -> None:
        self.cores = tuple(cores)

    @property
    def follows_prefixes(self) -> bool:
        """As of ``ContextParallelAttention``, for all layers."""
        return all(core.follows_prefixes for core in self.cores)

    @property
    def takes_device_bounds(self) -> bool:
        """As of ``ContextParallelAttention``, for all layers."""
        return all(core.takes_device_bounds for core in self.cores)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: SequenceStep, *, sink: Tensor | None = None) -> Tensor:
        return self.cores[layer](q, k, v, layer, step, sink=sink)
