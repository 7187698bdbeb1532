# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine in a thread of its own, used from event loops."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mcore_inference._fields import as_integer, as_number
from mcore_inference._stability import experimental_api
from mcore_inference.engine._engine import DynamicInferenceEngine
from mcore_inference.engine._weights import WeightChunk, WeightPolicy, check_policy
from mcore_inference.requests import DynamicInferenceRequestRecord, EngineDeadError, QueueFullError
from mcore_inference.sampling import SamplingParams

__all__ = ["EngineHealth", "EngineRunner", "Increment", "RequestStream"]

_LOG = logging.getLogger("mcore_inference.engine")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Increment:
    """What a request gained since the last increment."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top_n_logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""
    record: DynamicInferenceRequestRecord | None = None
    """The finished record, with the last increment only."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class EngineHealth:
    """Whether the engine makes progress."""

    alive: bool
    """The thread runs, did not fail, and is idle or stepped lately."""
    last_step_age_s: float | None
    """Seconds since the last step ended, or since work arrived; None when idle."""
    unfinished_requests: int
    failure: str | None
    """What ended the thread."""


@experimental_api
class RequestStream:
    """Increments of one request, for one event loop.

    Iterate it to the end, or ``abort`` it: an abandoned request goes on for nobody.
    """

    def __init__(self, abort: Callable[[int], None], loop: asyncio.AbstractEventLoop, *, whole: bool = False) -> None:
        self._abort = abort
        self.loop = loop
        self.whole = whole
        """One increment at the end, with everything."""
        self._queue: asyncio.Queue[Increment | Exception] = asyncio.Queue()
        self.request_id = -1
        # Owned by the engine's thread:
        self.num_tokens = 0
        self.num_characters = 0

    def __aiter__(self) -> AsyncIterator[Increment]:
        return self._increments()

    async def _increments(self) -> AsyncIterator[Increment]:
        while True:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            yield item
            if item.record is not None:
                return

    async def record(self) -> DynamicInferenceRequestRecord:
        """The finished record.

        Raises:
            EngineDeadError: the engine failed or was closed before the request ended.
        """
        async for increment in self:
            if increment.record is not None:
                return increment.record
        raise AssertionError("a stream ends with a record or an error")

    def abort(self) -> None:
        """End the request at the next step; nothing happens when it has ended."""
        self._abort(self.request_id)

    def deliver(self, item: Increment | Exception) -> None:
        """From any thread."""
        _call_in(self.loop, self.put, item)

    def put(self, item: Increment | Exception) -> None:
        """In the thread of the event loop."""
        self._queue.put_nowait(item)


@dataclass(frozen=True)
class _Command:
    """Something to do in the engine's thread between two steps."""

    run: Callable[[], None]
    refuse: Callable[[], None]
    """Instead of ``run``, when the engine ended before."""


