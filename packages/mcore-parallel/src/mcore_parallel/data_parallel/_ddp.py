# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Data parallelism with flat gradient buffers."""

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel.comm import RegisteredMemory
from mcore_parallel.data_parallel._buffer import DataGroups, GradBuffer
from mcore_parallel.data_parallel._config import DistributedDataParallelConfig
from mcore_parallel.data_parallel._gather import ParamGather
from mcore_parallel.data_parallel._subgroups import DataGroupSplitter
from mcore_parallel.groups import Group, NamedShard, Piece, ProcessGroups, named_shards
from mcore_parallel.tensor_parallel import MainGradient, WeightCopyHolder, WeightGradientSink


class DistributedDataParallel(nn.Module):
    """A model whose gradients are summed over the ranks that hold other data.

    Every backward adds its gradients to main gradients, which are views into flat buffers; ``parameter.grad`` stays
    None. Gradients are sums: nothing is averaged, the optimizer divides once by the global count. A parameter whose
    gradient is partial over model-parallel axes (``ShardSpec.partial``) is summed over those too. Tied parameters
    are one parameter. A parameter that the backward did not reach takes part with what it has accumulated.

    With the distributed optimizer the parameters move into flat buffers as well (each stays the same object, its storage changes),
    a rank completes the gradients of its slices only, and ``pieces()`` says which those are.

    All ranks start their sums in one fixed order, whatever the order in which gradients become complete.

    Use: ``zero_grad_buffer()``; all micro-batches but the last inside ``no_sync()``; the last outside;
    ``finish_grad_sync()``; then ``gradients()`` (sliced: ``pieces()``) are complete on every rank.

    Args:
        config: see there.
        module: the model; parameters without requires_grad are left alone.
        groups: its process groups.
    """

    def __init__(self, config: DistributedDataParallelConfig, module: nn.Module, groups: ProcessGroups) -> None:
        super().__init__()
        self.config, self.module, self.groups = config, module, groups
        # The backward reaches parameters in about the reverse order of their registration.
        shards = [shard for shard in named_shards(module) if shard.parameter.requires_grad][::-1]
        self.registered: dict[tuple[int, ...], RegisteredMemory] = {}
        """By the ranks of the data group; filled with ``nccl_ub``."""
        splitter = DataGroupSplitter(groups, config)
        split = {group: splitter.split(group) for group in _data_groups(shards, groups)}
        self.grad_buffers = _buffers(config, shards, groups, split, self.registered)
        self._grads = {name: grad for buffer in self.grad_buffers for name, grad in buffer.grads.items()}
        self._bucket_of = {name: bucket for buffer in self.grad_buffers for name, bucket in buffer.bucket_of.items()}
        self._queue = sorted((bucket for buffer in self.grad_buffers for bucket in buffer.buckets), key=lambda bucket: bucket.position)
        self._next = 0
        self._syncing = True
        # How often each gradient is reported in a backward that ends in a sum: learnt in the first one.
        self._expected: dict[str, int] | None = None
        self._reports = dict.fromkeys(self._grads, 0)
        # Sums that hold nothing of this step yet, whatever is in their memory.
        self._fresh: set[str] = set()
        # Sums that somebody added to first without claiming them, as recorded work does; he will in later steps.
        self._unclaimed: set[str] = set()
        self._hooks = [shard.parameter.register_post_accumulate_grad_hook(self._collector(shard.name)) for shard in shards]
        self._fed = self._feed_layers(shards) if config.gradient_accumulation_fusion else []
        self._names = [shard.name for shard in shards][::-1]
        self._gather = ParamGather(module, self.grad_buffers)
        self._copy_holders = [part for part in module.modules() if isinstance(part, WeightCopyHolder)]
        self._drop_weight_copies()
        if config.overlap_param_gather:
            self.enable_forward_pre_hook()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    @property
    def is_sliced(self) -> bool:
        """Whether ranks complete slices of the gradients only."""
        return self.config.use_distributed_optimizer

    def gradients(self) -> dict[str, Tensor]:
        """Main gradient of every trained parameter by global name: live views, summed once ``finish_grad_sync`` ran.

        With the distributed optimizer only this rank's pieces of them are summed; the rest is scratch.
        """
        self._zero_fresh(self._names)
        return {name: self._grads[name] for name in self._names}

    def pieces(self) -> list[Piece]:
        """What this rank updates: with the distributed optimizer its slices, otherwise every parameter whole; in the model's order."""
        by_name = {piece.name: piece for buffer in self.grad_buffers for piece in buffer.pieces()}
        return [by_name[name] for name in self._names if name in by_name]

    def zero_grad_buffer(self) -> None:
        """Forget all gradients; call before the first micro-batch of a step."""
        for buffer in self.grad_buffers:
            buffer.data.zero_()
            for bucket in buffer.buckets:
                for accumulator in bucket.accumulators.values():
                    accumulator.zero_()
        self._fresh.clear()

    def discard_gradients(self) -> None:
        """As ``zero_grad_buffer``, but the first gradient of a parameter overwrites its sum where it can; ``train_step`` calls this.

        Sums without a gradient are zeroed when their reduction starts, and by ``gradients()``; until then views that are held from before
        show the last step. Work that an ``IterationGraph`` records calls ``zero_grad_buffer()``: whether it overwrites or adds would be
        recorded with it.
        """
        for bucket in self._queue:
            for name in bucket.accumulators:
                bucket.grads[name].zero_()
        self._fresh = set(self._grads)
        self._zero_fresh(self._unclaimed)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def start_grad_sync(self) -> None:
        """Start all sums that have not begun; ``finish_grad_sync`` does so too. No gradient may come afterwards."""
        while self._next < len(self._queue):
            self._launch_next()

    def finish_grad_sync(self) -> None:
        """Complete all sums; call once after the last micro-batch, on every rank."""
        self.start_grad_sync()
        outer = []
        for bucket in self._queue:
            bucket.drain()
            outer.append(bucket.start_outer())
        for work in outer:
            if work is not None:
                work.wait()
        for buffer in self.grad_buffers:
            buffer.sum_partial()
        if self._expected is None and any(self._reports.values()):
            self._expected = dict(self._reports)
        self._restart()

    def reset_overlap(self) -> None:
        """Learn anew when gradients are complete; call after the graph of the model changed, between two steps."""
        self._expected = None
        self._restart()

    def scale_gradients(self, factor: float | Tensor) -> None:
        """Multiply all main gradients."""
        for buffer in self.grad_buffers:
            buffer.data.mul_(factor)

    def offload_grad_buffers(self) -> None:
        """Give the memory of the gradients back, between two steps; generation may use it meanwhile.

        Raises:
            RuntimeError: with ``nccl_ub``, whose memory stays registered.
        """
        if self.config.nccl_ub:
            raise RuntimeError("nccl_ub=True keeps the gradients in registered memory, which cannot be given back; set nccl_ub=False")
        for buffer in self.grad_buffers:
            buffer.data.untyped_storage().resize_(0)
        self._fresh.clear()

    def restore_grad_buffers(self) -> None:
        """Undo ``offload_grad_buffers``; all gradients are zero then."""
        for buffer in self.grad_buffers:
            buffer.data.untyped_storage().resize_(buffer.data.numel() * buffer.data.element_size())
        self.zero_grad_buffer()

    def start_param_sync(self) -> None:
        """Gather the slices of all updated parameters; the optimizer calls this after its step.

        With ``overlap_param_gather`` the gathers end in the next forward, otherwise here. Without the distributed optimizer
        there is nothing to gather. Layers that keep copies of their weights in another form (``WeightCopyHolder``) make new ones.
        """
        self._drop_weight_copies()
        self._gather.start()
        if not self._gather.has_hooks:
            self._gather.finish()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are complete; call before reading them outside a forward."""
        self._gather.finish()

    def enable_forward_pre_hook(self) -> None:
        """Let modules wait for their own parameters (``overlap_param_gather`` does this from the start)."""
        self._gather.add_hooks()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Forwards no longer wait; before a capture of the forward, for instance.

        Args:
            param_sync: complete the parameters now.
        """
        self._gather.remove_hooks()
        if param_sync:
            self._gather.finish()

    def close(self) -> None:
        """Take the hooks off, give weight gradients back to autograd, and give up registered memory.

        Call on every rank before ``ProcessGroups.close`` or the end of the world; parameters and gradients stay usable.
        """
        self._gather.finish()
        self._gather.remove_hooks()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        # Left as they are they would go on to add gradients here, and another owner of the parameters would get none.
        for layer in self._fed:
            layer.accumulate_weight_gradients_into({})
        self._fed.clear()
        for memory in self.registered.values():
            memory.close()

    def broadcast_params(self) -> None:
        """Give all replicas the parameters and buffers of the first one.

        Raises:
            ValueError: a parameter is kept in eight bits, with scales that are no parameters (``LoraConfig.base_dtype``); on every rank of
                several replicas.
        """
        # What is on its way would write over what comes.
        self._gather.finish()
        tensors = [(shard.parameter.detach(), self.groups.data(shard.spec.view)) for shard in named_shards(self.module)]
        tensors += [(buffer, self.groups.dp_cp) for buffer in self.module.buffers()]
        tensors = [(tensor, group) for tensor, group in tensors if group.size > 1]
        if narrow := [tensor.dtype for tensor, _ in tensors if tensor.is_floating_point() and tensor.itemsize == 1]:
            raise ValueError(
                f"a parameter is in {narrow[0]}, and its scales would not go with it; call broadcast_params before quantize_base"
            )
        for tensor, group in tensors:
            dist.broadcast(tensor, src=group.ranks[0], group=group.pg)
        self._drop_weight_copies()

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        main_grad = self._main_gradient(name)

        def collect(parameter: Tensor) -> None:
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                self._begin(name)
                self._done(name)
            else:
                main_grad.add(grad)

        return collect

    def _feed_layers(self, shards: list[NamedShard]) -> list[WeightGradientSink]:
        """Let layers that can add their weight gradients to the main gradients themselves do so; returns them."""
        fed: list[WeightGradientSink] = []
        names = {id(shard.parameter): shard.name for shard in shards}
        for module in self.module.modules():
            own = {local: names[id(p)] for local, p in module.named_parameters(recurse=False) if id(p) in names}
            if own and isinstance(module, WeightGradientSink):
                module.accumulate_weight_gradients_into({local: self._main_gradient(name) for local, name in own.items()})
                fed.append(module)
        return fed

    def _main_gradient(self, name: str) -> MainGradient:
        return MainGradient(
            self._accumulator(name),
            begin=functools.partial(self._begin, name),
            done=functools.partial(self._done, name),
            claim=functools.partial(self._claim, name),
        )

    def _drop_weight_copies(self) -> None:
        for layer in self._copy_holders:
            layer.parameters_changed()

    def _accumulator(self, name: str) -> Tensor:
        return self._bucket_of[name].accumulators.get(name, self._grads[name])

    def _begin(self, name: str) -> None:
        if self._bucket_of[name].launched:
            raise RuntimeError(
                f"a gradient of {name} came after its sum over the replicas had started: run all micro-batches but the last "
                "inside no_sync(), call finish_grad_sync() between steps, and reset_overlap() after a change of the model's graph"
            )
        if name in self._fresh:
            self._unclaimed.add(name)
            self._zero_fresh([name])

    def _claim(self, name: str) -> bool:
        fresh = name in self._fresh
        self._fresh.discard(name)
        return fresh

    def _zero_fresh(self, names: Collection[str]) -> None:
        if fresh := self._fresh.intersection(names):
            launch: Any = torch
            launch._foreach_zero_([self._accumulator(name) for name in fresh])
            self._fresh -= fresh

    def _done(self, name: str) -> None:
        if self._syncing:
            self._report(name)

    def _report(self, name: str) -> None:
        self._reports[name] += 1
        if self._expected is None or not self.config.overlap_grad_reduce or self._reports[name] > self._expected[name]:
            return
        self._bucket_of[name].missing -= 1
        # One order on all ranks, or collectives of different buckets would meet.
        while self._next < len(self._queue) and self._queue[self._next].missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        if self.config.reduce_scatter_with_fp32_accumulation and self._next:
            # Its scratch is as large as a bucket: one at a time.
            self._queue[self._next - 1].drain()
        self._zero_fresh(self._queue[self._next].grads)
        self._queue[self._next].launch()
        self._next += 1

    def _restart(self) -> None:
        self._next = 0
        self._reports = dict.fromkeys(self._grads, 0)
        for bucket in self._queue:
            bucket.reset()
        for name, count in (self._expected or {}).items():
            self._bucket_of[name].missing += count


