# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How many adapters an engine holds, and beside which layers."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api

__all__ = ["LoraSlots"]

_TARGETS = ("down", "gate", "in_proj", "kv_down", "out", "out_proj", "q", "q_down", "q_up", "qkv", "up")
"""Linear layers of mixers and of plain feed-forwards."""
_USUAL = ("qkv", "out", "up", "down", "q", "q_down", "q_up", "kv_down")
_REFUSED = {"kv_up": "is absorbed into queries, which one product serves for all requests"}


@experimental_api
@dataclass(frozen=True, kw_only=True)
class LoraSlots:
    """Memory of an engine for adapters that requests choose from (``InferenceConfig.lora``).

    It is taken when the engine is made: ``max_loras * max_lora_rank * (in + out)`` numbers in the model's dtype for each linear layer
    [in -> out] of the targets. An adapter of a lower rank takes a whole slot.

    Raises:
        ValueError: a field is out of its range or of another type, or a target is none of the linear layers that can have adapters.

    Example:
        >>> LoraSlots(max_loras=8).total_rank
        128
    """

    max_loras: int = 4
    """Adapters that are loaded at the same time."""
    max_lora_rank: int = 16
    """Greatest rank of one."""
    targets: tuple[str, ...] | None = None
    """Linear layers that an adapter may change: the last parts of their names. Of attention "qkv", "gate" and "out", of latent attention
    "q", "q_down", "q_up", "kv_down" and "out", of recurrent mixers "in_proj" and "out_proj", of feed-forwards without experts "up" and
    "down". The model must have each of them. None for those of attention, but "gate", and of feed-forwards that it has."""

    def __post_init__(self) -> None:
        for name, most in (("max_loras", 2**10), ("max_lora_rank", 2**12)):
            object.__setattr__(self, name, as_integer(name, getattr(self, name), 1, most))
        if self.targets is None:
            return
        if isinstance(self.targets, str) or not isinstance(self.targets, Sequence):
            raise ValueError(f'targets={self.targets!r} is a {type(self.targets).__name__}; give names, such as ("qkv", "out")')
        object.__setattr__(self, "targets", tuple(self.targets))
        if not self.targets or any(self.targets.count(target) > 1 for target in self.targets):
            raise ValueError(f'targets={self.targets!r} must name at least one linear layer, each once, such as ("qkv", "out")')
        for target in self.targets:
            if isinstance(target, str) and target in _REFUSED:
                raise ValueError(f"targets={target!r} {_REFUSED[target]}; leave it out, or merge the adapter")
            if target not in _TARGETS:
                raise ValueError(f"targets={target!r} is no linear layer that can have adapters; choose from {', '.join(_TARGETS)}")

    @property
    def wanted(self) -> tuple[str, ...]:
        """``targets``; without them those that a model may have."""
        return _USUAL if self.targets is None else self.targets

    @property
    def total_rank(self) -> int:
        """Ranks of all slots together."""
        return self.max_loras * self.max_lora_rank
