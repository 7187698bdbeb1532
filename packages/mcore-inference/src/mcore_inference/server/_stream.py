# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Waiting for an engine on behalf of a client that may leave."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mcore_inference.engine import Increment, RequestStream

T = TypeVar("T")

_DRAINED = 4
"""Times the longest body that is read before the connection is cut."""


class ClientGone(Exception):
    """The client closed the connection."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``; it is cancelled when the client leaves. The request's body has been read before.

    Raises:
        ClientGone: the client left first.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, Increment]]:
    """Increments of several requests as they come, with the number of the request."""
    if len(streams) == 1:
        async for increment in streams[0]:
            yield 0, increment
        return
    queue: asyncio.Queue[tuple[int, Increment | Exception]] = asyncio.Queue()

    async def pump(index: int, stream: RequestStream) -> None:
        try:
            async for increment in stream:
                queue.put_nowait((index, increment))
        except Exception as error:
            queue.put_nowait((index, error))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(streams)
        while left:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            yield index, item
            left -= item.record is not None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """Server-sent events; stops the events when the client leaves.

    The answer begins with the first event: an error before it is answered with a status of its own.

    Args:
        events: texts of the ``data`` fields; closed in every case, so that it can clean up.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[str]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events: Any = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def write() -> None:
            nonlocal has_begun
            async for event in self._events:
                if not has_begun:
                    has_begun = True
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        try:
            await unless_gone(receive, write())
        except ClientGone:
            if not has_begun:
                raise
        finally:
            await self._events.aclose()


async def read_body(request: Request, max_bytes: int) -> bytes | None:
    """The body, or None if it is longer than ``max_bytes``.

    Of a body that is too long some more is read and dropped: a client that is still sending would see its connection reset
    instead of the answer.

    Raises:
        ClientGone: the client left, or took too long, before the body was whole.
    """
    declared = request.headers.get("content-length", "0")
    limit = _DRAINED * max_bytes
    if declared.isdigit() and int(declared) > limit:
        return None
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > limit:
                return None
            if size > max_bytes:
                parts.clear()
            else:
                parts.append(part)
    except ClientDisconnect as error:
        raise ClientGone from error
    return b"".join(parts) if size <= max_bytes else None
