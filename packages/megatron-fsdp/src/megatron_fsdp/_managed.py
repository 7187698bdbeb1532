# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One parameter of a unit in its two forms, sharded and whole."""

import weakref

from torch import nn

from megatron_fsdp._uneven import Place
from megatron_fsdp._units import ParameterSite


class ManagedParameter:
    """One parameter in its two forms; exactly one of them is registered in the module at a time."""

    def __init__(self, site: ParameterSite, place: Place, sharded: nn.Parameter, full: nn.Parameter) -> None:
        self.names = site.names
        # Weak, or the whole parameter would stay as long as its shard.
        self._original = weakref.ref(site.parameter)
        self.place = place
        self.sharded = sharded
        """What the optimizer steps: this rank's rows in the main dtype, a DTensor when there are ranks."""
        self.full = full
        """What forward and backward use: a view of the gathered buffer in the compute dtype."""
        self._slots = site.slots

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def original(self) -> nn.Parameter | None:
        """The module's own parameter, as long as somebody (an optimizer) holds it."""
        return self._original()

    def register(self, *, full: bool) -> None:
        """Put the whole or the sharded form into the module tree.

        Raises:
            RuntimeError: somebody else put another parameter there.
        """
        for name, (module, attribute) in zip(self.names, self._slots, strict=False):
            found = module._parameters.get(attribute)
            if full and found is not self.sharded and found is not self.full:
                raise RuntimeError(
                    f"{name!r} was bound to another parameter after fully_shard, where it would be neither sharded nor summed over ranks; "
                    "tie, replace or add parameters before"
                )
        if full and self.full.requires_grad != self.sharded.requires_grad:
            self.full.requires_grad_(self.sharded.requires_grad)
        parameter = self.full if full else self.sharded
        for module, attribute in self._slots:
            module._parameters[attribute] = parameter
