# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Host memory that a state is copied to before training goes on, kept from one save to the next."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from mcore_ckpt._sharded import DeferredTensor, ShardedTensor

__all__ = ["Staging"]

_ALIGNMENT = 64

Key = TypeVar("Key")


class Staging:
    """One buffer, page-locked where the state lies on a GPU; whoever has a copy in it holds it.

    Page-locked memory is slow to get and copies out of a GPU at full speed, so a buffer that is large enough serves again.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None
        self._locked = False

    @property
    def num_bytes(self) -> int:
        """Bytes that are held between saves."""
        return 0 if self._buffer is None else self._buffer.numel()

    def copy(self, shards: Mapping[Key, ShardedTensor | DeferredTensor]) -> tuple[dict[Key, ShardedTensor], Callable[[], None]]:
        """The values of ``shards`` as they are now, in host memory, and what to call when they are needed no more.

        Copies from a GPU are queued behind its work and waited for together.
        """
        held = {key: (shard, shard.data.detach()) for key, shard in shards.items()}
        devices = {data.device for _, data in held.values() if data.device.type == "cuda"}
        total = sum(_room(data) for _, data in held.values())
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.numel() < total or (devices and not self._locked):
            # The old one goes before the new one comes.
            buffer = None
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
            self._buffer = buffer

        return staged, release


def _lock(buffer: Tensor) -> bool:
    """Page-lock memory that exists, to the byte; an allocation of torch's own would be rounded up to a power of two."""
    cudart: Any = torch.cuda.cudart()
    locked = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)) == 0
    if locked:
        weakref.finalize(buffer, cudart.cudaHostUnregister, buffer.data_ptr())
    return locked


def _room(data: Tensor) -> int:
    return -(-data.nbytes // _ALIGNMENT) * _ALIGNMENT
