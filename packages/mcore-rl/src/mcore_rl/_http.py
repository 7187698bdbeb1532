# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One HTTP server: bodies there, answers back, and whatever goes wrong under its name."""

import asyncio
import io
import math
import socket
import ssl
from http.client import HTTPException, HTTPResponse
from typing import cast
from urllib.parse import urlsplit

from mcore_rl._stability import experimental_api

_MAX_REPLY = 64 << 20


@experimental_api
class PeerError(RuntimeError):
    """A server gave no answer: not reached, it died, or it refused. The message names the server."""

    status: int | None = None
    """Of HTTP, where the server refused with one."""


@experimental_api
class PeerTimeoutError(PeerError, TimeoutError):
    """A server did not answer in time."""


@experimental_api
class PeerReplyError(PeerError):
    """A server's answer cannot be learnt from: not of the protocol, without token ids or log-probabilities, or of another vocabulary."""


class HttpPeer:
    """POSTs to one server, each on a connection of its own, which ends with whoever waits.

    Args:
        url: of the server without path, as ``http://127.0.0.1:8000``.
        api_key: sent as a bearer token.
        timeout_s: seconds from the connection to the last byte.

    Raises:
        ValueError: a setting that is out of range; names it.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise ValueError(f"url={url!r} must be http(s)://host:port without a path")
        if not 0 < timeout_s < math.inf:
            raise ValueError(f"timeout_s={timeout_s} must be positive and finite")
        if any(not " " < character <= "~" for character in api_key or ""):
            raise ValueError("api_key must be visible ASCII characters; take spaces and line ends off")
        self.url, self.timeout_s = url, timeout_s
        self._host, self._netloc = parts.hostname, parts.netloc.rpartition("@")[2]
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def post(self, path: str, body: bytes) -> bytes:
        """The content of the answer to a JSON body.

        Raises:
            PeerTimeoutError: ``timeout_s`` went by.
            PeerReplyError: the answer is no HTTP.
            PeerError: the server was not reached, died, or refused.
        """
        try:
            async with asyncio.timeout(self.timeout_s):
                raw = await self._exchange(path, body)
        except TimeoutError as error:
            raise PeerTimeoutError(f"{self.url} did not answer within timeout_s={self.timeout_s}") from error
        except OSError as error:
            raise PeerError(f"{self.url} was lost: {error}") from error
        return self._content(raw)

    async def _exchange(self, path: str, body: bytes) -> bytes:
        """All bytes of the answer; the server ends it by closing."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        try:
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {self._netloc}\r\nContent-Type: application/json\r\n{self._authorization}"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            raw = bytearray()
            while part := await reader.read(1 << 16):
                raw += part
                if len(raw) > _MAX_REPLY:
                    raise PeerReplyError(f"{self.url} answered more than {_MAX_REPLY >> 20} MiB")
            return bytes(raw)
        finally:
            writer.transport.abort()

    def _content(self, raw: bytes) -> bytes:
        if not raw:
            raise PeerError(f"{self.url} closed the connection without an answer")
        reply = HTTPResponse(cast("socket.socket", _Received(raw)))
        try:
            reply.begin()
            content = reply.read()
        except HTTPException as error:
            # Cut off is a server that died; anything else is no HTTP.
            kind = PeerError if raw.startswith(b"HTTP/") else PeerReplyError
            raise kind(f"{self.url} gave no whole HTTP answer: {error!r}") from error
        except ValueError as error:
            raise PeerReplyError(f"{self.url} gave no HTTP answer: {error}") from error
        if reply.status != 200:
            refusal = PeerError(f"{self.url} refused with status {reply.status}: {content[:500]!r}")
            refusal.status = reply.status
            raise refusal
        return content


class _Received:
    """Bytes where the standard library's parser expects a socket."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self.raw)
