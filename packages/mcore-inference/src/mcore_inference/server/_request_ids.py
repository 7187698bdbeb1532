# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A name for every HTTP request: taken from the client or made, sent back, and written to the log."""

import logging
import re
import time
import uuid
from collections.abc import Callable, Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
CLIENT_LEFT = 499
"""Status in the log of a request whose client left before the answer."""
_LOG = logging.getLogger("mcore_inference.server")
# What is echoed and logged is bounded, and cannot break a line of the log or a header.
_ALLOWED = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_current: ContextVar[str | None] = ContextVar("mcore_request_id", default=None)


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The client's ``X-Request-Id`` when it is 1 to 128 plain characters, else a new one."""
    for name, value in headers:
        if name.lower() == HEADER and _ALLOWED.fullmatch(value):
            return value.decode("ascii")
    return f"req-{uuid.uuid4().hex}"


def current_request_id() -> str | None:
    """Of the HTTP request that this task answers."""
    return _current.get()


class RequestIds:
    """ASGI middleware: ids in, out and in the log, one line a request.

    Args:
        app: the application.
        count: told the status of each response.
    """

    def __init__(self, app: ASGIApp, count: Callable[[int], None]) -> None:
        self._app, self._count = app, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number = request_id_of(scope["headers"])
        status, begin = CLIENT_LEFT, time.monotonic()

        async def with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (HEADER, number.encode())]}
            await send(message)

        token = _current.set(number)
        try:
            await self._app(scope, receive, with_id)
        finally:
            _current.reset(token)
            self._count(status)
            seconds = time.monotonic() - begin
            # The path is the client's: repr keeps it on one line.
            _LOG.info("request_id=%s %s %r %d %.3f s", number, scope["method"], scope["path"][:256], status, seconds)
