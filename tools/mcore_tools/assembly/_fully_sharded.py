# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model sharded by megatron_fsdp in the trunk's places: the model, its gradient sync and the source of its gradients."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mcore_parallel import Group, Piece, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.comm import all_reduce
from mcore_parallel.models import GPTModel, TransformerLayer
from mcore_parallel.optim import StateShard
from mcore_parallel.pipeline import ModelChunks
from mcore_parallel.tensor_parallel import BorrowedGradBuffer, VocabParallelEmbedding, WeightGradientSink
from megatron_fsdp import FlatShard, MegatronFSDP, MixedPrecisionPolicy, fully_shard_model


class FullyShardedModel(nn.ModuleList):
    """A GPTModel whose parameters, gradients and optimizer state are divided among its replicas.

    Units are its layers, and an embedding that no output layer shares.

    Pass it to ``train_step`` and ``evaluate`` as model and as sync, and to ``MegatronOptimizer`` (with
    ``use_distributed_optimizer``) as the source of gradients. Gradients are sums over the replicas. It is the list of this stage's
    chunks, each of them sharded. Experts are divided among their own replicas.

    Args:
        model: this rank's stage, not sharded yet.
        groups: its process groups.
        zero_dp_strategy: what is divided, as in ``megatron_fsdp.fully_shard``.
        eight_bit_parameters: names of those that are gathered in 8 bits, on this stage or on others.
        options: more of its keywords, such as ``num_prefetch_units``.
    """

    def __init__(
        self,
        model: GPTModel | ModelChunks,
        groups: ProcessGroups,
        *,
        zero_dp_strategy: str = "optim_grads_params",
        eight_bit_parameters: Collection[str] = (),
        **options: Any,
    ) -> None:
        chunks = [cast(GPTModel, chunk) for chunk in model] if isinstance(model, ModelChunks) else [model]
        shards = list(named_shards(model))
        meshes = {view: _mesh(groups.data(view), chunks[0]) for view in ("dense", "expert")}
        options["zero_dp_strategy"] = zero_dp_strategy
        super().__init__([_shard(chunk, meshes, eight_bit_parameters, **options) for chunk in chunks])
        self.groups = groups
        self._divides_gradients = zero_dp_strategy in ("optim_grads", "optim_grads_params")
        # Not a child: its parameters have names already.
        self._whole = (model,)
        self._specs = {shard.name: shard.spec for shard in shards}
        self._shapes = {shard.name: tuple(shard.parameter.shape) for shard in shards}
        self._flat: dict[str, FlatShard] = {}
        for chunk in self.chunks:
            self._flat |= chunk.flat_shards()
            if groups.pp.size == 1:
                # The schedules of a pipeline may compute weight gradients after the backward, when nothing is lent.
                _feed_layers(chunk, self._shapes, chunks[0].dtype)

    @property
    def chunks(self) -> list[MegatronFSDP]:
        """Of this stage, in order."""
        return [cast(MegatronFSDP, chunk) for chunk in self]

    def forward(self, x: Tensor, step: Any) -> Any:
        [chunk] = self
        return chunk(x, step)

    # Gradient sync

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate; gradients that are divided are summed in every backward, and no rank keeps whole ones."""
        with ExitStack() as stack:
            for chunk in [] if self._divides_gradients else self.chunks:
                stack.enter_context(chunk.no_sync())
            yield

    def finish_grad_sync(self) -> None:
        """Complete all sums, those over model-parallel ranks included."""
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        for name, gradient in self.gradients().items():
            for axis in self._specs[name].partial:
                group = self.groups.axis(self._specs[name].view, axis)
                if group.size > 1:
                    gradient.copy_(all_reduce(gradient, group))

    def offload_grad_buffers(self) -> None:
        """Give the memory of the gradients back, between two steps; generation may use it meanwhile.

        Raises:
            RuntimeError: the memory is registered (``nccl_ub``), or in the host already (``cpu_offload``).
        """
        for chunk in self.chunks:
            chunk.offload_grad_buffers()

    def restore_grad_buffers(self) -> None:
        """Undo ``offload_grad_buffers``; all gradients are zero then."""
        for chunk in self.chunks:
            chunk.restore_grad_buffers()

    # Source of gradients

    @property
    def module(self) -> nn.Module:
        """The model itself, with the names of its parameters."""
        return self._whole[0]

    @property
    def is_sliced(self) -> bool:
        return True

    def gradients(self) -> dict[str, Tensor]:
        """This rank's range of each gradient."""
        return {name: shard.gradient for name, shard in self._flat.items() if shard.gradient is not None}

    def pieces(self) -> list[Piece]:
        """What this rank updates, in the model's order."""
        pieces = []
        for name, spec in self._specs.items():
            shard = self._flat.get(name)
            if shard is not None and shard.gradient is not None:
                tensors = (shard.parameter, shard.gradient, self._shapes[name])
                pieces.append(Piece(name, spec, shard.start, shard.end, *tensors, self.groups.data(spec.view), shard.replica))
        return pieces

    def start_param_sync(self) -> None:
        """The next forward gathers what was updated."""
        for chunk in self.chunks:
            chunk.install_optimized_model_weights()

    def finish_param_sync(self) -> None:
        """Nothing to wait for."""

    # State

    def parameter_shards(self) -> dict[str, list[StateShard]]:
        """This rank's boxes of every parameter and persistent buffer, live: fill them in place to load."""
        self.start_param_sync()
        state_shards: dict[str, list[StateShard]] = {}
        for name, shard in self._flat.items():
            spec = self._specs[name]
            base = spec.offset(self.groups)
            replica = spec.pipeline_copy(self.groups) * self.groups.data(spec.view).size + shard.replica
            for axis in ("tp", "ep") if spec.view == "expert" else ("tp",):
                if axis not in spec.shards:
                    group = self.groups.axis(spec.view, axis)
                    replica = replica * group.size + group.rank
            state_shards[name] = [
                StateShard(name, view, spec, tuple(begin + more for begin, more in zip(base, offset, strict=True)), replica)
                for offset, view in shard.blocks(shard.parameter)
            ]
        for buffer in named_buffer_shards(self.module):
            state_shards[buffer.name] = [StateShard(buffer.name, buffer.tensor, buffer.spec)]
        return state_shards


