# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which rows of the hidden states go from which rank to which, between two stages that split them differently."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

from mcore_parallel.groups import HyperCommGrid

_AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, kw_only=True)
class BridgeEnd:
    """The ranks of one pipeline stage of a grid.

    Replica d holds its own whole sequences; of each of them context rank c of C holds slices c and 2C - 1 - c of 2C; the
    tensor-parallel ranks hold the same rows, or under sequence parallelism each its share of them.

    Example:
        >>> BridgeEnd.of(HyperCommGrid((2, 2), ("tp", "pp"), rank_offset=4, world_size=8), last=True).ranks
        (((6, 7),),)
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """Global ranks, indexed by dp, cp and tp."""
    sequence_parallel: bool = False

    @classmethod
    def of(cls, grid: HyperCommGrid, *, last: bool, sequence_parallel: bool = False) -> "BridgeEnd":
        """The last or the first pipeline stage of a grid with axes among tp, cp, dp, pp.

        Raises:
            ValueError: another axis of more than one rank.
        """
        sizes = dict(zip(grid.dim_names, grid.shape, strict=True))
        strides = dict(zip(grid.dim_names, accumulate(grid.shape, lambda a, b: a * b, initial=1), strict=False))
        if other := [name for name, size in sizes.items() if name not in _AXES and size > 1]:
            raise ValueError(f"grid has axis {other[0]!r} of {sizes[other[0]]} ranks; a bridge joins grids of {', '.join(_AXES)}")
        begin = grid.rank_offset + (sizes.get("pp", 1) - 1) * strides.get("pp", 0) * last

        def steps(axis: str) -> list[int]:
            return [number * strides.get(axis, 0) for number in range(sizes.get(axis, 1))]

        ranks = tuple(tuple(tuple(begin + d + c + t for t in steps("tp")) for c in steps("cp")) for d in steps("dp"))
        return cls(ranks=ranks, sequence_parallel=sequence_parallel)

    @property
    def members(self) -> frozenset[int]:
        return frozenset(rank for replica in self.ranks for cell in replica for rank in cell)


@dataclass(frozen=True, kw_only=True)
class BridgeBatch:
    """One micro-batch of all replicas together; hidden states are its tokens, sequence by sequence."""

    sequence_lengths: tuple[int, ...]
    """Of all sequences, in order."""
    hidden_size: int
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    """Where hidden states are received."""
    source_sequences: tuple[int, ...] | None = None
    """How many sequences each replica of the source holds, in order; None for as even as can be."""
    destination_sequences: tuple[int, ...] | None = None
    """The same for the destination."""


class RowTransfer(NamedTuple):
    """Consecutive rows that one rank has and another needs."""

    sender: int
    receiver: int
    sender_row: int
    """First row in what the sender holds."""
    receiver_row: int
    num_rows: int


class _Piece(NamedTuple):
    """Rows [start, stop) of the whole micro-batch, as a rank holds them."""

    start: int
    stop: int
    rank: int
    row: int


def plan_rows(source: BridgeEnd, destination: BridgeEnd, batch: BridgeBatch, *, backward: bool = False) -> list[RowTransfer]:
    """How every row crosses over once, from the ranks that hold it to those that need it.

    The tensor-parallel ranks of a stage divide the work: each sends, and receives, its share of the rows, also when all of them
    hold, or need, the same ones (then ``plan_spread`` follows). Numbers of replicas need not divide one another.

    Args:
        source: where hidden states come from.
        destination: where they go.
        batch: the micro-batch.
        backward: the way back of the gradients.

    Raises:
        ValueError: sequences per replica that do not add up, a length that cp or, under sequence parallelism, tp does not divide.

    Example:
        >>> source, destination = BridgeEnd(ranks=(((0,),), ((1,),))), BridgeEnd(ranks=(((2,),),))
        >>> [tuple(t) for t in plan_rows(source, destination, BridgeBatch(sequence_lengths=(4, 4), hidden_size=1))]
        [(0, 2, 0, 0, 4), (1, 2, 0, 4, 4)]
    """
    have = sorted(_pieces(source, batch, batch.source_sequences, "source"))
    need = sorted(_pieces(destination, batch, batch.destination_sequences, "destination"))
    if backward:
        have, need = need, have
    transfers: list[RowTransfer] = []
    at = 0
    for piece in need:
        while have[at].stop <= piece.start:
            at += 1
        other = at
        while other < len(have) and have[other].start < piece.stop:
            begin, end = max(have[other].start, piece.start), min(have[other].stop, piece.stop)
            sender_row, receiver_row = (p.row + begin - p.start for p in (have[other], piece))
            transfers.append(RowTransfer(have[other].rank, piece.rank, sender_row, receiver_row, end - begin))
            other += 1
    return transfers


def plan_spread(end: BridgeEnd, batch: BridgeBatch, sequences: tuple[int, ...] | None) -> list[RowTransfer]:
    """How the tensor-parallel ranks of a stage complete each other's rows; empty under sequence parallelism."""
    if end.sequence_parallel:
        return []
    transfers: list[RowTransfer] = []
    for cell, _, num_rows in _cells(end, batch, sequences, "end"):
        for number, rank in enumerate(cell):
            begin, stop = _share(num_rows, len(cell), number)
            transfers += [RowTransfer(rank, other, begin, begin, stop - begin) for other in cell if other != rank and stop > begin]
    return transfers


