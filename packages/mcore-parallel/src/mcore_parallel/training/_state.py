# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Model and optimizer as named parts of global tensors, for a checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel._shards import ShardSpec, named_shards


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
    """A tensor of an optimizer's state with the placement of its parameter."""

    @property
    def tensor(self) -> Tensor: ...
    @property
    def spec(self) -> ShardSpec: ...


class StatefulOptimizer(Protocol):
    """An optimizer whose state can be saved and restored."""

    @property
    def step_count(self) -> int: ...

    def load_step_count(self, count: int) -> None: ...

    def state_shards(self) -> Mapping[str, PlacedTensor]: ...


def model_state(model: nn.Module, groups: ProcessGroups) -> dict[str, TensorShard]:
    """Every parameter of this rank's stage by its global name."""
    return {shard.name: _placed(shard.parameter.detach(), shard.spec, groups) for shard in named_shards(model)}


def optimizer_state(optimizer: StatefulOptimizer, groups: ProcessGroups) -> dict[str, TensorShard]:
    """Every tensor of the optimizer's state by its global name; ``step_count`` is kept beside."""
    return {name: _placed(shard.tensor, shard.spec, groups) for name, shard in optimizer.state_shards().items()}


def _placed(tensor: Tensor, spec: ShardSpec, groups: ProcessGroups) -> TensorShard:
    return TensorShard(tensor, spec.shape, spec.offset(groups), spec.replica(groups))
