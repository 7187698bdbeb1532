# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Do boxes cover a tensor exactly once? Overlaps, gaps and differences of boxes."""

from bisect import bisect_right, insort
from collections.abc import Sequence

from mcore_ckpt.chunks._box import Box

__all__ = ["OverlapSearch", "check_tiling", "find_gap", "find_overlap", "subtract"]

_STEPS_A_BOX = 64
_FEW_STEPS = 2**16


class OverlapSearch:
    """Boxes among which two that overlap are looked for.

    Where planes that cut no box part them, each group is searched alone: so a grid of n boxes takes about n steps a dim. Boxes that
    differ in two dims only are swept along one and kept sorted in the other. What is left is compared pair by pair, within a budget.

    Args:
        boxes: all of one number of dims.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._solid = [place for place, box in enumerate(boxes) if box.num_elements]
        self._begin = [box.offset for box in boxes]
        self._end = [box.end for box in boxes]
        self._steps_left = _STEPS_A_BOX * len(boxes) + _FEW_STEPS

    def search(self) -> tuple[int, int] | None:
        """See `find_overlap`."""
        groups = [self._solid] if len(self._solid) > 1 else []
        while groups:
            group = groups.pop()
            dims = self._differing(group)
            if not dims:
                return group[0], group[1]
            if len(dims) <= 2:
                pair = self._sweep(group, dims[0], dims[-1])
                if pair is not None:
                    return pair
                continue
            for dim in dims:
                parts = self._part(group, dim)
                if len(parts) > 1:
                    groups += [part for part in parts if len(part) > 1]
                    break
            else:
                pair = self._compare(group, dims)
                if pair is not None:
                    return pair
        return None

    def _differing(self, group: list[int]) -> list[int]:
        """Dims in which not all boxes are alike."""
        begin, end = self._begin[group[0]], self._end[group[0]]
        self._spend(len(group))
        alike = range(len(begin))
        differing: set[int] = set()
        for place in group:
            if self._begin[place] != begin or self._end[place] != end:
                differing.update(dim for dim in alike if self._begin[place][dim] != begin[dim] or self._end[place][dim] != end[dim])
        return sorted(differing)

    def _part(self, group: list[int], dim: int) -> list[list[int]]:
        """The boxes between one plane across ``dim`` that cuts none of them and the next."""
        self._spend(len(group))
        parts: list[list[int]] = []
        limit = 0
        for place in sorted(group, key=lambda place: self._begin[place][dim]):
            if not parts or self._begin[place][dim] >= limit:
                parts.append([])
            parts[-1].append(place)
            limit = max(limit, self._end[place][dim])
        return parts

    def _sweep(self, group: list[int], along: int, across: int) -> tuple[int, int] | None:
        """Boxes that differ in two dims, or in one: those under the plane that moves ``along`` lie apart ``across``."""
        events = [(self._begin[place][along], 1, place) for place in group]
        # Those that end at a place go before those that begin there.
        events += [(self._end[place][along], 0, place) for place in group]
        active: list[tuple[int, int]] = []
        for _, begins, place in sorted(events):
            entry = (self._begin[place][across], place)
            at = bisect_right(active, entry)
            if not begins:
                del active[at - 1]
                continue
            if at and self._end[active[at - 1][1]][across] > entry[0]:
                return active[at - 1][1], place
            if at < len(active) and active[at][0] < self._end[place][across]:
                return active[at][1], place
            insort(active, entry)
        return None

    def _compare(self, group: list[int], dims: list[int]) -> tuple[int, int] | None:
        """Boxes that no plane parts, pair by pair."""
        along, *others = sorted(dims, key=lambda dim: -len({self._begin[place][dim] for place in group}))
        active: list[int] = []
        for place in sorted(group, key=lambda place: self._begin[place][along]):
            begin, end = self._begin[place], self._end[place]
            self._spend(1 + len(active))
            active = [other for other in active if self._end[other][along] > begin[along]]
            for other in active:
                if all(self._begin[other][dim] < end[dim] and begin[dim] < self._end[other][dim] for dim in others):
                    return other, place
            active.append(place)
        return None

    def _spend(self, num_steps: int) -> None:
        self._steps_left -= num_steps
        if self._steps_left < 0:
            raise ValueError(f"{len(self._begin)} parts are too intricate to compare; cut the tensor along planes")


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
