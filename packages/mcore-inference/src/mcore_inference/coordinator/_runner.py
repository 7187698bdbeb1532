# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engines of a coordinator behind the interface of one engine's runner."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from mcore_inference._figures import counters, together
from mcore_inference._stability import experimental_api
from mcore_inference.adapters import LoraWeights
from mcore_inference.coordinator._client import InferenceClient, RemoteStream
from mcore_inference.coordinator._config import CoordinatorSecurity
from mcore_inference.coordinator._messages import MAX_MESSAGE_BYTES, EngineStatus, Status
from mcore_inference.coordinator._states import MemberState
from mcore_inference.engine import EngineHealth, Increment, RequestStream, WeightSlice, deliver
from mcore_inference.requests import CoordinatorError, EngineDeadError, RequestError
from mcore_inference.sampling import SamplingParams

_STATUS_S = 0.25
"""Between two looks at the engines."""
_STATUS_TIMEOUT_S = 2.0


@experimental_api
class CoordinatedRunner:
    """Sends requests to a coordinator from any thread's event loop, as ``EngineRunner`` does to its engine.

    A coordinator that is gone for a while fails the requests that are open; ``health`` reports it, and later requests are served when it is
    back.

    Args:
        address: of the coordinator.
        security: its secret and public key, and its control secret for ``load_weights``.
        timeout_s: as of ``InferenceClient``.
        max_message_bytes: as of the coordinator.

    Raises:
        CoordinatorError: no answer in time, or a refusal.
        ValueError: the address is none, or beyond this machine without ``security`` of a public key; or a limit is out of its range.
    """

    def __init__(
        self,
        address: str,
        *,
        security: CoordinatorSecurity | None = None,
        timeout_s: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._client = InferenceClient(address, security=security, timeout_s=timeout_s, max_message_bytes=max_message_bytes)
        self._open: dict[int, tuple[RemoteStream, RequestStream]] = {}
        self._news: list[tuple[RequestStream, Increment | Exception]] = []
        """Of this turn of the loop, in which whole messages come."""
        self._status: Status | None = None
        self._counters: dict[str, float] = {}
        """Of the last status."""
        self._loras: tuple[str, ...] = ()
        self._num_others = 0
        """Requests of other clients, as of the last status."""
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
        """New tokens that a prompt of this length can get at most; below 1 when there is no room."""
        return self.max_sequence_length - num_prompt_tokens

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread, or was given to ``fail``."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """End for good, from any thread: open requests and all later ones get ``EngineDeadError``, and a server over it ends.

        For one who knows that no engine will come any more. Nothing happens after an end.

        Args:
            error: what ended the engines.
        """
        if self._failure is None and self._thread.is_alive():
            self._failure = error
            self._end()

    def health(self) -> EngineHealth:
        """Alive while the coordinator answers and has engines that take requests; the age is that of the engine which is slowest, as it
        reported it last, and the requests are those of all clients, of others as of the last status."""
        status, reason = self._status, None
        if self._failure is not None:
            reason = f"{type(self._failure).__name__}: {self._failure}"
        elif not self._thread.is_alive():
            reason = "the runner was closed"
        elif status is None:
            reason = "the coordinator does not answer"
        elif not _serving(status):
            reason = "all engines are draining" if status.engines else "the coordinator has no engine"
        elif status.state == "stopped":
            reason = "the engines are stopped"
        engines = [] if status is None else status.engines
        age = max((engine.last_step_age_s for engine in engines if engine.last_step_age_s is not None), default=None)
        unfinished = len(self._open) + self._num_others
        return EngineHealth(alive=reason is None, last_step_age_s=age, unfinished_requests=unfinished, failure=reason)

    def stats(self) -> dict[str, float]:
        """Figures of all engines together, and how many there are, drain, and were lost.

        Counters are sums, over engines that are gone, too: they fall only when another coordinator takes the address. They keep their
        values while the coordinator does not answer. Of ``weight_version`` it is the smallest of the engines, of
        ``seconds_to_first_token`` and ``max_tokens`` the largest.
        """
        status = self._status
        now = dict.fromkeys(("engines", "draining_engines", "open_requests", "open_tokens"), 0.0)
        return {**now, **self._counters, **({} if status is None else _merged(status))}

    def engine_stats(self) -> dict[str, dict[str, float]]:
        """``stats`` of each engine, by its name, and its requests and tokens and whether it drains, as the coordinator knows them."""
        engines = [] if self._status is None else self._status.engines
        return {
            engine.name: {
                **engine.stats,
                "open_requests": float(engine.open_requests),
                "open_tokens": float(engine.open_tokens),
                "draining": float(engine.state == MemberState.DRAINING),
            }
            for engine in engines
        }

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = True,
        lora: str | None = None,
    ) -> RequestStream:
        """Send a request and get its stream; lower priorities are served first. Without ``stream`` only the finished record is sent.
        ``lora`` names the adapter that answers; the stream of one that is not loaded ends with ``UnknownLoraError``.

        Raises:
            CoordinatorError: the coordinator is gone, or this runner was closed.
            EngineDeadError: the engines failed for good (``fail``).
            RequestError: it is longer than 8 MiB or ``max_message_bytes``.
        """
        increments = RequestStream(self.abort, asyncio.get_running_loop(), whole=not stream)
        loop = self._open_loop()
        try:
            began = asyncio.run_coroutine_threadsafe(self._begin(prompt, sampling_params, priority, lora, increments), loop)
        except RuntimeError:
            raise self._ended() from None
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
            EngineDeadError: the engines failed for good.
        """
        loop = self._open_loop()
        loading = asyncio.run_coroutine_threadsafe(self._client.load_weights(chunks, version, in_flight=in_flight), loop)
        return await asyncio.wrap_future(loading)

    @property
    def loras(self) -> tuple[str, ...]:
        """Adapters that requests may name, as of the last status, in the order of their loads."""
        return self._loras

    async def find_loras(self) -> tuple[str, ...]:
        """``loras`` as the coordinator has them now: others may have loaded some.

        Raises:
            CoordinatorError: as of ``load_weights``, or no answer within two seconds.
            EngineDeadError: the engines failed for good.
        """
        await self._in_loop(self._refresh)
        return self._loras

    async def load_lora(self, name: str, weights: LoraWeights) -> None:
        """Load an adapter into all engines, or into none; as ``InferenceClient.load_lora``.

        Raises:
            LoraLoadError: as there.
            CoordinatorError: as there, or this runner was closed.
            EngineDeadError: the engines failed for good.
        """
        await self._in_loop(lambda: self._change_lora(self._client.load_lora(name, weights)))

    async def unload_lora(self, name: str) -> None:
        """Let all engines forget an adapter, or none; as ``InferenceClient.unload_lora``.

        Raises:
            UnknownLoraError: as there.
            LoraInUseError: as there.
            CoordinatorError: as there, or this runner was closed.
            EngineDeadError: the engines failed for good.
        """
        await self._in_loop(lambda: self._change_lora(self._client.unload_lora(name)))

    async def _in_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """In the loop of the thread."""
        loop = self._open_loop()
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), loop))

    def abort(self, request_id: int) -> None:
        """End a request, from any thread; nothing happens when it has ended."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._cancel, request_id)

    def close(self) -> None:
        """Abort what is open, which gets ``EngineDeadError``, and end the thread; the engines go on. May be called again."""
        self._end()
        self._thread.join()

    def _end(self) -> None:
        if self._loop is not None and self._closing is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._closing.set)

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or not self._thread.is_alive() or self._failure is not None:
            raise self._ended()
        return self._loop

    def _ended(self) -> CoordinatorError | EngineDeadError:
        failure = self._failure
        return CoordinatorError("the runner was closed") if failure is None else EngineDeadError(f"the engines failed: {failure}")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        async with self._client:
            self._take_status(await self._client.status())
            self._ready.set()
            watching = asyncio.ensure_future(self._watch())
            await self._closing.wait()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            error = EngineDeadError("the runner was closed") if self._failure is None else self._ended()
            for number in list(self._open):
                self._cancel(number, error)
            self._deliver()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_STATUS_S)
            try:
                self._take_status(await asyncio.wait_for(self._client.status(), _STATUS_TIMEOUT_S))
            except (CoordinatorError, TimeoutError):
                self._status = None

    async def _change_lora(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            # Whoever waited for it names it, or names it no more, at once.
            with contextlib.suppress(CoordinatorError):
                await self._refresh()

    async def _refresh(self) -> None:
        try:
            self._take_status(await asyncio.wait_for(self._client.status(), _STATUS_TIMEOUT_S))
        except TimeoutError:
            raise CoordinatorError(f"the coordinator did not say its state within {_STATUS_TIMEOUT_S:g} s; try again later") from None

    def _take_status(self, status: Status) -> None:
        merged = _merged(status)
        self._loras = tuple(status.loras)
        self._counters, self._status = counters(merged), status
        # Ends come before a status that does not count them.
        self._num_others = max(0, status.waiting_requests + int(merged["open_requests"]) - len(self._open))

    async def _begin(
        self, prompt: str | Sequence[int], params: SamplingParams | None, priority: int, lora: str | None, stream: RequestStream
    ) -> int:
        def take(item: Increment | Exception) -> None:
            if isinstance(item, Exception) or item.record is not None:
                self._open.pop(remote.request_id, None)
            self._add((stream, item))

        remote = await self._client.submit(prompt, params, priority=priority, stream=not stream.whole, lora=lora)
        remote.take = take
        self._open[remote.request_id] = (remote, stream)
        return remote.request_id

    def _cancel(self, request_id: int, error: Exception | None = None) -> None:
        remote, stream = self._open.pop(request_id, (None, None))
        if remote is not None and stream is not None:
            remote.abort()
            self._add((stream, error or RequestError(request_id, "the request was aborted")))

    def _add(self, news: tuple[RequestStream, Increment | Exception]) -> None:
        if not self._news:
            assert self._loop is not None, "called in it"
            self._loop.call_soon(self._deliver)
        self._news.append(news)

    def _deliver(self) -> None:
        """One call into the loop of each server for all that came, since each wakes it."""
        news, self._news = self._news, []
        deliver(news)


def _serving(status: Status) -> list[EngineStatus]:
    return [engine for engine in status.engines if engine.state != MemberState.DRAINING]


def _merged(status: Status) -> dict[str, float]:
    engines = status.engines
    merged = together([status.past, *(engine.stats for engine in engines)])
    merged["waiting_requests"] = merged.get("waiting_requests", 0.0) + status.waiting_requests
    merged["engines"] = float(len(_serving(status)))
    merged["draining_engines"] = float(len(engines) - len(_serving(status)))
    merged["open_requests"] = float(sum(engine.open_requests for engine in engines))
    merged["open_tokens"] = float(sum(engine.open_tokens for engine in engines))
    return merged
