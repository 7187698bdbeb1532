# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums over ranks under way, and how many of them may be."""

import collections
from collections.abc import Sequence

from megatron_fsdp._unit import Unit


class Reductions:
    """Units whose gradients are being reduced, oldest first; only so many that one unit's may be read while another's are written."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._running: collections.deque[Unit] = collections.deque()
        groups = [group for unit in units for group in unit.groups]
        self._budget = max(group.layout.numel * group.gradients.dtype.itemsize for group in groups)

    def start(self, unit: Unit, *, outer: bool) -> None:
        """Start reducing the gradients of a unit, ``outer`` as in ``Gradients.start_reduce``; wait for old ones if there are too many."""
        unit.reduced = True
        for group in unit.groups:
            if group.trainable:
                group.gradients.start_reduce(outer=outer)
        self._running.append(unit)
        while len(self._running) > 1 and sum(each.num_held_bytes for each in self._running) > self._budget:
            for group in self._running.popleft().groups:
                group.gradients.finish_reduce()

    def clear(self) -> None:
        """Count none as under way."""
        self._running.clear()

    def finish(self) -> None:
        """Let all that were started arrive in the gradients."""
        self.clear()
        for unit in reversed(self._units):
            for group in unit.groups:
                group.gradients.finish_reduce()
