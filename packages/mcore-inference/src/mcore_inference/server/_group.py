# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Servers of several processes at one address, which count as one: the socket that all listen on, and what they count together."""

import errno
import multiprocessing
import socket
import time
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Any

from mcore_inference._fields import as_integer
from mcore_inference._stability import experimental_api
from mcore_inference.requests import PortInUseError

_BACKLOG = 2048
"""Connections that wait to be accepted."""
_LEFT_S = 0.002
"""That a connection is left to servers which have fewer; one that hangs does not take it."""
_NEXT_S = 0.05
"""Since a connection was left, after which one that is there is another."""
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

    def forget(self) -> None:
        """The process has ended: what it had answered still counts, and others wait for it no more."""
        self._cells[self._row + _CONNECTIONS] = self._cells[self._row + _BEATS] = 0

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

    @property
    def is_busier(self) -> bool:
        """Whether another server, which serves, has fewer connections than this one."""
        own = self._cells[self._row + _CONNECTIONS]
        rows = zip(self._cells[_CONNECTIONS::_ROW], self._cells[_BEATS::_ROW], strict=True)
        return any(beats and count < own for count, beats in rows)

    def responses(self) -> dict[int, int]:
        """Answers of all servers by status, those that there were."""
        rows = [self._cells[at * _ROW + _FIRST_STATUS : (at + 1) * _ROW] for at in range(self.num_servers)]
        return {status: total for status, *each in zip(_STATUSES, *rows, strict=True) if (total := sum(each))}


class _Listener(socket.socket):
    """A socket that servers of several processes accept on; each leaves a connection for a moment to those that have fewer.

    The system wakes all that wait for one, most often the same first, which would take nearly all while it is not busy.
    """

    counts: ServerCounts
    """Of the server that accepts here."""
    _left_since = _left_last = 0.0

    def listen(self, backlog: int = _BACKLOG, /) -> None:
        """asyncio takes one number for what it accepts in a turn and for how many may wait; the latter stays."""
        super().listen(_BACKLOG)

    def accept(self) -> tuple[socket.socket, Any]:
        if self.counts.is_busier and self._leaves(time.monotonic()):
            raise BlockingIOError
        self._left_last = 0.0
        return super().accept()

    def _leaves(self, now: float) -> bool:
        if now - self._left_last > _NEXT_S:
            self._left_since = now
        self._left_last = now
        return now - self._left_since < _LEFT_S


@experimental_api
class ServerGroup:
    """An address that servers of several processes share; they listen on one socket, and count answers and connections together.

    The one with the fewest connections takes the next, or after a moment whichever is free, so one that hangs or ended gets none. The group
    is given to processes when they are made (``multiprocessing.get_context("spawn").Process(args=...)``), and each calls
    ``serve_runner(..., member=group.member(index))``.

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

    def listener(self, index: int = 0) -> socket.socket:
        """The socket, for the server of this process, which closes it."""
        listener = _Listener(self.socket.family, self.socket.type, self.socket.proto, fileno=self.socket.detach())
        listener.counts = self.counts(index)
        return listener

    def counts(self, index: int = 0) -> ServerCounts:
        """What a server counts by."""
        return ServerCounts(self.num_servers, self.cells, index)

    def member(self, index: int) -> "GroupMember":
        """One of the servers.

        Raises:
            ValueError: it has no such server.
        """
        return GroupMember(self, as_integer("index", index, 0, self.num_servers - 1))

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
