# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums over ranks under way, and how many of them may be."""

import collections
import functools
from collections.abc import Sequence

import torch

from megatron_fsdp._group import ParameterGroup
from megatron_fsdp._lane import Lane, Ticket
from megatron_fsdp._ranks import Ranks
from megatron_fsdp._unit import Unit


class Reductions:
    """Units whose gradients are being reduced, oldest first; only so many that one unit's may be read while another's are written."""

    def __init__(self, units: Sequence[Unit], lane: Lane) -> None:
        self._units = units
        self._running: collections.deque[Unit] = collections.deque()
        groups = [group for unit in units for group in unit.groups]
        self._budget = max(group.layout.numel * group.gradients.dtype.itemsize for group in groups)
        families: dict[tuple[str, ...], list[ParameterGroup]] = {}
        for group in groups:
            families.setdefault(tuple(ranks.name for ranks in _several(group)), []).append(group)
        self._contributions = [Contributions(_several(family[0]), family, lane) for family in families.values()]

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

    def close(self) -> None:
        """All that belong to this step were started: ask which parameters have a gradient. A collective."""
        for each in self._contributions:
            each.ask()

    def finish(self) -> None:
        """Let all that were started arrive in the gradients."""
        self.clear()
        for unit in reversed(self._units):
            for group in unit.groups:
                group.gradients.finish_reduce()
        for each in self._contributions:
            each.settle()


class Contributions:
    """Which parameters of one family have a gradient on any rank; a rank that has one of every parameter itself never reads it.

    Args:
        all_ranks: that reduce the gradients of the family.
        groups: of the family.
        lane: that reductions run on.
    """

    def __init__(self, all_ranks: Sequence[Ranks], groups: Sequence[ParameterGroup], lane: Lane) -> None:
        self._all_ranks, self._groups, self._lane = all_ranks, groups, lane
        self._own: list[bool] = []
        self._own_on_device = torch.empty(0)
        self._asking: Ticket | None = None
        self._answer = torch.empty(0)

    def ask(self) -> None:
        """Start comparing what ranks have given to reductions since the last ``settle``."""
        own = [given for group in self._groups for given in group.gradients.contributions]
        if own != self._own:
            self._own, self._own_on_device = own, torch.tensor(own, dtype=torch.uint8, device=self._groups[0].device)
        self._asking = self._lane.launch(self._reduce)

    def _reduce(self) -> None:
        self._answer = self._own_on_device
        for ranks in self._all_ranks:
            self._answer = ranks.all_reduce(self._answer, "max")

    def settle(self) -> None:
        """Give the gradients that were asked about to the parameters that have one."""
        if self._asking is None:
            return
        self._asking.wait()
        self._asking = None
        # Read at most once, and by a rank in doubt only: the host waits for it.
        answer, position = functools.cache(self._answer.tolist), 0
        for group in self._groups:
            begin, position = position, position + len(group.parameters)
            group.gradients.settle(lambda begin=begin, end=position: answer()[begin:end])


def _several(group: ParameterGroup) -> list[Ranks]:
    return [ranks for ranks in group.topology.all_ranks if ranks.size > 1]
