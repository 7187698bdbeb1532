# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which tokens a context-parallel rank holds: of every sequence an early chunk and the late one that mirrors it; the tokens after them."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.comm import all_gather
from mcore_parallel.groups import Group


class SequenceSplitError(ValueError):
    """A sequence whose length is not a multiple of twice the ranks that share it, or bounds that are none."""


class HeadSplitError(ValueError):
    """Attention heads that the ranks of an all-to-all cannot share evenly."""


@internal_api
class Segment(NamedTuple):
    """Consecutive tokens of one sequence, as a rank holds them."""

    position: int
    """Of the first token in its sequence."""
    row: int
    """Of the first token among the rank's tokens."""
    length: int


def sequence_lengths(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Lengths of packed sequences.

    Args:
        cu_seqlens: [N + 1] integers, where each sequence begins and the last one ends; on the host, or reading it waits for the device.

    Raises:
        SequenceSplitError: bounds that do not begin with 0 or that fall.
    """
    bounds = cu_seqlens.tolist()
    if cu_seqlens.dim() != 1 or len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in itertools.pairwise(bounds)):
        raise SequenceSplitError(f"cu_seqlens={bounds} must be one row of bounds that begins with 0 and never falls")
    return tuple(b - a for a, b in itertools.pairwise(bounds))


@internal_api
def segments(lengths: Sequence[int], size: int, rank: int) -> list[list[Segment]]:
    """Of every sequence the segments that ``rank`` holds; its tokens lie sequence by sequence, in rising position.

    A sequence is cut into 2 ``size`` chunks, of which rank i holds i and 2 ``size`` - 1 - i: with a causal mask all ranks
    have equally many scores to compute. Chunks that touch are one segment.

    Raises:
        SequenceSplitError: 2 ``size`` does not divide a length.
    """
    per_sequence, row = [], 0
    for number, length in enumerate(lengths):
        if size > 1 and length % (2 * size):
            raise SequenceSplitError(
                f"sequence {number} of length {length} must be a multiple of 2 * cp = {2 * size}; pad it, or lower cp={size}"
            )
        if size == 1:
            per_sequence.append([Segment(0, row, length)])
        elif rank == size - 1:
            per_sequence.append([Segment(length // (2 * size) * rank, row, length // size)])
        else:
            chunk = length // (2 * size)
            per_sequence.append([Segment(chunk * rank, row, chunk), Segment(chunk * (2 * size - 1 - rank), row + chunk, chunk)])
        row += length // size
    return per_sequence


def zigzag_indices(lengths: int | Sequence[int], size: int, rank: int) -> Tensor:
    """Numbers of the tokens that ``rank`` of ``size`` holds, among all tokens of the sequences behind one another.

    Args:
        lengths: of the sequences; one number for a single sequence.
        size: number of ranks.
        rank: from 0.

    Returns:
        [sum(lengths) / size] int64, on the CPU.

    Raises:
        SequenceSplitError: 2 ``size`` does not divide a length.

    Example:
        >>> zigzag_indices(8, size=2, rank=0).tolist(), zigzag_indices(8, size=2, rank=1).tolist()
        ([0, 1, 6, 7], [2, 3, 4, 5])
    """
    lengths = [lengths] if isinstance(lengths, int) else lengths
    parts, start = [torch.empty(0, dtype=torch.int64)], 0
    for length, held in zip(lengths, segments(lengths, size, rank), strict=True):
        parts += [torch.arange(start + part.position, start + part.position + part.length) for part in held]
        start += length
    return torch.cat(parts)


def zigzag_inverse(lengths: int | Sequence[int], size: int) -> Tensor:
    """The way back: the shares of all ranks, joined in rank order and indexed by this, lie in natural order.

    Raises:
        SequenceSplitError: 2 ``size`` does not divide a length.

    Example:
        >>> x = torch.arange(8)
        >>> joined = torch.cat([x[zigzag_indices(8, 2, rank)] for rank in range(2)])
        >>> joined[zigzag_inverse(8, 2)].tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return inverse_permutation(torch.cat([zigzag_indices(lengths, size, rank) for rank in range(size)]))


@internal_api
def inverse_permutation(permutation: Tensor) -> Tensor:
    """Index that undoes an index."""
    inverted = torch.empty_like(permutation)
    inverted[permutation] = torch.arange(len(permutation), dtype=permutation.dtype, device=permutation.device)
    return inverted


def tokens_ahead(values: Tensor, lengths: tuple[int, ...], group: Group, *, by: int) -> Tensor:
    """For each token of this rank the value ``by`` tokens later in its sequence; 0 where the sequence has ended.

    Args:
        values: [T] of this rank's tokens (``zigzag_indices``), without a gradient; small things such as ids and weights, because all
            ranks' are gathered.
        lengths: of the whole sequences, over all ranks.
        group: the context-parallel ranks.
        by: how many tokens, at least 0.

    Returns:
        [T].

    Raises:
        SequenceSplitError: as of ``zigzag_indices``.

    Example:
        >>> tokens_ahead(torch.tensor([1, 2, 3, 4, 5]), (3, 2), Group.single(), by=1)
        tensor([2, 3, 0, 5, 0])
    """
    source = _sources(lengths, group.size, group.rank, by).to(values.device, non_blocking=True)
    whole = all_gather(values, group)
    # One value more, which those behind the ends read.
    return torch.cat((whole, whole.new_zeros(1)))[source]


@functools.lru_cache(maxsize=256)
def _sources(lengths: tuple[int, ...], size: int, rank: int, by: int) -> Tensor:
    """[T] of ``rank``: where the value lies among those of all ranks behind one another; behind them all for none."""
    held = [zigzag_indices(lengths, size, other) for other in range(size)]
    place = torch.empty(sum(lengths) + 1, dtype=torch.int64)
    place[torch.cat(held)] = torch.arange(sum(lengths))
    place[-1] = sum(lengths)
    ends = torch.tensor(lengths).cumsum(0)
    wanted = held[rank] + by
    end = ends[torch.searchsorted(ends, held[rank], right=True)]
    return place[torch.where(wanted < end, wanted, sum(lengths))]
