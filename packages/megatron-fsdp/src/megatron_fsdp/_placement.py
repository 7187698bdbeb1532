# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which part of a global tensor the module's own parameter is, under tensor or expert parallelism."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from megatron_fsdp._dtensor import as_dtensor
from megatron_fsdp._layout import Shape
from megatron_fsdp._topology import Topology

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Placements = Mapping[str, int | Mapping[str, int]]
"""Pattern for parameter names -> {mesh axis: tensor dim}, or the dim alone for the axis ``tp_dim``."""


@dataclass(frozen=True)
class ModelPart:
    """One block of a global tensor; ``cuts`` says which axis of the mesh divides which of its dims."""

    shape: Shape
    """Of the global tensor."""
    offset: Shape
    """Where the block begins in it."""
    local_shape: Shape
    cuts: tuple[tuple[str, int], ...] = ()
    """(axis, dim), one axis a dim; a dim is cut as ``torch.chunk`` does."""

    @classmethod
    def whole(cls, shape: Shape) -> "ModelPart":
        return cls(shape, tuple(0 for _ in shape), shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index that cuts the block out of the global tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.offset, self.local_shape, strict=True))

    def gather(self, local: torch.Tensor, topology: Topology) -> torch.Tensor:
        """The global tensor from the blocks of all ranks. A collective over the axes of ``cuts``."""
        for axis, dim in self.cuts:
            ranks = topology.model_ranks(axis)
            if ranks.size == 1:
                continue
            chunk = -(-self.shape[dim] // ranks.size)
            rows = local.movedim(dim, 0)
            padded = rows.new_zeros((chunk, *rows.shape[1:]))
            padded[: rows.shape[0]] = rows
            # Chunks are full up to the last that is not, so that what pads them gathers at the end.
            local = ranks.all_gather(padded)[: self.shape[dim]].movedim(0, dim)
        return local.contiguous()


def model_part(name: str, parameter: nn.Parameter, cuts: Mapping[str, int] | None, topology: Topology) -> ModelPart:
    """The part that a parameter is: as its DTensor says, or as the caller does.

    Args:
        name: of the parameter, for messages.
        parameter: of the module.
        cuts: axis -> dim, from the caller; None if it said nothing.
        topology: where the axes are.

    Raises:
        ValueError: an axis or dim that does not exist, two axes on one dim, a DTensor on another mesh or with partial sums.
    """
    dtensor = as_dtensor(parameter)
    if dtensor is not None:
        if cuts is not None:
            raise ValueError(f"placements name {name!r}, a DTensor, which has its own; leave it out")
        cuts = _dtensor_cuts(name, dtensor, topology)
    if cuts is None:
        return ModelPart.whole(tuple(parameter.shape))
    local = tuple(parameter.shape) if dtensor is None else tuple(dtensor.to_local().shape)
    shape, offset = list(local), [0] * len(local)
    for axis, dim in cuts.items():
        if axis not in topology.model_axes:
            raise ValueError(
                f"{name!r} is divided over axis {axis!r}, but the mesh of this parameter has model axes {sorted(topology.model_axes)}; "
                "pass a mesh with all axes"
            )
        if not 0 <= dim < len(local):
            raise ValueError(f"{name!r} is divided over {axis!r} along dim {dim}, but has {len(local)} dims; count from 0")
        if list(cuts.values()).count(dim) > 1:
            raise ValueError(f"{name!r} is divided along dim {dim} over {sorted(cuts)}; at most one axis a dim is supported")
        ranks = topology.model_ranks(axis)
        if dtensor is None:
            shape[dim], offset[dim] = local[dim] * ranks.size, local[dim] * ranks.rank
        else:
            shape[dim] = dtensor.shape[dim]
            offset[dim] = min(-(-shape[dim] // ranks.size) * ranks.rank, shape[dim])
    return ModelPart(tuple(shape), tuple(offset), local, tuple(cuts.items()))


def _dtensor_cuts(name: str, dtensor: "DTensor", topology: Topology) -> dict[str, int]:
    from torch.distributed.tensor import Replicate, Shard

    axes = dtensor.device_mesh.mesh_dim_names or ()
    if len(axes) != len(dtensor.placements):
        raise ValueError(f"{name!r} is a DTensor on a mesh without names; name its axes, and pass a device_mesh that has them too")
    cuts = {}
    for axis, placement in zip(axes, dtensor.placements, strict=True):
        if axis not in topology.model_axes:
            raise ValueError(
                f"{name!r} is a DTensor over mesh axis {axis!r}, but device_mesh has model axes {sorted(topology.model_axes)}; "
                "pass the whole mesh with dp_shard_dim"
            )
        if type(placement) is Shard:
            cuts[axis] = placement.dim
        elif not isinstance(placement, Replicate):
            raise ValueError(f"{name!r} has placement {placement} over {axis!r}; only Shard and Replicate can be sharded further")
    return cuts


def read_placements(placements: Placements, tp_dim: str | None, names: list[str]) -> dict[str, dict[str, int]]:
    """Axis -> dim of each parameter that a pattern matches; the first pattern wins.

    Raises:
        ValueError: a pattern matches nothing, or gives a bare dim without ``tp_dim``.
    """
    found: dict[str, dict[str, int]] = {}
    for pattern, value in placements.items():
        if isinstance(value, int) and tp_dim is None:
            raise ValueError(f"placements[{pattern!r}]={value} is a dim without an axis; set tp_dim, or write {{'tp': {value}}}")
        matched = fnmatch.filter(names, pattern)
        if not matched:
            raise ValueError(f"placements has {pattern!r}, which matches no parameter; there are {names[:5]}...")
        for name in matched:
            found.setdefault(name, dict(value) if isinstance(value, Mapping) else {str(tp_dim): value})
    return found
