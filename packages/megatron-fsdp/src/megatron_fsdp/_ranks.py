# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that hold shards or replicas of one model, and the collectives over them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp._policy import Strategy

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

# The functional operators exist under one name from torch 2.11 on and are asynchronous: `wait` ends them.
_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Ranks:
    """A process group as seen from one of its ranks; a group of one needs no communicator."""

    size: int = 1
    rank: int = 0
    pg: dist.ProcessGroup | None = field(default=None, repr=False)
    name: str = ""

    @classmethod
    def of(cls, pg: dist.ProcessGroup) -> "Ranks":
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg, pg.group_name)

    def gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Start filling ``full`` [size * n] with every rank's ``shard`` [n]; ``wait`` ends it."""
        # Only this form is safe on gloo: of the one that allocates, its threads store a long name without a lock and free memory twice.
        return _c10d.all_gather_into_tensor_out(shard, self.size, self.name, out=full)

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        """Start summing ``full`` [size * n] over ranks into this rank's slice [n]; ``wait`` ends it."""
        return _c10d.reduce_scatter_tensor(full, "sum", self.size, self.name)

    def start_all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Start reducing ``x`` over ranks; ``wait`` ends it."""
        return _c10d.all_reduce(x, op, self.name)

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce over ranks and wait."""
        return x if self.size == 1 else wait(self.start_all_reduce(x, op))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate equal shapes over ranks along dimension 0 and wait."""
        if self.size == 1:
            return x
        return wait(self.gather_into(x.new_empty((self.size * x.shape[0], *x.shape[1:])), x.contiguous()))

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x`` by the first rank's."""
        if self.size > 1:
            dist.broadcast(x, group=self.pg, group_src=0)


def wait(x: torch.Tensor) -> torch.Tensor:
    """End what fills ``x``; nothing to do when it is already there."""
    return _c10d.wait_tensor(x)


@dataclass(frozen=True)
class Topology:
    """How the ranks of one model split: ``shards`` cut each buffer, ``replicas`` hold equal copies of the cut."""

    shards: Ranks
    replicas: tuple[Ranks, ...]
    mesh: DeviceMesh | None
    placements: "tuple[Placement, ...]"

    @property
    def size(self) -> int:
        """Ranks over which gradients are reduced."""
        size = self.shards.size
        for ranks in self.replicas:
            size *= ranks.size
        return size

    @property
    def all_ranks(self) -> tuple[Ranks, ...]:
        return (self.shards, *self.replicas)

    def replicated(self) -> "Topology":
        """The same ranks, all of them replicas."""
        if self.mesh is None:
            return self
        from torch.distributed.tensor import Replicate

        replicas = tuple(ranks for ranks in self.all_ranks if ranks.size > 1)
        return Topology(Ranks(), replicas, self.mesh, tuple(Replicate() for _ in self.placements))

    @classmethod
    def build(cls, strategy: Strategy, device: torch.device, mesh: DeviceMesh | None, pg: dist.ProcessGroup | None) -> "Topology":
        """Read the mesh or group that the caller gave; with neither, the default group, or one rank without any.

        Raises:
            ValueError: both a mesh and a group, or a mesh of more than two axes.
        """
        if mesh is not None and pg is not None:
            raise ValueError("device_mesh and process_group are both given; pass one of them")
        if mesh is None:
            if pg is None and not dist.is_initialized():
                return cls(Ranks(), (), None, ())
            mesh = DeviceMesh.from_group(pg if pg is not None else dist.group.WORLD, device.type)  # type: ignore[arg-type]
        if mesh.ndim > 2:
            raise ValueError(
                f"device_mesh has axes {mesh.mesh_dim_names or mesh.ndim}; pass the data axes only: (shard,) or (replicate, shard)"
            )
        axes = [Ranks.of(mesh.get_group(axis)) for axis in range(mesh.ndim)]
        if strategy is Strategy.no_shard:
            # Nothing is divided, so plain tensors say it all, and step faster than DTensors.
            return cls(Ranks(), tuple(ranks for ranks in axes if ranks.size > 1), None, ())
        # Slow to import, so only where DTensors are made.
        from torch.distributed.tensor import Replicate, Shard

        return cls(axes[-1], tuple(axes[:-1]), mesh, (*(Replicate() for _ in axes[:-1]), Shard(0)))
