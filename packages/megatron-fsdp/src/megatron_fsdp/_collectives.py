# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Process groups as one of their ranks sees them, and collectives over them that write where they are told to and copy nothing."""

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A collective under way; ``wait`` orders the current stream, or the caller where there is none, behind it."""

    def wait(self) -> object: ...


# The functional operators exist under one name from torch 2.11 on and are asynchronous: `wait` ends them.
_c10d = torch.ops._c10d_functional

_APART = "megatron_fsdp"
"""What torch's logs and traces call the communicators of ``Ranks.apart``."""


@dataclass(frozen=True)
class Ranks:
    """A process group as seen from one of its ranks; a group of one needs no communicator."""

    size: int = 1
    rank: int = 0
    pg: dist.ProcessGroup | None = field(default=None, repr=False)
    name: str = ""

    @classmethod
    def of(cls, pg: dist.ProcessGroup) -> "Ranks":
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg, pg.group_name)

    def apart(self, device: torch.device) -> "Ranks":
        """The same ranks over a communicator for these gathers and sums alone, which all of them make once in the life of the world.

        A communicator runs one collective after the other: what a module exchanges over the same one would wait behind the gathers.
        """
        assert self.pg is not None, "a group of one exchanges nothing"
        members, backend = dist.get_process_group_ranks(self.pg), dist.get_backend_config(self.pg)
        for pg in dist.distributed_c10d._world.pg_map:
            if pg.group_desc == _APART and (dist.get_process_group_ranks(pg), dist.get_backend_config(pg)) == (members, backend):
                return Ranks.of(pg)
        timeout = self.pg._get_backend(device).options._timeout
        world = dist.group.WORLD
        assert world is not None
        # The communicator of a world that is bound to a device would be split, and ranks that are no members would be waited for.
        bound, world.bound_device_id = world.bound_device_id, None
        try:
            group = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=_APART)
        finally:
            world.bound_device_id = bound
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        return Ranks.of(group)

    def gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Start filling ``full`` [size * n] with every rank's ``shard`` [n]; ``wait`` ends it."""
        # Only this form is safe on gloo: of the one that allocates, its threads store a long name without a lock and free memory twice.
        return _c10d.all_gather_into_tensor_out(shard, self.size, self.name, out=full)

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce over ranks and wait."""
        return x if self.size == 1 else _wait(_c10d.all_reduce(x, op, self.name))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate equal shapes over ranks along dimension 0 and wait."""
        if self.size == 1:
            return x
        return _wait(self.gather_into(x.new_empty((self.size * x.shape[0], *x.shape[1:])), x.contiguous()))

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x`` by the first rank's."""
        if self.size > 1:
            dist.broadcast(x, group=self.pg, group_src=0)


def _wait(x: torch.Tensor) -> torch.Tensor:
    """End what fills ``x``; nothing to do when it is already there."""
    return _c10d.wait_tensor(x)


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
