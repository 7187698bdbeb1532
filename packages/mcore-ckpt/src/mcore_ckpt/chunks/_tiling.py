# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Do boxes cover a tensor exactly once? Overlaps, gaps and differences of boxes."""

from collections.abc import Sequence

from mcore_ckpt.chunks._box import Box

__all__ = ["check_tiling", "find_gap", "find_overlap", "subtract"]

_MAX_SEARCH = 2000
"""Of more parts than this the hole is not looked for: each part may cut every piece that is left."""


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

    Sweeps along the dim with the most distinct starts: a grid of n boxes costs about n * sqrt(n) comparisons.
    """
    solid = [place for place, box in enumerate(boxes) if box.num_elements]
    if len(solid) < 2:
        return None
    num_dims = len(boxes[solid[0]].shape)
    if num_dims == 0:
        return solid[0], solid[1]
    dim = max(range(num_dims), key=lambda d: len({boxes[place].offset[d] for place in solid}))
    solid.sort(key=lambda place: boxes[place].offset[dim])
    active: list[int] = []
    for place in solid:
        start = boxes[place].offset[dim]
        active = [other for other in active if boxes[other].end[dim] > start]
        for other in active:
            if boxes[other].intersect(boxes[place]) is not None:
                return other, place
        active.append(place)
    return None


def find_gap(whole: Box, parts: Sequence[Box]) -> Box | None:
    """A box inside ``whole`` that no part touches, None when the parts cover it."""
    remaining = [whole] if whole.num_elements else []
    for part in parts:
        if part.num_elements:
            remaining = [piece for box in remaining for piece in subtract(box, part)]
        if not remaining:
            return None
    return remaining[0]


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
        if len(boxes) > _MAX_SEARCH:
            held = sum(box.num_elements for box in boxes)
            raise ValueError(f"the {len(boxes)} parts hold {held} of {whole.num_elements} elements of shape {list(shape)}")
        gap = find_gap(whole, boxes)
        assert gap is not None
        raise ValueError(f"no part holds {describe(gap)} of shape {list(shape)}")


def describe(box: Box) -> str:
    """The box as an index expression."""
    return "[" + ", ".join(f"{begin}:{end}" for begin, end in zip(box.offset, box.end, strict=True)) + "]"
