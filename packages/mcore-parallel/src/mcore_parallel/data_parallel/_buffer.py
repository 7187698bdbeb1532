# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One flat tensor of gradients that are summed over the same ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel._groups import Group
from mcore_parallel._shards import NamedShard
from mcore_parallel.data_parallel._layout import BucketRange, lay_out_buckets


class Bucket:
    """A stretch of a buffer: what is complete of it, and its running sum."""

    def __init__(self, data: Tensor, group: Group, position: int) -> None:
        self.data, self.group, self.position = data, group, position
        """``position``: number of its last parameter in backward order."""
        self.missing = 0
        """Gradient reports to come before the sum may start."""
        self.launched = False
        self._work: dist.Work | None = None

    def launch(self) -> None:
        """Start the sum."""
        self.launched = True
        if self.group.size > 1:
            self._work = dist.all_reduce(self.data, group=self.group.pg, async_op=True)

    def finish(self) -> None:
        """Wait for the sum (on the compute stream, when there is one)."""
        if self._work is not None:
            self._work.wait()
        self._work, self.launched = None, False


class GradBuffer:
    """Gradients of ``shards`` back to back, in the given order.

    Args:
        shards: parameters in the order in which the backward reaches them.
        positions: their numbers among all parameters of the model in that order.
        dtype: of the gradients.
        data_group: ranks that hold other data.
        partial_groups: groups over which the gradients are summed once more, after the data sum.
        bucket_elements: elements after which a bucket closes.
    """

    def __init__(
        self,
        shards: Sequence[NamedShard],
        positions: Sequence[int],
        dtype: torch.dtype,
        data_group: Group,
        partial_groups: Sequence[Group],
        bucket_elements: int,
    ) -> None:
        numels = [shard.parameter.numel() for shard in shards]
        self.data = torch.zeros(sum(numels), dtype=dtype, device=shards[0].parameter.device)
        self.partial_groups = tuple(partial_groups)
        views = self.data.split(numels)
        self.grads = {shard.name: view.view_as(shard.parameter) for shard, view in zip(shards, views, strict=True)}
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[str, Bucket] = {}
        for part in lay_out_buckets(numels, bucket_elements):
            bucket = self._bucket(part, data_group, positions)
            self.buckets.append(bucket)
            self.bucket_of |= {shards[index].name: bucket for index in part.members}

    def sum_partial(self) -> None:
        """Add up partial gradients of the model-parallel ranks; call when the data sums are finished."""
        for group in self.partial_groups:
            if group.size > 1:
                dist.all_reduce(self.data, group=group.pg)

    def _bucket(self, part: BucketRange, group: Group, positions: Sequence[int]) -> Bucket:
        return Bucket(self.data[part.start : part.end], group, positions[part.members[-1]])
