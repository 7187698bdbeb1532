# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where each gradient lies in a flat buffer, which stretch is summed at once, and which rank owns what of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_ALIGN = 64
"""Elements to which a parameter's start is rounded up in a sliced buffer: 128 bytes of 16-bit elements, what vector loads and NCCL like."""


@dataclass(frozen=True)
class BucketRange:
    """A stretch of a flat buffer, holding whole parameters."""

    start: int
    end: int
    members: tuple[int, ...]
    """Indices of its parameters, in buffer order."""


@dataclass(frozen=True)
class SlicedLayout:
    """A flat buffer whose buckets are cut into equal slices, one a rank."""

    buckets: tuple[BucketRange, ...]
    """``end - start`` is a multiple of ``num_slices``; padding fills up."""
    starts: tuple[int, ...]
    """Of each parameter, in the buffer."""
    num_slices: int

    @property
    def total(self) -> int:
        """Elements of the buffer, padding included."""
        return self.buckets[-1].end if self.buckets else 0

    def slice_of(self, bucket: BucketRange, index: int) -> tuple[int, int]:
        """Begin and end of one rank's slice, in the buffer."""
        size = (bucket.end - bucket.start) // self.num_slices
        return bucket.start + index * size, bucket.start + (index + 1) * size


def lay_out_buckets(numels: Sequence[int], bucket_size: int) -> tuple[BucketRange, ...]:
    """Cut consecutive parameters into buckets; one closes as soon as it holds ``bucket_size`` elements.

    A pure function of sizes, so that all ranks agree.

    Example:
        >>> [bucket.members for bucket in lay_out_buckets([3, 3, 10, 1], 6)]
        [(0, 1), (2,), (3,)]
    """
    buckets: list[BucketRange] = []
    start = end = 0
    members: list[int] = []
    for index, numel in enumerate(numels):
        end += numel
        members.append(index)
        if end - start >= bucket_size or index == len(numels) - 1:
            buckets.append(BucketRange(start, end, tuple(members)))
            start, members = end, []
    return tuple(buckets)


def lay_out_slices(shapes: Sequence[tuple[int, ...]], bucket_size: int, num_slices: int, multiple: int = 1) -> SlicedLayout:
    """Cut consecutive parameters into buckets of equal slices whose borders fall between rows of the parameters.

    A row is the last dim of a parameter of two dims or more, so that what a slice holds of a matrix is one box of it and a
    checkpoint needs no flat ranges. Starts and slice sizes are multiples of the rows' common multiple; a parameter whose rows
    would make that multiple larger than an eighth of a slice begins a new bucket. A pure function of shapes.

    Args:
        shapes: of the parameters this rank holds, in backward order.
        bucket_size: elements after which a bucket closes.
        num_slices: ranks that share a bucket.
        multiple: of which every bucket's size is one.

    Example:
        >>> layout = lay_out_slices([(3, 64), (5,)], 1000, 2)
        >>> layout.starts, layout.total, layout.slice_of(layout.buckets[0], 1)
        ((0, 192), 256, (128, 256))
    """
    buckets: list[BucketRange] = []
    starts: list[int] = []
    start = end = 0
    members: list[int] = []
    unit = _ALIGN

    def close() -> None:
        nonlocal start, end, members, unit
        size = _round_up(end - start, math.lcm(num_slices * unit, multiple))
        buckets.append(BucketRange(start, start + size, tuple(members)))
        start = end = start + size
        members, unit = [], _ALIGN

    for index, shape in enumerate(shapes):
        row = math.lcm(_ALIGN, shape[-1] if len(shape) > 1 and shape[-1] else 1)
        if members and math.lcm(unit, row) > max(bucket_size // (8 * num_slices), unit):
            close()
        unit = math.lcm(unit, row)
        # Rows are counted from the start of the bucket, whose slices are multiples of the unit.
        begin = start + _round_up(end - start, row)
        starts.append(begin)
        end = begin + math.prod(shape)
        members.append(index)
        if end - start >= bucket_size:
            close()
    if members:
        close()
    return SlicedLayout(tuple(buckets), tuple(starts), num_slices)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
