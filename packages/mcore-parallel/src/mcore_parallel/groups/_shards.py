# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What part of which global parameter a rank holds, declared once by the layer that owns it."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from mcore_parallel.groups._groups import Group, ProcessGroups

__all__ = ["NamedBuffer", "NamedShard", "Piece", "ShardSpec", "ShardedModule", "boxes", "named_buffer_shards", "named_shards"]


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
    of the tokens); the data axes are always summed and are not named here. "embd" is the one across pipeline stages: the
    first and the last one hold a copy each."""

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
        """Number of this copy among the ranks that hold the same part: those of its pipeline stage, and of both ends of the pipeline
        if it is partial over "embd"; 0 is the one that counts."""
        axes = ("tp", "ep", "dp") if self.view == "expert" else ("tp", "cp", "dp")
        number = self.pipeline_copy(groups)
        for axis in axes:
            if axis not in self.shards:
                group = groups.axis(self.view, axis)
                number = number * group.size + group.rank
        return number

    def pipeline_copy(self, groups: ProcessGroups) -> int:
        """1 for the copy of the last stage of a parameter that both ends of the pipeline hold, else 0."""
        return groups.embd.rank if "embd" in self.partial and groups.embd is not None else 0


@runtime_checkable
class ShardedModule(Protocol):
    """A module that owns parameters or persistent buffers and says where they lie."""

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        """Specs of what this module owns directly, by local name."""
        ...


@dataclass(frozen=True)
class NamedShard:
    """One parameter of a model with its global name and placement."""

    name: str
    parameter: nn.Parameter
    spec: ShardSpec


@dataclass(frozen=True)
class NamedBuffer:
    """One persistent buffer of a model with its global name and placement: saved and sent like a parameter, and not trained."""

    name: str
    tensor: Tensor
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
        own, buffers = dict(module.named_parameters(recurse=False, remove_duplicate=False)), _persistent_buffers(module)
        specs = module.shard_specs() if isinstance(module, ShardedModule) else {}
        if unknown := set(specs) - set(own) - set(buffers):
            raise ValueError(f"{type(module).__name__} at {prefix!r} declares placements of {sorted(unknown)}, which it does not own")
        for name, parameter in own.items():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            spec = specs.get(name) or ShardSpec(shape=tuple(parameter.shape))
            yield NamedShard(f"{prefix}.{name}" if prefix else name, parameter, spec)


def named_buffer_shards(model: nn.Module) -> Iterator[NamedBuffer]:
    """Every persistent buffer of ``model`` with its placement; one whose owner declares nothing is replicated in the dense view."""
    for prefix, module in model.named_modules():
        buffers = _persistent_buffers(module)
        specs = module.shard_specs() if buffers and isinstance(module, ShardedModule) else {}
        for name, tensor in buffers.items():
            spec = specs.get(name) or ShardSpec(shape=tuple(tensor.shape))
            yield NamedBuffer(f"{prefix}.{name}" if prefix else name, tensor, spec)


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in module.named_buffers(recurse=False) if name not in module._non_persistent_buffers_set}


@dataclass(frozen=True, eq=False)
class Piece:
    """A flat range of one parameter with its gradient; together the pieces of all ranks cover every parameter.

    Example:
        >>> boxes((2, 3, 4), 8, 16)  # rows 2 of the first matrix and 0 of the second one
        [((0, 2, 0), (1, 1, 4)), ((1, 0, 0), (1, 1, 4))]
    """

    name: str
    """Of the parameter."""
    spec: ShardSpec
    start: int
    """In the flattened parameter of this rank."""
    end: int
    parameter: Tensor
    """[end - start] view of the model's parameter."""
    gradient: Tensor
    """[end - start] view of the main gradient; complete after ``finish_grad_sync``."""
    shape: tuple[int, ...]
    """Of the whole parameter as this rank holds it."""
    data_group: Group
    """Replicas of the parameter."""
    instance: int | None = None
    """Number of this copy of the slice among the optimizer instances; None when every replica holds the parameter whole."""
    factor: float = 1.0
    """What the gradient must be multiplied by to be the sum over the replicas."""

    @property
    def is_whole(self) -> bool:
        return self.instance is None


def boxes(shape: Sequence[int], start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The flat range [start, end) of a row-major tensor as (offset, size) boxes in order; each is contiguous, 2 ndim - 1 at most."""
    if start >= end:
        return []
    if len(shape) <= 1:
        return [((start,), (end - start,))] if shape else [((), ())]
    inner = math.prod(shape[1:])
    head, whole = -(-start // inner), end // inner
    if head > whole:
        return _inside(shape, start // inner, start, end)
    pieces = _inside(shape, head - 1, start, head * inner)
    if whole > head:
        pieces.append(((head, *(0 for _ in shape[1:])), (whole - head, *shape[1:])))
    return pieces + _inside(shape, whole, whole * inner, end)


def _inside(shape: Sequence[int], index: int, start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes of a range that lies within one index of the first dim."""
    begin = index * math.prod(shape[1:])
    return [((index, *offset), (1, *size)) for offset, size in boxes(shape[1:], start - begin, end - begin)]
