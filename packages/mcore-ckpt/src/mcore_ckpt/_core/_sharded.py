# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The part of a global tensor that this rank holds, from whatever describes it."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt.chunks import Box

__all__ = ["DeferredTensor", "ShardLike", "ShardedTensor", "as_parts", "as_sharded", "as_writable", "entries"]


@runtime_checkable
class ShardLike(Protocol):
    """What any object must offer to be saved or loaded as one part of a global tensor."""

    @property
    def data(self) -> Tensor: ...
    @property
    def global_shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> tuple[int, ...]: ...
    @property
    def replica(self) -> int: ...


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """One part of a global tensor, a box of it.

    Over all ranks, the parts with ``replica == 0`` cover the global tensor exactly once; a part that several ranks hold
    alike may have ``replica == 0`` on more than one of them. A part may be empty.

    Raises:
        ValueError: the part does not fit the global tensor.

    Example:
        Rows 4 and 5 of an [8, 3] weight:

        >>> ShardedTensor(torch.zeros(2, 3), global_shape=(8, 3), offset=(4, 0)).box
        Box(offset=(4, 0), shape=(2, 3))
    """

    data: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    replica: int = 0
    """Number of this copy among the ranks that hold the same part; the copies numbered 0 are the ones that must be complete."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(int(size) for size in self.global_shape))
        object.__setattr__(self, "offset", tuple(int(begin) for begin in self.offset))
        if not isinstance(self.data, Tensor):
            raise ValueError(f"data is {type(self.data).__name__}; it must be a tensor")
        if self.data.layout is not torch.strided or self.data.is_quantized or self.data.device.type == "meta":
            raise ValueError(f"data has layout {self.data.layout} on {self.data.device}; it must be a dense tensor with storage")
        if self.replica < 0:
            raise ValueError(f"replica={self.replica} must be at least 0")
        shape = tuple(self.data.shape)
        if len(self.global_shape) != len(shape) or len(self.offset) != len(shape):
            raise ValueError(f"data shape {shape}, global_shape={self.global_shape} and offset={self.offset} must have equally many dims")
        if not Box.whole(self.global_shape).contains(self.box):
            raise ValueError(f"data of shape {shape} at offset={self.offset} reaches outside global_shape={self.global_shape}")

    @property
    def box(self) -> Box:
        """Which indices of the global tensor this part is."""
        return Box(self.offset, tuple(self.data.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


@dataclass(frozen=True, eq=False)
class DeferredTensor:
    """A tensor, or a part of one, that is made when its turn to be written comes, so that a state of many needs the memory of one."""

    dtype: torch.dtype
    global_shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Returns it, in host memory; called once a save."""
    replica: int = 0
    part: Box | None = None
    """Which indices of the global tensor ``read`` returns; None for all."""

    @property
    def box(self) -> Box:
        """Which indices of the global tensor this is."""
        return Box.whole(self.global_shape) if self.part is None else self.part

    @property
    def num_bytes(self) -> int:
        """Of the part."""
        return self.box.num_elements * self.dtype.itemsize

    @property
    def data(self) -> Tensor:
        return self.read()


