# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One flat tensor of gradients that are summed over the same ranks, and the parameters that lie alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel.comm import Pending, start_all_reduce_in_place, start_gather_into, start_reduce_scatter_into
from mcore_parallel.data_parallel._config import DistributedDataParallelConfig
from mcore_parallel.data_parallel._layout import BucketRange, SlicedLayout, lay_out_buckets, lay_out_slices
from mcore_parallel.groups import Group, NamedShard, Piece

_FAST_MULTIPLE = 65536
"""Elements of which a bucket is a multiple with ``pad_buckets_for_high_nccl_busbw``."""


@dataclass(frozen=True)
class DataGroups:
    """Ranks that hold other data, and how they share slices."""

    data: Group
    """All of them."""
    inner: Group
    """Those that share the slices of one optimizer instance."""
    outer: Group
    """Those that hold the same slice, one an instance."""
    gather: Group
    """As ``inner``; may have a communicator of its own."""


class Bucket:
    """A stretch of a buffer: what is complete of it, and its running sum.

    Args:
        data: its gradients.
        mine: this rank's slice of them; None when every replica gets the whole sum.
        groups: ranks that are summed over.
        position: number of its last parameter in backward order.
        config: how to sum.
    """

    def __init__(self, data: Tensor, mine: Tensor | None, groups: DataGroups, position: int, config: DistributedDataParallelConfig) -> None:
        self.data, self.mine, self.groups, self.position, self.config = data, mine, groups, position, config
        self.missing = 0
        """Gradient reports to come before the sum may start."""
        self.launched = False
        self.grads: dict[str, Tensor] = {}
        """Views of its parameters' gradients."""
        self.accumulators: dict[str, Tensor] = {}
        """Private float32 sums of some of them."""
        self._work: Pending | None = None

    def launch(self) -> None:
        """Start the sum.

        Raises:
            ArithmeticError: a local gradient fails a check that the config asks for.
        """
        self.launched = True
        for name, accumulator in self.accumulators.items():
            self.grads[name].copy_(accumulator)
        if self.config.check_for_nan_in_grad or self.config.check_for_large_grads:
            self._check()
        if self.groups.data.size == 1:
            return
        if self.config.average_in_collective:
            self.data.mul_(1.0 / self.groups.data.size)
        fp32 = self.config.reduce_scatter_with_fp32_accumulation
        if self.mine is None:
            self._work = start_all_reduce_in_place(self.data, self.groups.data, fp32_accumulation=fp32)
        else:
            self._work = start_reduce_scatter_into(self.mine, self.data, self.groups.inner, fp32_accumulation=fp32)

    def drain(self) -> None:
        """Wait for the sum within one instance (on the compute stream, when there is one)."""
        if self._work is not None:
            self._work.wait()
        self._work = None

    def start_outer(self) -> Pending | None:
        """Add the slices of all instances up."""
        if self.mine is None or self.groups.outer.size == 1:
            return None
        return start_all_reduce_in_place(self.mine, self.groups.outer, fp32_accumulation=self.config.reduce_scatter_with_fp32_accumulation)

    def reset(self) -> None:
        """Nothing is under way and no report has come."""
        self.launched, self.missing = False, 0

    def _check(self) -> None:
        largest = self.data.abs().amax().item() if self.data.numel() else 0.0
        if largest <= (self.config.large_grad_limit if self.config.check_for_large_grads else torch.finfo(torch.float64).max):
            return
        for name, grad in self.grads.items():
            value = grad.abs().amax().item()
            finite = value <= torch.finfo(grad.dtype).max
            if finite and not (self.config.check_for_large_grads and value > self.config.large_grad_limit):
                continue
            limit = f"an element of magnitude {value}, large_grad_limit={self.config.large_grad_limit}"
            problem = limit if finite else "a value that is not finite"
            group = self.groups.data
            raise ArithmeticError(
                f"rank {group.ranks[group.rank]} on {grad.device}: the local gradient of {name} holds {problem}, "
                f"before its sum over the ranks {list(group.ranks)}; look at this rank's batch"
            )


