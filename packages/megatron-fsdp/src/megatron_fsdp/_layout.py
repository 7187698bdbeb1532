# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where each parameter lies in the flat buffer of its group: a pure plan.

The buffer is cut into ``num_shards`` equal slices, one a rank. A parameter lies contiguously in it, so that its
gathered form is a plain view, and slice borders fall between its rows, so that each rank holds whole rows. A row is a
slice along the leading dimension, or along the first few merged when those rows would be too coarse to balance
(a weight ``[2, F, D]`` over 8 ranks has rows of ``D`` elements).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

_MAX_PADDING = 0.05  # share of the buffer that alignment may waste before rows are made finer
_MAX_PADDING_PER_SHARD = 64  # elements; keeps whole rows in toy models, where the share says nothing
_ALIGNMENT = 64  # elements; large buffers start parameters and slices there, for vectorised kernels


@dataclass(frozen=True)
class Segment:
    """Place of one parameter in a flat buffer.

    Example:
        >>> Segment(shape=(4, 3), merged=1, offset=0).rows(0, 6)
        (0, 2)
    """

    shape: Shape
    merged: int
    """How many leading dimensions make up the row index; rows have shape ``shape[merged:]``."""
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_shape(self) -> Shape:
        return self.shape[self.merged :]

    @property
    def row_numel(self) -> int:
        return math.prod(self.row_shape)

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[: self.merged])

    def rows(self, rank: int, shard_numel: int) -> tuple[int, int]:
        """First row on ``rank`` and the row after its last; equal when it holds none."""
        if self.numel == 0:
            return (0, self.num_rows) if rank == 0 else (self.num_rows, self.num_rows)
        start, stop = (min(max(border - self.offset, 0), self.numel) for border in (rank * shard_numel, (rank + 1) * shard_numel))
        assert start % self.row_numel == 0 and stop % self.row_numel == 0, "a slice border splits a row"
        return start // self.row_numel, stop // self.row_numel

    def boxes(self, first: int, last: int) -> list[tuple[Shape, Shape]]:
        """Cover rows ``first`` to ``last`` by blocks ``(offsets, sizes)`` of the parameter's own shape, in memory order."""
        tail = tuple(0 for _ in self.row_shape)
        return [(start + tail, size + self.row_shape) for start, size in _boxes(self.shape[: self.merged], first, last)]


@dataclass(frozen=True)
class FlatLayout:
    """Places of the parameters of one group, in the order they were given."""

    segments: tuple[Segment, ...]
    num_shards: int
    shard_numel: int

    @property
    def numel(self) -> int:
        """Elements of the whole buffer, padding included."""
        return self.num_shards * self.shard_numel

    @functools.cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """(first element, element after the last) of the padding between parameters and behind them."""
        ends = sorted((segment.offset, segment.offset + segment.numel) for segment in self.segments if segment.numel)
        borders = [0, *(border for span in ends for border in span), self.numel]
        return tuple((begin, end) for begin, end in zip(borders[::2], borders[1::2], strict=True) if begin < end)


def plan_layout(shapes: Sequence[Shape], num_shards: int, *, block_rows: int | None = None, alignment: int = 1) -> FlatLayout:
    """Place parameters in one buffer so that every rank holds an equal slice of whole rows.

    Rows are made finer, coarsest parameter first, until padding is below 5 % of the buffer (or 64 elements a rank).

    Args:
        shapes: of the parameters.
        num_shards: slices.
        block_rows: slice borders fall on multiples of so many rows of dimension 0, whatever the padding; None lets them fall on any row.
        alignment: parameters begin at multiples of so many elements, if their rows are such; large buffers have more.

    Example:
        >>> layout = plan_layout([(5, 3)], 2)
        >>> [layout.segments[0].rows(rank, layout.shard_numel) for rank in range(2)]
        [(0, 3), (3, 5)]
    """
    merged = [min(1, len(shape)) for shape in shapes]
    total = sum(math.prod(shape) for shape in shapes)
    coarse = max(_ALIGNMENT, alignment) if total >= _ALIGNMENT**2 * num_shards else alignment
    allowed = total + max(int(_MAX_PADDING * total), _MAX_PADDING_PER_SHARD * num_shards)
    while True:
        layout = _place(shapes, merged, num_shards, coarse, block_rows or 1, limit=allowed)
        if layout is not None:
            return layout
        if block_rows is not None:
            layout = _place(shapes, merged, num_shards, alignment, block_rows, limit=None)
            assert layout is not None
            return layout
        row_numels = [math.prod(shape[depth:]) for shape, depth in zip(shapes, merged, strict=True)]
        coarsest = max(range(len(shapes)), key=row_numels.__getitem__)
        if row_numels[coarsest] <= 1:
            # Rows of one element always fit; alignment alone can be over the limit.
            layout = _place(shapes, merged, num_shards, alignment, 1, limit=None)
            assert layout is not None
            return layout
        merged[coarsest] += 1


