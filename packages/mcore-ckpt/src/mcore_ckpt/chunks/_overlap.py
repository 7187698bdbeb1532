# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The search for two boxes that share an index, in a number of steps that the number of boxes bounds."""

from bisect import bisect_right, insort
from collections.abc import Sequence

from mcore_ckpt.chunks._box import Box

__all__ = ["OverlapSearch"]

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
