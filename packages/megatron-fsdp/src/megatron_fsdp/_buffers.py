# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Flat buffers whose memory comes and goes, and the two persistent ones that units take turns in."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from megatron_fsdp._context import RegisteredMemory
from megatron_fsdp._layout import FlatLayout, Segment


class FlatBuffer:
    """Flat storage with parameter views, which survive ``release`` and see the new contents after ``allocate``.

    Autograd keeps views of weights for the backward; because release and allocate act on the storage, those views are
    valid again once the buffer is gathered again. A buffer in a slot borrows its memory, whose address never changes.
    """

    def __init__(self, layout: FlatLayout, flat: torch.Tensor, *, borrowed: bool = False) -> None:
        self.layout, self.flat = layout, flat
        self._num_bytes = flat.untyped_storage().nbytes()
        self._borrowed, self._in_use = borrowed, not borrowed

    @property
    def allocated(self) -> bool:
        return self._in_use

    def allocate(self) -> None:
        """Take the memory; contents are undefined until written."""
        if not self._in_use and not self._borrowed:
            self.flat.untyped_storage().resize_(self._num_bytes)
        self._in_use = True

    def release(self) -> None:
        """Give the memory back."""
        if not self._borrowed:
            self.flat.untyped_storage().resize_(0)
        self._in_use = False

    def view(self, segment: Segment) -> torch.Tensor:
        """The parameter's place, in its own shape.

        The view has its own version counter: gathering again writes the same values, which autograd must not take for
        a change of a saved tensor.
        """
        return self.flat.data[segment.offset : segment.offset + segment.numel].view(segment.shape)


def local_view(flat: torch.Tensor, segment: Segment, rank: int, shard_numel: int) -> torch.Tensor:
    """This rank's rows of a parameter in its slice ``flat`` [shard_numel]: [rows, *row shape]."""
    if segment.numel == 0:
        first, last = segment.rows(rank, shard_numel)
        return flat[:0].view(last - first if segment.row_numel == 0 else 0, *segment.row_shape)
    first, last = segment.rows(rank, shard_numel)
    # An empty share may lie outside of the slice.
    start = segment.offset + first * segment.row_numel - rank * shard_numel if last > first else 0
    return flat[start : start + (last - first) * segment.row_numel].view(last - first, *segment.row_shape)


Needs = Mapping[torch.dtype, Sequence[int]]
"""Elements of each flat buffer that a unit needs, by dtype."""

_ALIGNMENT = 256  # elements, where buffers in a slot begin; vectorised kernels and collectives want 16 bytes or more


class BufferOccupant(Protocol):
    """What may lie in a ``BufferSlot``: a unit."""

    @property
    def name(self) -> str: ...

    @property
    def busy(self) -> bool:
        """Whether its memory is not to be used for gathering another one ahead."""
        ...

    def evict(self, by: str) -> None:
        """Give the memory back to ``by``, or raise if that cannot be."""
        ...


class GradBufferOccupant(Protocol):
    """What may lie in a ``GradBufferSlot``: the gradients of a group."""

    @property
    def has_unreduced(self) -> bool: ...

    def finish_reduce(self) -> None: ...


class BufferSlot:
    """Memory for what is gathered of one unit at a time."""

    def __init__(self, numels: Mapping[torch.dtype, int], device: torch.device, memory: RegisteredMemory) -> None:
        with memory.allocating():
            self._flat = {dtype: torch.zeros(numel, dtype=dtype, device=device) for dtype, numel in numels.items()}
        self._owner: BufferOccupant | None = None

    def views(self, needs: Needs) -> dict[torch.dtype, list[torch.Tensor]]:
        """Views [numel] for the buffers of one unit, behind each other."""
        views = {}
        for dtype, numels in needs.items():
            ends = [sum(map(_aligned, numels[: index + 1])) for index in range(len(numels))]
            views[dtype] = [self._flat[dtype][end - _aligned(numel) :][:numel] for end, numel in zip(ends, numels, strict=True)]
        return views

    def is_free_for(self, unit: BufferOccupant) -> bool:
        """Whether the unit can be gathered ahead; ranks that call units alike agree upon it."""
        return self._owner is None or self._owner is unit or not self._owner.busy

    def claim(self, unit: BufferOccupant) -> None:
        """The unit is about to be gathered: another one that still lies here is evicted."""
        if self._owner is not None and self._owner is not unit:
            self._owner.evict(unit.name)
        self._owner = unit


class GradBufferSlot:
    """Memory for the whole gradients of one unit at a time."""

    def __init__(self, numels: Mapping[torch.dtype, int], device: torch.device, memory: RegisteredMemory) -> None:
        self._slot = BufferSlot(numels, device, memory)
        self._owner: int | None = None
        self._occupants: dict[int, list[GradBufferOccupant]] = {}

    def views(self, unit: int, needs: Needs) -> "dict[torch.dtype, list[GradBufferView]]":
        """A view for each buffer of one unit."""
        return {dtype: [GradBufferView(self, unit, flat) for flat in views] for dtype, views in self._slot.views(needs).items()}

    def join(self, unit: int, gradients: GradBufferOccupant) -> None:
        self._occupants.setdefault(unit, []).append(gradients)

    def claim(self, unit: int) -> bool:
        """Whether the unit may write here: nobody does, or what is here can be waited for."""
        if self._owner is not None and self._owner != unit:
            if any(each.has_unreduced for each in self._occupants[self._owner]):
                return False
            for each in self._occupants[self._owner]:
                each.finish_reduce()
        self._owner = unit
        return True


class GradBufferView:
    """The place of one flat buffer in a slot."""

    def __init__(self, slot: GradBufferSlot, unit: int, flat: torch.Tensor) -> None:
        self._slot, self._unit, self._flat = slot, unit, flat

    def join(self, gradients: GradBufferOccupant) -> None:
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
        self._slots = [BufferSlot(slots[0], device, memory) for _ in range(2)]
        self._gradient_slots = [GradBufferSlot(slots[1], device, memory) for _ in range(2)]

    def slot(self, unit: int) -> BufferSlot:
        return self._slots[unit % 2]

    def gathered(self, unit: int) -> dict[torch.dtype, list[torch.Tensor]]:
        """Memory for the gathered buffers of a unit, in the order of its needs."""
        return self.slot(unit).views(self._gathered[unit])

    def gradients(self, unit: int) -> dict[torch.dtype, list[GradBufferView]]:
        """Memory for its whole gradients, likewise."""
        return self._gradient_slots[unit % 2].views(unit, self._gradients[unit])


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
