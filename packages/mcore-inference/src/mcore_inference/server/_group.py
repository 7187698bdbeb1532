# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Servers of several processes at one address, which count as one: the socket that all listen on, and what they count together."""

import errno
import multiprocessing
import socket
import time
from collections.abc import MutableSequence
from dataclasses import dataclass

from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api
from mcore_inference.requests import PortInUseError

_BACKLOG = 2048
"""Connections that wait to be accepted."""
_STATUSES = range(100, 600)
_CONNECTIONS, _BEATS, _FIRST_STATUS = 0, 1, 2
_ROW = _FIRST_STATUS + len(_STATUSES)


class ServerCounts:
    """Answers, connections and beats of each server of a group. Each writes its own row, any reads the sums.

    Args:
        num_servers: of the group.
        cells: of all rows; memory that the processes share, where they are several.
        index: of the server that counts.
    """

    def __init__(self, num_servers: int, cells: MutableSequence[int], index: int = 0) -> None:
        self.num_servers, self._cells, self._row = num_servers, cells, index * _ROW

    def count_response(self, status: int) -> None:
        self._cells[self._row + _FIRST_STATUS + status - _STATUSES.start] += 1

    def change_connections(self, by: int) -> None:
        """Of this server."""
        self._cells[self._row + _CONNECTIONS] += by

    def forget_connections(self) -> None:
        """Of a process that ended; what it had answered still counts."""
        self._cells[self._row + _CONNECTIONS] = 0

    def beat(self) -> None:
        """A sign of life of this server."""
        self._cells[self._row + _BEATS] += 1

    @property
    def num_beats(self) -> int:
        """Of this server."""
        return self._cells[self._row + _BEATS]

    @property
    def connections(self) -> int:
        """That are open, of all servers."""
        return sum(self._cells[_CONNECTIONS::_ROW])

    def responses(self) -> dict[int, int]:
        """Answers of all servers by status, those that there were."""
        rows = [self._cells[at * _ROW + _FIRST_STATUS : (at + 1) * _ROW] for at in range(self.num_servers)]
        return {status: total for status, *each in zip(_STATUSES, *rows, strict=True) if (total := sum(each))}


class _Listener(socket.socket):
    """asyncio takes one number for what it accepts in a turn and for how many may wait; the latter stays."""

    def listen(self, backlog: int = _BACKLOG, /) -> None:
        super().listen(_BACKLOG)


@experimental_api
class ServerGroup:
    """An address that servers of several processes share; they listen on one socket, and count answers and connections together.

    Whichever of them is free takes the next connection, so one that hangs or ended gets none. It is given to processes when they are made
    (``multiprocessing.get_context("spawn").Process(args=...)``), and each calls ``serve_runner(..., member=group.member(index))``.

    Args:
        host: address to bind.
        port: 0 for a free one.
        num_servers: processes, each with an index of its own.

    Raises:
        ValueError: a port or a number out of its range.
        PortInUseError: names the port.
        OSError: the address is not one of this machine; names it.
    """

    def __init__(self, host: str, port: int, num_servers: int) -> None:
        if not 0 <= port < 2**16:
            raise ValueError(f"port={port} must lie in 0..65535; 0 takes a free one")
        self.host, self.num_servers = host, as_integer("num_servers", num_servers, 1, 1024)
        self.created = int(time.time())
        """Seconds since the epoch."""
        size = num_servers * _ROW
        # A process alone needs no memory that others see.
        self.cells: MutableSequence[int] = [0] * size if num_servers == 1 else multiprocessing.get_context("spawn").RawArray("Q", size)
        """Of ``ServerCounts``."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self.socket.bind((host, port))
        except OSError as error:
            self.socket.close()
            raise self._named(error, port) from error
        self.port: int = self.socket.getsockname()[1]

    @property
    def url(self) -> str:
        """Base address, for instance ``http://127.0.0.1:8000``."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    def listen(self) -> None:
        """Let connections come, which wait for a server.

        Raises:
            PortInUseError: another process listens meanwhile.
        """
        try:
            self.socket.listen(_BACKLOG)
        except OSError as error:
            raise self._named(error, self.port) from error

    @property
    def accepts(self) -> int:
        """Connections that a server takes in one turn of its loop: with others beside it few, so that a burst is spread."""
        return _BACKLOG if self.num_servers == 1 else 1

    def listener(self) -> socket.socket:
        """The socket, for the server of this process, which closes it."""
        return _Listener(self.socket.family, self.socket.type, self.socket.proto, fileno=self.socket.detach())

    def counts(self, index: int = 0) -> ServerCounts:
        """What a server counts by."""
        return ServerCounts(self.num_servers, self.cells, index)

    def member(self, index: int) -> "GroupMember":
        """One of the servers."""
        return GroupMember(self, index)

    def close(self) -> None:
        """Of this process; the port is free when all of them closed theirs."""
        self.socket.close()

    def _named(self, error: OSError, port: int) -> OSError:
        if error.errno == errno.EADDRINUSE:
            return PortInUseError(self.host, port)
        return OSError(error.errno, f"{error.strerror} (host={self.host!r}, port={port})")


@experimental_api
@dataclass(frozen=True)
class GroupMember:
    """One server of a group, in the process that it runs in."""

    group: ServerGroup
    index: int
    """From 0."""
