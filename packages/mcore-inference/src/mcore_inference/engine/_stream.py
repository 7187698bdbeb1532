# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a request gains, on its way from an engine's thread to an event loop."""

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcore_inference._stability import experimental_api, internal_api
from mcore_inference.engine._queue import asyncio_Queue, asyncio_QueueShutDown
from mcore_inference.engine._stream_text import StreamText
from mcore_inference.requests import DynamicInferenceRequestRecord

__all__ = [
    "EndTurns",
    "EndingQueue",
    "Growth",
    "Increment",
    "News",
    "RequestStream",
    "Result",
    "call_in",
    "deliver",
    "settle",
    "settle_all",
]

_TURN_S = 1e-3
"""Of each pass of an event loop, in which texts of ended requests are made: its other streams wait as long, and steps that need the
interpreter."""


@experimental_api
@dataclass(kw_only=True)
class Increment:
    """What a request gained since the last increment."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_n_logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    record: DynamicInferenceRequestRecord | None = None
    """The finished record, with the last increment only."""


@internal_api
class EndingQueue:
    """Increments of one request until it ends, by a record or an error; who reads further finds the end, and does not wait."""

    def __init__(self) -> None:
        self._items: asyncio_Queue[Increment | Exception] = asyncio_Queue()
        self.has_end = False

    def add(self, item: Increment | Exception) -> None:
        """Nothing happens behind the end."""
        with contextlib.suppress(asyncio_QueueShutDown):
            self._items.put_nowait(item)
        if isinstance(item, Exception) or item.record is not None:
            self.has_end = True
            self._items.shutdown()

    def drained(self) -> list[Increment | Exception]:
        """What is there, which is taken out."""
        return [self._items.get_nowait() for _ in range(self._items.qsize())]

    async def increments(self) -> AsyncIterator[Increment]:
        """What has not been read; a reader that is slower than the engine gets fewer, longer ones."""
        while True:
            try:
                item = await self._items.get()
            except asyncio_QueueShutDown:
                return
            waiting: list[Increment] = []
            while not isinstance(item, Exception):
                waiting.append(item)
                if self._items.empty():
                    break
                item = self._items.get_nowait()
            if waiting:
                yield _joined(waiting)
            if isinstance(item, Exception):
                raise item

    async def record(self) -> DynamicInferenceRequestRecord:
        """Of the last increment.

        Raises:
            RuntimeError: it was read before.
        """
        async for increment in self.increments():
            if increment.record is not None:
                return increment.record
        raise RuntimeError("the end of this stream was read before; keep the record of its last increment")


@experimental_api
class RequestStream:
    """Increments of one request, for one event loop.

    Iterate it to the end, or ``abort`` it: an abandoned request goes on for nobody. Increments that wait for a slow reader are joined.
    """

    def __init__(self, abort: Callable[[int], None], loop: asyncio.AbstractEventLoop, *, whole: bool = False) -> None:
        self._abort = abort
        self.loop = loop
        self.whole = whole
        """One increment at the end, with everything."""
        self._queue = EndingQueue()
        self._take: Callable[[Increment | Exception], None] = self._queue.add
        self.request_id = -1
        self.is_aborted = False
        """By its reader, before the end came; nobody asks for text of it any more."""
        # Owned by the engine's thread until the end, and by the loop's behind it:
        self.num_tokens = 0
        self.num_characters = 0
        self.text: StreamText | None = None
        """Made in the loop's thread; None where the record's grows with each step, or there is none."""

    def __aiter__(self) -> AsyncIterator[Increment]:
        return self._queue.increments()

    async def record(self) -> DynamicInferenceRequestRecord:
        """The finished record.

        Raises:
            EngineDeadError: the engine failed or was closed before the request ended.
            RuntimeError: the end of the stream was read before.
        """
        return await self._queue.record()

    def abort(self) -> None:
        """End the request at the next step; nothing happens when it has ended. The last increment has no text then; that of the record is
        made where it is read."""
        # Many requests end in one step, and the engine's thread would be woken for each.
        if not self._queue.has_end:
            self.is_aborted = True
            self._abort(self.request_id)

    def deliver(self, item: Increment | Exception) -> None:
        """From any thread."""
        call_in(self.loop, self.put, item)

    def put(self, item: Increment | Exception) -> None:
        """In the thread of the event loop."""
        self._take(item)

    def forward(self, take: Callable[[Increment | Exception], None]) -> None:
        """Call a function with all that comes, and has come, in place of the iteration, whose task and queue cost more than a token.

        Args:
            take: called in the event loop's thread; the last call has the record, or an error.
        """
        self._take = take
        for item in self._queue.drained():
            take(item)


News = tuple[RequestStream, Increment | DynamicInferenceRequestRecord | Exception]
"""Of a stream, an increment that is made, or its end: the finished record, of which the thread of the event loop makes one, or an error."""
Growth = tuple[RequestStream, DynamicInferenceRequestRecord, int, int, str | StreamText]
"""Of a stream, what its request gained: the record, the first token and the one behind the last, and the text or where it is made. The
record's lists only grow, so that the thread of the event loop makes an increment of it."""


