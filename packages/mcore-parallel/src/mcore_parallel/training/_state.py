# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Model and optimizer as named parts of global tensors, for a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from mcore_parallel.groups import ProcessGroups, ShardSpec, named_buffer_shards, named_shards


@dataclass(frozen=True)
class TensorShard:
    """The part of one global tensor that this rank holds: a live tensor, filled in place to load it."""

    data: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Where the part begins in the global tensor."""
    replica: int
    """Number of this copy among the ranks that hold the same part; 0 is the one that counts."""


class PlacedTensor(Protocol):
    """A tensor of an optimizer's state with the placement of its parameter, or (offset and replica given) a box of such a tensor."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def spec(self) -> ShardSpec: ...
    @property
    def offset(self) -> tuple[int, ...] | None: ...
    @property
    def replica(self) -> int | None: ...


@runtime_checkable
class SlicedModel(Protocol):
    """A model that holds slices of its parameters, as fully sharded data parallelism does, and says where they and its buffers lie."""

    def parameter_shards(self) -> Mapping[str, PlacedTensor | Sequence[PlacedTensor]]: ...


class StatefulOptimizer(Protocol):
    """An optimizer whose state can be saved and restored."""

    @property
    def step_count(self) -> int: ...

    def load_step_count(self, count: int) -> None: ...

    def state_shards(self) -> Mapping[str, PlacedTensor | Sequence[PlacedTensor]]: ...


def model_state(model: nn.Module, groups: ProcessGroups) -> dict[str, "TensorShard | list[TensorShard]"]:
    """Every parameter and persistent buffer of this rank's stage by its global name; what this rank holds in several boxes
    (``SlicedModel``) is a list."""
    if isinstance(model, SlicedModel):
        return _boxes(model.parameter_shards(), groups)
    state = {shard.name: _placed(shard.parameter.detach(), shard.spec, groups) for shard in named_shards(model)}
    return {**state, **{buffer.name: _placed(buffer.tensor, buffer.spec, groups) for buffer in named_buffer_shards(model)}}


def optimizer_state(optimizer: StatefulOptimizer, groups: ProcessGroups) -> dict[str, "TensorShard | list[TensorShard]"]:
    """Every tensor of the optimizer's state by its global name; ``step_count`` is kept beside.

    A state that this rank holds in several boxes of the global tensor is a list.
    """
    return _boxes(optimizer.state_shards(), groups)


def _boxes(
    shards: Mapping[str, PlacedTensor | Sequence[PlacedTensor]], groups: ProcessGroups
) -> dict[str, "TensorShard | list[TensorShard]"]:
    return {
        name: [_box(part, groups) for part in value] if isinstance(value, Sequence) else _box(value, groups)
        for name, value in shards.items()
    }


def _box(part: PlacedTensor, groups: ProcessGroups) -> TensorShard:
    placed = _placed(part.tensor, part.spec, groups)
    offset = placed.offset if part.offset is None else part.offset
    return TensorShard(part.tensor, part.spec.shape, offset, placed.replica if part.replica is None else part.replica)


def _placed(tensor: Tensor, spec: ShardSpec, groups: ProcessGroups) -> TensorShard:
    return TensorShard(tensor, spec.shape, spec.offset(groups), spec.replica(groups))
