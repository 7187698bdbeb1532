# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory that NCCL may read and write directly."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mcore_parallel.groups import Group

NCCL_ALLOCATOR: str | None = "TORCH" if dist.is_nccl_available() else None
"""Who allocates memory that NCCL can register: torch's own allocator of NCCL memory; None where this torch has no NCCL, and all memory
comes from the usual allocator."""


class RegisteredMemory:
    """Allocates tensors in memory that is registered with a group's NCCL communicator.

    With any other backend, or for a group of one, everything here does nothing and tensors come from the usual allocator.
    Keep the object as long as the tensors, and ``close`` it before the process group is destroyed.

    Args:
        group: whose communicator will use the tensors.
        device: of the tensors.
        also: further groups whose communicators will use them.
        symmetric: register a window that lies alike on all ranks, which all of them must then allocate alike; otherwise, or
            when the communicator refuses, plainly.

    Example:
        >>> memory = RegisteredMemory(Group.single(), torch.device("cpu"))
        >>> with memory.allocate():
        ...     buffer = torch.zeros(4)
        >>> memory.active
        False
    """

    def __init__(self, group: Group, device: torch.device, *, also: Sequence[Group] = (), symmetric: bool = True) -> None:
        self._symmetric, self._pool = symmetric, None
        self._backends: list[Any] = []
        self._registered: list[Any] = []
        for one in dict.fromkeys([group, *also]):
            backend = _nccl_backend(one, device)
            if backend is not None:
                # The communicator comes into being with the first collective, and registration needs it.
                dist.all_reduce(torch.zeros(1, device=device), group=one.pg)
                self._backends.append(backend)
        if self._backends:
            self._pool: Any = torch.cuda.MemPool(self._backends[0].mem_allocator)

    @property
    def active(self) -> bool:
        """Whether tensors really lie in registered memory."""
        return self._pool is not None

    @property
    def allocator(self) -> str | None:
        """``NCCL_ALLOCATOR`` where it is used; None for the usual allocator."""
        return NCCL_ALLOCATOR if self.active else None

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
        self._backends, self._pool = [], None

    def _register(self) -> None:
        for backend in self._backends:
            if self._symmetric:
                try:
                    backend.register_mem_pool(self._pool, symm=True)
                except RuntimeError:
                    # This NCCL or this machine has no symmetric windows; plain registration still avoids a copy.
                    self._symmetric = False
            if not self._symmetric:
                backend.register_mem_pool(self._pool)
            self._registered.append(backend)

    def _deregister(self) -> None:
        while self._registered:
            self._registered.pop().deregister_mem_pool(self._pool)


def _nccl_backend(group: Group, device: torch.device) -> Any:
    if group.pg is None or device.type != "cuda" or not dist.is_nccl_available():
        return None
    backend: Any = group.pg._get_backend(device)
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
