# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Do boxes cover a tensor exactly once? Overlaps, gaps and differences of boxes."""

from collections.abc import Sequence

from mcore_ckpt.chunks._box import Box
from mcore_ckpt.chunks._overlap import OverlapSearch

__all__ = ["check_tiling", "find_gap", "find_overlap", "subtract"]

_MAX_CUTS = 2**14
"""The hole is looked for by so many cuts: each part may cut every piece that is left."""


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that together hold the indices of ``box`` outside ``hole``."""
    common = box.intersect(hole)
    if common is None:
        return [box] if box.num_elements else []
    pieces, begin, end = [], list(box.offset), list(box.end)
    for dim in range(len(begin)):
        # Cut what lies before and after the hole along this dim, then go on with the slab between.
        for low, high in ((begin[dim], common.offset[dim]), (common.end[dim], end[dim])):
            if low < high:
                corner, limit = begin.copy(), end.copy()
                corner[dim], limit[dim] = low, high
                pieces.append(Box(tuple(corner), tuple(b - a for a, b in zip(corner, limit, strict=True))))
        begin[dim], end[dim] = common.offset[dim], common.end[dim]
    return pieces


def find_overlap(boxes: Sequence[Box]) -> tuple[int, int] | None:
    """Positions of two boxes that share an index, None when all are disjoint.

    Raises:
        ValueError: in three dims or more, boxes so intricate that comparing them takes far more steps than there are boxes.
    """
    return OverlapSearch(boxes).search()


def find_gap(whole: Box, parts: Sequence[Box], *, max_cuts: int | None = None) -> Box | None:
    """A box inside ``whole`` that no part touches; None when the parts cover it, or ``max_cuts`` were not enough to tell."""
    remaining, num_cuts = [whole] if whole.num_elements else [], 0
    for part in parts:
        if part.num_elements:
            num_cuts += len(remaining)
            if max_cuts is not None and num_cuts > max_cuts:
                return None
            remaining = [piece for box in remaining for piece in subtract(box, part)]
        if not remaining:
            return None
    return remaining[0] if remaining else None


def check_tiling(shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Check that ``boxes`` cover a tensor of ``shape`` exactly once.

    Raises:
        ValueError: a box with another number of dims or outside the tensor, two that overlap, or a region in none.
    """
    whole = Box.whole(shape)
    for box in boxes:
        if len(box.shape) != len(shape):
            raise ValueError(f"part {describe(box)} has {len(box.shape)} dims, the tensor {len(shape)}")
        if not whole.contains(box):
            raise ValueError(f"part {describe(box)} lies outside shape {list(shape)}")
    overlap = find_overlap(boxes)
    if overlap is not None:
        raise ValueError(f"parts {describe(boxes[overlap[0]])} and {describe(boxes[overlap[1]])} overlap")
    # Disjoint boxes inside the tensor cover it exactly when their sizes add up; the search for the hole only serves the message.
    if sum(box.num_elements for box in boxes) != whole.num_elements:
        gap = find_gap(whole, boxes, max_cuts=_MAX_CUTS)
        if gap is not None:
            raise ValueError(f"no part holds {describe(gap)} of shape {list(shape)}")
        held = sum(box.num_elements for box in boxes)
        raise ValueError(f"the {len(boxes)} parts hold {held} of {whole.num_elements} elements of shape {list(shape)}")


def describe(box: Box) -> str:
    """The box as an index expression."""
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in zip(box.offset, box.end, strict=True)) + "]"
