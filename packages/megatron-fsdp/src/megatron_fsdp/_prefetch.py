# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""In which order units are gathered, learnt from the first forward."""

import hashlib


class GatherOrder:
    """Order of units in a forward, and which to gather ahead.

    Example:
        >>> order = GatherOrder(1)
        >>> for unit in (0, 1, 2): order.visit(unit)
        >>> order.freeze()
        >>> order.following(1), order.preceding(1)
        ([2], [0])
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._recording: list[int] = []
        self._order: tuple[int, ...] | None = None
        self._position: dict[int, int] = {}

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
        position = self._position.get(unit)
        return [] if position is None or self._order is None else list(self._order[position + 1 : position + 1 + self._depth])

    def preceding(self, unit: int) -> list[int]:
        """Units to gather ahead in a backward."""
        position = self._position.get(unit)
        return [] if position is None or self._order is None else list(self._order[max(0, position - self._depth) : position][::-1])

    def digest(self) -> int:
        """A number that differs between ranks whose order differs."""
        return int.from_bytes(hashlib.sha256(repr(self._order).encode()).digest()[:7], "big")
