# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model sharded by megatron_fsdp in the trunk's places: the model, its gradient sync and the source of its gradients."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel import Piece, ProcessGroups, ShardSpec, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel, TransformerLayer
from mcore_parallel.optim import StateShard
from megatron_fsdp import FlatShard, MixedPrecisionPolicy, fully_shard_model


class FullyShardedModel(nn.Module):
    """A GPTModel whose parameters, gradients and optimizer state are divided among its replicas; every layer is one unit.

    Pass it to ``train_step`` and ``evaluate`` as model and as sync, and to ``MegatronOptimizer`` (with
    ``use_distributed_optimizer``) as the source of gradients. Gradients are sums over the replicas.

    Args:
        model: this rank's stage, not sharded yet.
        groups: its process groups.

    Raises:
        ValueError: a parameter whose replicas are not the data-parallel ranks (of experts, unless ep=1 and etp=tp); tied embeddings
            over several stages.
    """

    def __init__(self, model: GPTModel, groups: ProcessGroups) -> None:
        super().__init__()
        self.groups, self.config, self.dtype = groups, model.config, model.dtype
        self._specs: dict[str, ShardSpec] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for shard in named_shards(model):
            replicas = groups.data(shard.spec.view).ranks
            if replicas != groups.dp_cp.ranks:
                raise ValueError(
                    f"{shard.name} has its replicas on ranks {replicas} and other parameters on {groups.dp_cp.ranks}; "
                    "fully sharded data parallelism divides all alike, so set ep=1 and etp=tp"
                )
            if "embd" in shard.spec.partial:
                # The ranges of a rank follow from its whole stage, so those of the two copies do not match.
                raise ValueError(
                    f"{shard.name} is shared by the first and the last of pp={groups.pp.size} stages, which fully sharded data parallelism "
                    "cuts differently; set pp=1 or share_embeddings_and_output_weights=False"
                )
            self._specs[shard.name], self._shapes[shard.name] = shard.spec, tuple(shard.parameter.shape)
        # As with DistributedDataParallel: gradients are summed in 32 bits, and the float32 master is the optimizer's.
        narrow = model.dtype.itemsize < 4
        policy = MixedPrecisionPolicy(main_params_dtype=model.dtype if narrow else None, main_grads_dtype=torch.float32 if narrow else None)
        self.sharded = fully_shard_model(
            model,
            fsdp_unit_modules=[TransformerLayer],
            process_group=_process_group(groups),
            mixed_precision=policy,
            gradient_reduce="sum",
        )
        self._flat: Mapping[str, FlatShard] = self.sharded.flat_shards()

    def forward(self, x: Tensor, step: Any) -> Any:
        return self.sharded(x, step)

    # Gradient sync

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        self.sharded.zero_grad_buffer()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        with self.sharded.no_sync():
            yield

    def finish_grad_sync(self) -> None:
        """Complete all sums, those over model-parallel ranks included."""
        self.sharded.finish_grad_sync()
        for name, gradient in self.gradients().items():
            for axis in self._specs[name].partial:
                group = self.groups.axis(self._specs[name].view, axis)
                if group.size > 1:
                    gradient.copy_(all_reduce(gradient, group))

    # Source of gradients

    @property
    def module(self) -> nn.Module:
        """The model itself, with the names of its parameters."""
        return self.sharded.module

    @property
    def is_sliced(self) -> bool:
        return True

    def gradients(self) -> dict[str, Tensor]:
        """This rank's range of each gradient."""
        return {name: shard.gradient for name, shard in self._flat.items() if shard.gradient is not None}

    def pieces(self) -> list[Piece]:
        """What this rank updates, in the model's order."""
        found = []
        for name, spec in self._specs.items():
            shard = self._flat.get(name)
            if shard is not None and shard.gradient is not None:
                tensors = (shard.parameter, shard.gradient, self._shapes[name])
                found.append(Piece(name, spec, shard.start, shard.end, *tensors, self.groups.data(spec.view), shard.replica))
        return found

    def start_param_sync(self) -> None:
        """The next forward gathers what was updated."""
        self.sharded.install_optimized_model_weights()

    def finish_param_sync(self) -> None:
        """Nothing to wait for."""

    # State

    def parameter_shards(self) -> dict[str, list[StateShard]]:
        """This rank's boxes of every parameter, live: fill them in place to load."""
        self.sharded.install_optimized_model_weights()
        found: dict[str, list[StateShard]] = {}
        for name, shard in self._flat.items():
            spec = self._specs[name]
            base, replica = spec.offset(self.groups), shard.replica
            if "tp" not in spec.shards:
                replica = replica * self.groups.tp.size + self.groups.tp.rank
            found[name] = [
                StateShard(name, view, spec, tuple(begin + more for begin, more in zip(base, offset, strict=True)), replica)
                for offset, view in shard.blocks(shard.parameter)
            ]
        return found


def _process_group(groups: ProcessGroups) -> dist.ProcessGroup | None:
    """Of the replicas; a world of other ranks must not be taken for them where there is one replica."""
    replicas = groups.dp_cp
    if replicas.size > 1 or not dist.is_initialized():
        return replicas.pg
    alone = dist.new_group(list(replicas.ranks), use_local_synchronization=True)
    assert isinstance(alone, dist.ProcessGroup), "this rank is in the group"
    return alone
