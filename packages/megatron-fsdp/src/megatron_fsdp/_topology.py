# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How the ranks of one model split: which axes of a mesh cut parameters, which hold copies, which belong to the module itself."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp._collectives import Ranks
from megatron_fsdp._policy import Strategy

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# Of axes that cannot be meant where two unnamed data axes are read by their order.
_MODEL_AXES = frozenset({"tp", "etp", "ep", "cp", "pp"})


@dataclass(frozen=True)
class Topology:
    """The ranks of the dense parameters, or of the experts.

    ``shards`` cut each buffer, ``outer`` cuts main parameters and optimizer state of each shard again, ``replicas`` hold equal copies.
    """

    shards: Ranks = field(default_factory=Ranks)
    outer: Ranks = field(default_factory=Ranks)
    replicas: tuple[Ranks, ...] = ()
    mesh: DeviceMesh | None = None
    """Of the DTensors; None makes plain tensors."""
    shard_axis: int | None = None
    """Axis of the mesh that ``shards`` lie on; None where nothing is cut."""
    outer_axis: int | None = None
    """Axis of the mesh that ``outer`` lies on; None where it cuts nothing."""
    model_axes: Mapping[str, int] = field(default_factory=dict)
    """Name -> axis of the mesh, of those over which the module itself is divided or computes alike."""

    @property
    def size(self) -> int:
        """Ranks over which gradients are reduced."""
        size = self.num_shards
        for ranks in self.replicas:
            size *= ranks.size
        return size

    @property
    def num_shards(self) -> int:
        """Parts that main parameters are cut into."""
        return self.shards.size * self.outer.size

    @property
    def shard(self) -> int:
        """Which of these parts is this rank's; the parts of one gathered shard lie beside each other."""
        return self.shards.rank * self.outer.size + self.outer.rank

    @property
    def all_ranks(self) -> tuple[Ranks, ...]:
        return (self.shards, self.outer, *self.replicas)

    @property
    def replica(self) -> int:
        """Number of this copy among the ranks that hold the same part."""
        number = 0
        for ranks in self.replicas:
            number = number * ranks.size + ranks.rank
        return number

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank of the mesh, along all its axes."""
        return self.mesh is None or not any(self.mesh.get_coordinate() or ())

    def replicated(self) -> "Topology":
        """The same ranks, all of them replicas."""
        replicas = tuple(ranks for ranks in self.all_ranks if ranks.size > 1)
        return replace(self, shards=Ranks(), outer=Ranks(), replicas=replicas, shard_axis=None, outer_axis=None)

    def plain(self) -> "Topology":
        """Without a mesh: nothing is divided and plain tensors say it all, which step faster than DTensors."""
        return self if self.model_axes else replace(self, mesh=None)

    def apart_from(self, names: Set[str], device: torch.device) -> "Topology":
        """The same ranks, none of them over a communicator that has one of these names."""

        def apart(ranks: Ranks) -> Ranks:
            return ranks.apart(device) if ranks.size > 1 and ranks.name in names else ranks

        replicas = tuple(apart(ranks) for ranks in self.replicas)
        return replace(self, shards=apart(self.shards), outer=apart(self.outer), replicas=replicas)

    def model_ranks(self, axis: str) -> Ranks:
        """The ranks along a model axis."""
        assert self.mesh is not None, "model axes are axes of a mesh"
        return Ranks.of(self.mesh.get_group(self.model_axes[axis]))

    def placements(self, ndim: int, model: Mapping[str, int]) -> "tuple[Placement, ...]":
        """Placements on the mesh of a parameter with ``ndim`` dimensions whose module is divided as ``model`` (axis -> dim) says.

        The module's own cuts come first, then those of ``shards``, then those of ``outer``; torch reads a mesh from left to right, so a
        cut on the left of an earlier one is strided.
        """
        assert self.mesh is not None, "placements are those of a mesh"
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.placement_types import _StridedShard

        # Axis -> (dim, turn).
        cuts = {self.model_axes[name]: (dim, 0) for name, dim in model.items()}
        for axis, turn in ((self.shard_axis, 1), (self.outer_axis, 2)):
            if axis is not None and ndim:
                cuts[axis] = (0, turn)
        placements: list[Placement] = []
        for axis in range(self.mesh.ndim):
            if axis not in cuts:
                placements.append(Replicate())
                continue
            dim, turn = cuts[axis]
            factor = 1
            for later in range(axis + 1, self.mesh.ndim):
                if later in cuts and cuts[later][0] == dim and cuts[later][1] < turn:
                    factor *= self.mesh.size(later)
            placements.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
        return tuple(placements)


@dataclass(frozen=True, kw_only=True)
class MeshAxes:
    """Which axes of a mesh are for data, by name; the others belong to the module."""

    shard: str | None = None
    """Cuts buffers; None reads a mesh of one axis, or of two as (replicate, shard)."""
    outer: str | None = None
    """Holds copies of the shards."""
    outer_strategy: Strategy = Strategy.no_shard
    """``optim`` lets ``outer`` cut main parameters and optimizer state."""

    def __post_init__(self) -> None:
        if self.outer is not None and self.shard is None:
            raise ValueError(f"dp_outer_dim={self.outer!r} needs dp_shard_dim; name the axis that shards")

    def topology(self, field_name: str, device: torch.device, mesh: DeviceMesh | None, pg: dist.ProcessGroup | None) -> Topology:
        """Read the mesh or group that the caller gave; with neither, the default group, or one rank without any.

        Raises:
            TypeError: something else than a mesh.
            ValueError: both a mesh and a group, axes that the mesh lacks, axes that are not named, or an outer strategy without an axis.
        """
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise TypeError(f"{field_name} is a {type(mesh).__name__}; make a mesh by torch.distributed.device_mesh.init_device_mesh")
        if mesh is not None and pg is not None:
            raise ValueError(f"{field_name} and process_group are both given; pass one of them")
        if mesh is None:
            if self.shard is not None:
                raise ValueError(f"dp_shard_dim={self.shard!r} names an axis of {field_name}, which is not given; pass the mesh")
            if self.outer_strategy:
                raise ValueError(f"outer_dp_sharding_strategy='optim' needs {field_name} with an axis dp_outer_dim")
            if pg is None and not dist.is_initialized():
                return Topology()
            mesh = DeviceMesh.from_group(pg if pg is not None else dist.group.WORLD, device.type)  # type: ignore[arg-type]
        names = mesh.mesh_dim_names or ()
        shard, outer = self._positions(field_name, mesh, names)
        model = {name: axis for axis, name in enumerate(names) if axis not in (shard, outer)}
        groups = [Ranks.of(mesh.get_group(axis)) for axis in range(mesh.ndim)]
        if outer is None:
            if self.outer_strategy:
                raise ValueError(f"outer_dp_sharding_strategy='optim' needs a second data axis in {field_name}; name it by dp_outer_dim")
            return Topology(groups[shard], mesh=mesh, shard_axis=shard, model_axes=model)
        if self.outer_strategy:
            return Topology(groups[shard], groups[outer], mesh=mesh, shard_axis=shard, outer_axis=outer, model_axes=model)
        replicas = (groups[outer],) if groups[outer].size > 1 else ()
        return Topology(groups[shard], replicas=replicas, mesh=mesh, shard_axis=shard, model_axes=model)

    def _positions(self, field_name: str, mesh: DeviceMesh, names: tuple[str, ...]) -> tuple[int, int | None]:
        if self.shard is None:
            if mesh.ndim > 2 or _MODEL_AXES & set(names):
                raise ValueError(
                    f"{field_name} has axes {names or mesh.ndim}; name the data axes by dp_shard_dim and dp_outer_dim, the others "
                    "belong to the module"
                )
            return mesh.ndim - 1, 0 if mesh.ndim == 2 else None
        for argument, name in (("dp_shard_dim", self.shard), ("dp_outer_dim", self.outer)):
            if name is not None and name not in names:
                raise ValueError(f"{argument}={name!r} is no axis of {field_name}, whose axes are {names}; name one of them")
        if self.outer == self.shard:
            raise ValueError(f"dp_outer_dim and dp_shard_dim are both {self.shard!r}; name two axes")
        return names.index(self.shard), None if self.outer is None else names.index(self.outer)