def count_rows(end: BridgeEnd, batch: BridgeBatch, sequences: tuple[int, ...] | None, rank: int) -> int:
    """Rows of the hidden states of one rank of the stage."""
    for cell, _, num_rows in _cells(end, batch, sequences, "end"):
        if rank in cell:
            return num_rows // len(cell) if end.sequence_parallel else num_rows
    raise ValueError(f"rank {rank} is not among {sorted(end.members)}")


def _pieces(end: BridgeEnd, batch: BridgeBatch, sequences: tuple[int, ...] | None, name: str) -> Iterator[_Piece]:
    """The rows that each rank sends or receives: all rows of the micro-batch, each once."""
    for cell, intervals, num_rows in _cells(end, batch, sequences, name):
        for number, rank in enumerate(cell):
            begin, stop = _share(num_rows, len(cell), number)
            row = 0
            for first, last in intervals:
                low, high = max(begin, row), min(stop, row + last - first)
                if low < high:
                    local = low - begin if end.sequence_parallel else low
                    yield _Piece(first + low - row, first + high - row, rank, local)
                row += last - first


def _cells(
    end: BridgeEnd, batch: BridgeBatch, sequences: tuple[int, ...] | None, name: str
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]], int]]:
    """For each dp and cp place its tensor-parallel ranks, the intervals of rows there in local order, and their number."""
    count = len(batch.sequence_lengths)
    replicas = len(end.ranks)
    held = sequences or tuple(count * (d + 1) // replicas - count * d // replicas for d in range(replicas))
    if len(held) != replicas or sum(held) != count or min(held) < 0:
        raise ValueError(f"{name}_sequences={held} must have one entry for each of {replicas} replicas and add up to {count} sequences")
    starts = [0, *accumulate(batch.sequence_lengths)]
    first = 0
    for replica, number in zip(end.ranks, held, strict=True):
        here = range(first, first + number)
        first += number
        for context_rank, cell in enumerate(replica):
            intervals: list[tuple[int, int]] = []
            for start, stop in (part for n in here for part in _slices(starts[n], batch.sequence_lengths[n], len(replica), context_rank)):
                if intervals and intervals[-1][1] == start:
                    start = intervals.pop()[0]
                intervals.append((start, stop))
            num_rows = sum(stop - start for start, stop in intervals)
            if end.sequence_parallel and num_rows % len(cell):
                raise ValueError(
                    f"tp={len(cell)} of the {name} must divide its {num_rows} rows; pad the batch or turn sequence_parallel off"
                )
            yield cell, intervals, num_rows


def _slices(start: int, length: int, context_size: int, context_rank: int) -> Sequence[tuple[int, int]]:
    if context_size == 1:
        return [(start, start + length)]
    if length % (2 * context_size):
        raise ValueError(f"a sequence of {length} tokens must be a multiple of 2 * cp = {2 * context_size}; pad it")
    size = length // (2 * context_size)
    return [(start + n * size, start + (n + 1) * size) for n in (context_rank, 2 * context_size - 1 - context_rank)]


def _share(num_rows: int, parts: int, number: int) -> tuple[int, int]:
    size = -(-num_rows // parts)
    return min(number * size, num_rows), min((number + 1) * size, num_rows)
