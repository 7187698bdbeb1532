# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory that NCCL may read and write directly."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mcore_parallel._groups import Group


class RegisteredMemory:
    """Allocates tensors in memory that is registered with the group's NCCL communicator.

    With any other backend, or for a group of one, everything here does nothing and tensors come from the usual allocator.
    Keep the object as long as the tensors, and ``close`` it before the process group is destroyed.

    Args:
        group: whose communicator will use the tensors.
        device: of the tensors.
        symmetric: register a window that lies alike on all ranks, which all of them must then allocate alike; otherwise, or
            when the communicator refuses, plainly.

    Example:
        >>> memory = RegisteredMemory(Group.single(), torch.device("cpu"))
        >>> with memory.allocate():
        ...     buffer = torch.zeros(4)
        >>> memory.active
        False
    """

    def __init__(self, group: Group, device: torch.device, *, symmetric: bool = True) -> None:
        self._backend: Any = None
        self._pool: Any = None
        self._symmetric, self._registered = symmetric, False
        if group.pg is None or device.type != "cuda":
            return
        backend: Any = group.pg._get_backend(device)
        if not (dist.is_nccl_available() and isinstance(backend, dist.ProcessGroupNCCL)):
            return
        # The communicator comes into being with the first collective, and registration needs it.
        dist.all_reduce(torch.zeros(1, device=device), group=group.pg)
        self._backend, self._pool = backend, torch.cuda.MemPool(backend.mem_allocator)

    @property
    def active(self) -> bool:
        """Whether tensors really lie in registered memory."""
        return self._pool is not None

    @contextmanager
    def allocate(self) -> Iterator[None]:
        """Tensors created inside lie in the pool; it is registered at the end."""
        if self._pool is None:
            yield
            return
        self._deregister()
        with torch.cuda.use_mem_pool(self._pool):
            yield
        self._register()

    def close(self) -> None:
        """Deregister; the tensors stay usable."""
        self._deregister()
        self._backend = self._pool = None

    def _register(self) -> None:
        if self._symmetric:
            try:
                self._backend.register_mem_pool(self._pool, symm=True)
                self._registered = True
                return
            except RuntimeError:
                # This NCCL or this machine has no symmetric windows; plain registration still avoids a copy.
                self._symmetric = False
        self._backend.register_mem_pool(self._pool)
        self._registered = True

    def _deregister(self) -> None:
        if self._registered:
            self._backend.deregister_mem_pool(self._pool)
            self._registered = False
