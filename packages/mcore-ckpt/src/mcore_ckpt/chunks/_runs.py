# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Consecutive elements of a tensor as boxes."""

import math
from collections.abc import Iterator

from mcore_ckpt.chunks._box import Box

__all__ = ["runs"]


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
