# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engines of a coordinator behind the interface of one engine's runner."""

import asyncio
import contextlib
import threading
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import Tensor

from mcore_inference._stability import experimental_api
from mcore_inference.coordinator._client import InferenceClient, RemoteStream
from mcore_inference.coordinator._config import CoordinatorSecurity
from mcore_inference.coordinator._messages import Status
from mcore_inference.engine import EngineHealth, Increment, RequestStream, WeightSlice, deliver
from mcore_inference.requests import CoordinatorError, RequestError
from mcore_inference.sampling import SamplingParams

_STATUS_S = 0.5


@experimental_api
class CoordinatedRunner:
    """Sends requests to a coordinator from any thread's event loop, as ``EngineRunner`` does to its engine.

    A coordinator that is gone for a while fails the requests that are open; ``health`` reports it, and later requests are served when it is
    back.

    Args:
        address: of the coordinator.
        security: its secret and public key.
        timeout_s: as of ``InferenceClient``.

    Raises:
        CoordinatorError: no answer in time, or a refusal.
        ValueError: the address is none.
    """

    def __init__(self, address: str, *, security: CoordinatorSecurity | None = None, timeout_s: float = 30.0) -> None:
        self._client = InferenceClient(address, security=security, timeout_s=timeout_s)
        self._open: dict[int, tuple[RemoteStream, RequestStream]] = {}
        self._news: list[tuple[RequestStream, Increment | Exception]] = []
        """Of this turn of the loop, in which whole messages come."""
        self._status: Status | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._closing: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="mcore-client", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> "CoordinatedRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def max_sequence_length(self) -> int:
        """Of the engine with the shortest; 0 while there is none."""
        return self._client.max_sequence_length

    def room(self, num_prompt_tokens: int) -> int:
        """New tokens that a prompt of this length can get at most; the engine refuses what its cache cannot hold."""
        return self.max_sequence_length - num_prompt_tokens

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread."""
        return self._failure

    def health(self) -> EngineHealth:
        """Alive while the coordinator answers and has engines."""
        status, reason = self._status, None
        if not self._thread.is_alive() or self._failure is not None:
            reason = f"the client ended: {self._failure!r}"
        elif status is None:
            reason = "the coordinator does not answer"
        elif not status.engines:
            reason = "the coordinator has no engine"
        elif status.state == "stopped":
            reason = "the engines are stopped"
        return EngineHealth(alive=reason is None, last_step_age_s=None, unfinished_requests=len(self._open), failure=reason)

    def stats(self) -> dict[str, float]:
        """Engines, open requests and tokens, as the coordinator knows them."""
        engines = [] if self._status is None else self._status.engines
        return {
            "engines": len(engines),
            "open_requests": sum(engine.open_requests for engine in engines),
            "open_tokens": sum(engine.open_tokens for engine in engines),
        }

    async def submit(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, *, priority: int = 0, stream: bool = True
    ) -> RequestStream:
        """Send a request and get its stream; lower priorities are served first. Without ``stream`` only the finished record is sent.

        Raises:
            CoordinatorError: the coordinator is gone, or this runner was closed.
        """
        increments = RequestStream(self.abort, asyncio.get_running_loop(), whole=not stream)
        if self._loop is None or not self._thread.is_alive():
            raise CoordinatorError("the runner was closed")
        try:
            began = asyncio.run_coroutine_threadsafe(self._begin(prompt, sampling_params, priority, increments), self._loop)
        except RuntimeError as error:
            raise CoordinatorError("the runner was closed") from error
        increments.request_id = await asyncio.wrap_future(began)
        return increments

    async def load_weights(
        self,
        chunks: Iterable[tuple[str, Tensor | WeightSlice]],
        version: int | None = None,
        *,
        in_flight: Literal["recompute", "keep", "drain"] = "recompute",
    ) -> int:
        """Replace the weights of all engines; as ``InferenceClient.load_weights``, and so are arguments, result and errors.

        Raises:
            CoordinatorError: as there, or this runner was closed.
        """
        if self._loop is None or not self._thread.is_alive():
            raise CoordinatorError("the runner was closed")
        loading = asyncio.run_coroutine_threadsafe(self._client.load_weights(chunks, version, in_flight=in_flight), self._loop)
        return await asyncio.wrap_future(loading)

    def abort(self, request_id: int) -> None:
        """End a request, from any thread; nothing happens when it has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel, request_id)

    def close(self) -> None:
        """Abort what is open and end the thread; the engines go on. May be called again."""
        if self._loop is not None and self._closing is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        async with self._client:
            self._status = await self._client.status()
            self._ready.set()
            watching = asyncio.ensure_future(self._watch())
            await self._closing.wait()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            for number in list(self._open):
                self._cancel(number)
            self._deliver()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_STATUS_S)
            try:
                self._status = await asyncio.wait_for(self._client.status(), 4 * _STATUS_S)
            except (CoordinatorError, TimeoutError):
                self._status = None

    async def _begin(self, prompt: str | Sequence[int], params: SamplingParams | None, priority: int, stream: RequestStream) -> int:
        def take(item: Increment | Exception) -> None:
            if isinstance(item, Exception) or item.record is not None:
                self._open.pop(remote.request_id, None)
            self._add((stream, item))

        remote = await self._client.submit(prompt, params, priority=priority, stream=not stream.whole)
        remote.take = take
        self._open[remote.request_id] = (remote, stream)
        return remote.request_id

    def _cancel(self, request_id: int) -> None:
        remote, stream = self._open.pop(request_id, (None, None))
        if remote is not None and stream is not None:
            remote.abort()
            self._add((stream, RequestError(request_id, "the request was aborted")))

    def _add(self, news: tuple[RequestStream, Increment | Exception]) -> None:
        if not self._news:
            assert self._loop is not None, "called in it"
            self._loop.call_soon(self._deliver)
        self._news.append(news)

    def _deliver(self) -> None:
        """One call into the loop of each server for all that came, since each wakes it."""
        news, self._news = self._news, []
        deliver(news)
