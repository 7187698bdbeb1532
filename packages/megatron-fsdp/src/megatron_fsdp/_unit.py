# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A module that is gathered as one."""

from torch import nn

from megatron_fsdp._double_buffer import Slot
from megatron_fsdp._group import ParameterGroup


class Unit:
    """A module whose parameter groups are gathered together, in memory of its own or in a slot that it shares with other units."""

    def __init__(self, index: int, name: str, module: nn.Module, groups: list[ParameterGroup], slot: Slot | None = None) -> None:
        self.index, self.name, self.module, self.groups = index, name, module, groups
        self._slot = slot if any(group.reshards for group in groups) else None
        self.depth = 0
        """Calls in progress, above one when the module calls itself."""
        self.open_calls = 0
        """Calls of the current forward whose backward is not over."""
        self.reduced = False
        """Whether this backward has started its reduction."""
        self.gathered = False
        """Whether the whole parameters are registered and readable."""
        self.busy = False
        """Whether its slot is not to be used for gathering another unit ahead: from the start of its gather to the end of its turn."""
        self.evicted = False
        """Whether another unit took its slot before all its gradients were there."""
        self.kept = False
        """Whether it stays gathered after its forward, because the backward begins with it."""

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
        self.busy, self.evicted = True, False
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
            for group in self.groups:
                for parameter in group.parameters:
                    parameter.register(full=True)
            self.gathered = True

    def evict(self) -> None:
        """Leave the slot to another unit, in a backward perhaps before the last gradient."""
        self.evicted = self.gathered
        self.close()

    def close(self) -> None:
        """Register the sharded parameters and give gathered memory back."""
        self.kept = self.busy = False
        for group in self.groups:
            group.release()
        if self.gathered:
            self.gathered = False
            for group in self.groups:
                for parameter in group.parameters:
                    parameter.register(full=False)
