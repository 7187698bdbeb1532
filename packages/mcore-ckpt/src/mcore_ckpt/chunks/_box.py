# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A box of indices in an n-dimensional tensor."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add, le, sub
from typing import Any

__all__ = ["Box", "runs"]


@dataclass(frozen=True, order=True)
class Box:
    """The indices ``offset[i] <= index[i] < offset[i] + shape[i]`` of every dim i.

    A box of no dims stands for the one element of a scalar; a box with a zero in its shape is empty.

    Raises:
        ValueError: lengths differ, or a value is not a non-negative int.

    Example:
        >>> Box((2, 0), (4, 3)).intersect(Box((4, 1), (9, 9)))
        Box(offset=(4, 1), shape=(2, 2))
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"offset={self.offset} and shape={self.shape} must have one entry a dim each")
        for value in (*self.offset, *self.shape):
            if type(value) is not int or value < 0:
                raise ValueError(f"offset={self.offset}, shape={self.shape}: {value!r} must be an int of at least 0")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box of a full tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def end(self) -> tuple[int, ...]:
        """One past the last index of each dim."""
        return tuple(map(add, self.offset, self.shape))

    @property
    def num_elements(self) -> int:
        """Number of indices inside; 1 for a scalar's box."""
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """The part that both boxes share, None where that is empty."""
        if len(self.shape) != len(other.shape):
            raise ValueError(f"{self} and {other} have different numbers of dims")
        begin = tuple(map(max, self.offset, other.offset))
        shape = tuple(map(sub, map(min, self.end, other.end), begin))
        return Box(begin, shape) if min(shape, default=1) > 0 else None

    def contains(self, other: "Box") -> bool:
        """Whether every index of ``other`` lies inside; an empty box lies inside when its corners do."""
        if len(self.shape) != len(other.shape):
            raise ValueError(f"{self} and {other} have different numbers of dims")
        return all(map(le, self.offset, other.offset)) and all(map(le, other.end, self.end))

    def relative_to(self, outer: "Box") -> "Box":
        """The same indices counted from the corner of ``outer``, which contains this box."""
        return Box(tuple(map(sub, self.offset, outer.offset)), self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index that cuts this box out of the tensor it counts in."""
        return tuple(slice(begin, end) for begin, end in zip(self.offset, self.end, strict=True))

    def to_json(self) -> list[list[int]]:
        """Offset and shape as two lists."""
        return [list(self.offset), list(self.shape)]

    @classmethod
    def from_json(cls, value: Any) -> "Box":
        """Inverse of ``to_json``.

        Raises:
            ValueError: not two equally long lists of non-negative ints.
        """
        if not (isinstance(value, list) and len(value) == 2 and all(isinstance(part, list) for part in value)):
            raise ValueError(f"{value!r} must be [offset, shape]")
        return cls(tuple(value[0]), tuple(value[1]))


def runs(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[int, Box]]:
    """Elements ``begin`` to ``end`` of a tensor, counted row by row, as boxes of consecutive elements; each with the number of its first.

    Example:
        The end of row 0, rows 1 and 2, and the beginning of row 3:

        >>> [(first, box.offset, box.shape) for first, box in runs((5, 4), 3, 13)]
        [(3, (0, 3), (1, 1)), (4, (1, 0), (2, 4)), (12, (3, 0), (1, 1))]
    """
    if begin >= end:
        return
    if not shape:
        yield 0, Box((), ())
        return
    row = math.prod(shape[1:])
    # Whole rows, if any, and what is left of the rows before and after.
    low, high = -(-begin // row), end // row
    if low > high:
        yield from _in_row(shape, begin, end)
        return
    yield from _in_row(shape, begin, low * row)
    if low < high:
        yield low * row, Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
    yield from _in_row(shape, high * row, end)


def _in_row(shape: tuple[int, ...], begin: int, end: int) -> Iterator[tuple[int, Box]]:
    """`runs` of elements of one row."""
    row = math.prod(shape[1:])
    number = begin // row
    for first, box in runs(shape[1:], begin - number * row, end - number * row):
        yield first + number * row, Box((number, *box.offset), (1, *box.shape))
