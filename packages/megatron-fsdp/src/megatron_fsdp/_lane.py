# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Work that runs beside the computation: on a stream of its own where there are streams, on the communicator's threads elsewhere."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from megatron_fsdp._registered import RegisteredMemory


class Work(Protocol):
    """A collective under way; ``wait`` orders the current stream, or the caller where there is none, behind it."""

    def wait(self) -> object: ...


class Ticket:
    """Something that a lane runs; ``wait`` makes what it wrote readable."""

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


class Lane:
    """Runs one kind of communication in the order it was launched; the host never waits on a device.

    Everything launched begins after what the current stream was given so far, so a buffer may be written as soon as it is free there.
    A buffer that was launched with is free again for the current stream once the ticket was waited for; nothing needs ``record_stream``.
    """

    def __init__(self, device: torch.device) -> None:
        # The highest priority: short copies and sums must not queue behind the products that hide them.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def launch(self, begin: Callable[[], Work | None], end: Callable[[], None] | None = None, *, after: Ticket | None = None) -> Ticket:
        """Run ``begin``, then ``end`` when what ``begin`` started is over; both after another ticket, if one is given.

        Without streams ``end``, and all that comes after a ticket, run in ``wait``.
        """
        if self._stream is None:
            return Ticket(begin(), end) if after is None else Ticket(after, lambda: Ticket(begin(), end).wait())
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if after is not None:
                after.wait()
            Ticket(begin(), end).wait()
        event = torch.cuda.Event()
        event.record(self._stream)
        return Ticket(event=event)

    def synchronize(self) -> None:
        """Let the host wait for all that was launched."""
        if self._stream is not None:
            self._stream.synchronize()


class Computation:
    """The stream of the forward, which lanes start from and are waited for by.

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


class Lanes:
    """Beside the computation: gathers of parameters, sums inside the shard ranks, sums over the outer axis; and what they work on."""

    def __init__(self, device: torch.device, memory: RegisteredMemory | None = None) -> None:
        self.computation = Computation(device)
        self.gather, self.reduce, self.cross = Lane(device), Lane(device), Lane(device)
        self.memory = memory or RegisteredMemory((), device)

    def synchronize(self) -> None:
        """Let the host wait for all that was launched, and no further."""
        for lane in (self.gather, self.reduce, self.cross):
            lane.synchronize()
