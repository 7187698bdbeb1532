# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""DTensors whose rows are divided unevenly, as a flat layout divides them.

Torch's own arithmetic assumes even chunks, so the true place of the local rows travels with each tensor that leaves the
wheel (``ShardTensor``): through copies and arithmetic, to torch's checkpoint planner, and to ``full_tensor``.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from megatron_fsdp._dtensor import dtensor_of, spec_of
from megatron_fsdp._layout import FlatLayout, Segment, Shape
from megatron_fsdp._placement import ModelPart
from megatron_fsdp._ranks import Ranks
from megatron_fsdp._topology import Topology

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


@dataclass(frozen=True)
class Place:
    """Where a parameter lies among ranks; knows how to wrap, gather and cut it."""

    segment: Segment
    """In the module's own shape."""
    layout: FlatLayout
    topology: Topology
    part: ModelPart
    """Of the global tensor that the module's own is."""

    @property
    def rows(self) -> tuple[int, int]:
        """This rank's rows."""
        return self.segment.rows(self.topology.shard, self.layout.shard_numel)

    @property
    def shape(self) -> Shape:
        """Shape of the wrapped tensor: the global one."""
        return self.part.shape

    @property
    def local_shape(self) -> Shape:
        """Shape of a local tensor: [rows, *row shape]; the module's own shape when nothing is divided."""
        if self.layout.num_shards == 1:
            return self.segment.shape
        first, last = self.rows
        return (last - first, *self.segment.row_shape)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds all of the global tensor or none of it."""
        if self.part.cuts:
            return False
        shares = [self.segment.rows(shard, self.layout.shard_numel) for shard in range(self.layout.num_shards)]
        return sum(last > first for first, last in shares) <= 1

    def boxes(self) -> Iterator[tuple[Shape, Shape, torch.Size]]:
        """Blocks (offsets in the module's tensor, sizes, first element and count in the local one) that cover this rank's rows."""
        start = 0
        for offsets, sizes in self.segment.boxes(*self.rows):
            numel = torch.Size(sizes).numel()
            yield offsets, sizes, torch.Size((start, numel))
            start += numel

    def global_boxes(self) -> Iterator[tuple[Shape, Shape, torch.Size]]:
        """``boxes`` with offsets in the global tensor."""
        for offsets, sizes, within in self.boxes():
            yield tuple(base + offset for base, offset in zip(self.part.offset, offsets, strict=True)), sizes, within

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """A tensor of the parameter's shape around this rank's rows; plain when there is no mesh."""
        local = local.view(self.local_shape)
        if self.topology.mesh is None:
            return local
        if local.dtype not in self._specs:
            self._specs[local.dtype] = spec_of(self.topology.mesh, self._placements, torch.Size(self.shape), local.dtype)
        spec = self._specs[local.dtype]
        if not self._is_cut:
            return dtensor_of(local, spec)
        from megatron_fsdp._shard_tensor import ShardTensor

        return ShardTensor.of(local, spec, self)

    @functools.cached_property
    def _specs(self) -> "dict[torch.dtype, DTensorSpec]":
        return {}

    @property
    def _placements(self) -> "tuple[Placement, ...]":
        return self.topology.placements(len(self.shape), dict(self.part.cuts))

    @property
    def _is_cut(self) -> bool:
        return self.layout.num_shards > 1 or bool(self.part.cuts)

    def rows_of(self, name: str, tensor: "DTensor") -> torch.Tensor:
        """This rank's rows of a DTensor that holds the parameter, however it is divided. A collective.

        Raises:
            ValueError: on every rank, if the tensor has another shape, or lies otherwise than its placements say.
        """
        if place_of(tensor) == self:
            return tensor.to_local()
        _check(name, tensor, self.shape)
        return self.cut(tensor.full_tensor())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Place":
        # It never changes, and process groups cannot be copied.
        return self

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """The whole global parameter from every rank's rows, on every rank. A collective."""
        topology, row = self.topology, self.segment.row_numel
        if topology.mesh is not None:
            # What lies in the memory of the host is gathered where the ranks communicate.
            local = local.to(topology.mesh.device_type)
        counts = [
            last - first for first, last in (self.segment.rows(shard, self.layout.shard_numel) for shard in range(topology.num_shards))
        ]
        if topology.num_shards == 1:
            return self.part.gather(local.detach().clone().view(self.segment.shape), topology)
        most = max(counts) * row
        padded = local.new_zeros(most)
        padded[: local.numel()] = local.detach().reshape(-1)
        gathered = topology.shards.all_gather(topology.outer.all_gather(padded)).view(topology.num_shards, most)
        parts = [gathered[shard, : count * row] for shard, count in enumerate(counts)]
        return self.part.gather(torch.cat(parts).view(self.segment.shape), topology)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole global tensor."""
        return self.cut_own(full[self.part.slices])

    def cut_own(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor that is as the module's own parameter."""
        first, last = self.rows
        row = self.segment.row_numel
        return whole.reshape(-1)[first * row : last * row].view(self.local_shape)


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where the rows of a tensor lie that this package has cut."""
    place = vars(tensor).get("place")
    return place if isinstance(place, Place) else None


def _check(name: str, tensor: "DTensor", shape: Shape) -> None:
    """Refuse, on every rank, a DTensor that torch would take for another one: whose part on some rank is not an even chunk."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name!r} has shape {tuple(tensor.shape)} in the state dict and {shape} in the module")
    if place_of(tensor) is not None:
        return
    mesh, local = tensor.device_mesh, tensor.to_local()
    expected, _ = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    wrong = torch.tensor(int(tuple(local.shape) != tuple(expected)), dtype=torch.int32, device=mesh.device_type)
    for axis in range(mesh.ndim):
        wrong = Ranks.of(mesh.get_group(axis)).all_reduce(wrong, "max")
    if wrong.item():
        raise ValueError(
            f"{name!r} is a DTensor whose parts are no even chunks, so that its rows cannot be known; "
            "load the entries of state_dict() themselves, copies of them, or whole tensors"
        )
