# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A parameter that is sharded: where it is used, where its rows lie among ranks, its two forms, its flat range on a rank."""

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp._collectives import Ranks
from megatron_fsdp._layout import FlatLayout, Segment, Shape
from megatron_fsdp._policy import KeepsFloat32
from megatron_fsdp._topology import Topology

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def as_dtensor(tensor: torch.Tensor) -> "DTensor | None":
    """The tensor if it is a DTensor; a plain one is told without the slow import."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor is its own."""
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.to_local()


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


@dataclass(frozen=True)
class ParameterSite:
    """One parameter and every place of the tree that refers to it."""

    parameter: nn.Parameter
    names: tuple[str, ...]
    """Qualified names; more than one when the parameter is tied."""
    slots: tuple[tuple[nn.Module, str], ...]
    """(module, attribute) of each name."""

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def in_float32(self) -> bool:
        """Whether a module that uses it keeps it in float32."""
        return any(isinstance(module, KeepsFloat32) and attribute in module.float32_parameters() for module, attribute in self.slots)

    @property
    def current(self) -> nn.Parameter:
        """What is registered now: the parameter, or what a module from the meta device got in its place."""
        module, attribute = self.slots[0]
        parameter = module._parameters[attribute]
        assert parameter is not None, "a plan holds parameters only"
        return parameter


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
        from megatron_fsdp._shard_tensor import ShardTensor, dtensor_of, spec_of

        if local.dtype not in self._specs:
            self._specs[local.dtype] = spec_of(self.topology.mesh, self._placements, torch.Size(self.shape), local.dtype)
        tensor = dtensor_of(local, self._specs[local.dtype])
        return ShardTensor.of(tensor, self) if self._is_cut else tensor

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
            registered = module._parameters.get(attribute)
            if full and registered is not self.sharded and registered is not self.full:
                raise RuntimeError(
                    f"{name!r} was bound to another parameter after fully_shard, where it would be neither sharded nor summed over ranks; "
                    "tie, replace or add parameters before"
                )
        if full and self.full.requires_grad != self.sharded.requires_grad:
            self.full.requires_grad_(self.sharded.requires_grad)
        parameter = self.full if full else self.sharded
        for module, attribute in self._slots:
            module._parameters[attribute] = parameter


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatShard:
    """A contiguous range of one flattened parameter; over the ranks that shard it, the ranges cover it once.

    Example:
        >>> shard = FlatShard(shape=(4, 3), start=6, end=12, boxes=(((2, 0), (2, 3)),), parameter=torch.ones(6), gradient=None, replica=0)
        >>> [(offset, tuple(view.shape)) for offset, view in shard.blocks(shard.parameter)]
        [((2, 0), (2, 3))]
    """

    shape: Shape
    """Of the whole parameter."""
    start: int
    """First element, in the flattened parameter."""
    end: int
    """Element after the last."""
    boxes: tuple[tuple[Shape, Shape], ...]
    """(offset, size) of the blocks of the parameter that cover the range, in memory order."""
    parameter: torch.Tensor
    """[end - start], of the main parameter."""
    gradient: torch.Tensor | None
    """[end - start], of the reduced gradient, complete after ``finish_grad_sync``; None for a frozen parameter."""
    replica: int
    """Number of this copy among the ranks that hold the same range."""

    def blocks(self, flat: torch.Tensor) -> list[tuple[Shape, torch.Tensor]]:
        """(offset, view) of each box in a tensor [end - start] that lies as this shard does."""
        blocks, at = [], 0
        for offset, size in self.boxes:
            numel = torch.Size(size).numel()
            blocks.append((offset, flat[at : at + numel].view(size)))
            at += numel
        return blocks
