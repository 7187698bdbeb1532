# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What all parameter groups of one model share: dtypes, devices, streams, registered memory and the order of collectives."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp._collectives import Ranks, Work
from megatron_fsdp._order import CollectiveOrder
from megatron_fsdp._policy import MixedPrecisionPolicy


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


class WorkHandle:
    """Something that a stream runs; ``wait`` makes what it wrote readable."""

    def __init__(self, work: Work | None = None, end: Callable[[], None] | None = None, event: torch.cuda.Event | None = None) -> None:
        self._work, self._end, self._event = work, end, event

    def wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)
            return
        if self._work is not None:
            self._work.wait()
        if self._end is not None:
            self._end()


class Stream:
    """Runs one kind of communication in the order it was launched; the host never waits on a device.

    Everything launched begins after what the current stream was given so far, so a buffer may be written as soon as it is free there.
    A buffer that was launched with is free again for the current stream once the handle was waited for; nothing needs ``record_stream``.
    """

    def __init__(self, device: torch.device) -> None:
        # The highest priority: short copies and sums must not queue behind the GEMMs that hide them.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def launch(
        self, begin: Callable[[], Work | None], end: Callable[[], None] | None = None, *, after: WorkHandle | None = None
    ) -> WorkHandle:
        """Run ``begin``, then ``end`` when what ``begin`` started is over; both after another handle's, if one is given.

        Without streams ``end``, and all that comes after a handle, run in ``wait``.
        """
        if self._stream is None:
            return WorkHandle(begin(), end) if after is None else WorkHandle(after, lambda: WorkHandle(begin(), end).wait())
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            WorkHandle(begin(), end).wait()
        event = torch.cuda.Event()
        event.record(self._stream)
        return WorkHandle(event=event)

    def synchronize(self) -> None:
        """Let the host wait for all that was launched."""
        if self._stream is not None:
            self._stream.synchronize()


class ComputeStream:
    """The stream of the forward, which streams start from and are waited for by.

    Autograd sums a gradient on the stream where its parameter entered the oldest graph that is still alive. For units captured in CUDA
    graphs that is a stream of the capture, which nothing else waits for before the end of the backward.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Forward and backward run on the current stream."""
        if self._is_cuda:
            self._stream = torch.cuda.current_stream()

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """What is inside runs there, behind the current stream, which goes on behind it and may use again what was freed inside."""
        current = torch.cuda.current_stream() if self._is_cuda else None
        if current is None or self._stream is None or current == self._stream:
            yield
            return
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)


class Streams:
    """Beside the computation: gathers of parameters, sums inside the shard ranks, sums over the outer axis; and what they work on."""

    def __init__(self, device: torch.device, memory: RegisteredMemory | None = None) -> None:
        self.computation = ComputeStream(device)
        self.gather, self.reduce, self.cross = Stream(device), Stream(device), Stream(device)
        self.memory = memory or RegisteredMemory((), device)

    def synchronize(self) -> None:
        """Let the host wait for all that was launched, and no further."""
        for stream in (self.gather, self.reduce, self.cross):
            stream.synchronize()


@dataclass(frozen=True, kw_only=True)
class ShardContext:
    """Dtypes, devices and what runs beside the computation."""

    policy: MixedPrecisionPolicy
    divisor: int
    """Of summed gradients."""
    device: torch.device
    """Where the module computes."""
    streams: Streams
    calls: CollectiveOrder
    cpu_offload: bool = False
    """Whether main parameters and reduced gradients lie in the memory of the host."""

    @property
    def home(self) -> torch.device:
        """Where main parameters and reduced gradients lie."""
        return torch.device("cpu") if self.cpu_offload else self.device

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """[numel] at home; page-locked where a device copies to it and from it while the host goes on."""
        return torch.zeros(numel, dtype=dtype, device=self.home, pin_memory=self.cpu_offload and self.device.type == "cuda")

    def on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor from home where the module computes, copied in the order of the current stream; itself if it is there."""
        return tensor.to(self.device, non_blocking=True)
