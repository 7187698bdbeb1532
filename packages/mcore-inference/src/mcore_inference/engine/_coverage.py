# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which elements of a tensor came: no tensor, only boxes."""

import math
from collections.abc import Sequence

Box = tuple[tuple[int, ...], tuple[int, ...]]


class Coverage:
    """Boxes of one tensor that came, none of them twice. Those that continue one another are kept as one.

    Args:
        shape: of the tensor.

    Example:
        >>> rows = Coverage((4, 2))
        >>> rows.add((0, 0), (3, 2)), rows.add((2, 0), (4, 2)), rows.add((3, 0), (4, 2)), rows.is_whole
        (True, False, True, True)
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._missing = math.prod(shape)
        self._boxes: list[Box] = []

    @property
    def is_whole(self) -> bool:
        """Whether every element came."""
        return not self._missing

    def add(self, begin: tuple[int, ...], end: tuple[int, ...]) -> bool:
        """Take a box inside the shape that is not empty; False, and nothing taken, where a part of it came before."""
        if any(_meet((begin, end), box) for box in self._boxes):
            return False
        self._missing -= math.prod(last - first for first, last in zip(begin, end, strict=True))
        box = (begin, end)
        while self._boxes and (joined := _joined(self._boxes[-1], box)) is not None:
            self._boxes.pop()
            box = joined
        self._boxes.append(box)
        return True


def _meet(one: Box, other: Box) -> bool:
    return all(a < d and c < b for a, b, c, d in zip(*one, *other, strict=True))


def _joined(one: Box, other: Box) -> Box | None:
    """Both as one box, where the second continues the first along one dim."""
    different = [dim for dim in range(len(one[0])) if (one[0][dim], one[1][dim]) != (other[0][dim], other[1][dim])]
    if len(different) != 1 or one[1][different[0]] != other[0][different[0]]:
        return None
    return one[0], other[1]
