# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights between processes of one device: written into memory that both map, each part announced and released over a Unix socket.

For as long as a refit takes, a rank owns a slot for each neighbour that it sends to, all of them at most half a bucket. It writes a part
of a bucket there and announces it; the neighbour copies the part out and answers, and the slot is free for the next part. At the end the
neighbour unmaps the slot.
"""

import contextlib
import json
import logging
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt.chunks import Box
from mcore_parallel import Group
from mcore_rl._ranks._ended import ended
from mcore_rl._ranks._exchange import all_gather_json
from mcore_rl._refit._message import WeightMessage
from mcore_rl._refit._shared_memory import SharedMemory, map_memory

_log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 14
"""Of one message on a socket."""
_SEND, _TAKE = "did not send weights", "did not take weights"
_LOOK_S = 1.0
"""Between two looks whether those who are waited for live: a child of theirs may keep their sockets open."""

_Wait = tuple[int, socket.socket, str]
"""Rank, its socket, and what it does not do for as long."""


class NeighbourError(RuntimeError):
    """Ranks of this device that did not do their part.

    Args:
        ranks: in the world.
        what: they did not do.
        waited_s: for so long.
        gave_up: they said so.
    """

    def __init__(self, ranks: Sequence[int], what: str, waited_s: float, *, gave_up: bool = False) -> None:
        super().__init__(f"ranks {list(ranks)} {what}")
        self.ranks, self.what, self.waited_s, self.gave_up = list(ranks), what, waited_s, gave_up


@dataclass
class _Outgoing:
    """To one neighbour."""

    connection: socket.socket
    memory: SharedMemory | None = None
    """The slot; None between two refits, and where the neighbour cannot map it."""
    parts: deque[WeightMessage] = field(default_factory=deque)
    """Not written yet."""
    is_free: bool = True
    """Whether what was written last is taken."""
    is_mapped: bool = False
    """Whether the neighbour maps the slot, and will let it go."""


@dataclass
class _Incoming:
    """From one neighbour."""

    connection: socket.socket
    memory: Tensor | None = None
    parts: deque[WeightMessage] = field(default_factory=deque)
    """Not here yet."""


class Neighbours:
    """The ranks with which this one exchanges weights by memory; ``next_turn``, ``open``, ``exchange`` for each bucket and ``close`` make
    one refit.

    Args:
        world: all ranks.
        device: of this rank's weights.
        outgoing: sockets to those that take weights.
        incoming: sockets to those that send weights.
    """

    def __init__(
        self, world: Group, device: torch.device, outgoing: Mapping[int, socket.socket], incoming: Mapping[int, socket.socket]
    ) -> None:
        self._world, self._device = world, device
        self._outgoing = {rank: _Outgoing(connection) for rank, connection in outgoing.items()}
        self._incoming = {rank: _Incoming(connection) for rank, connection in incoming.items()}
        self._turn = 0
        self._is_open = False
        self._hung_up: set[int] = set()
        self.peers: frozenset[int] = frozenset()
        """Those of the last refit, on either side."""
        # Whoever keeps a plan for the next refit need not close it.
        self._disconnect = weakref.finalize(self, _close_all, [*outgoing.values(), *incoming.values()])

    @property
    def destinations(self) -> set[int]:
        """Those that map what this rank sends, in the refit that is open."""
        return {rank for rank, one in self._outgoing.items() if one.memory is not None}

    @property
    def sources(self) -> set[int]:
        """Those whose memory this rank maps, in the refit that is open."""
        return {rank for rank, one in self._incoming.items() if one.memory is not None}

    def next_turn(self) -> int:
        """The number of the refit that begins; what is left of the one before is given up."""
        self.give_up(self._turn)
        self._turn += 1
        return self._turn

    def open(self, largest: Mapping[int, int], limit: int, timeout_s: float) -> None:
        """Make the slots of a refit, and map those of others.

        Args:
            largest: bytes of the largest message to each rank.
            limit: bytes of all slots of this rank, but for 16 each.
            timeout_s: limit of waiting for all of them.

        Raises:
            NeighbourError: they did not answer in time.
        """
        begin = time.monotonic()
        self._is_open = True
        for rank, one in self._outgoing.items():
            one.parts.clear()
            one.is_free, one.is_mapped = True, False
            try:
                one.memory = SharedMemory(max(16, min(largest[rank], limit // len(self._outgoing))), self._device)
            except (RuntimeError, OSError) as error:
                refused = f"{type(error).__name__}: {error}"
                _log.warning("rank %d cannot be given memory to map, its weights are copied between the processes: %s", rank, refused)
                self._send(one.connection, {"refused": refused})
                continue
            self._send(one.connection, one.memory.handle, one.memory.fds)
            one.memory.close_fds()
        for rank, one in self._incoming.items():
            one.parts.clear()
            _, handle, fds = self._receive([(rank, one.connection, _SEND)], begin, timeout_s)
            refused = handle.get("refused")
            try:
                one.memory = map_memory(handle, fds, self._device) if refused is None else None
            except (RuntimeError, OSError) as error:
                refused = f"{type(error).__name__}: {error}"
                _log.warning("the memory of rank %d cannot be mapped, its weights are copied between the processes: %s", rank, refused)
            finally:
                _close(fds)
            self._send(one.connection, {"refused": refused})
        for rank, one in self._outgoing.items():
            _, reply, _ = self._receive([(rank, one.connection, _TAKE)], begin, timeout_s)
            one.is_mapped = reply["refused"] is None
            if not one.is_mapped and one.memory is not None:
                one.memory.free(peer_releases=False)
                one.memory = None
        self.peers = frozenset(self.sources | self.destinations)

    def exchange(
        self,
        outgoing: Mapping[int, WeightMessage],
        incoming: Mapping[int, WeightMessage],
        held: Mapping[tuple[str, Box], Tensor],
        timeout_s: float,
    ) -> Iterator[tuple[WeightMessage, Tensor]]:
        """Write what neighbours take of a bucket, and give what they write: each part with the slot that has it, which is theirs again
        once the next one is asked for. Ends when all is here and the last part is written.

        Args:
            outgoing: by rank of ``destinations``.
            incoming: by rank of ``sources``.
            held: what this rank has of the weights.
            timeout_s: limit of waiting for them.

        Raises:
            NeighbourError: names those that did not send or take within the limit, gave up, or died.
        """
        for rank, message in outgoing.items():
            one = self._outgoing[rank]
            assert one.memory is not None
            one.parts.extend(message.split(one.memory.num_bytes))
        for rank, message in incoming.items():
            other = self._incoming[rank]
            assert other.memory is not None
            other.parts.extend(message.split(other.memory.numel()))
        begin = time.monotonic()
        while True:
            self._write(held)
            waits = [(rank, one.connection, _SEND) for rank, one in self._incoming.items() if one.parts]
            waits += [(rank, one.connection, _TAKE) for rank, one in self._outgoing.items() if one.parts]
            if not waits:
                return
            rank, reply, _ = self._receive(waits, begin, timeout_s)
            if "written" not in reply:
                self._outgoing[rank].is_free = True
                continue
            one, paused = self._incoming[rank], time.monotonic()
            assert one.memory is not None
            yield one.parts.popleft(), one.memory
            self._wait_for_device()
            self._send(one.connection, {"taken": True})
            begin += time.monotonic() - paused

    def close(self, timeout_s: float) -> None:
        """End a refit: unmap all, and free what all others have unmapped.

        Args:
            timeout_s: limit of waiting for them.

        Raises:
            NeighbourError: they did not take the last weights in time.
        """
        for one in self._incoming.values():
            if one.memory is not None:
                one.memory = None
                self._send(one.connection, {"closed": True})
        begin = time.monotonic()
        while waits := [(rank, one.connection, _TAKE) for rank, one in self._outgoing.items() if one.memory is not None]:
            rank, reply, _ = self._receive(waits, begin, timeout_s)
            one = self._outgoing[rank]
            if "closed" in reply and one.memory is not None:
                one.memory.free()
                one.memory = None
        self._is_open = False

    def give_up(self, turn: int) -> None:
        """Let all memory go of a refit that was not closed, and tell its neighbours; nothing happens for one that was, or that another
        followed.

        Args:
            turn: its number.
        """
        if turn != self._turn:
            return
        for other in self._incoming.values():
            other.memory = None
        if self._is_open:
            self._is_open = False
            for connection in [one.connection for one in (*self._outgoing.values(), *self._incoming.values())]:
                self._send(connection, {"gave_up": True})
        kept = [rank for rank, one in self._outgoing.items() if one.memory is not None]
        gone = ended(self._world, kept) if kept else []
        for rank in kept:
            one = self._outgoing[rank]
            if one.memory is not None:
                # Who closes a socket has unmapped before, or dies, which on a GPU may take longer than anybody waits.
                one.memory.free(peer_releases=one.is_mapped and rank not in gone and rank not in self._hung_up)
                one.memory = None

    def disconnect(self) -> None:
        """Close all sockets."""
        self.give_up(self._turn)
        self._disconnect()
        self._outgoing, self._incoming = {}, {}

    def _write(self, held: Mapping[tuple[str, Box], Tensor]) -> None:
        """The next part for each neighbour whose slot is free."""
        ready = [one for one in self._outgoing.values() if one.parts and one.is_free]
        for one in ready:
            assert one.memory is not None
            one.parts.popleft().pack(held, one.memory.tensor)
        if ready:
            self._wait_for_device()
        for one in ready:
            one.is_free = False
            self._send(one.connection, {"written": True})

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _send(self, connection: socket.socket, value: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        data = json.dumps({**value, "turn": self._turn}).encode()
        # Who is gone is named where its answer is waited for.
        with contextlib.suppress(ConnectionError):
            socket.send_fds(connection, [data], list(fds))

    def _receive(self, waits: Sequence[_Wait], begin: float, timeout_s: float) -> tuple[int, dict[str, Any], list[int]]:
        """Rank, value and file descriptors of the next message of this refit.

        Args:
            waits: for whom.
            begin: of waiting.
            timeout_s: limit of it.
        """
        by_number = {connection.fileno(): (rank, connection, what) for rank, connection, what in waits}
        ranks = [rank for rank, *_ in waits]
        poll = select.poll()
        for number in by_number:
            poll.register(number, select.POLLIN)
        while True:
            left = begin + timeout_s - time.monotonic()
            events = poll.poll(1e3 * max(0.0, min(left, _LOOK_S)))
            if not events and (late := ranks if left <= 0 else ended(self._world, ranks)):
                # Of those who wait for each other the sender is first.
                what = next(what for rank, _, what in waits if rank in late)
                raise NeighbourError([rank for rank, _, other in waits if rank in late and other == what], what, time.monotonic() - begin)
            for number, _ in events:
                rank, connection, what = by_number[number]
                try:
                    data, fds, _, _ = socket.recv_fds(connection, _MOST_BYTES, 1)
                except ConnectionError:
                    data, fds = b"", []
                if not data:
                    self._hung_up.add(rank)
                    raise NeighbourError([rank], what, time.monotonic() - begin)
                message = json.loads(data)
                if message["turn"] == self._turn:
                    if "gave_up" in message:
                        raise NeighbourError([rank], "gave up", time.monotonic() - begin, gave_up=True)
                    return rank, message, fds
                # Of a refit that was given up.
                _close(fds)


def _close_all(connections: Iterable[socket.socket]) -> None:
    for connection in connections:
        connection.close()


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


@contextlib.contextmanager
def listening(place: list[str] | None) -> Iterator["Listener"]:
    """Be reached by ranks of the same machine and device while all of a world find each other.

    Args:
        place: machine and device; None where memory cannot be shared.
    """
    if place is None:
        yield Listener(None, None)
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        # A name of the system's choice, which goes with the socket.
        listener.bind("")
        listener.listen(socket.SOMAXCONN)
        yield Listener(listener, place)


@dataclass(frozen=True)
class Listener:
    """Of one rank, while neighbours are found; ``listening`` makes it."""

    _socket: socket.socket | None
    _place: list[str] | None

    @property
    def address(self) -> list[str] | None:
        """Machine, device and name, for all ranks; None where memory cannot be shared."""
        return None if self._place is None or self._socket is None else [*self._place, self._socket.getsockname().hex()]

    def connect(
        self,
        addresses: Sequence[list[str] | None],
        destinations: Iterable[int],
        sources: Iterable[int],
        *,
        world: Group,
        device: torch.device,
        control_device: torch.device,
        timeout_s: float,
    ) -> Neighbours:
        """The neighbours of this rank; all ranks of the world call it.

        Args:
            addresses: of all ranks.
            destinations: those that this rank sends to.
            sources: those that send to this one.
            world: all ranks.
            device: of this rank's weights.
            control_device: where tensors must be to be gathered over the world.
            timeout_s: limit of waiting for neighbours.

        Raises:
            NeighbourError: they did not come in time.
        """
        near = {rank: address for rank, address in enumerate(addresses) if address is not None and address[:-1] == self._place}
        incoming: dict[int, socket.socket] = {}
        unreachable: list[int] = []
        for rank in sorted(near.keys() & set(sources)):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(bytes.fromhex(near[rank][-1]))
                connection.send(json.dumps({"rank": world.rank}).encode())
                incoming[rank] = connection
            except OSError as error:
                connection.close()
                unreachable.append(rank)
                _log.warning("rank %d of this device cannot be reached, its weights are copied between the processes: %s", rank, error)
        unreached = all_gather_json(unreachable, world, control_device)
        expected = {rank for rank in near.keys() & set(destinations) if world.rank not in unreached[rank]}
        outgoing: dict[int, socket.socket] = {}
        begin = time.monotonic()
        while expected:
            assert self._socket is not None
            self._socket.settimeout(max(0.001, begin + timeout_s - time.monotonic()))
            try:
                connection, _ = self._socket.accept()
            except TimeoutError as error:
                raise NeighbourError(sorted(expected), "did not come", time.monotonic() - begin) from error
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
            if user != os.getuid():
                # Any user of the machine may connect to such a name.
                connection.close()
                continue
            rank = json.loads(connection.recv(_MOST_BYTES))["rank"]
            expected.remove(rank)
            outgoing[rank] = connection
        return Neighbours(world, device, outgoing, incoming)