def _feed_layers(chunk: MegatronFSDP, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
    """Let layers that can write their weight gradients into the memory of a reduction do so."""
    loans = chunk.gradient_loans()
    totals = {name: torch.empty(shapes[name], dtype=_gradient_dtype(dtype), device="meta") for name in loans}
    for prefix, module in chunk.module.named_modules():
        if isinstance(module, WeightGradientSink):
            own = cast(nn.Module, module).named_parameters(recurse=False)
            names = {local: f"{prefix}.{local}" if prefix else local for local, _ in own}
            # The shards have other shapes: what is lent is as large as the whole.
            module.accumulate_weight_gradients_into(
                {local: BorrowedGradBuffer(totals[name], lend=loans[name]) for local, name in names.items() if name in loans}
            )


def _shard(chunk: GPTModel, meshes: Mapping[str, DeviceMesh | None], eight_bit: Collection[str], **options: Any) -> MegatronFSDP:
    # As with DistributedDataParallel: gradients are summed in 32 bits, and the float32 master is the optimizer's.
    narrow = chunk.dtype.itemsize < 4
    policy = MixedPrecisionPolicy(main_params_dtype=chunk.dtype if narrow else None, main_grads_dtype=_gradient_dtype(chunk.dtype))
    specs = {shard.name: shard.spec for shard in named_shards(chunk)}
    # In a process of its own there are no ranks that hold other experts, and no meshes.
    experts = [name for name, spec in specs.items() if spec.view == "expert" and meshes["expert"] is not None]
    # A table that the output layer reads too belongs to the root, which stays gathered for it; so does one for which two buffers of layers
    # would have to be larger.
    buffered = options.get("fsdp_double_buffer", False)
    in_root = buffered or chunk.config.share_embeddings_and_output_weights
    kinds = (TransformerLayer,) if in_root else (VocabParallelEmbedding, TransformerLayer)
    return fully_shard_model(
        chunk,
        fsdp_unit_modules=[kind for kind in kinds if any(isinstance(module, kind) for module in chunk.modules())],
        device_mesh=meshes["dense"],
        expt_device_mesh=meshes["expert"] if experts else None,
        expert_parameters=experts,
        # The ends of the pipeline add up their gradients of a shared table, so they must cut it alike.
        separate_parameters=[name for name, spec in specs.items() if "embd" in spec.partial],
        eight_bit_parameters=[name for name in specs if name in eight_bit],
        mixed_precision=policy,
        gradient_reduce="sum",
        # Layers of a pattern, or with and without experts, differ.
        maxpool_double_buffer=buffered,
        **options,
    )


def _gradient_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.itemsize >= 4 else torch.float32


def _mesh(replicas: Group, model: GPTModel) -> DeviceMesh | None:
    """Of the replicas; a world of other ranks must not be taken for them where there is one replica."""
    if not dist.is_initialized():
        return None
    pg = replicas.pg
    if pg is None:
        pg = dist.new_group(list(replicas.ranks), use_local_synchronization=True)
        assert isinstance(pg, dist.ProcessGroup), "this rank is in the group"
    return DeviceMesh.from_group(pg, next(model.parameters()).device.type)
