# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The names by which a server is asked."""

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mcore_inference.server._errors import ApiError
from mcore_inference.server._request_ids import current_request_id

_SHOWN = 80


class AllowedHosts:
    """ASGI middleware of a server without a token: 400 to a request whose Host header names none of these.

    A page in a browser can make a name point at a loopback address; its requests carry that name as host.

    Args:
        app: the application.
        hosts: names and addresses, without port; one of IPv6 in brackets.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, [host.lower() for host in hosts]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else None
        if host is None or _name(host) in self._hosts:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            400,
            f"the Host header {host[:_SHOWN]!r} names another server; ask by one of {', '.join(dict.fromkeys(self._hosts))}, or start the "
            "server with a token (--token-file), with which it answers by any name",
            code="invalid_host",
        )
        await JSONResponse(error.body(current_request_id()), error.status)(scope, receive, send)


def _name(host: str) -> str:
    """A Host header without its port."""
    name, bracket, _ = host.lower().partition("]")
    return name + bracket if bracket else name.partition(":")[0]
