# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Host buffers that a state is copied to before training goes on; reused by the next save."""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from mcore_ckpt._core._sharded import DeferredTensor, ShardedTensor

__all__ = ["SharedMemory", "Staged", "Staging"]

_ALIGNMENT = 64

Key = TypeVar("Key")


class SharedMemory:
    """Memory that another process sees when it is handed ``handle``; it lies in no file system, whose size may be bounded.

    Args:
        num_bytes: above 0.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.handle = os.memfd_create("mcore-ckpt", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.handle)
        os.ftruncate(self.handle, num_bytes)
        self.content = mmap.mmap(self.handle, num_bytes)
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.content))

    def find(self, piece: memoryview) -> int | None:
        """Position of the bytes of ``piece``, None where they are not all in here."""
        if piece.readonly:
            return None
        begin = ctypes.addressof(ctypes.c_ubyte.from_buffer(piece)) - self._address
        return begin if 0 <= begin <= self.num_bytes - len(piece) else None


@dataclass(frozen=True)
class Staged(Generic[Key]):
    """A copy of a state."""

    shards: dict[Key, ShardedTensor]
    memory: SharedMemory | None
    """Where it lies; None where this system cannot share memory without a file."""
    release: Callable[[], None]
    """To be called when the copy is needed no more."""


class Staging:
    """One buffer, page-locked where the state lies on a GPU; whoever has a copy in it holds it.

    Page-locked memory is slow to get and copies out of a GPU at full speed, so a buffer that is large enough serves again.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._memory: SharedMemory | None = None
        self._locked = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are held between saves."""
        return 0 if self._buffer is None else self._buffer.numel()

    def copy(self, shards: Mapping[Key, ShardedTensor | DeferredTensor]) -> Staged[Key]:
        """The values of ``shards`` as they are now, in host memory.

        Copies from a GPU are queued behind its work and waited for together.
        """
        held = {key: (shard, shard.data.detach()) for key, shard in shards.items()}
        devices = {data.device for _, data in held.values() if data.device.type == "cuda"}
        total = sum(_room(data) for _, data in held.values())
        buffer, self._buffer = self._buffer, None
        memory, self._memory = self._memory, None
        if buffer is None or buffer.numel() < total or (devices and not self._locked):
            # The old one goes before the new one comes.
            buffer = memory = None
            if total and hasattr(os, "memfd_create"):
                memory = SharedMemory(total)
                buffer = torch.frombuffer(memory.content, dtype=torch.uint8)
            else:
                buffer = torch.empty(total, dtype=torch.uint8)
            self._locked = bool(devices) and _lock(buffer)
        staged, begin = {}, 0
        for key, (shard, data) in held.items():
            target = buffer[begin : begin + data.nbytes].view(data.dtype).view(data.shape)
            target.copy_(data, non_blocking=True)
            staged[key] = ShardedTensor(target, shard.global_shape, shard.box.offset, shard.replica)
            begin += _room(data)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

        def release() -> None:
            self._buffer, self._memory = buffer, memory

        return Staged(staged, memory, release)


def _lock(buffer: Tensor) -> bool:
    """Page-lock memory that exists, to the byte; an allocation of torch's own would be rounded up to a power of two."""
    cudart: Any = torch.cuda.cudart()
    locked = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0
    if locked:
        weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr())
    return locked


def _room(data: Tensor) -> int:
    return -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