@experimental_api
class EngineRunner:
    """Steps an engine while it has requests, in one thread that nothing else may touch the engine beside.

    A request that fails ends alone. An exception of a step ends the runner: every open request gets ``EngineDeadError``, and so does
    every later one.

    Args:
        engine: of one rank; it must not be used elsewhere until ``close``.
        stall_timeout_s: age of the last step at which a busy engine counts as dead in ``health``.
        max_failed_steps: steps that fail one after the other before the engine is given up. A step that fails before that ends its own
            requests only.
        max_waiting_requests: length of the engine's queue at which ``submit`` refuses; None for the engine's own limit only.

    Raises:
        ValueError: the engine's model is split over ranks, which have to step together; a limit out of its range.
    """

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        *,
        stall_timeout_s: float = 60.0,
        max_failed_steps: int = 3,
        max_waiting_requests: int | None = None,
    ) -> None:
        tp = engine.model.groups.tp.size
        if tp > 1:
            raise ValueError(
                f"tp={tp} ranks must be stepped together and a runner steps one; serve with tp=1, or call step() on every rank"
            )
        self.engine = engine
        self._stall_timeout_s = as_number("stall_timeout_s", stall_timeout_s, 0, 1e9)
        self._max_failed_steps = as_integer("max_failed_steps", max_failed_steps, 1, 2**31)
        self._max_waiting = 2**31 if max_waiting_requests is None else as_integer("max_waiting_requests", max_waiting_requests, 1, 2**31)
        self.num_failed_steps = 0
        """Steps that raised."""
        self._failed_in_a_row = 0
        self._wake = threading.Condition()
        self._commands: list[_Command] = []
        self._drains: list[_Command] = []
        """Run once no request is in flight."""
        self._num_holds = 0
        self._streams: dict[int, RequestStream] = {}
        self._closing = False
        self._paused = False
        self._failure: BaseException | None = None
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="mcore-engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "EngineRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout_s: float = 60.0) -> None:
        """Abort what is open and end the thread; may be called again.

        Raises:
            TimeoutError: the step in progress did not end in time.
        """
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's step of {time.monotonic() - self._progress:.0f} s did not end within timeout_s={timeout_s}")

    async def submit(
        self,
        prompt: str | Sequence[int] | Tensor,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = True,
    ) -> RequestStream:
        """Queue a request and get its stream.

        Args:
            prompt: as of ``DynamicInferenceEngine.add_request``.
            sampling_params: as there.
            priority: lower ones are served first.
            stream: False for one increment at the end, which costs nothing a token.

        Raises:
            RequestError: (a subclass) as ``DynamicInferenceEngine.add_request``; ``QueueFullError`` at ``max_waiting_requests``.
            ValueError: as there.
            EngineDeadError: the engine failed or was closed.
        """
        loop = asyncio.get_running_loop()
        increments = RequestStream(self.abort, loop, whole=not stream)

        def add() -> None:
            if self.engine.num_waiting >= self._max_waiting:
                raise QueueFullError(
                    None, f"{self.engine.num_waiting} requests wait and max_waiting_requests={self._max_waiting}; try again later"
                )
            increments.request_id = self.engine.add_request(prompt, sampling_params, priority=priority)
            self._streams[increments.request_id] = increments

        added = asyncio.ensure_future(self.call(add))
        try:
            await asyncio.shield(added)
        except asyncio.CancelledError:
            # The caller is gone, but the engine may already hold the request: abort once its number is known.
            added.add_done_callback(lambda task: None if task.cancelled() or task.exception() else increments.abort())
            raise
        return increments

    async def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between two steps, in the engine's thread, and return its result (for instance a weight load).

        Raises:
            EngineDeadError: the engine failed or was closed.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def command() -> None:
            try:
                value = function()
            except Exception as error:
                _call_in(loop, _settle, result, None, error)
            else:
                _call_in(loop, _settle, result, value, None)

        def refuse() -> None:
            _call_in(loop, _settle, result, None, self._dead())

        self._send(_Command(command, refuse))
        return await result

    async def load_weights(
        self, chunks: Iterable[WeightChunk], version: int | None = None, *, in_flight: WeightPolicy = "recompute"
    ) -> None:
        """``DynamicInferenceEngine.load_weights`` between two steps; with ``drain`` after the steps that end the requests in flight.

        Requests that arrive meanwhile are computed with the new weights. After a load that failed half-way no step runs until one
        succeeds; requests wait for it.

        Args:
            chunks: read in the engine's thread.
            version: as there.
            in_flight: as there.

        Raises:
            WeightLoadError: as there.
            ValueError: as there.
            RuntimeError: ``drain`` while the runner is paused or suspended, or after a load that failed half-way.
            EngineDeadError: the engine failed or was closed.
        """
        check_policy(in_flight)
        if in_flight != "drain":
            await self.call(lambda: self.engine.load_weights(chunks, version, in_flight=in_flight))
            return
        await self.call(self._hold_queue)
        try:
            await self._until_drained()
            await self.call(lambda: self.engine.load_weights(chunks, version))
        finally:
            self._send(_Command(self._release_queue, lambda: None))

    def _hold_queue(self) -> None:
        if self.engine.num_in_flight and (self._paused or not self.engine.can_step):
            raise RuntimeError("in_flight='drain' needs steps, and none runs; unpause() and resume(), or choose recompute or keep")
        self._num_holds += 1
        self.engine.hold_queue(True)

    def _release_queue(self) -> None:
        self._num_holds -= 1
        self.engine.hold_queue(self._num_holds > 0)

    async def _until_drained(self) -> None:
        loop = asyncio.get_running_loop()
        drained: asyncio.Future[Any] = loop.create_future()
        waiter = _Command(
            lambda: _call_in(loop, _settle, drained, None, None), lambda: _call_in(loop, _settle, drained, None, self._dead())
        )
        await self.call(lambda: self._drains.append(waiter))
        await drained

    async def pause(self) -> None:
        """Stop stepping, at the end of the step in progress. Requests keep their place, new ones queue; returns when no step runs.

        Raises:
            EngineDeadError: the engine failed or was closed.
        """
        await self.call(lambda: self._set_paused(True))

    async def unpause(self) -> None:
        """Step again; as ``pause``."""
        await self.call(lambda: self._set_paused(False))

    async def suspend(self) -> None:
        """Pause, and free the memory of the cache (``DynamicInferenceEngine.suspend``); as ``pause``."""
        await self.call(lambda: (self._set_paused(True), self.engine.suspend()))

    async def resume(self) -> None:
        """Take the memory again; the engine stays paused.

        Raises:
            torch.OutOfMemoryError: others use it; the engine stays suspended.
            EngineDeadError: the engine failed or was closed.
        """
        await self.call(self.engine.resume)

    def _set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._progress = time.monotonic()

    def abort(self, request_id: int) -> None:
        """End a request at the next step, from any thread; its stream gets the record."""

        def command() -> None:
            record = self.engine.abort(request_id)
            if record is not None:
                _deliver(self._gained(request_id, record, ended=True))

        self._send(_Command(command, lambda: None))

    def _send(self, command: _Command) -> None:
        with self._wake:
            if not self._closing:
                self._commands.append(command)
                self._wake.notify()
                return
        command.refuse()

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread; None while it runs, and after ``close``."""
        return self._failure

    @property
    def max_sequence_length(self) -> int:
        """Tokens of a prompt and its output together."""
        return self.engine.context.max_sequence_length

    def room(self, num_prompt_tokens: int) -> int:
        """New tokens that a prompt of this length can get at most; below 1 when there is no room."""
        return self.engine.context.room(num_prompt_tokens)

    def stats(self) -> dict[str, float]:
        """``DynamicInferenceEngine.stats``, and the steps that failed."""
        return {**self.engine.stats(), "failed_steps": self.num_failed_steps}

    def health(self) -> EngineHealth:
        """Liveness by progress: a thread that hangs in a step is dead after ``stall_timeout_s``."""
        busy = bool(self._commands or (self._streams and not self._paused))
        age = time.monotonic() - self._progress if busy else None
        alive = self._thread.is_alive() and not self._closing and (age is None or age < self._stall_timeout_s)
        failure = None if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"
        return EngineHealth(alive=alive, last_step_age_s=age, unfinished_requests=len(self._streams), failure=failure)

    # -- the engine's thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            device = self.engine.context.device
            if device.type == "cuda" and device.index is not None:
                # Which GPU is current, each thread says for itself.
                torch.cuda.set_device(device)
            while self._next_commands():
                if self._has_work():
                    self._step()
                if self._drains and not self.engine.num_in_flight:
                    drains, self._drains = self._drains, []
                    for drained in drains:
                        drained.run()
        except BaseException as error:
            self._failure = error
            _LOG.critical("the engine is given up after %d failed steps in a row: %r", self._failed_in_a_row, error)
        finally:
            self._shut_down()

    def _step(self) -> None:
        """One step, and what it brought to the streams; a step that fails ends its requests, too many in a row end the runner."""
        failure: Exception | None = None
        try:
            finished = self.engine.step()
        except Exception as error:
            failure, finished = error, self.engine.take_finished()
            self.num_failed_steps += 1
            _LOG.exception("a step failed and ended %d requests", len(finished))
        self._failed_in_a_row = 0 if failure is None else self._failed_in_a_row + 1
        self._progress = time.monotonic()
        ended = {record.request_id: record for record in finished}
        news: list[_News] = []
        for request_id, stream in list(self._streams.items()):
            if request_id in ended:
                news += self._gained(request_id, ended[request_id], ended=True)
            elif not stream.whole:
                news += self._gained(request_id, self.engine.get_request(request_id), ended=False)
        _deliver(news)
        if failure is not None and self._failed_in_a_row >= self._max_failed_steps:
            raise failure

    def _next_commands(self) -> bool:
        """Wait for work and run the commands; False when the runner closes."""
        with self._wake:
            while not (self._commands or self._closing or self._has_work()):
                self._wake.wait()
                self._progress = time.monotonic()
            if self._closing:
                return False
            commands, self._commands = self._commands, []
        for command in commands:
            command.run()
        return True

    def _has_work(self) -> bool:
        return not self._paused and self.engine.has_work

    def _gained(self, request_id: int, record: DynamicInferenceRequestRecord, *, ended: bool) -> "list[_News]":
        """What a request has that its stream has not; empty or of one entry."""
        stream = self._streams.get(request_id)
        if stream is None:
            return []
        tokens, values, best = record.since(stream.num_tokens)
        text = record.generated_text[stream.num_characters :]
        if ended:
            del self._streams[request_id]
        if not (tokens or text or ended):
            return []
        stream.num_tokens += len(tokens)
        stream.num_characters += len(text)
        increment = Increment(tokens=tokens, log_probs=values, top_n_logprobs=best, text=text, record=record if ended else None)
        return [(stream, increment)]

    def _shut_down(self) -> None:
        with self._wake:
            self._closing = True
            commands, self._commands = self._commands, []
        streams, self._streams = self._streams, {}
        drains, self._drains = self._drains, []
        for command in [*commands, *drains]:
            command.refuse()
        _deliver([(stream, self._dead()) for stream in streams.values()])
        # Last, since a failed engine may fail again here.
        for request_id in streams:
            self.engine.abort(request_id)

    def _dead(self) -> EngineDeadError:
        if self._failure is not None:
            return EngineDeadError(f"the engine failed: {type(self._failure).__name__}: {self._failure}")
        return EngineDeadError("the engine was closed")


_News = tuple[RequestStream, Increment | Exception]


def _deliver(news: Iterable[_News]) -> None:
    """Put into streams what is new, with one call into each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_News]] = {}
    for stream, item in news:
        by_loop.setdefault(stream.loop, []).append((stream, item))
    for loop, items in by_loop.items():
        _call_in(loop, _put_all, items)


def _put_all(items: Iterable[_News]) -> None:
    for stream, item in items:
        stream.put(item)


def _call_in(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Call in a loop's thread; a loop that is closed has nobody waiting any more."""
    if not loop.is_closed():
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            assert loop.is_closed()


def _settle(future: "asyncio.Future[Any]", value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
