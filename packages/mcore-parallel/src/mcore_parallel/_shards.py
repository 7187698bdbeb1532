# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What part of which global parameter a rank holds, declared once by the layer that owns it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import nn

from mcore_parallel._groups import ProcessGroups

__all__ = ["NamedShard", "ShardSpec", "ShardedModule", "named_shards"]


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Placement of one parameter.

    Example:
        A column-parallel weight [out, in], rows split over tp:

        >>> spec = ShardSpec(shape=(8, 4), shards={"tp": 0})
        >>> spec.view, spec.partial
        ('dense', ())
    """

    shape: tuple[int, ...]
    """Global shape, before any split."""
    view: str = "dense"
    """Which factorisation of the ranks applies: "dense" (axes tp cp dp pp) or "expert" (axes tp ep dp pp)."""
    shards: Mapping[str, int] = field(default_factory=dict)
    """axis -> dim cut evenly over it; on all other axes the parameter is replicated. One axis a dim."""
    partial: tuple[str, ...] = ()
    """Model axes over which each rank's gradient is a partial sum (for instance tp, of a norm that sees a share
    of the tokens); the data axes are always summed and are not named here."""

    def local_shape(self, groups: ProcessGroups) -> tuple[int, ...]:
        """Shape this rank holds.

        Raises:
            ValueError: an axis does not divide its dim.
        """
        shape = list(self.shape)
        for axis, dim in self.shards.items():
            size = groups.axis(self.view, axis).size
            if shape[dim] % size:
                raise ValueError(f"{axis}={size} must divide dim {dim} of shape {self.shape}; lower {axis}")
            shape[dim] //= size
        return tuple(shape)

    def offset(self, groups: ProcessGroups) -> tuple[int, ...]:
        """Where this rank's part begins in the global tensor."""
        local, start = self.local_shape(groups), [0] * len(self.shape)
        for axis, dim in self.shards.items():
            start[dim] = local[dim] * groups.axis(self.view, axis).rank
        return tuple(start)

    def slices(self, groups: ProcessGroups) -> tuple[slice, ...]:
        """Index that cuts this rank's part out of the global tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset(groups), self.local_shape(groups), strict=True))

    def replica(self, groups: ProcessGroups) -> int:
        """Number of this copy among the ranks of its pipeline stage that hold the same part; 0 is the one that counts."""
        axes = ("tp", "ep", "dp") if self.view == "expert" else ("tp", "cp", "dp")
        number = 0
        for axis in axes:
            if axis not in self.shards:
                group = groups.axis(self.view, axis)
                number = number * group.size + group.rank
        return number


@runtime_checkable
class ShardedModule(Protocol):
    """A module that owns parameters and says where they lie."""

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        """Specs of the parameters this module owns directly, by their local name."""
        ...


@dataclass(frozen=True)
class NamedShard:
    """One parameter of a model with its global name and placement."""

    name: str
    parameter: nn.Parameter
    spec: ShardSpec


def named_shards(model: nn.Module) -> Iterator[NamedShard]:
    """Every distinct parameter of ``model`` with its placement; the only reader of the placement tables.

    A parameter whose owner declares nothing is replicated in the dense view with a full gradient.
    A tied parameter appears once, under its first name.

    Raises:
        ValueError: a module declares a parameter it does not own.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        specs = module.shard_specs() if isinstance(module, ShardedModule) else {}
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        if unknown := set(specs) - set(own):
            raise ValueError(f"{type(module).__name__} at {prefix!r} declares placements of {sorted(unknown)}, which it does not own")
        for name, parameter in own.items():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            spec = specs.get(name) or ShardSpec(shape=tuple(parameter.shape))
            yield NamedShard(f"{prefix}.{name}" if prefix else name, parameter, spec)