def entries(state: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of a state.

    Raises:
        CheckpointingException: it is no mapping, or a name is no string; says what to give.
    """
    if not isinstance(state, Mapping):
        raise CheckpointingException(f"the state is {type(state).__name__}; give names and tensors, such as model.state_dict()")
    for name, value in state.items():
        if not isinstance(name, str):
            raise CheckpointingException(f"the state has an entry called {name!r}, which is {type(name).__name__}; names are strings")
        yield name, value


def as_sharded(name: str, value: Any) -> ShardedTensor:
    """``value`` as the part that this rank holds; shares its storage.

    Args:
        name: for messages.
        value: a `ShardedTensor`, any `ShardLike`, a DTensor (also unevenly sharded), or a plain tensor, which every rank holds whole.

    Raises:
        CheckpointingException: none of these, or it does not fit together.
    """
    try:
        if isinstance(value, ShardedTensor):
            return value
        # A DTensor can only exist once its module was imported, so there is no need to import it here.
        dtensor = sys.modules.get("torch.distributed.tensor")
        if dtensor is not None and isinstance(value, dtensor.DTensor):
            return _from_dtensor(value)
        if isinstance(value, Tensor):
            return ShardedTensor(value.detach(), tuple(value.shape), (0,) * value.dim())
        if isinstance(value, ShardLike):
            return ShardedTensor(value.data.detach(), tuple(value.global_shape), tuple(value.offset), value.replica)
    except ValueError as error:
        raise CheckpointingException(f"{name}: {error}") from error
    raise CheckpointingException(
        f"{name} is {type(value).__name__}; give a tensor, a DTensor, an object with data, global_shape, offset and replica, or a dict of "
        "these (a module or optimizer goes in as its state_dict())"
    )


def as_writable(name: str, value: Any) -> Sequence[ShardedTensor | DeferredTensor]:
    """The parts of one global tensor that this rank can write: `as_parts`, or those made when their turn comes."""
    if isinstance(value, DeferredTensor):
        return [value]
    if isinstance(value, list) and value and all(isinstance(part, DeferredTensor) for part in value):
        return value
    return as_parts(name, value)


def as_parts(name: str, value: Any) -> list[ShardedTensor]:
    """The parts of one global tensor that this rank holds: those of a list, the boxes that it names itself, or the one of `as_sharded`.

    Boxes are named by DTensors of several, by tensors that answer torch's questions for chunks (``__create_chunk_list__`` and
    ``__get_tensor_shard__``), and by ``torch.distributed``'s own sharded tensors.
    """
    if isinstance(value, list | tuple):
        return [as_sharded(name, part) for part in value]
    boxes = _boxes(name, value)
    if boxes is None:
        return [as_sharded(name, value)]
    shape = tuple(value.shape)
    replica = _replica(value) if hasattr(value, "device_mesh") else 0
    # A rank that holds no box still says of what.
    boxes = boxes or [(torch.empty((0,) * len(shape), dtype=value.dtype), (0,) * len(shape))]
    try:
        return [ShardedTensor(data.detach(), shape, offset, replica) for data, offset in boxes]
    except ValueError as error:
        raise CheckpointingException(f"{name}: {error}") from error


def _boxes(name: str, value: Any) -> list[tuple[Tensor, tuple[int, ...]]] | None:
    """Tensors and offsets of the boxes that ``value`` names itself; None where it names none."""
    if hasattr(value, "local_shards"):
        return [(shard.tensor, tuple(shard.metadata.shard_offsets)) for shard in value.local_shards()]
    # Torch's DTensor asks its local part, which seldom knows, and alone is one box; a type derived from it answers by itself.
    local = value._local_tensor if type(value).__name__ == "DTensor" else value
    find = getattr(local, "__get_tensor_shard__", None)
    if find is None:
        return None
    from torch.distributed.checkpoint.metadata import MetadataIndex

    return [(find(MetadataIndex(name, chunk.offsets)), tuple(chunk.offsets)) for chunk in value.__create_chunk_list__()]


def _from_dtensor(value: Any) -> ShardedTensor:
    if any(placement.is_partial() for placement in value.placements):
        raise ValueError(f"a DTensor placed {value.placements} holds partial sums; redistribute it to Shard or Replicate first")
    with torch.no_grad():
        local = value.to_local()
    coordinate = value.device_mesh.get_coordinate()
    global_shape = tuple(value.shape)
    if coordinate is None or local.numel() == 0:
        # Outside the mesh, or past the end of an uneven split: nothing of this tensor is here.
        empty = local.detach().reshape(-1)[:0].reshape((0,) * max(len(global_shape), 1))
        if not global_shape:
            raise ValueError("a scalar DTensor has no part on this rank; give it only to the ranks of its mesh")
        return ShardedTensor(empty, global_shape, (0,) * len(global_shape), 0)
    chunks = value.__create_chunk_list__()
    if len(chunks) != 1 or tuple(chunks[0].sizes) != tuple(local.shape):
        raise ValueError(f"the local part of a DTensor placed {value.placements} is not one box of it; redistribute it to plain Shard")
    return ShardedTensor(local.detach(), global_shape, tuple(chunks[0].offsets), _replica(value))


def _replica(value: Any) -> int:
    """Number of a DTensor's local part among the ranks that hold the same one."""
    replica = 0
    for place, size, placement in zip(value.device_mesh.get_coordinate(), value.device_mesh.shape, value.placements, strict=True):
        if placement.is_replicate():
            replica = replica * size + place
    return replica