class GradBuffer:
    """Gradients of ``shards`` back to back, in the given order, or with padding so that slices fall between rows.

    Args:
        shards: parameters in the order in which the backward reaches them.
        positions: their numbers among all parameters of the model in that order.
        dtype: of the gradients.
        groups: ranks that hold other data.
        partial_groups: groups over which the gradients are summed once more, after the data sum.
        config: how to sum and how large buckets are.
        sliced: each rank completes its slice only, and the parameters move into a flat buffer of their own.
    """

    def __init__(
        self,
        shards: Sequence[NamedShard],
        positions: Sequence[int],
        dtype: torch.dtype,
        groups: DataGroups,
        partial_groups: Sequence[Group],
        config: DistributedDataParallelConfig,
        *,
        sliced: bool = False,
    ) -> None:
        parameters = [shard.parameter for shard in shards]
        elements = config.bucket_elements(groups.data.size, sum(parameter.numel() for parameter in parameters))
        self.config, self.groups, self.partial_groups = config, groups, tuple(partial_groups)
        self.shards = tuple(shards)
        shapes = [tuple(parameter.shape) for parameter in parameters]
        multiple = _FAST_MULTIPLE if config.pad_buckets_for_high_nccl_busbw else 1
        self.layout = _layout(shapes, elements, groups.inner.size if sliced else None, multiple)
        self.data = torch.zeros(self.layout.total, dtype=dtype, device=parameters[0].device)
        self.params = _take_over(parameters, self.layout) if sliced else None
        """The parameters, each a view into this, at the places of their gradients; None unless sliced."""
        self.grads = {
            shard.name: self.data[start : start + shard.parameter.numel()].view(shard.parameter.shape)
            for shard, start in zip(shards, self.layout.starts, strict=True)
        }
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[str, Bucket] = {}
        for part in self.layout.buckets:
            bucket = self._bucket(part, positions)
            self.buckets.append(bucket)
            self.bucket_of |= {shards[index].name: bucket for index in part.members}

    def sum_partial(self) -> None:
        """Add up partial gradients of the model-parallel ranks; call when the data sums are finished."""
        stretches = [self.data] if self.params is None else [bucket.mine for bucket in self.buckets if bucket.mine is not None]
        for group in self.partial_groups:
            if group.size > 1:
                for stretch in stretches:
                    dist.all_reduce(stretch, group=group.pg)

    def pieces(self) -> list[Piece]:
        """What this rank updates of the parameters, in buffer order."""
        factor = float(self.groups.data.size) if self.config.average_in_collective else 1.0
        pieces = []
        for part in self.layout.buckets:
            for index in part.members:
                shard, at = self.shards[index], self.layout.starts[index]
                numel = shard.parameter.numel()
                grad, parameter = self.grads[shard.name].view(-1), shard.parameter.detach().view(-1)
                begin, end, instance = 0, numel, None
                if self.params is not None:
                    low, high = self.layout.slice_of(part, self.groups.inner.rank)
                    begin, end, instance = min(max(low - at, 0), numel), max(min(high - at, numel), 0), self.groups.outer.rank
                    if begin >= end:
                        continue
                shape = tuple(shard.parameter.shape)
                views = (parameter[begin:end], grad[begin:end])
                pieces.append(Piece(shard.name, shard.spec, begin, end, *views, shape, self.groups.data, instance, factor))
        return pieces

    def start_gather(self, index: int) -> Pending | None:
        """Fetch the other ranks' slices of the parameters of one bucket."""
        if self.params is None:
            return None
        part = self.layout.buckets[index]
        low, high = self.layout.slice_of(part, self.groups.gather.rank)
        return start_gather_into(self.params[part.start : part.end], self.params[low:high], self.groups.gather)

    def _bucket(self, part: BucketRange, positions: Sequence[int]) -> Bucket:
        mine = None
        if self.params is not None:
            low, high = self.layout.slice_of(part, self.groups.inner.rank)
            mine = self.data[low:high]
        bucket = Bucket(self.data[part.start : part.end], mine, self.groups, positions[part.members[-1]], self.config)
        for index in part.members:
            name = self.shards[index].name
            bucket.grads[name] = self.grads[name]
            if self.config.accumulates_in_fp32(name) and self.data.element_size() == 2:
                bucket.accumulators[name] = torch.zeros_like(self.grads[name], dtype=torch.float32)
        return bucket


def _layout(shapes: Sequence[tuple[int, ...]], elements: int, num_slices: int | None, multiple: int) -> SlicedLayout:
    if num_slices is not None:
        return lay_out_slices(shapes, elements, num_slices, multiple)
    numels = [torch.Size(shape).numel() for shape in shapes]
    starts = [sum(numels[:index]) for index in range(len(numels))]
    return SlicedLayout(lay_out_buckets(numels, elements), tuple(starts), 1)


def _take_over(parameters: Sequence[torch.nn.Parameter], layout: SlicedLayout) -> Tensor:
    """Move the parameters into one flat tensor; each stays the object that it was."""
    flat = torch.zeros(layout.total, dtype=parameters[0].dtype, device=parameters[0].device)
    for parameter, start in zip(parameters, layout.starts, strict=True):
        place = flat[start : start + parameter.numel()].view(parameter.shape)
        place.copy_(parameter.detach())
        parameter.data = place
    return flat
