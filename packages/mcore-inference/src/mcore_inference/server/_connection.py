# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Connections that may not be held for nothing: limits of time and number around uvicorn's protocol.

uvicorn closes connections that idle between requests (``timeout_keep_alive``), but waits for ever for a request's header or body, and for
a client to take its answer; its ``limit_concurrency`` answers without bounding the connections that say nothing.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from mcore_inference._fields import as_integer, as_number
from mcore_inference._stability import experimental_api
from mcore_inference.server._addresses import RefusalLimiter
from mcore_inference.server._errors import ApiError
from mcore_inference.server._group import ServerCounts
from mcore_inference.server._request_ids import HEADER, request_id_of

_MAX_SECONDS = 86_400.0
_WARNING_INTERVAL_S = 1.0
"""Between two warnings of the same text."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How long and how often clients may hold a connection.

    Raises:
        ValueError: a field of another type or out of its range.
    """

    max_connections: int = 1024
    """At once, of all servers of an address together; a further one is answered 503 and closed."""
    header_timeout_s: float = 10.0
    """From the first byte of a request (of a new connection: from its start) to the end of its header; then 408."""
    body_timeout_s: float = 30.0
    """From the end of the header to the end of the body; then 408."""
    idle_timeout_s: float = 15.0
    """Between two requests of a connection."""
    write_timeout_s: float = 60.0
    """That a client may leave its answer unread, once the socket's buffers are full; then the connection is cut."""
    max_refused_per_s: float | None = None
    """Requests of one address a second, on average, that are no HTTP, incomplete, or answered 4xx. Connections of an address with more
    are left unread and closed after ``penalty_s``. None for no limit: where clients share an address, as behind a proxy, that limits."""
    penalty_s: float = 1.0
    """How long such a connection is held; those beyond a quarter of ``max_connections`` are closed at once."""

    def __post_init__(self) -> None:
        as_integer("max_connections", self.max_connections, 1, 2**20)
        for name in ("header_timeout_s", "body_timeout_s", "idle_timeout_s", "write_timeout_s", "penalty_s"):
            as_number(name, getattr(self, name), 1e-3, _MAX_SECONDS)
        if self.max_refused_per_s is not None:
            as_number("max_refused_per_s", self.max_refused_per_s, 1e-3, 1e6)

    @property
    def beat_s(self) -> float:
        """How often a connection's time is looked at."""
        return min(1.0, self.header_timeout_s / 4, self.body_timeout_s / 4, self.write_timeout_s / 4)


class _Http11(H11Protocol):
    """uvicorn's protocol; what is no HTTP is handed to ``on_invalid``.

    uvicorn's own answer to it raises where the application's has begun, and makes the application's raise where it has not.
    """

    on_invalid: Callable[[str], None]

    def send_400_response(self, msg: str) -> None:
        self.on_invalid(msg)


class LimitedConnection(asyncio.Protocol):
    """One connection: hands everything to uvicorn's protocol, and watches how far the client is.

    Requests may be pipelined, and uvicorn then goes on without new data; so the phase is read off its state, after data and at a beat.

    Args:
        inner: uvicorn's protocol.
        limits: of time and number.
        counts: told of the connection, and of an answer that the application did not give.
        limiter: told of a request that did not come whole; None for no limit of such.
    """

    def __init__(self, inner: _Http11, limits: ConnectionLimits, counts: ServerCounts, limiter: RefusalLimiter | None = None) -> None:
        inner.on_invalid = lambda message: self._refuse(ApiError(400, message, code="invalid_http"))
        self._inner, self._limits, self._counts, self._limiter = inner, limits, counts, limiter
        self._is_refused = self._has_data = False
        self._transport: asyncio.Transport | None = None
        self._phase: tuple[str, object] | None = None
        """"header" or "body", and uvicorn's object for the request, which tells one body from the next."""
        self._since = 0.0
        self._unread_since: float | None = None
        self._beat: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._inner.connection_made(transport)
        self._counts.change_connections(1)
        most = self._limits.max_connections
        if self._counts.connections > most:
            self._refuse(ApiError(503, f"max_connections={most} are open; try again later", code="too_many_connections"))
        else:
            self._check()

    def data_received(self, data: bytes) -> None:
        self._has_data = True
        if self._transport is not None and not self._transport.is_closing():
            self._inner.data_received(data)
            self._look()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._beat is not None:
            self._beat.cancel()
        is_cut = self._phase is not None and (self._phase[0] == "body" or (self._has_data and self._inner.cycle is None))
        if (is_cut or self._is_refused) and self._limiter is not None:
            self._limiter.count(_address(self._transport), self._inner.loop.time())
        self._counts.change_connections(-1)
        self._inner.connection_lost(exc)

    def pause_writing(self) -> None:
        self._unread_since = self._inner.loop.time()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._unread_since = None
        self._inner.resume_writing()

    # -- limits ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Take down when the phase began that the connection is in."""
        phase, conn = None, self._inner.conn
        if conn.their_state is h11.SEND_BODY:
            phase = ("body", self._inner.cycle)
        elif conn.their_state is h11.IDLE and (self._inner.cycle is None or conn.trailing_data[0]):
            phase = ("header", None)
        if phase != self._phase:
            self._phase, self._since = phase, self._inner.loop.time()

    def _check(self) -> None:
        """At each beat: is a limit over?"""
        assert self._transport is not None
        if self._transport.is_closing() and self._unread_since is None:
            return
        self._look()
        limits, now = self._limits, self._inner.loop.time()
        if self._unread_since is not None and now - self._unread_since > limits.write_timeout_s:
            self._transport.abort()
            return
        if self._phase is not None:
            name = self._phase[0]
            seconds = limits.header_timeout_s if name == "header" else limits.body_timeout_s
            if now - self._since > seconds:
                message = f"the request's {name} did not come within {name}_timeout_s={seconds:g}; send it at once"
                self._refuse(ApiError(408, message, code=f"{name}_timeout"))
        self._beat = self._inner.loop.call_later(limits.beat_s, self._check)

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the application, unless it has begun to, and close."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._is_refused = True
        if self._inner.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._transport.write(_response(error, request_id_of(self._inner.headers or [])))
            self._counts.count_response(error.status)
            self._transport.close()
        else:
            self._transport.abort()


