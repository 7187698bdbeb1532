# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Data parallelism with flat gradient buffers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel._shards import NamedShard, named_shards
from mcore_parallel.data_parallel._buffer import GradBuffer
from mcore_parallel.data_parallel._config import DistributedDataParallelConfig


class DistributedDataParallel(nn.Module):
    """A model whose gradients are summed over the ranks that hold other data.

    Every backward adds its gradients to main gradients, which are views into flat buffers; ``parameter.grad`` stays
    None. Gradients are sums: nothing is averaged, the optimizer divides once by the global count. A parameter whose
    gradient is partial over model-parallel axes (``ShardSpec.partial``) is summed over those too. Tied parameters
    are one parameter. A parameter that the backward did not reach takes part with what it has accumulated.

    All ranks start their sums in one fixed order, whatever the order in which gradients become complete.

    Use: ``zero_grad_buffer()``; all micro-batches but the last inside ``no_sync()``; the last outside;
    ``finish_grad_sync()``; then ``gradients()`` are complete on every rank.

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
        self.grad_buffers = _buffers(config, shards, groups)
        self._grads = {name: grad for buffer in self.grad_buffers for name, grad in buffer.grads.items()}
        self._bucket_of = {name: bucket for buffer in self.grad_buffers for name, bucket in buffer.bucket_of.items()}
        self._queue = sorted((bucket for buffer in self.grad_buffers for bucket in buffer.buckets), key=lambda bucket: bucket.position)
        self._next = 0
        self._syncing = True
        # How often each gradient is reported in a backward that ends in a sum: learnt in the first one.
        self._expected: dict[str, int] | None = None
        self._reports = dict.fromkeys(self._grads, 0)
        self._hooks = [shard.parameter.register_post_accumulate_grad_hook(self._collector(shard.name)) for shard in shards]
        self._names = [shard.name for shard in named_shards(module) if shard.parameter.requires_grad]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def gradients(self) -> dict[str, Tensor]:
        """Main gradient of every trained parameter by global name: live views, summed once ``finish_grad_sync`` ran."""
        return {name: self._grads[name] for name in self._names}

    def zero_grad_buffer(self) -> None:
        """Forget all gradients; call before the first micro-batch of a step."""
        for buffer in self.grad_buffers:
            buffer.data.zero_()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def finish_grad_sync(self) -> None:
        """Complete all sums; call once after the last micro-batch, on every rank."""
        while self._next < len(self._queue):
            self._launch_next()
        for bucket in self._queue:
            bucket.finish()
        for buffer in self.grad_buffers:
            buffer.sum_partial()
        if self._expected is None and any(self._reports.values()):
            self._expected = dict(self._reports)
        self._restart()

    def reset_overlap(self) -> None:
        """Learn anew when gradients are complete; call after the graph of the model changed, between two steps."""
        self._expected = None
        self._restart()

    def broadcast_params(self) -> None:
        """Give all replicas the parameters and buffers of the first one."""
        tensors = [(shard.parameter.detach(), self.groups.data(shard.spec.view)) for shard in named_shards(self.module)]
        tensors += [(buffer, self.groups.dp_cp) for buffer in self.module.buffers()]
        for tensor, group in tensors:
            if group.size > 1:
                dist.broadcast(tensor, src=group.ranks[0], group=group.pg)

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        grad, bucket = self._grads[name], self._bucket_of[name]

        def collect(parameter: Tensor) -> None:
            if bucket.launched:
                parameter.grad = None
                raise RuntimeError(
                    f"a gradient of {name} came after its sum over the replicas had started: run all micro-batches but the last "
                    "inside no_sync(), call finish_grad_sync() between steps, and reset_overlap() after a change of the model's graph"
                )
            if parameter.grad is not None:
                grad.add_(parameter.grad)
                parameter.grad = None
            if self._syncing:
                self._report(name)

        return collect

    def _report(self, name: str) -> None:
        self._reports[name] += 1
        if self._expected is None or not self.config.overlap_grad_reduce or self._reports[name] > self._expected[name]:
            return
        self._bucket_of[name].missing -= 1
        # One order on all ranks, or collectives of different buckets would meet.
        while self._next < len(self._queue) and self._queue[self._next].missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        self._queue[self._next].launch()
        self._next += 1

    def _restart(self) -> None:
        self._next = 0
        self._reports = dict.fromkeys(self._grads, 0)
        for bucket in self._queue:
            bucket.missing = 0
        for name, count in (self._expected or {}).items():
            self._bucket_of[name].missing += count


def _buffers(config: DistributedDataParallelConfig, shards: list[NamedShard], groups: ProcessGroups) -> list[GradBuffer]:
    keyed: dict[tuple[Any, ...], list[int]] = {}
    for position, shard in enumerate(shards):
        spec, parameter = shard.spec, shard.parameter
        partial = tuple(group for axis in spec.partial if (group := groups.axis(spec.view, axis)).size > 1)
        key = (parameter.device, _grad_dtype(config, parameter.dtype), groups.data(spec.view), partial)
        keyed.setdefault(key, []).append(position)
    return [
        GradBuffer([shards[position] for position in positions], positions, dtype, group, partial, config.bucket_elements(group.size))
        for (_, dtype, group, partial), positions in keyed.items()
    ]


def _grad_dtype(config: DistributedDataParallelConfig, dtype: torch.dtype) -> torch.dtype:
    if dtype in (torch.float32, torch.float64):
        return dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"parameters of dtype {dtype} cannot be trained; use float64, float32, bfloat16 or float16")
    return torch.float32 if config.grad_reduce_in_fp32 else dtype
