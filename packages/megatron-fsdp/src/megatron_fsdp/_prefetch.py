# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""In which order units are gathered, learnt from the first forward, and which to gather ahead."""

from collections.abc import Mapping, Sequence


class GatherOrder:
    """Order of units in a forward, and which to gather ahead.

    Args:
        depth: how many units may be gathered ahead of the running one.
        names: of the units, the root's first.
        num_bytes: of each unit's gathered parameters.
        budget: most bytes that may be gathered ahead; None leaves the bound to ``depth``.

    Example:
        >>> order = GatherOrder(2, ["", "entry", "layer"], num_bytes=[4, 4, 4], budget=4)
        >>> for unit in (0, 1, 2): order.visit(unit)
        >>> order.freeze()
        >>> order.following(0), order.preceding(2)
        ([1], [1])
    """

    def __init__(self, depth: int, names: Sequence[str], *, num_bytes: Sequence[int], budget: int | None = None) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._depth, self._num_bytes, self._budget = depth, num_bytes, budget
        self._recording: list[int] = []
        self._order: tuple[int, ...] | None = None
        self._position: dict[int, int] = {}
        self._lists: tuple[dict[int, list[int]], dict[int, list[int]]] = {}, {}

    def choose(self, forward: Mapping[str, Sequence[str]], backward: Mapping[str, Sequence[str]]) -> None:
        """As ``MegatronFSDP.set_prefetch``."""
        for where, lists in (("forward", forward), ("backward", backward)):
            for unit, ahead in lists.items():
                shown = f"{where}={{{unit!r}: {list(ahead)}}}"
                if unknown := sorted({unit, *ahead} - set(self._numbers)):
                    raise ValueError(f"{shown} names {unknown[0]!r}, which is no unit; units are {', '.join(map(repr, self._numbers))}")
                if unit in ahead or any(self._numbers[each] == 0 for each in ahead):
                    raise ValueError(f"{shown} must name neither the unit itself nor the root; leave them out")
        self._lists = self._numbered(forward), self._numbered(backward)

    @property
    def frozen(self) -> bool:
        return self._order is not None

    def restart(self) -> None:
        """A forward begins."""
        self._recording.clear()

    def visit(self, unit: int) -> None:
        """A unit begins; a unit that runs twice counts where it ran first."""
        if not self.frozen and unit not in self._recording:
            self._recording.append(unit)

    def freeze(self) -> None:
        """A forward is complete: keep its order."""
        if not self.frozen:
            self._order = tuple(self._recording)
            self._position = {unit: position for position, unit in enumerate(self._order)}

    def following(self, unit: int) -> list[int]:
        """Units to gather ahead in a forward."""
        if unit in self._lists[0]:
            return self._affordable(self._lists[0][unit])
        position = self._position.get(unit)
        return [] if position is None or self._order is None else self._affordable(self._order[position + 1 :][: self._depth])

    def preceding(self, unit: int) -> list[int]:
        """Units to gather ahead in a backward."""
        if unit in self._lists[1]:
            return self._affordable(self._lists[1][unit])
        position = self._position.get(unit)
        return [] if position is None or self._order is None else self._affordable(self._order[:position][::-1][: self._depth])

    def _numbered(self, lists: Mapping[str, Sequence[str]]) -> dict[int, list[int]]:
        return {self._numbers[unit]: [self._numbers[each] for each in ahead] for unit, ahead in lists.items()}

    def is_last(self, unit: int) -> bool:
        """Whether a backward begins with this unit."""
        return self._order is not None and self._order[-1] == unit

    def _affordable(self, units: Sequence[int]) -> list[int]:
        found: list[int] = []
        spent = 0
        for unit in units:
            spent += self._num_bytes[unit]
            if self._budget is not None and spent > self._budget:
                break
            found.append(unit)
        return found