def _buffers(
    config: DistributedDataParallelConfig,
    shards: list[NamedShard],
    groups: ProcessGroups,
    split: dict[Group, DataGroups],
    registered: dict[tuple[int, ...], RegisteredMemory],
) -> list[GradBuffer]:
    keyed: dict[tuple[Any, ...], list[int]] = {}
    for position, shard in enumerate(shards):
        spec, parameter = shard.spec, shard.parameter
        partial = tuple(group for axis in spec.partial if (group := groups.axis(spec.view, axis)).size > 1)
        sliced = not config.keeps_whole(shard.name)
        key = (parameter.device, _grad_dtype(config, parameter.dtype), groups.data(spec.view), partial, parameter.dtype if sliced else None)
        keyed.setdefault(key, []).append(position)
    buffers = []
    for (device, dtype, group, partial, sliced), positions in keyed.items():
        members = [shards[position] for position in positions]
        with ExitStack() as stack:
            if config.nccl_ub:
                if group.ranks not in registered:
                    cut, symmetric = split[group], not config.disable_symmetric_registration
                    registered[group.ranks] = RegisteredMemory(cut.inner, device, also=[cut.gather], symmetric=symmetric)
                stack.enter_context(registered[group.ranks].allocate())
            buffers.append(GradBuffer(members, positions, dtype, split[group], partial, config, sliced=sliced is not None))
    return buffers


def _data_groups(shards: list[NamedShard], groups: ProcessGroups) -> list[Group]:
    """Distinct data groups, dense ones first on every rank, or ranks would make new communicators in different orders."""
    views = sorted({shard.spec.view for shard in shards})
    return list(dict.fromkeys(groups.data(view) for view in views))


def _grad_dtype(config: DistributedDataParallelConfig, dtype: torch.dtype) -> torch.dtype:
    if dtype in (torch.float32, torch.float64):
        return dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"parameters of dtype {dtype} cannot be trained; use float64, float32, bfloat16 or float16")
    return torch.float32 if config.grad_reduce_in_fp32 else dtype