def plan_atomic(shapes: Sequence[Shape], num_shards: int, loads: Sequence[int], *, alignment: int = 1) -> FlatLayout:
    """Place every parameter whole in one slice: the largest first, each where the least is, among equals where ``loads`` are least.

    Args:
        shapes: of the parameters.
        num_shards: slices, which are as large as the fullest.
        loads: [num_shards] of what other buffers gave the ranks.
        alignment: parameters begin at multiples of so many elements; large buffers have more.

    Example:
        >>> layout = plan_atomic([(2, 3), (4, 3), (1, 3)], 2, [9, 0])
        >>> [segment.offset // layout.shard_numel for segment in layout.segments]
        [0, 1, 0]
    """
    numels = [math.prod(shape) for shape in shapes]
    alignment = max(_ALIGNMENT, alignment) if sum(numels) >= _ALIGNMENT**2 * num_shards else alignment
    filled, owners, starts = [0] * num_shards, [0] * len(shapes), [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda index: -numels[index]):
        owner = min(range(num_shards), key=lambda shard: (filled[shard], loads[shard], shard))
        owners[index], starts[index] = owner, filled[owner]
        filled[owner] += -(-numels[index] // alignment) * alignment
    shard_numel = max(1, *filled)
    places = zip(shapes, owners, starts, strict=True)
    segments = tuple(Segment(tuple(shape), min(1, len(shape)), owner * shard_numel + start) for shape, owner, start in places)
    return FlatLayout(segments, num_shards, shard_numel)


def _place(
    shapes: Sequence[Shape], merged: Sequence[int], num_shards: int, alignment: int, block_rows: int, *, limit: int | None
) -> FlatLayout | None:
    """Lay out with the given rows, or None when that needs more than ``limit`` elements."""
    total = sum(math.prod(shape) for shape in shapes)
    row_numels = [max(1, math.prod(shape[depth:])) * block_rows for shape, depth in zip(shapes, merged, strict=True)]
    shard_numel = max(1, -(-total // num_shards))
    step = alignment
    # Largest first; small ones then fill the gaps that row borders leave.
    order = sorted(range(len(shapes)), key=lambda index: -math.prod(shapes[index]))
    while True:
        shard_numel = -(-shard_numel // step) * step
        if limit is not None and shard_numel * num_shards > max(limit, num_shards):
            return None
        offsets, blocked = _fill([math.prod(shape) for shape in shapes], row_numels, order, shard_numel, alignment)
        if blocked is not None:
            step = math.lcm(step, blocked)
            if limit is not None and step > limit:
                return None
            continue
        end = max((offsets[index] + math.prod(shapes[index]) for index in order), default=0)
        if end <= shard_numel * num_shards:
            segments = tuple(Segment(tuple(shape), depth, offset) for shape, depth, offset in zip(shapes, merged, offsets, strict=True))
            return FlatLayout(segments, num_shards, shard_numel)
        shard_numel = max(shard_numel + 1, -(-end // num_shards))


def _fill(
    numels: Sequence[int], row_numels: Sequence[int], order: Sequence[int], shard_numel: int, alignment: int
) -> tuple[list[int], int | None]:
    """Offsets for one slice size, and the row size that the slice would have to be a multiple of, if one blocks."""
    offsets = [0] * len(numels)
    gaps: list[list[int]] = []
    cursor = 0
    for index in order:
        numel, row = numels[index], row_numels[index]
        for gap in gaps:
            start = -(-gap[0] // alignment) * alignment
            if start + numel <= gap[1] and start // shard_numel == (start + max(numel, 1) - 1) // shard_numel:
                offsets[index], gap[0] = start, start + numel
                break
        else:
            start = -(-cursor // alignment) * alignment
            border = (start // shard_numel + 1) * shard_numel
            if start + numel > border:
                start += (border - start) % row
                border = (start // shard_numel + 1) * shard_numel
                if start + numel > border + shard_numel * (start % shard_numel != 0) and shard_numel % row:
                    return offsets, row
            if start > cursor:
                gaps.append([cursor, start])
            offsets[index] = start
            cursor = start + numel
    return offsets, None


def _boxes(lead: Shape, first: int, last: int) -> list[tuple[Shape, Shape]]:
    if first >= last:
        return []
    if len(lead) <= 1:
        return [((first,), (last - first,))] if lead else [((), ())]
    inner = math.prod(lead[1:])
    boxes: list[tuple[Shape, Shape]] = []
    start = first
    while start < last:
        index, within = divmod(start, inner)
        if within == 0 and last - start >= inner:
            count = (last - start) // inner
            boxes.append(((index, *(0 for _ in lead[1:])), (count, *lead[1:])))
            start += count * inner
        else:
            stop = min(last, (index + 1) * inner)
            boxes += [((index, *offset), (1, *size)) for offset, size in _boxes(lead[1:], within, within + stop - start)]
            start = stop
    return boxes