@internal_api
class EndTurns:
    """Ends of streams that wait for a turn of their event loop, in which their texts are made: one in each pass of a loop, however many
    deliveries bring them."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.AbstractEventLoop, deque[tuple[RequestStream, DynamicInferenceRequestRecord]]] = {}
        """Of each loop that has a turn in its next pass; changed in its thread."""

    def add(self, loop: asyncio.AbstractEventLoop, ends: Iterable[tuple[RequestStream, DynamicInferenceRequestRecord]]) -> None:
        """In the thread of the loop."""
        if (waiting := self._waiting.get(loop)) is not None:
            waiting.extend(ends)
        elif new := deque(ends):
            self._waiting[loop] = new
            self._take_turn(loop)

    def _take_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        """As many as fit a turn: nothing comes behind the end of a stream."""
        if not (ends := self._waiting[loop]):
            del self._waiting[loop]
            return
        until = time.monotonic() + _TURN_S
        try:
            while ends:
                stream, record = ends.popleft()
                stream.put(_last_of(stream, record))
                if time.monotonic() >= until:
                    break
        finally:
            # Also where none is left: what comes in this pass of the loop waits for the next.
            loop.call_soon(self._take_turn, loop)

    def forget_closed(self) -> None:
        """Loops that were closed have no turns any more."""
        for loop in [loop for loop in list(self._waiting) if loop.is_closed()]:
            self._waiting.pop(loop, None)


@internal_api
def deliver(news: Iterable[News], growths: Iterable[Growth] = (), turns: EndTurns | None = None) -> None:
    """Put into streams what is new, with one call into each event loop; growths first. Ends come in turns of the loop: their texts are made
    there.

    Args:
        news: made increments, errors and records of streams.
        growths: of streams that go on.
        turns: of all deliveries of one engine; None for news without records.
    """
    turns = turns or EndTurns()
    turns.forget_closed()
    by_loop = defaultdict[asyncio.AbstractEventLoop, tuple[list[Growth], list[News]]](lambda: ([], []))
    for growth in growths:
        by_loop[growth[0].loop][0].append(growth)
    for item in news:
        by_loop[item[0].loop][1].append(item)
    for loop, parts in by_loop.items():
        call_in(loop, _put_all, loop, turns, *parts)


Result = tuple["asyncio.Future[Any]", Any, Exception | None]
"""A future, and the value or the error that it gets."""


@internal_api
def settle_all(results: Iterable[Result]) -> None:
    """Give futures what they wait for, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Result]] = {}
    for result in results:
        by_loop.setdefault(result[0].get_loop(), []).append(result)
    for loop, items in by_loop.items():
        call_in(loop, _settle_all, items)


def _joined(parts: Sequence[Increment]) -> Increment:
    """One of several that follow each other, at least one."""
    if len(parts) == 1:
        return parts[0]
    return Increment(
        tokens=[token for part in parts for token in part.tokens],
        log_probs=[value for part in parts for value in part.log_probs],
        top_n_logprobs=[best for part in parts for best in part.top_n_logprobs],
        text="".join(part.text for part in parts),
        record=parts[-1].record,
    )


def _put_all(loop: asyncio.AbstractEventLoop, turns: EndTurns, growths: Iterable[Growth], news: Iterable[News]) -> None:
    for stream, record, first, end, text in growths:
        stream.put(_grown_by(record, first, end, text))
    ends: list[tuple[RequestStream, DynamicInferenceRequestRecord]] = []
    for stream, item in news:
        if isinstance(item, DynamicInferenceRequestRecord):
            ends.append((stream, item))
        else:
            stream.put(item)
    turns.add(loop, ends)


def _last_of(stream: RequestStream, record: DynamicInferenceRequestRecord) -> Increment:
    """What a stream has not of its record, whose text is made here; of one whose reader gave it up, by who reads the record."""
    tokens, values, best = record.since(stream.num_tokens)
    if stream.is_aborted:
        text = ""
    elif stream.text is None:
        text = record.generated_text[stream.num_characters :]
    else:
        text = stream.text.end(tokens)
        record.settle_text(stream.text.emitted, stream.text.failure)
    return Increment(tokens=tokens, log_probs=values, top_n_logprobs=best, text=text, record=record)


def _grown_by(record: DynamicInferenceRequestRecord, first: int, end: int, text: str | StreamText) -> Increment:
    """The increment of a ``Growth``."""
    tokens, values, best = record.since(first)
    # The engine's thread may have added to them since.
    count = end - first
    tokens = tokens[:count]
    new = text if isinstance(text, str) else text.push(tokens)
    return Increment(tokens=tokens, log_probs=values[:count], top_n_logprobs=best[:count], text=new)


def _settle_all(results: Iterable[Result]) -> None:
    for result in results:
        settle(*result)


def call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Call in a loop's thread; a loop that is closed has nobody waiting any more."""
    if not loop.is_closed():
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            assert loop.is_closed()


def settle(future: "asyncio.Future[Any]", value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
