# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two persistent buffers that units take turns in, so that a step allocates none and every unit always lies at one address."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from megatron_fsdp._registered import RegisteredMemory

if TYPE_CHECKING:
    from megatron_fsdp._gradients import Gradients
    from megatron_fsdp._unit import Unit

Needs = Mapping[torch.dtype, Sequence[int]]
"""Elements of each flat buffer that a unit needs, by dtype."""

_ALIGNMENT = 256  # elements, where buffers in a slot begin; vectorised kernels and collectives want 16 bytes or more


class Slot:
    """Memory for what is gathered of one unit at a time."""

    def __init__(self, numels: Mapping[torch.dtype, int], device: torch.device, memory: RegisteredMemory) -> None:
        with memory.allocating():
            self._flat = {dtype: torch.zeros(numel, dtype=dtype, device=device) for dtype, numel in numels.items()}
        self._owner: Unit | None = None

    def rooms(self, needs: Needs) -> dict[torch.dtype, list[torch.Tensor]]:
        """Views [numel] for the buffers of one unit, behind each other."""
        found = {}
        for dtype, numels in needs.items():
            ends = [sum(map(_aligned, numels[: index + 1])) for index in range(len(numels))]
            found[dtype] = [self._flat[dtype][end - _aligned(numel) :][:numel] for end, numel in zip(ends, numels, strict=True)]
        return found

    def is_free_for(self, unit: "Unit") -> bool:
        """Whether the unit can be gathered ahead; ranks that call units alike agree upon it."""
        return self._owner is None or self._owner is unit or not self._owner.busy

    def claim(self, unit: "Unit") -> None:
        """The unit is about to be gathered: another one that still lies here is given back.

        Raises:
            RuntimeError: the other one is in the middle of its forward.
        """
        if self._owner is not None and self._owner is not unit:
            if self._owner.depth:
                raise RuntimeError(
                    f"unit {unit.name!r} runs inside the forward of unit {self._owner.name!r}, with which it shares a buffer; "
                    "set fsdp_double_buffer=False, or leave one of them out of fsdp_unit_modules"
                )
            self._owner.evict()
        self._owner = unit


class GradientSlot:
    """Memory for the whole gradients of one unit at a time."""

    def __init__(self, numels: Mapping[torch.dtype, int], device: torch.device, memory: RegisteredMemory) -> None:
        self._slot = Slot(numels, device, memory)
        self._owner: int | None = None
        self._users: dict[int, list[Gradients]] = {}

    def rooms(self, unit: int, needs: Needs) -> dict[torch.dtype, "list[GradientRoom]"]:
        """A room for each buffer of one unit."""
        return {dtype: [GradientRoom(self, unit, room) for room in rooms] for dtype, rooms in self._slot.rooms(needs).items()}

    def join(self, unit: int, gradients: "Gradients") -> None:
        self._users.setdefault(unit, []).append(gradients)

    def claim(self, unit: int) -> bool:
        """Whether the unit may write here: nobody does, or what is here can be waited for."""
        if self._owner is not None and self._owner != unit:
            if any(each.has_unreduced for each in self._users[self._owner]):
                return False
            for each in self._users[self._owner]:
                each.finish_reduce()
        self._owner = unit
        return True


class GradientRoom:
    """The place of one flat buffer in a slot."""

    def __init__(self, slot: GradientSlot, unit: int, flat: torch.Tensor) -> None:
        self._slot, self._unit, self._flat = slot, unit, flat

    def join(self, gradients: "Gradients") -> None:
        """Say who writes here."""
        self._slot.join(self._unit, gradients)

    def claim(self) -> torch.Tensor | None:
        """[numel] to write to; None while another unit's gradients are here that no reduction has taken yet."""
        return self._flat if self._slot.claim(self._unit) else None


class DoubleBuffers:
    """Which slot each unit has: they take turns in the order of their definition; the root has buffers of its own.

    Args:
        names: of all units, the root first.
        gathered: what each unit needs for gathered parameters.
        gradients: what it needs for whole gradients.
        device: where the slots lie.
        memory: the pool they come from.
        largest: units may differ, and slots are as large as the largest needs.

    Raises:
        ValueError: no unit but the root, a unit inside another, or units that differ without ``largest``.
    """

    def __init__(
        self,
        names: Sequence[str],
        gathered: Sequence[Needs],
        gradients: Sequence[Needs],
        device: torch.device,
        memory: RegisteredMemory,
        *,
        largest: bool,
    ) -> None:
        if len(names) < 2:
            raise ValueError("fsdp_double_buffer=True has nothing to alternate between, the root is the only unit; set fsdp_unit_modules")
        for name in names[1:]:
            outer = next((other for other in names[1:] if name.startswith(f"{other}.")), None)
            if outer is not None:
                raise ValueError(
                    f"fsdp_double_buffer=True, but unit {name!r} lies inside unit {outer!r}; leave one out of fsdp_unit_modules"
                )
        self._gathered, self._gradients = gathered, gradients
        slots = []
        for what, needs in (("gathered parameters", gathered), ("gradients", gradients)):
            totals = [{dtype: sum(map(_aligned, numels)) for dtype, numels in need.items()} for need in needs[1:]]
            if not largest:
                _check_alike(what, names[1:], needs[1:])
            slots.append({dtype: max(total.get(dtype, 0) for total in totals) for total in totals for dtype in total})
        self._slots = [Slot(slots[0], device, memory) for _ in range(2)]
        self._gradient_slots = [GradientSlot(slots[1], device, memory) for _ in range(2)]

    def slot(self, unit: int) -> Slot:
        return self._slots[unit % 2]

    def gathered(self, unit: int) -> dict[torch.dtype, list[torch.Tensor]]:
        """Memory for the gathered buffers of a unit, in the order of its needs."""
        return self.slot(unit).rooms(self._gathered[unit])

    def gradients(self, unit: int) -> dict[torch.dtype, list[GradientRoom]]:
        """Memory for its whole gradients, likewise."""
        return self._gradient_slots[unit % 2].rooms(unit, self._gradients[unit])


def _check_alike(what: str, names: Sequence[str], needs: Sequence[Needs]) -> None:
    for name, need in zip(names, needs, strict=True):
        if {dtype: list(numels) for dtype, numels in need.items()} != {dtype: list(numels) for dtype, numels in needs[0].items()}:
            raise ValueError(
                f"fsdp_double_buffer=True wants units alike, but for {what} unit {names[0]!r} needs {_describe(needs[0])} "
                f"and unit {name!r} {_describe(need)}; set maxpool_double_buffer=True, or leave {name!r} out of fsdp_unit_modules"
            )


def _describe(need: Needs) -> str:
    return ", ".join(f"{list(numels)} elements of {dtype}" for dtype, numels in need.items()) or "nothing"


def _aligned(numel: int) -> int:
    return -(-numel // _ALIGNMENT) * _ALIGNMENT
