# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Connections that may not be held for nothing: limits of time and number around uvicorn's protocol.

uvicorn closes connections that idle between requests (``timeout_keep_alive``), but waits for ever for a request's header or body, and for
a client to take its answer; its ``limit_concurrency`` answers without bounding the connections that say nothing.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol

from mcore_inference._fields import as_integer, as_number
from mcore_inference._stability import experimental_api
from mcore_inference.server._errors import ApiError
from mcore_inference.server._request_ids import HEADER, request_id_of

_MAX_SECONDS = 86_400.0


@experimental_api
@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """How long and how often clients may hold a connection.

    Raises:
        ValueError: a field of another type or out of its range.
    """

    max_connections: int = 1024
    """At once; a further one is answered 503 and closed."""
    header_timeout_s: float = 10.0
    """From the first byte of a request (of a new connection: from its start) to the end of its header; then 408."""
    body_timeout_s: float = 30.0
    """From the end of the header to the end of the body; then 408."""
    idle_timeout_s: float = 15.0
    """Between two requests of a connection."""
    write_timeout_s: float = 60.0
    """That a client may leave its answer unread, once the socket's buffers are full; then the connection is cut."""

    def __post_init__(self) -> None:
        as_integer("max_connections", self.max_connections, 1, 2**20)
        for name in ("header_timeout_s", "body_timeout_s", "idle_timeout_s", "write_timeout_s"):
            as_number(name, getattr(self, name), 1e-3, _MAX_SECONDS)

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
        refused: called with the status of an answer that the application did not give.
    """

    def __init__(self, inner: _Http11, limits: ConnectionLimits, refused: Callable[[int], None]) -> None:
        inner.on_invalid = lambda message: self._refuse(ApiError(400, message, code="invalid_http"))
        self._inner, self._limits, self._refused = inner, limits, refused
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
        most = self._limits.max_connections
        if len(self._inner.connections) > most:
            self._refuse(ApiError(503, f"max_connections={most} are open; try again later", code="too_many_connections"))
        else:
            self._check()

    def data_received(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._inner.data_received(data)
            self._look()

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._beat is not None:
            self._beat.cancel()
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
        if self._inner.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._transport.write(_response(error, request_id_of(self._inner.headers or [])))
            self._refused(error.status)
            self._transport.close()
        else:
            self._transport.abort()


def limited_protocol(limits: ConnectionLimits, refused: Callable[[int], None]) -> Any:
    """What uvicorn calls for every connection (``Config(http=...)``)."""

    def make(config: Config, server_state: Any, app_state: dict[str, Any], _loop: Any = None) -> LimitedConnection:
        return LimitedConnection(_Http11(config, server_state, app_state, _loop), limits, refused)

    return make


def _response(error: ApiError, request_id: str) -> bytes:
    body = json.dumps(error.body(request_id)).encode()
    reason = {400: "Bad Request", 408: "Request Timeout", 503: "Service Unavailable"}[error.status]
    head = [f"HTTP/1.1 {error.status} {reason}", "Content-Type: application/json", f"Content-Length: {len(body)}", "Connection: close"]
    head += [f"{HEADER.decode()}: {request_id}", *(f"{name}: {value}" for name, value in error.headers.items())]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + body
