# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""DTensors whose rows are divided unevenly, as a flat layout divides them.

Torch's own arithmetic assumes even chunks, so the true place of the local rows travels with each tensor that leaves the
wheel: to torch's checkpoint planner, and to ``full_tensor``, which would else be wrong without a word.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from megatron_fsdp._dtensor import as_dtensor, dtensor_of, spec_of
from megatron_fsdp._layout import FlatLayout, Segment, Shape
from megatron_fsdp._placement import ModelPart
from megatron_fsdp._topology import Topology

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
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
        return self.mark(dtensor_of(local, self._specs[local.dtype]))

    @functools.cached_property
    def _specs(self) -> "dict[torch.dtype, DTensorSpec]":
        return {}

    @property
    def _placements(self) -> "tuple[Placement, ...]":
        return self.topology.placements(len(self.shape), dict(self.part.cuts))

    @property
    def _is_marked(self) -> bool:
        return self.layout.num_shards > 1 or bool(self.part.cuts)

    def parameter(self, local: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """The wrapped rows as a parameter."""
        parameter = nn.Parameter(self.wrap(local), requires_grad=requires_grad)
        dtensor = as_dtensor(parameter)
        if dtensor is not None:
            self.mark(dtensor)
        return parameter

    def mark(self, tensor: "DTensor") -> "DTensor":
        """Tell the tensor where its rows are, unless torch's arithmetic finds them."""
        if self._is_marked:
            local: Any = tensor._local_tensor
            local.__create_write_items__ = _Method(_write_items, self, local)
            local.__create_chunk_list__ = _Method(_chunks, self, local)
            local.__get_tensor_shard__ = _Method(_box, self, local)
            tensor.full_tensor = _Method(_full_tensor, self, tensor)
        return tensor

    def holds(self, tensor: "DTensor") -> bool:
        """Whether the tensor is divided exactly so; every rank gives one answer."""
        marked = _mark_of(tensor)
        return self._is_marked and marked is not None and marked.place == self

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


class _Method:
    """A function of one tensor and its place, as an attribute of the tensor; a copy of the tensor has one of its own."""

    def __init__(self, function: Callable[..., Any], place: Place, tensor: torch.Tensor | None) -> None:
        self._function, self.place = function, place
        # Weak, because a tensor in a reference cycle keeps its memory until the next garbage collection.
        self._tensor = None if tensor is None else weakref.ref(tensor)

    def __call__(self, *args: Any, **_: Any) -> Any:
        if self._tensor is None:
            raise RuntimeError("a shard copied by copy.deepcopy can be loaded by load_state_dict only; take state_dict() again")
        tensor = self._tensor()
        assert tensor is not None, "the method of a tensor outlived it"
        return self._function(self.place, tensor, *args)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Method":
        # Places know process groups, which cannot be copied. Torch's checkpointer notes the copy of a tensor before its attributes.
        tensor = None if self._tensor is None else self._tensor()
        return _Method(self._function, self.place, memo.get(id(tensor)))

    def __reduce__(self) -> Any:
        raise TypeError(
            "a shard knows its ranks and cannot be pickled; save it by torch.distributed.checkpoint or mcore_ckpt, "
            "or save the whole tensors of full_state_dict()"
        )


def _mark_of(tensor: torch.Tensor) -> _Method | None:
    found = vars(tensor).get("full_tensor")
    return found if isinstance(found, _Method) else None


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a part that this package has cut."""
    return _mark_of(tensor) is not None


def _chunks(place: Place, _: object) -> "list[ChunkStorageMetadata]":
    # Torch's checkpoint package is slow to import, and loaded by whoever calls this.
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)) for offsets, sizes, _ in place.global_boxes()]


def _write_items(place: Place, local: torch.Tensor, fqn: str, _: object) -> "list[WriteItem]":
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(local)
    size = torch.Size(place.shape)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=size),
        )
        for chunk in _chunks(place, local)
    ]


def _box(place: Place, local: torch.Tensor, index: "MetadataIndex") -> torch.Tensor:
    for offsets, sizes, (start, numel) in place.global_boxes():
        if index.offset is None or tuple(index.offset) == offsets:
            return local.detach().view(-1)[start : start + numel].view(sizes)
    raise ValueError(f"{index.fqn!r} has no block at {index.offset} on this rank")


def _full_tensor(place: Place, tensor: "DTensor") -> torch.Tensor:
    return place.gather(tensor.to_local())
