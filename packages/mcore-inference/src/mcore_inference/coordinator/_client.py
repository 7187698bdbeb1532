# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A client of a coordinator, for one event loop."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Literal

import zmq
import zmq.asyncio
from torch import Tensor

from mcore_inference._fields import as_integer, as_number
from mcore_inference._stability import experimental_api
from mcore_inference.adapters import LoraWeights
from mcore_inference.coordinator._config import SECONDS, CoordinatorSecurity
from mcore_inference.coordinator._lora_answers import checked_name, raise_fault
from mcore_inference.coordinator._messages import (
    MAX_MESSAGE_BYTES,
    MAX_NUMBER,
    MAX_REQUEST_BYTES,
    MAX_TEXT,
    MAX_TOKENS,
    PROTOCOL,
    UNREADABLE,
    Abort,
    AskStatus,
    Connect,
    ConnectAck,
    Disconnect,
    EngineReply,
    Failure,
    Heartbeat,
    LoadLora,
    LoadWeights,
    Message,
    Partial,
    Partials,
    Pause,
    Refusal,
    Resume,
    Signal,
    SignalAck,
    Status,
    Stop,
    SubmitRequest,
    Suspend,
    UnloadLora,
    Unpause,
    WeightAck,
    WeightBucket,
    decode_for_client,
    encode,
)
from mcore_inference.coordinator._peer import connect, reconnect
from mcore_inference.coordinator._weights import pack
from mcore_inference.engine import EndingQueue, Increment, WeightLoadError, WeightSlice
from mcore_inference.requests import (
    CoordinatorError,
    DynamicInferenceRequestRecord,
    EngineDeadError,
    EngineLostError,
    RequestError,
    StaleWeightsError,
    request_error,
)
from mcore_inference.sampling import SamplingParams

_TURN_S = 0.005
"""That messages are taken for, before the loop does something else."""


@experimental_api
class RemoteStream:
    """Increments of one request: as ``RequestStream``, from wherever its engine is."""

    def __init__(self, client: "InferenceClient", number: int, sampling_params: SamplingParams, *, whole: bool = False) -> None:
        self._client = client
        self.sampling_params = sampling_params
        self.whole = whole
        """One increment at the end, with everything."""
        self.request_id = number
        self._queue = EndingQueue()
        self.take: Callable[[Increment | Exception], None] = self._queue.add
        """Called with all that comes; another one, set before anything came, stands for the iteration."""

    def __aiter__(self) -> AsyncIterator[Increment]:
        return self._queue.increments()

    async def record(self) -> DynamicInferenceRequestRecord:
        """The finished record.

        Raises:
            RequestError: the engine refused the request.
            EngineLostError: its engine was lost; ``StaleWeightsError`` where engines are there, and none with the weights loaded last.
            EngineDeadError: the engines were stopped.
            CoordinatorError: the coordinator is gone.
            RuntimeError: the end of the stream was read before.
        """
        return await self._queue.record()

    def abort(self) -> None:
        """End the request; nothing happens when it has ended."""
        self._client.forget(self.request_id)