class _Penalty(asyncio.Protocol):
    """A connection of an address that is over its limit: nothing of it is read, which costs its client time and the server next to none.

    Args:
        seconds: until it is closed.
        held: all such connections.
        most: of them at once.
    """

    def __init__(self, seconds: float, held: set["_Penalty"], most: int) -> None:
        self._seconds, self._held, self._most = seconds, held, most
        self._end: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._held) >= self._most:
            transport.abort()
            return
        self._held.add(self)
        transport.pause_reading()
        self._end = asyncio.get_running_loop().call_later(self._seconds, transport.abort)

    def abort(self) -> None:
        """Before its time."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._held.discard(self)
        if self._end is not None:
            self._end.cancel()


class _Arrival(asyncio.Protocol):
    """A new connection: what it becomes depends on its address, and nothing is made for it before.

    Args:
        choose: gives the protocol for an address.
    """

    def __init__(self, choose: Callable[[str], asyncio.Protocol]) -> None:
        self._choose = choose

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        protocol = self._choose(_address(transport))
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


class _SeldomWarnings(logging.Filter):
    """Lets each of uvicorn's warnings through once a second: strangers cause them, a line of the log for each request otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, tuple[float, int]] = {}
        """Of each text: when it was written, and how often it was not since."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        # uvicorn's own texts, which are few and have no arguments.
        written, left_out = self._last.get(record.msg, (-_WARNING_INTERVAL_S, 0))
        is_due = record.created - written >= _WARNING_INTERVAL_S
        self._last[record.msg] = (record.created, 0) if is_due else (written, left_out + 1)
        if is_due and left_out:
            record.msg = f"{record.msg} ({left_out} more since this was last said)"
        return is_due


class _ServerLog(logging.Logger):
    """A logger of one server, with a filter of its own: what other servers of the process log is not filtered.

    Args:
        shared: gets what passes.
    """

    def __init__(self, shared: logging.Logger) -> None:
        super().__init__(shared.name)
        self.parent = self._shared = shared
        self.addFilter(_SeldomWarnings())

    def isEnabledFor(self, level: int) -> bool:
        # A logger that is not registered would keep the answer when levels change.
        return self._shared.isEnabledFor(level)


class ConnectionGuard:
    """What uvicorn calls for every connection (``Config(http=...)``).

    Args:
        limits: of the connections of all servers of the address. Of refusals each server allows its share.
        counts: of the server.
    """

    def __init__(self, limits: ConnectionLimits, counts: ServerCounts) -> None:
        self._limits, self._counts = limits, counts
        share = limits.max_refused_per_s and limits.max_refused_per_s / counts.num_servers
        self._limiter = None if share is None else RefusalLimiter(share)
        self._held: set[_Penalty] = set()
        self._log = _ServerLog(logging.getLogger("uvicorn.error"))

    def __call__(self, config: Config, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> asyncio.Protocol:
        limiter, limits = self._limiter, self._limits
        if limiter is None:
            return LimitedConnection(self._http11(config, server_state, app_state, _loop), limits, self._counts)

        def choose(address: str) -> asyncio.Protocol:
            if limiter.is_over(address, asyncio.get_running_loop().time()):
                return _Penalty(limits.penalty_s, self._held, max(1, limits.max_connections // 4 // self._counts.num_servers))
            inner = self._http11(config, server_state, app_state, _loop)
            inner.app = _counted(inner.app, limiter, address)
            return LimitedConnection(inner, limits, self._counts, limiter)

        return _Arrival(choose)

    def _http11(self, config: Config, server_state: Any, app_state: dict[str, Any], loop: Any) -> _Http11:
        protocol = _Http11(config, server_state, app_state, loop)
        protocol.logger = self._log
        return protocol

    def abort_held(self) -> None:
        """At the end of the server, in its loop."""
        for each in self._held:
            each.abort()


def _counted(app: Any, limiter: RefusalLimiter, address: str) -> Any:
    """An application whose refusals count for an address."""

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        async def seen(message: Any) -> None:
            if message["type"] == "http.response.start" and 400 <= message["status"] < 499:
                limiter.count(address, asyncio.get_running_loop().time())
            await send(message)

        await app(scope, receive, seen)

    return counted


def _address(transport: asyncio.BaseTransport | None) -> str:
    """Of the client; empty when the system does not say it."""
    name = None if transport is None else transport.get_extra_info("peername")
    return str(name[0]) if name else ""


def _response(error: ApiError, request_id: str) -> bytes:
    body = json.dumps(error.body(request_id)).encode()
    reason = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}[error.status]
    head = [f"HTTP/1.1 {error.status} {reason}", "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close"]
    head += [f"{HEADER.decode()}: {request_id}", *(f"{name}: {value}" for name, value in error.headers.items())]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
