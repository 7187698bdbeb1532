# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which rows of the hidden states go from which rank to which, between two stages that split them differently; and their shapes, exchanged
between hosts."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

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


_DIMS = {"s": 1, "b": 0, "h": 2}


class ShapeExchange:
    """Tells the destination the micro-batch of a tensor that the source sends, and holds it for the gradient on its way back.

    Replicas whose rows meet in one replica of the other side send equal shapes. Shapes travel between hosts (gloo), so that nothing
    waits for a GPU.

    Args:
        source: last stage of the first grid, without context parallelism.
        destination: first stage of the second.
        rank: this process.
        pg: a gloo group with the ranks of both; None for the default one.
        dim_mapping: dimension of the tensors that is the sequence "s", the batch "b" and the hidden size "h"; None for
            ``{"s": 1, "b": 0, "h": 2}``.
        dtype: of all tensors.
        device: where tensors are received.
        tensor_ndim: 3, or 2 for [rows, hidden] with the batch folded into the rows.

    Raises:
        ValueError: a dimension map that is none, another number of dimensions, context parallelism.
    """

    def __init__(
        self,
        source: BridgeEnd,
        destination: BridgeEnd,
        *,
        rank: int,
        pg: dist.ProcessGroup | None,
        dim_mapping: Mapping[str, int] | None,
        dtype: torch.dtype,
        device: torch.device,
        tensor_ndim: int,
    ) -> None:
        mapping = dict(_DIMS if dim_mapping is None else dim_mapping)
        if sorted(mapping) != ["b", "h", "s"] or sorted(mapping.values()) != [0, 1, 2]:
            raise ValueError(f"dim_mapping={mapping} must map 's', 'b' and 'h' to 0, 1 and 2, each once")
        if tensor_ndim not in (2, 3):
            raise ValueError(f"tensor_ndim={tensor_ndim} must be 3, or 2 for [rows, hidden]")
        for name, end in (("source", source), ("destination", destination)):
            if len(end.ranks[0]) > 1:
                raise ValueError(f"cp={len(end.ranks[0])} of the {name}: to split sequences, build from BridgeEnd and pass a BridgeBatch")
        self.source, self.destination, self.rank, self.pg = source, destination, rank, pg
        self.dtype, self.device = dtype, device
        self._order = tuple(mapping[name] for name in "bsh") if tensor_ndim == 3 else None
        # Micro-batches whose gradient has yet to come back: of this rank as source, and as destination.
        self._sent: deque[BridgeBatch] = deque()
        self._received: deque[BridgeBatch] = deque()
        self._own_shapes: deque[Tensor] = deque()
        self._pending: list[tuple[dist.Work, Tensor]] = []

    def rows(self, x: Tensor) -> Tensor:
        """A tensor as [rows, H], sequence by sequence."""
        return (x if self._order is None else x.permute(self._order)).reshape(-1, x.shape[-1 if self._order is None else self._order[2]])

    def tensor(self, rows: Tensor, batch: BridgeBatch) -> Tensor:
        """The reverse of ``rows``: contiguous, a leaf of its own."""
        rows = rows.detach()
        if self._order is None:
            return rows
        x = rows.view(-1, batch.sequence_lengths[0], batch.hidden_size)
        return x.permute([self._order.index(dim) for dim in range(3)]).contiguous()

    def announce(self, x: Tensor) -> BridgeBatch:
        """From the source: the micro-batch of what it is about to send; its leader tells those that receive."""
        ndim = 2 if self._order is None else 3
        if x.ndim != ndim or x.dtype != self.dtype:
            raise ValueError(f"rank {self.rank} sends {tuple(x.shape)} {x.dtype}; the bridge is for {ndim} dimensions of {self.dtype}")
        shape = torch.tensor([x.shape[0], 1, x.shape[1]] if self._order is None else [x.shape[dim] for dim in self._order])
        batch = self._batch(shape)
        replica = _replica(self.source, self.rank)
        if self.source.ranks[replica][0][0] == self.rank:
            for other in _overlapping(replica, len(self.source.ranks), len(self.destination.ranks)):
                for receiver in self.destination.ranks[other][0]:
                    if receiver == self.rank:
                        self._own_shapes.append(shape)
                    elif (work := dist.isend(shape, receiver, group=self.pg)) is not None:
                        self._pending.append((work, shape))
        self._pending = [entry for entry in self._pending if not entry[0].is_completed()]
        self._sent.append(batch)
        return batch

    def learn(self) -> BridgeBatch:
        """To the destination: the micro-batch of what it is about to receive."""
        replica = _replica(self.destination, self.rank)
        leaders = [self.source.ranks[d][0][0] for d in _overlapping(replica, len(self.destination.ranks), len(self.source.ranks))]
        shapes: dict[int, Tensor] = {}
        for leader in leaders:
            if leader != self.rank:
                shapes[leader] = torch.empty(3, dtype=torch.int64)
                dist.recv(shapes[leader], leader, group=self.pg)
            elif self._own_shapes:
                shapes[leader] = self._own_shapes.popleft()
            else:
                raise ValueError(f"rank {self.rank} is in both grids and has sent nothing yet; call send_forward first")
        if len({tuple(shape.tolist()) for shape in shapes.values()}) > 1:
            sizes = {leader: tuple(shape.tolist()) for leader, shape in shapes.items()}
            raise ValueError(f"ranks send batch, sequence, hidden size {sizes} to one replica; make them equal or pass a BridgeBatch")
        batch = self._batch(shapes[leaders[0]])
        self._received.append(batch)
        return batch

    def batch_of_gradient(self, *, sends: bool) -> BridgeBatch:
        """The micro-batch whose gradient the destination sends next, or the source receives next: the oldest one outstanding."""
        outstanding = self._received if sends else self._sent
        if not outstanding:
            raise ValueError(f"rank {self.rank} has {'received' if sends else 'sent'} no tensor that waits for its gradient")
        return outstanding.popleft()

    def finish(self) -> None:
        """Wait for all shapes that were sent."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _batch(self, shape: Tensor) -> BridgeBatch:
        size, length, hidden = (int(number) for number in shape)
        sources, destinations = len(self.source.ranks), len(self.destination.ranks)
        if size * sources % destinations:
            raise ValueError(
                f"a batch of {size} in each of {sources} source replicas does not divide among {destinations} of the destination; "
                "change the batch size or pass a BridgeBatch"
            )
        return BridgeBatch(
            sequence_lengths=(length,) * (size * sources),
            hidden_size=hidden,
            dtype=self.dtype,
            device=self.device,
            source_sequences=(size,) * sources,
            destination_sequences=(size * sources // destinations,) * destinations,
        )


def _replica(end: BridgeEnd, rank: int) -> int:
    return next(number for number, replica in enumerate(end.ranks) if rank in replica[0])


def _overlapping(replica: int, here: int, there: int) -> range:
    """Replicas of the other side, of ``there``, that hold rows of one replica of ``here``."""
    return range(replica * there // here, -(-(replica + 1) * there // here))