@experimental_api
class InferenceClient:
    """Sends requests to the engines of a coordinator; an async context manager.

    Args:
        address: of the coordinator, ``tcp://host:port``; one beyond this machine needs its public key.
        security: the coordinator's secret and public key, and its control secret for signals and weights, where it has one.
        timeout_s: seconds that the coordinator gets to answer ``start`` and signs of life; after them everything open fails.
        heartbeat_s: as of the coordinator.
        max_message_bytes: as of the coordinator; longer requests are refused here, and those above 8 MiB.

    Raises:
        ValueError: a limit out of its range.

    Example:
        >>> async def ask(address: str) -> list[int]:
        ...     async with InferenceClient(address) as client:
        ...         record = await client.add_request("Once upon", SamplingParams(num_tokens_to_generate=8))
        ...         return record.generated_tokens
    """

    def __init__(
        self,
        address: str,
        *,
        security: CoordinatorSecurity | None = None,
        timeout_s: float = 30.0,
        heartbeat_s: float = 1.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._address = address
        self._max_bytes = as_integer("max_message_bytes", max_message_bytes, 1024, 2**40)
        self._security = CoordinatorSecurity() if security is None else security
        self._timeout_s = as_number("timeout_s", timeout_s, *SECONDS)
        self._heartbeat_s = as_number("heartbeat_s", heartbeat_s, *SECONDS)
        self._numbers = itertools.count()
        self._streams: dict[int, RemoteStream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._sending: set[asyncio.Future[Any]] = set()
        self._heard = 0.0
        self._connected: asyncio.Future[ConnectAck] | None = None
        self._context: zmq.asyncio.Context | None = None
        self.max_sequence_length = 0
        """Of the engine with the shortest, as the last ``status`` (or ``start``) knew it; 0 for none."""

    async def __aenter__(self) -> "InferenceClient":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Connect.

        Raises:
            CoordinatorError: no answer within ``timeout_s``, or a refusal.
            ValueError: the address is none, or beyond this machine without ``security`` of a public key; or the client was started before.
        """
        if self._context is not None:
            raise ValueError("the client was started before; make a new one")
        self._context = zmq.asyncio.Context()
        try:
            self._socket = connect(self._context, self._address, self._security, self._max_bytes)
            self._connected = asyncio.get_running_loop().create_future()
            self._heard = time.monotonic()
            self._tasks = [asyncio.ensure_future(self._receive())]
            self._greet()
            try:
                acknowledgement = await asyncio.wait_for(asyncio.shield(self._connected), self._timeout_s)
            except TimeoutError:
                raise CoordinatorError(
                    f"no answer from {self._address} within timeout_s={self._timeout_s:g}; is a coordinator there, are the keys its own?"
                ) from None
        except BaseException:
            await self.stop()
            raise
        self.max_sequence_length = acknowledgement.max_sequence_length
        self._tasks.append(asyncio.ensure_future(self._beat()))

    async def stop(self) -> None:
        """Leave: open requests are aborted. The engines go on. May be called again."""
        self._fail_all(CoordinatorError("the client was stopped"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._context is not None and not self._context.closed:
            with contextlib.suppress(Exception):
                self._send(Disconnect())
                self._socket.close()
            # Sending may take as long as the socket lingers.
            await asyncio.get_running_loop().run_in_executor(None, self._context.term)

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        stream: bool = True,
        lora: str | None = None,
    ) -> RemoteStream:
        """Send a request and get its stream; iterate it to the end, or ``abort`` it. Engines serve lower priorities first.

        Without ``stream`` one increment comes, at the end; a request of a lost engine goes to another then. ``lora`` names the adapter of
        ``load_lora`` that answers, None the model alone; the stream of one that is not loaded ends with ``UnknownLoraError``.

        Raises:
            CoordinatorError: the client is not started, or lost its coordinator.
            RequestError: it is longer than 8 MiB or ``max_message_bytes``.
            ValueError: ``lora`` is no name.
        """
        return self._submit(prompt, sampling_params, priority, lora, stream=stream)

    def add_request(
        self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, *, priority: int = 0, lora: str | None = None
    ) -> "asyncio.Future[DynamicInferenceRequestRecord]":
        """Send a request and get a future of its record, which has the latency seen from here; cancelling it aborts the request.

        Raises:
            CoordinatorError: the client is not started, or lost its coordinator.
            RequestError: it is longer than 8 MiB or ``max_message_bytes``.
            ValueError: ``lora`` is no name.
        """
        stream, begin = self._submit(prompt, sampling_params, priority, lora, stream=False), time.monotonic()

        async def finish() -> DynamicInferenceRequestRecord:
            try:
                record = await stream.record()
            finally:
                stream.abort()
            record.latency = time.monotonic() - begin
            return record

        return asyncio.ensure_future(finish())

    async def pause_engines(self) -> None:
        """Let all engines stop at the end of a step; requests keep their place. Returns when all have.

        Raises:
            CoordinatorError: not possible now, not without the coordinator's control secret, or an engine was lost meanwhile (named; the
                others are paused).
        """
        await self._signal(Pause)

    async def unpause_engines(self) -> None:
        """Let paused engines go on; as ``pause_engines``."""
        await self._signal(Unpause)

    async def suspend_engines(self) -> None:
        """Pause the engines and free the memory of their caches; as ``pause_engines``."""
        await self._signal(Pause)
        await self._signal(Suspend)

    async def resume_engines(self) -> None:
        """Take the memory again and go on; as ``pause_engines``."""
        await self._signal(Resume)
        await self._signal(Unpause)

    async def stop_engines(self) -> None:
        """End all engines' work for the coordinator; open requests of all clients fail with ``EngineDeadError``."""
        await self._signal(Stop)

    async def load_weights(
        self,
        chunks: Iterable[tuple[str, Tensor | WeightSlice]],
        version: int | None = None,
        *,
        in_flight: Literal["recompute", "keep", "drain"] = "recompute",
    ) -> int:
        """Replace the weights of all engines, as ``DynamicInferenceEngine.load_weights``; returns when all have them.

        Chunks are sent by buckets of at most 16 MiB, each when all engines have the one before. Engines that a load missed, such as one
        that was started again, get no requests while others have its weights. When none has them any more, requests fail with
        ``StaleWeightsError`` until weights are loaded again; so give versions from 1, as 0 is what engines start with.

        Args:
            chunks: read in a thread; together every element once.
            version: of the new weights; None for one above all that were given. One that was given before is for the weights that had it:
                to repeat a load, or to go back.
            in_flight: what requests in flight do.

        Returns:
            The version.

        Raises:
            WeightLoadError: engines refused the weights, by name; those that had begun to copy wait for another load.
            CoordinatorError: there is no engine, the coordinator has a control secret which is not this client's, or engines were lost
                meanwhile (named; the others have the weights).
            ValueError: an unknown policy, or a version that is none.
            Exception: whatever ``chunks`` raises.
        """
        if in_flight not in ("recompute", "keep", "drain"):
            raise ValueError(f"in_flight={in_flight!r} is unknown; choose recompute, keep or drain")
        wanted = -1 if version is None else as_integer("version", version, 0, MAX_NUMBER)
        self._check_open()
        number = next(self._numbers)
        answer = await self._send_weights(LoadWeights(call=number, version=wanted, in_flight=in_flight), chunks)
        if answer.error:
            raise WeightLoadError(answer.error)
        return answer.version

    async def load_lora(self, name: str, weights: LoraWeights) -> None:
        """Load an adapter into all engines, or into none, as ``DynamicInferenceEngine.load_lora``; returns when all have it.

        The coordinator keeps it: engines that come later, or are started again, get requests once they have it. No request may name it
        before. Buckets are sent as those of ``load_weights``.

        Args:
            name: by which requests name it.
            weights: in any dtype, on any device.

        Raises:
            LoraLoadError: engines refused it, by name; or a loaded one has the name.
            CoordinatorError: there is no engine, some were lost or late meanwhile (named; none has it), or the coordinator has a control
                secret which is not this client's.
            ValueError: the name is none.
        """
        self._check_open()
        number = next(self._numbers)
        begin = LoadLora(call=number, name=checked_name(name), rank=weights.rank, alpha=weights.alpha)
        raise_fault((await self._send_weights(begin, weights.tensors().items())).error)

    async def unload_lora(self, name: str) -> None:
        """Let all engines forget an adapter, or none; returns when all have.

        Raises:
            UnknownLoraError: it is not loaded.
            LoraInUseError: requests use it; it stays.
            CoordinatorError: there is no engine, some failed (named; all keep it) or were lost meanwhile (named; the others have forgotten
                it), or the coordinator has a control secret which is not this client's.
            ValueError: the name is none.
        """
        answer: WeightAck = await self._call(lambda number: UnloadLora(call=number, name=checked_name(name)))
        raise_fault(answer.error)

    async def _send_weights(self, begin: LoadWeights | LoadLora, chunks: Iterable[tuple[str, Tensor | WeightSlice]]) -> WeightAck:
        """By buckets, each when the one before was taken; the answer that ends the load."""
        number = begin.call
        try:
            answer: WeightAck = await self._ask(number, begin)
            buckets = pack(chunks, answer.bucket_bytes)
            while not answer.is_over:
                bucket = await asyncio.to_thread(next, buckets, None)
                end: Literal["", "whole"] = "whole" if bucket is None else ""
                answer = await self._ask(number, WeightBucket(call=number, index=answer.index + 1, chunks=bucket or [], end=end))
        except BaseException:
            # Engines wait for weights until they are told, and so do calls behind one whose turn has not come; a socket that is closed
            # tells it, too.
            with contextlib.suppress(Exception):
                self._send(WeightBucket(call=number, index=0, chunks=[], end="aborted"))
            raise
        return answer

    async def status(self) -> Status:
        """State and load of the engines."""
        result: Status = await self._call(lambda number: AskStatus(call=number))
        self.max_sequence_length = result.max_sequence_length
        return result

    # -- inside ------------------------------------------------------------------------------------------------------

    def forget(self, number: int) -> None:
        """Abort a request, if it is open."""
        if self._streams.pop(number, None) is not None and self._tasks:
            self._send(Abort(request_id=number))

    def _submit(
        self, prompt: str | Sequence[int], params: SamplingParams | None, priority: int, lora: str | None, *, stream: bool
    ) -> RemoteStream:
        self._check_open()
        if lora is not None:
            checked_name(lora)
        priority = as_integer("priority", priority, -(2**31), 2**31 - 1)
        params = SamplingParams() if params is None else params
        settings = params.serialize()
        remote = RemoteStream(self, next(self._numbers), params, whole=not stream)
        body: str | list[int] = prompt if isinstance(prompt, str) else [int(token) for token in prompt]
        number, most = remote.request_id, MAX_TEXT if isinstance(body, str) else MAX_TOKENS
        if len(body) > most:
            raise RequestError(number, f"the prompt has {len(body)} {'characters' if isinstance(body, str) else 'tokens'}, above {most}")
        message = SubmitRequest(request_id=number, prompt=body, sampling_params=settings, stream=stream, priority=priority, lora=lora)
        frame = encode(message)
        if len(frame) > min(self._max_bytes, MAX_REQUEST_BYTES):
            # The connection would be cut, and with it every other request.
            own = f"max_message_bytes={self._max_bytes}"
            bound = own if self._max_bytes <= MAX_REQUEST_BYTES else f"a request has at most {MAX_REQUEST_BYTES}"
            raise RequestError(number, f"it has {len(frame)} bytes and {bound}; shorten the prompt")
        self._streams[number] = remote
        self._send_frame(frame)
        return remote

    async def _signal(self, kind: type[Signal]) -> None:
        await self._call(lambda number: kind(call=number))

    async def _call(self, build: Any) -> Any:
        self._check_open()
        number = next(self._numbers)
        return await self._ask(number, build(number))

    async def _ask(self, number: int, message: Message) -> Any:
        """Send a message of a call, and wait for its answer."""
        result = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(message)
        try:
            return await result
        finally:
            self._calls.pop(number, None)

    def _greet(self) -> None:
        keys = self._security
        self._send(Connect(protocol=PROTOCOL, secret=keys.secret, control_secret=keys.control_secret or ""))

    def _check_open(self) -> None:
        if len(self._tasks) < 2 or any(task.done() for task in self._tasks):
            raise CoordinatorError("the client is not started, or lost its coordinator; use `async with InferenceClient(...)`")

    def _send(self, message: Message) -> None:
        self._send_frame(encode(message))

    def _send_frame(self, frame: bytes) -> None:
        # A DEALER queues without waiting; it is full only when the coordinator reads nothing for long.
        sent: Any = self._socket.send(frame)
        self._sending.add(sent)
        sent.add_done_callback(self._sending.discard)

    async def _beat(self) -> None:
        while True:
            self._send(Heartbeat())
            await asyncio.sleep(self._heartbeat_s)
            silent = time.monotonic() - self._heard
            if silent > self._timeout_s:
                self._fail_all(CoordinatorError(f"the coordinator at {self._address} was silent for {silent:.1f} s"))
                reconnect(self._socket, self._address)
                self._heard = time.monotonic()

    async def _receive(self) -> None:
        # As in the coordinator: a future for each message costs more than the message.
        socket = zmq.Socket.shadow(self._socket)
        while True:
            frame = await self._socket.recv()
            end = time.monotonic() + _TURN_S
            self._take(frame)
            with contextlib.suppress(zmq.Again):
                while time.monotonic() < end:
                    self._take(socket.recv(zmq.DONTWAIT))
            await asyncio.sleep(0)

    def _take(self, frame: bytes) -> None:
        """One message of the coordinator."""
        try:
            message = decode_for_client(frame)
        except UNREADABLE as error:
            # Whoever it was for would wait for ever.
            self._fail_all(CoordinatorError(f"a message of {self._address} was not understood ({error}); use one version"))
            return
        self._heard = time.monotonic()
        if isinstance(message, Partials):
            for part in message.items:
                self._deliver(part.request_id, _increment(part, None))
            for reply in message.replies:
                self._end(reply)
        elif isinstance(message, EngineReply):
            self._end(message)
        elif isinstance(message, Failure):
            self._deliver(message.request_id, _error(message))
            self._streams.pop(message.request_id, None)
        elif isinstance(message, SignalAck | Status | WeightAck):
            self._settle(message.call, message)
        elif isinstance(message, ConnectAck):
            if self._connected is not None and not self._connected.done():
                self._connected.set_result(message)
        elif isinstance(message, Refusal):
            self._refused(message)

    def _refused(self, refusal: Refusal) -> None:
        error = CoordinatorError(refusal.message)
        if refusal.call >= 0:
            self._settle(refusal.call, error)
        elif self._connected is not None and not self._connected.done():
            self._connected.set_exception(error)
        else:
            # It was restarted, or had given this client up: what was open is open no more.
            self._fail_all(error)
            self._greet()

    def _deliver(self, number: int, item: Increment | Exception) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.take(item)

    def _end(self, reply: EngineReply) -> None:
        stream = self._streams.pop(reply.request_id, None)
        if stream is None:
            return
        try:
            record = DynamicInferenceRequestRecord.deserialize(reply.record, stream.sampling_params)
        except (KeyError, TypeError, ValueError) as error:
            stream.take(CoordinatorError(f"the answer of an engine was not understood ({error!r}); use one version"))
        else:
            stream.take(_whole(record) if stream.whole else _increment(reply, record))

    def _settle(self, number: int, value: Any) -> None:
        call = self._calls.get(number)
        if call is None or call.done():
            return
        if isinstance(value, Exception):
            call.set_exception(value)
        else:
            call.set_result(value)

    def _fail_all(self, error: Exception) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.take(error)
        for number in list(self._calls):
            self._settle(number, error)


def _increment(message: Partial | EngineReply, record: DynamicInferenceRequestRecord | None) -> Increment:
    best = [dict(each) for each in message.top_n_logprobs]
    return Increment(tokens=message.tokens, log_probs=message.log_probs, top_n_logprobs=best, text=message.text, record=record)


def _whole(record: DynamicInferenceRequestRecord) -> Increment:
    tokens, log_probs, best = record.since(0)
    return Increment(tokens=tokens, log_probs=log_probs, top_n_logprobs=best, text=record.generated_text, record=record)


def _error(failure: Failure) -> Exception:
    plain = {cls.__name__: cls for cls in (EngineLostError, EngineDeadError, StaleWeightsError)}
    if failure.kind in plain:
        return plain[failure.kind](failure.message)
    return request_error(failure.kind, failure.message, is_transient=failure.is_transient)
