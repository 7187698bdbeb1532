# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory that NCCL reads and writes where it lies, without its own staging buffers."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp._ranks import Ranks


class RegisteredMemory:
    """A pool for the flat buffers of collectives, registered with their communicators once it has grown to what a step needs.

    Blocks come back to the pool and are handed out again, so that after a step no buffer lies anywhere else. With another backend
    than NCCL, or one rank, everything here does nothing and buffers come from the usual allocator.

    Args:
        all_ranks: groups whose communicators use the buffers.
        device: of the buffers.
        symmetric: register windows that lie alike on all ranks; otherwise, or where NCCL refuses, plainly.

    Example:
        >>> memory = RegisteredMemory((Ranks(),), torch.device("cpu"))
        >>> with memory.allocating():
        ...     buffer = torch.zeros(4)
        >>> memory.active
        False
    """

    def __init__(self, all_ranks: Sequence[Ranks], device: torch.device, *, symmetric: bool = True) -> None:
        self._symmetric = symmetric
        self._backends = [backend for ranks in all_ranks if (backend := _nccl_backend(ranks, device)) is not None]
        self._registered: list[Any] = []
        self._pool: Any = torch.cuda.MemPool(self._backends[0].mem_allocator) if self._backends else None

    @property
    def active(self) -> bool:
        """Whether buffers really lie in the pool."""
        return self._pool is not None

    @property
    def symmetric(self) -> bool:
        """Whether its windows lie alike on all ranks; known after ``register``."""
        return self._symmetric and bool(self._registered)

    def allocating(self) -> AbstractContextManager[object]:
        """What is allocated inside lies in the pool."""
        return contextlib.nullcontext() if self._pool is None else torch.cuda.use_mem_pool(self._pool)

    def register(self) -> None:
        """Register what the pool holds now; every rank must, at the same point, and their communicators must have been used."""
        self.close()
        for backend in self._backends:
            if self._symmetric:
                try:
                    backend.register_mem_pool(self._pool, symm=True)
                except RuntimeError:
                    # This NCCL or this machine has no symmetric windows.
                    self._symmetric = False
            if not self._symmetric:
                backend.register_mem_pool(self._pool)
            self._registered.append(backend)

    def close(self) -> None:
        """Deregister; buffers stay usable."""
        while self._registered:
            self._registered.pop().deregister_mem_pool(self._pool)


def _nccl_backend(ranks: Ranks, device: torch.device) -> Any:
    if ranks.pg is None or ranks.size == 1 or device.type != "cuda" or not dist.is_nccl_available():
        return None
    backend: Any = ranks.pg._get_backend(device)
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None
