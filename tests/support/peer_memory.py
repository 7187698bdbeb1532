# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory that the ranks of a gloo group store in, as GPUs of a host do in each other's: mapped files and a barrier."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import Group


class MappedMemory:
    """Conforms to ``mcore_moe.dispatch._symmetric.PeerMemory``. It begins as bytes of 0xFF, which are NaN in every floating-point format.

    Args:
        group: ranks of one machine.
        num_bytes: of each rank.
    """

    def __init__(self, group: Group, num_bytes: int) -> None:
        self._group = group
        names = [tempfile.mkdtemp()]
        dist.broadcast_object_list(names, src=group.ranks[0], group=group.pg)
        self._folder = Path(names[0])
        own = self._map(group.rank, num_bytes)
        own.fill_(255)
        self.barrier()
        self.peers = [own if rank == group.rank else self._map(rank, num_bytes) for rank in range(group.size)]
        self.barrier()
        if group.is_first:
            # What is mapped stays.
            shutil.rmtree(self._folder)
        self.addresses = torch.tensor([peer.data_ptr() for peer in self.peers])

    def barrier(self) -> None:
        dist.barrier(self._group.pg)

    def _map(self, rank: int, num_bytes: int) -> Tensor:
        return torch.from_file(str(self._folder / str(rank)), shared=True, size=num_bytes, dtype=torch.uint8)
