# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A module that is gathered as one: its state, how it is built, and the reductions of its gradients."""

import collections
import enum
import functools
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from megatron_fsdp._buffers import BufferSlot, DoubleBuffers
from megatron_fsdp._collectives import Ranks
from megatron_fsdp._context import ShardContext, Stream, WorkHandle
from megatron_fsdp._eight_bit import EightBitFormat
from megatron_fsdp._group import ParameterGroup
from megatron_fsdp._parameter_grouping import GroupPlan, UnitPlan


class UnitState(enum.Enum):
    """Where the whole parameters of a unit are; the head of ``_runtime.py`` has the diagram.

    - ``sharded`` -> ``gathering``, as its gather starts.
    - ``gathering`` -> ``whole``, as it is opened.
    - ``whole`` -> ``retained``, if the backward begins with it; ``spent``, as its backward is over.
    - ``retained`` -> ``spent``, as its backward is over.
    - ``spent`` -> ``whole``, if it runs again.
    - ``whole``, ``retained``, ``spent`` -> ``evicted``, if another unit takes the slot.
    - ``evicted`` -> ``gathering``, as its gather starts; ``sharded``, as the next backward begins.
    - All but ``evicted`` -> ``sharded``, as it is closed.
    """

    sharded = enum.auto()
    """The shards are registered, gathered memory is given back."""
    gathering = enum.auto()
    """The gather was started, the shards are registered."""
    whole = enum.auto()
    """The whole parameters are registered and readable, and in use."""
    retained = enum.auto()
    """As ``whole``, and staying so after its forward."""
    spent = enum.auto()
    """As ``whole``, until the last gradient is there; another unit may take its slot."""
    evicted = enum.auto()
    """As ``sharded``: another unit took its slot, perhaps before all its gradients were there."""


class Unit:
    """A module whose parameter groups are gathered together, in memory of its own or in a slot that it shares with other units."""

    def __init__(self, index: int, name: str, module: nn.Module, groups: list[ParameterGroup], slot: BufferSlot | None = None) -> None:
        self.index, self.name, self.module, self.groups = index, name, module, groups
        self._slot = slot if any(group.reshards for group in groups) else None
        self.state = UnitState.sharded
        self.depth = 0
        """Forward calls in progress, above one when the module calls itself."""
        self.open_calls = 0
        """Forward calls whose backward is not over."""
        self.reduced = False
        """Whether this backward has started its reduction."""

    @property
    def gathered(self) -> bool:
        """Whether the whole parameters are registered and readable."""
        return self.state in (UnitState.whole, UnitState.retained, UnitState.spent)

    @property
    def busy(self) -> bool:
        """Whether its slot is not to be used for gathering another unit ahead: from the start of its gather to the end of its turn."""
        return self.state in (UnitState.gathering, UnitState.whole, UnitState.retained)

    @property
    def num_bytes(self) -> int:
        """Of what a gather makes and ``close`` gives back."""
        return sum(group.num_bytes for group in self.groups if group.reshards)

    @property
    def num_held_bytes(self) -> int:
        """Of the buffers that are free again when the running reduction is over."""
        return sum(group.gradients.num_held_bytes for group in self.groups)

    @property
    def complete(self) -> bool:
        """Whether every trainable parameter got its gradient in this backward."""
        return all(group.gradients.complete for group in self.groups)

    @property
    def is_root(self) -> bool:
        return self.index == 0

    def start_gather(self) -> None:
        if self._slot is not None:
            self._slot.claim(self)
        if self.state is UnitState.spent:
            self.state = UnitState.whole
        elif not self.gathered:
            self.state = UnitState.gathering
        for group in self.groups:
            if group.reshards and not group.gathering:
                group.start_gather()

    def gather_ahead(self) -> None:
        """Start the gather if it needs no memory that another unit is using."""
        if self._slot is None or self._slot.is_free_for(self):
            self.start_gather()

    def open(self) -> None:
        """Make the whole parameters readable and register them."""
        self.start_gather()
        for group in self.groups:
            group.finish_gather()
        if not self.gathered:
            self._register(full=True)
            self.state = UnitState.whole

    def retain(self) -> None:
        """Stay gathered after the forward, because the backward begins with this unit."""
        if self.gathered:
            self.state = UnitState.retained

    def begin_backward(self) -> None:
        """A backward of the model begins."""
        self.reduced = False
        if self.state is UnitState.evicted:
            self.state = UnitState.sharded
        for group in self.groups:
            group.gradients.arrived.clear()

    def end_turn(self) -> None:
        """Its backward is over, but perhaps for the last gradients."""
        if self.gathered:
            self.state = UnitState.spent
        elif self.state is UnitState.gathering:
            self.state = UnitState.sharded

    def evict(self, by: str) -> None:
        """Leave the slot to another unit, in a backward perhaps before the last gradient.

        Raises:
            RuntimeError: this unit is in the middle of its forward.
        """
        if self.depth:
            raise RuntimeError(
                f"unit {by!r} runs inside the forward of unit {self.name!r}, with which it shares a buffer; "
                "set fsdp_double_buffer=False, or leave one of them out of fsdp_unit_modules"
            )
        was_gathered = self.gathered
        self.close()
        if was_gathered:
            self.state = UnitState.evicted

    def close(self) -> None:
        """Register the sharded parameters and give gathered memory back."""
        for group in self.groups:
            group.release()
        if self.gathered:
            self._register(full=False)
        if self.state is not UnitState.evicted:
            self.state = UnitState.sharded

    def _register(self, *, full: bool) -> None:
        for group in self.groups:
            for parameter in group.parameters:
                parameter.register(full=full)


