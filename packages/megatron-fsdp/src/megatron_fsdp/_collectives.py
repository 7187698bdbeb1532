# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The collectives of flat buffers, which write where they are told to and copy nothing."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_fsdp._ranks import Ranks

if TYPE_CHECKING:
    from megatron_fsdp._lane import Work

# UNTIL torch 2.12: before, these had other names, which now warn.
_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def start_gather(full: torch.Tensor, shard: torch.Tensor, ranks: Ranks) -> "Work | None":
    """Fill ``full`` [size * n] with every rank's ``shard`` [n], which may be this rank's slice of it."""
    if ranks.size == 1:
        if full.data_ptr() != shard.data_ptr():
            full.copy_(shard)
        return None
    return _gather_into(full, shard, group=ranks.pg, async_op=True)


class ShardSum:
    """The sum over ranks of a flat buffer ``full`` [size * n], of which this rank gets its slice ``result`` [n].

    What crosses ranks in 16 bits crosses once as it is and is added in float32: a ring would round it size - 1 times.

    Args:
        full: is not changed, unless one rank makes it the result.
        ranks: that it is summed over.
        comm_dtype: in which it crosses them.
        out: takes the result; None makes a tensor like ``full``.
    """

    def __init__(self, full: torch.Tensor, ranks: Ranks, comm_dtype: torch.dtype, *, out: torch.Tensor | None) -> None:
        self._full, self._ranks, self._comm_dtype, self._out = full, ranks, comm_dtype, out
        self._received: torch.Tensor | None = None

    @property
    def result(self) -> torch.Tensor:
        """Valid after ``end``."""
        assert self._out is not None, "begin makes it"
        return self._out

    @torch.no_grad()
    def begin(self) -> "Work | None":
        full, ranks = self._full, self._ranks
        if ranks.size == 1:
            self._out = full if self._out is None else self._out
            if self._out is not full:
                self._out.copy_(full)
            return None
        if self._out is None:
            self._out = full.new_empty(full.numel() // ranks.size)
        outgoing = full.to(self._comm_dtype)
        if self._comm_dtype.itemsize == 2:
            self._received = torch.empty_like(outgoing)
            return dist.all_to_all_single(self._received, outgoing, group=ranks.pg, async_op=True)
        if self._comm_dtype == full.dtype:
            return _reduce_scatter_into(self._out, full, group=ranks.pg, async_op=True)
        self._received = outgoing.new_empty(self._out.numel())
        return _reduce_scatter_into(self._received, outgoing, group=ranks.pg, async_op=True)

    @torch.no_grad()
    def end(self) -> None:
        received, self._received = self._received, None
        if received is None:
            return
        if received.numel() == self.result.numel():
            self.result.copy_(received)
        else:
            torch.sum(received.view(self._ranks.size, -1), dim=0, dtype=self.result.dtype, out=self._out)


def reduce_scatter(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """The sum over ranks of this rank's slice of ``x``."""
    out = x.new_empty(x.numel() // ranks.size)
    wait(_reduce_scatter_into(out, x, group=ranks.pg, async_op=True))
    return out


def all_reduce(x: torch.Tensor, ranks: Ranks, comm_dtype: torch.dtype) -> None:
    """Sum ``x`` [n] over ranks in place; what crosses them in 16 bits is added in float32."""
    if comm_dtype == x.dtype and comm_dtype.itemsize > 2:
        wait(dist.all_reduce(x, group=ranks.pg, async_op=True))
        return
    padded = torch.nn.functional.pad(x, (0, -x.numel() % ranks.size)).to(comm_dtype)
    total = ShardSum(padded, ranks, comm_dtype, out=None)
    wait(total.begin())
    total.end()
    wait(start_gather(padded, total.result, ranks))
    x.copy_(padded[: x.numel()])


def wait(work: "Work | None") -> None:
    """Order what follows behind ``work``."""
    if work is not None:
        work.wait()
