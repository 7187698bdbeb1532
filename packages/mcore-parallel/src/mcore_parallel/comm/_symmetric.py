# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Memory of each rank of a group that the others read and write directly."""

import importlib
import socket
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.comm._collectives import all_gather
from mcore_parallel.groups import Group, uses_nccl

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SymmetricBuffer:
    """As many bytes on each rank of a group, which every rank's kernels address: torch symmetric memory over NVLink or PCIe.

    All ranks create it together. What one rank stores in another's bytes is there behind the next ``barrier`` of both. Its tensors hold
    anything at first. Keep it until the last kernel that uses it has run on every rank. Nothing here uses NVLink multicast; what torch
    prepares for it, TORCH_SYMM_MEM_DISABLE_MULTICAST=1 leaves out.

    Args:
        group: ranks of one host, one GPU each, connected by NCCL.
        num_bytes: of each rank.
        device: this rank's GPU.
        timeout_s: longest wait of a barrier. Then the device prints which rank did not come, and the next call that waits for it fails.

    Raises:
        ValueError: what ``obstacle`` says, or ranks on other hosts, which are named.
        RuntimeError: the GPUs cannot address each other.

    Example:
        >>> SymmetricBuffer.obstacle(Group.single(), torch.device("cpu"))
        "a symmetric buffer needs CUDA, found device='cpu'; use a GPU"
    """

    def __init__(self, group: Group, num_bytes: int, device: torch.device, *, timeout_s: float) -> None:
        if reason := self.obstacle(group, device):
            raise ValueError(reason)
        _check_hosts(group, device)
        library = _library()
        # Not from the pool of its ``empty``: there a tensor may begin inside a block, at another place on each rank.
        self._bytes: Tensor = library._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)
        try:
            self._handle: Any = library.rendezvous(self._bytes, group.name)
        except RuntimeError as error:
            raise RuntimeError(
                f"ranks {list(group.ranks)} cannot address each other's GPU memory ({error}); use GPUs of one host that are peers, or an "
                "exchange by NCCL"
            ) from error
        self.peers: Sequence[Tensor] = [
            self._bytes if rank == group.rank else self._handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(group.size)
        ]
        """uint8 [num_bytes] of each rank, in rank order; this rank's own among them."""
        self.addresses = torch.tensor([peer.data_ptr() for peer in self.peers], dtype=torch.int64).to(device)
        """int64 [ranks] on the device, where the bytes of each rank begin, as this rank's kernels address them: multiples of 16."""
        self._timeout_ms = max(1, int(timeout_s * 1000))

    @staticmethod
    def obstacle(group: Group, device: torch.device) -> str | None:
        """Why this rank cannot have one, with the remedy; None where it can, as far as it knows alone."""
        if device.type != "cuda":
            return f"a symmetric buffer needs CUDA, found device={str(device)!r}; use a GPU"
        if group.pg is None or not uses_nccl(group.pg):
            return f"a symmetric buffer needs ranks connected by NCCL, found a group of {group.size}; initialise torch.distributed with it"
        allocator = _library().get_backend(device)
        if allocator not in (None, "CUDA"):
            return f"a symmetric buffer needs torch's symmetric memory of CUDA, found {allocator}; leave its backend as it is"
        return None

    def barrier(self) -> None:
        """The stream waits for all ranks: behind it are their stores from before it. The host does not wait."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)


def _library() -> Any:
    """torch's symmetric memory, imported by who uses it: its module defines operators."""
    return importlib.import_module("torch.distributed._symmetric_memory")


def _check_hosts(group: Group, device: torch.device) -> None:
    hosts = all_gather(torch.tensor([_host_number()], device=device), group).tolist()
    others = [rank for rank, host in zip(group.ranks, hosts, strict=True) if host != hosts[group.rank]]
    if others:
        raise ValueError(
            f"ranks {others} are on other hosts than rank {group.ranks[group.rank]}: a symmetric buffer joins GPUs of one host; "
            "choose a group within it, or an exchange by NCCL"
        )


def _host_number() -> int:
    """The same on all processes of a host; the name alone may be shared by containers of several."""
    boot = _BOOT_ID.read_text(encoding="ascii") if _BOOT_ID.exists() else ""
    return zlib.crc32(f"{socket.gethostname()} {boot}".encode())