def plan_double_buffers(
    plans: Sequence[UnitPlan], grouped: Sequence[Sequence[GroupPlan]], context: ShardContext, *, largest: bool
) -> DoubleBuffers:
    """The two slots of ``fsdp_double_buffer``, allocated.

    Raises:
        ValueError: as ``DoubleBuffers``.
    """
    gathered = [_by_dtype((group.dtypes(context)[1], group) for group in groups if group.reshards(context)) for groups in grouped]
    gradients = [_by_dtype((group.dtypes(context)[2], group) for group in groups if _sums_apart(group)) for groups in grouped]
    names = [plan.name for plan in plans]
    return DoubleBuffers(names, gathered, gradients, context.device, context.streams.memory, largest=largest)


def build_unit(
    index: int, plan: UnitPlan, groups: Sequence[GroupPlan], context: ShardContext, *, buffers: DoubleBuffers | None, form: EightBitFormat
) -> Unit:
    """Shard the parameters of a unit and register their shards."""
    buffers = None if index == 0 else buffers
    views = {} if buffers is None else {dtype: iter(flats) for dtype, flats in buffers.gathered(index).items()}
    grad_views = {} if buffers is None else {dtype: iter(flats) for dtype, flats in buffers.gradients(index).items()}
    built = []
    for group in groups:
        _, compute_dtype, grad_dtype = group.dtypes(context)
        built.append(
            ParameterGroup(
                group,
                context,
                eight_bit=form if group.eight_bit else None,
                flat_view=next(views[compute_dtype]) if views and group.reshards(context) else None,
                grad_view=next(grad_views[grad_dtype]) if grad_views and _sums_apart(group) else None,
            )
        )
        for item in built[-1].parameters:
            item.register(full=False)
    return Unit(index, plan.name, plan.module, built, None if buffers is None else buffers.slot(index))


def _sums_apart(group: GroupPlan) -> bool:
    """Whether its whole gradients live for a short time only."""
    return group.sites[0].parameter.requires_grad and not group.keeps_whole_gradient


def _by_dtype(groups: Iterable[tuple[torch.dtype, GroupPlan]]) -> dict[torch.dtype, list[int]]:
    numels: dict[torch.dtype, list[int]] = {}
    for dtype, group in groups:
        numels.setdefault(dtype, []).append(group.layout.numel)
    return numels


class Reductions:
    """Units whose gradients are being reduced, oldest first; only so many that one unit's may be read while another's are written."""

    def __init__(self, units: Sequence[Unit], stream: Stream) -> None:
        self._units = units
        self._running: collections.deque[Unit] = collections.deque()
        groups = [group for unit in units for group in unit.groups]
        self._budget = max(group.layout.numel * group.gradients.dtype.itemsize for group in groups)
        by_ranks: dict[tuple[str, ...], list[ParameterGroup]] = {}
        for group in groups:
            by_ranks.setdefault(tuple(ranks.name for ranks in _several(group)), []).append(group)
        self._contributions = [Contributions(_several(alike[0]), alike, stream) for alike in by_ranks.values()]

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
    """Which parameters that are reduced over the same ranks have a gradient on any of them.

    A rank that has one of every parameter itself never reads it.

    Args:
        all_ranks: that reduce the gradients.
        groups: that they reduce.
        stream: that reductions run on.
    """

    def __init__(self, all_ranks: Sequence[Ranks], groups: Sequence[ParameterGroup], stream: Stream) -> None:
        self._all_ranks, self._groups, self._stream = all_ranks, groups, stream
        self._own: list[bool] = []
        self._own_on_device = torch.empty(0)
        self._asking: WorkHandle | None = None
        self._answer = torch.empty(0)

    def ask(self) -> None:
        """Start comparing what ranks have contributed to reductions since the last ``settle``."""
        own = [contributed for group in self._groups for contributed in group.gradients.contributions]
        if own != self._own:
            self._own, self._own_on_device = own, torch.tensor(own, dtype=torch.uint8, device=self._groups[0].device)
        self._asking = self._stream.launch(self._reduce)

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
