# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model sharded by torch's FSDP2 in the trunk's places: the model, its gradient sync and the source of its gradients."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mcore_parallel import Piece, ProcessGroups, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel, TransformerLayer
from mcore_parallel.optim import StateShard

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class TorchShardedModel(nn.Module):
    """A GPTModel whose parameters, gradients and optimizer state torch's ``fully_shard`` divides by rows among its replicas.

    Units are its layers. It takes the places that ``FullyShardedModel`` takes. Gradients are sums over the replicas, in 32 bits or more;
    those of the micro-batches but the last are added whole on each rank, as torch does without synchronisation.

    Args:
        model: a whole model, not sharded yet.
        groups: its process groups; several replicas, one pipeline stage.
    """

    def __init__(self, model: GPTModel, groups: ProcessGroups) -> None:
        # Here, since a run that is not sharded so would wait two seconds for it.
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        super().__init__()
        self.groups = groups
        shards = list(named_shards(model))
        self._specs = {shard.name: shard.spec for shard in shards}
        self._shapes = {shard.name: tuple(shard.parameter.shape) for shard in shards}
        replicas = groups.data("dense").pg
        assert replicas is not None, "RunConfig refuses one replica"
        mesh = DeviceMesh.from_group(replicas, next(model.parameters()).device.type)
        total = torch.promote_types(model.dtype, torch.float32)
        policy = MixedPrecisionPolicy(reduce_dtype=total, cast_forward_inputs=False)
        for unit in [*(layer for layer in model.modules() if isinstance(layer, TransformerLayer)), model]:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
            cast("FSDPModule", unit).set_gradient_divide_factor(1.0)
            # Backends but NCCL know no sum with a factor, not even with the factor 1.
            cast("FSDPModule", unit).set_force_sum_reduction_for_comms(True)
        # Not a child: its parameters have names already.
        self._whole = (model,)
        self._parameters_by_name = {name: cast("DTensor", parameter) for name, parameter in model.named_parameters()}
        trained = [name for name, parameter in self._parameters_by_name.items() if parameter.requires_grad]
        self._gradients = {name: torch.zeros_like(self._local(name), dtype=total) for name in trained}

    @property
    def module(self) -> GPTModel:
        """The model itself, with the names of its parameters."""
        return self._whole[0]

    def forward(self, x: Tensor, step: Any) -> Any:
        return self.module(x, step)

    def train(self, mode: bool = True) -> "TorchShardedModel":
        """The model's own mode, too: it is no child."""
        self.module.train(mode)
        return super().train(mode)

    def modules(self) -> Iterator[nn.Module]:
        """With those of the model: who puts modules into another mode for a while sees all whose mode changes."""
        yield self
        yield from self.module.modules()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.module.parameters(recurse)

    # Gradient sync

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        self.module.zero_grad(set_to_none=True)
        for gradient in self._gradients.values():
            gradient.zero_()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        units = cast("FSDPModule", self.module)
        units.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            units.set_requires_gradient_sync(True)

    def finish_grad_sync(self) -> None:
        """Take over the sums of the replicas, and complete those over model-parallel ranks."""
        for name, total in self._gradients.items():
            gradient = self._parameters_by_name[name].grad
            if gradient is not None:
                total.add_(cast("DTensor", gradient).to_local())
            for axis in self._specs[name].partial:
                group = self.groups.axis("dense", axis)
                if group.size > 1:
                    total.copy_(all_reduce(total, group))
        self.module.zero_grad(set_to_none=True)

    # Source of gradients

    @property
    def is_sliced(self) -> bool:
        return True

    def gradients(self) -> dict[str, Tensor]:
        """This rank's rows of each gradient, flat."""
        return {name: gradient.view(-1) for name, gradient in self._gradients.items() if gradient.numel()}

    def pieces(self) -> list[Piece]:
        """What this rank updates, in the model's order."""
        pieces = []
        for name, gradient in self.gradients().items():
            local, shape = self._local(name), self._shapes[name]
            start = self._first_row(name) * (local.numel() // local.shape[0])
            tensors = (local.view(-1), gradient, shape)
            pieces.append(Piece(name, self._specs[name], start, start + local.numel(), *tensors, self.groups.data("dense"), 0))
        return pieces

    def start_param_sync(self) -> None:
        """The next forward gathers what was updated."""
        from torch.distributed.fsdp import FSDPModule

        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def finish_param_sync(self) -> None:
        """Nothing to wait for."""

    # State

    def parameter_shards(self) -> dict[str, list[StateShard]]:
        """This rank's rows of every parameter, live: fill them in place to load."""
        self.start_param_sync()
        boxes: dict[str, list[StateShard]] = {}
        for name, spec in self._specs.items():
            local, base = self._local(name), spec.offset(self.groups)
            if not local.numel():
                # Of few rows some ranks have none.
                continue
            replica = 0 if "tp" in spec.shards else self.groups.tp.rank
            boxes[name] = [StateShard(name, local, spec, (base[0] + self._first_row(name), *base[1:]), replica)]
        return boxes

    def _local(self, name: str) -> Tensor:
        return self._parameters_by_name[name].to_local().detach()

    def _first_row(self, name: str) -> int:
        """torch cuts rows as ``chunk`` does: equal parts, the last ones shorter or empty."""
        replicas, rows = self.groups.data("dense"), self._shapes[name][0]
        return min(rows, replicas.rank * -(-rows // replicas.size))
