# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A process group as one of its ranks sees it, and the collectives over it."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist

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
        made = dist.new_group(members, timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=_APART)
        assert isinstance(made, dist.ProcessGroup), "this rank is a member"
        return Ranks.of(made)

    def gather_into(self, full: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
        """Start filling ``full`` [size * n] with every rank's ``shard`` [n]; ``wait`` ends it."""
        # Only this form is safe on gloo: of the one that allocates, its threads store a long name without a lock and free memory twice.
        return _c10d.all_gather_into_tensor_out(shard, self.size, self.name, out=full)

    def reduce_scatter(self, full: torch.Tensor) -> torch.Tensor:
        """Start summing ``full`` [size * n] over ranks into this rank's slice [n]; ``wait`` ends it."""
        return _c10d.reduce_scatter_tensor(full, "sum", self.size, self.name)

    def start_all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Start reducing ``x`` over ranks; ``wait`` ends it."""
        return _c10d.all_reduce(x, op, self.name)

    def all_reduce(self, x: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce over ranks and wait."""
        return x if self.size == 1 else wait(self.start_all_reduce(x, op))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate equal shapes over ranks along dimension 0 and wait."""
        if self.size == 1:
            return x
        return wait(self.gather_into(x.new_empty((self.size * x.shape[0], *x.shape[1:])), x.contiguous()))

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite ``x`` by the first rank's."""
        if self.size > 1:
            dist.broadcast(x, group=self.pg, group_src=0)


def wait(x: torch.Tensor) -> torch.Tensor:
    """End what fills ``x``; nothing to do when it is already there."""
    return _c10d.wait_tensor(x)
