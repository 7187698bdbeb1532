# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory of one process that others map, on a GPU by CUDA IPC and on the host by a file without a name; what describes it is JSON."""

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.guard import ProcessMark


def place_of(device: torch.device) -> list[str] | None:
    """Machine and device; processes of equal ones can map each other's memory. None where there is no such way."""
    host = ProcessMark.own().host
    if not host or device.type not in ("cpu", "cuda"):
        return None
    # Numbers of GPUs are of each process alone.
    return [host, "cpu" if device.type == "cpu" else f"cuda {torch.cuda.get_device_properties(device).uuid}"]


class SharedMemory:
    """Memory of this process that one other process may map.

    Args:
        num_bytes: at least 1.
        device: where it is.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.fds: list[int] = []
        """What the other process is to be sent beside ``handle``."""
        self.handle: dict[str, Any] = {"num_bytes": num_bytes}
        """What the other process maps it by."""
        self._counter: list[Any] | None = None
        self._memory: Tensor | None
        if device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            _, parts = reduce_tensor(self._memory)
            # Behind dtype and number of the device: handle, size, offset, requires_grad, counter and its place, event, and whether to wait.
            ipc = list(parts[7:])
            self._counter = ipc[4:6]
            self.handle["cuda"] = [{"hex": part.hex()} if isinstance(part, bytes) else part for part in ipc]
        else:
            self.fds.append(os.memfd_create("mcore_rl"))
            os.ftruncate(self.fds[0], num_bytes)
            self._memory = _mapped(self.fds[0], num_bytes)

    @property
    def tensor(self) -> Tensor:
        """Its bytes."""
        assert self._memory is not None
        return self._memory

    def close_fds(self) -> None:
        """Once they are sent."""
        while self.fds:
            os.close(self.fds.pop())

    def free(self, *, peer_releases: bool = True) -> None:
        """Give it up. The memory itself stays for as long as the other process maps it.

        Args:
            peer_releases: the other process unmaps it, or has; False for one that died, or could not map it.
        """
        self.close_fds()
        if not peer_releases and self._counter is not None and self._memory is not None:
            # torch keeps the memory until the other process has counted down.
            storage: Any = torch.UntypedStorage
            storage._release_ipc_counter_cuda(*self._counter)
        self._memory = self._counter = None


def map_memory(handle: dict[str, Any], fds: Sequence[int], device: torch.device) -> Tensor:
    """The bytes of another process, mapped for as long as a tensor of theirs lives.

    Args:
        handle: of its `SharedMemory`.
        fds: as sent with it; they stay open.
        device: the same device, by its number here.

    Raises:
        RuntimeError, OSError: this process cannot map it.
    """
    num_bytes = handle["num_bytes"]
    if "cuda" not in handle:
        return _mapped(fds[0], num_bytes)
    # Slow to import, as above.
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    ipc = [bytes.fromhex(part["hex"]) if isinstance(part, dict) else part for part in handle["cuda"]]
    return rebuild_cuda_tensor(Tensor, (num_bytes,), (1,), 0, torch.storage.TypedStorage, torch.uint8, device.index, *ipc)


def _mapped(fd: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)
