# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Optimizer state as flat ranges of the cuts of its weight, which ``fully_sharded_model_space`` stores (releases up to 0.15, deprecated).

Of a weight [X, Y] cut into a by b pieces there is a tensor [a, b, X/a * Y/b]: each piece is flat, and the data-parallel ranks share its
elements. A dim that stacks layers or experts is cut into single ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt.chunks import Box

__all__ = ["Ranges", "find_ranges"]


@dataclass(frozen=True)
class Ranges:
    """How a weight of ``shape`` lies in a tensor [*cuts, elements of a piece]."""

    shape: tuple[int, ...]
    cuts: tuple[int, ...]
    """Pieces along each dim."""

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of one cut."""
        return tuple(size // cuts for size, cuts in zip(self.shape, self.cuts, strict=True))

    def box(self, layer: int) -> Box:
        """What the stored tensor has of one index of the weight's first dim."""
        first, *others = self.piece
        numel, place = math.prod(others), layer // first
        offset, size = (0,) * len(others), self.cuts[1:]
        return Box((place, *offset, layer % first * numel), (1, *size, numel))

    def layer(self, stored: Tensor) -> Tensor:
        """One index of the weight's first dim from its `box`."""
        return _joined(stored[0], self.cuts[1:], self.piece[1:])

    def whole(self, stored: Tensor) -> Tensor:
        """The weight's geometry from all of it."""
        return _joined(stored, self.cuts, self.piece)


def find_ranges(name: str, stored: Sequence[int], shape: Sequence[int]) -> Ranges | None:
    """How a state is stored, by its shape and that of its weight; None where both are the same.

    Raises:
        CheckpointingException: as none of both; names it.
    """
    stored, shape = tuple(stored), tuple(shape)
    if stored == shape:
        return None
    if len(stored) == len(shape) + 1 and all(cuts and size % cuts == 0 for size, cuts in zip(shape, stored, strict=False)):
        ranges = Ranges(shape, stored[:-1])
        if math.prod(ranges.piece) == stored[-1]:
            return ranges
    raise CheckpointingException(
        f"{name} has the shape {list(stored)}, which is neither that of its weight, {list(shape)}, nor that of flat ranges of the "
        "weight's cuts (fully_sharded_model_space); leave the optimizer out, or save it as fully_reshardable with the system that wrote it"
    )


def _joined(stored: Tensor, cuts: Sequence[int], piece: Sequence[int]) -> Tensor:
    count = len(cuts)
    order = [dim for axis in range(count) for dim in (axis, count + axis)]
    return stored.reshape((*cuts, *piece)).permute(order).reshape([pieces * size for pieces, size in zip(cuts, piece, strict=True)])
