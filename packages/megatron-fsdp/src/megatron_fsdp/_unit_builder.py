# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""From plans to units: their groups, and the memory that these share."""

from collections.abc import Iterable, Sequence

import torch

from megatron_fsdp._double_buffer import DoubleBuffers
from megatron_fsdp._eight_bit import EightBitFormat
from megatron_fsdp._families import GroupPlan
from megatron_fsdp._group import ParameterGroup
from megatron_fsdp._setting import Setting
from megatron_fsdp._unit import Unit
from megatron_fsdp._units import UnitPlan


def plan_double_buffers(
    plans: Sequence[UnitPlan], grouped: Sequence[Sequence[GroupPlan]], setting: Setting, *, largest: bool
) -> DoubleBuffers:
    """The two slots of ``fsdp_double_buffer``, allocated.

    Raises:
        ValueError: as ``DoubleBuffers``.
    """
    gathered = [_by_dtype((group.dtypes(setting)[1], group) for group in groups if group.reshards(setting)) for groups in grouped]
    gradients = [_by_dtype((group.dtypes(setting)[2], group) for group in groups if _sums_apart(group)) for groups in grouped]
    names = [plan.name for plan in plans]
    return DoubleBuffers(names, gathered, gradients, setting.device, setting.lanes.memory, largest=largest)


def build_unit(
    index: int, plan: UnitPlan, groups: Sequence[GroupPlan], setting: Setting, *, slots: DoubleBuffers | None, form: EightBitFormat
) -> Unit:
    """Shard the parameters of a unit and register their shards."""
    slots = None if index == 0 else slots
    rooms = {} if slots is None else {dtype: iter(found) for dtype, found in slots.gathered(index).items()}
    gradient_rooms = {} if slots is None else {dtype: iter(found) for dtype, found in slots.gradients(index).items()}
    built = []
    for group in groups:
        _, compute_dtype, grad_dtype = group.dtypes(setting)
        built.append(
            ParameterGroup(
                group,
                setting,
                eight_bit=form if group.eight_bit else None,
                room=next(rooms[compute_dtype]) if rooms and group.reshards(setting) else None,
                gradient_room=next(gradient_rooms[grad_dtype]) if gradient_rooms and _sums_apart(group) else None,
            )
        )
        for item in built[-1].parameters:
            item.register(full=False)
    return Unit(index, plan.name, plan.module, built, None if slots is None else slots.slot(index))


def _sums_apart(group: GroupPlan) -> bool:
    """Whether its whole gradients live for a short time only."""
    return group.sites[0].parameter.requires_grad and not group.keeps_whole_gradient


def _by_dtype(groups: Iterable[tuple[torch.dtype, GroupPlan]]) -> dict[torch.dtype, list[int]]:
    found: dict[torch.dtype, list[int]] = {}
    for dtype, group in groups:
        found.setdefault(dtype, []).append(group.layout.numel)
    return found
