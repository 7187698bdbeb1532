# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine that works for a coordinator."""

import asyncio
import contextlib
import functools
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq.asyncio

from mcore_inference._fields import as_integer, as_number
from mcore_inference._figures import FIGURES
from mcore_inference._stability import experimental_api
from mcore_inference.coordinator._config import SECONDS, CoordinatorSecurity
from mcore_inference.coordinator._messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    UNREADABLE,
    Abort,
    Disconnect,
    EngineReply,
    Failure,
    Leave,
    LeaveAck,
    LoadLora,
    LoadWeights,
    Message,
    Partial,
    Partials,
    Refusal,
    Register,
    RegisterAck,
    Report,
    Signal,
    SignalAck,
    Stop,
    SubmitRequest,
    UnloadLora,
    WeightAck,
    WeightBucket,
    decode_for_engine,
    encode,
    number_of_request,
)
from mcore_inference.coordinator._peer import Silence, connect, reconnect
from mcore_inference.coordinator._states import GroupState, MemberState, state_after
from mcore_inference.coordinator._weights import WeightReceiver
from mcore_inference.coordinator._worker_loras import WorkerLoras
from mcore_inference.engine import EngineHealth, EngineRunner, Increment, RequestStream
from mcore_inference.requests import EngineDeadError, RequestError
from mcore_inference.sampling import SamplingParams

_LOG = logging.getLogger("mcore_inference.coordinator")
_SILENT_BEATS = 30
"""Signs of life without an answer, after which the connection is made anew."""
_LEAVE_BEATS = 10
"""Of asking to leave without an answer, after which nobody is left to leave."""
_GOODBYE_S = 0.2
_LOOK_S = 0.05
"""Between two looks at whether a worker that leaves has ended its requests."""
_TURN_S = 0.005
"""That messages are taken for, before the loop does something else."""
_UNWRITABLE = (OverflowError, RecursionError)
"""What a message raises that cannot be written, such as one that is nested just as deep as could be read."""


@experimental_api
class EngineWorker:
    """Serves requests of a coordinator with one engine, in a thread, until ``close`` or a stop of all engines.

    It registers again when the coordinator was restarted or had given it up, and warns in the log now and then while it has no answer. With
    each sign of life it sends ``EngineRunner.stats`` and ``health``; an engine that makes no progress says so, and the coordinator gives
    its requests to others.

    Args:
        runner: the engine; others may use it meanwhile.
        address: of the coordinator.
        name: for messages to humans, ``dp-0``; the coordinator refuses one that another engine has (``refusal``).
        security: the coordinator's secret and public key.
        heartbeat_s: as of the coordinator.
        max_message_bytes: as of the coordinator; a request whose answer is longer fails.

    Raises:
        ValueError: the address is none, or beyond this machine without ``security`` of a public key; or a limit is out of its range.
    """

    def __init__(
        self,
        runner: EngineRunner,
        address: str,
        *,
        name: str = "engine",
        security: CoordinatorSecurity | None = None,
        heartbeat_s: float = 1.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self.runner = runner
        self.name = name
        self._address = address
        self._security = CoordinatorSecurity() if security is None else security
        self._heartbeat_s = as_number("heartbeat_s", heartbeat_s, *SECONDS)
        self._max_bytes = as_integer("max_message_bytes", max_message_bytes, 2**13, 2**40)
        self._id = secrets.token_hex(8)
        self._state = GroupState.RUNNING
        self._member = MemberState.JOINING
        self._leave_call = 0
        self._may_leave: asyncio.Future[None] | None = None
        """Done by the acknowledgement of the last ``Leave``."""
        self._draining: asyncio.Task[None] | None = None
        self._registration = 0
        """How often it had to register."""
        self._unanswered = 0
        """Signs of life since the coordinator, which answers each, was heard."""
        self._silence = Silence()
        self._num_unread = 0
        """Messages of the coordinator that are none of this version."""
        self._submitted: dict[int, asyncio.Task[None]] = {}
        """On their way to the engine."""
        self._open: dict[int, RequestStream] = {}
        """That the engine has."""
        self._turn = Partials(items=[])
        """Of this turn of the loop, in which all streams get what a step brought."""
        self._load: WeightReceiver | None = None
        """Of the load in progress."""
        self._load_error = ""
        """Of the last load."""
        self._bucket: int | None = None
        """Number of the bucket that is not acknowledged."""
        self._loading: asyncio.Task[None] | None = None
        self._loras = WorkerLoras(runner)
        self._refusal: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Event | None = None
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"mcore-{name}", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> "EngineWorker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def refusal(self) -> str | None:
        """Why the coordinator does not take this engine, such as a wrong secret; None while nothing is wrong."""
        return self._refusal

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread; None while it runs, and after a stop or ``close``."""
        return self._failure

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until a stop of all engines, or what ends the thread (``failure``); False when the time is over before."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def close(self, drain_s: float = 0.0, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """Take no more requests, let open ones end, and leave the coordinator, which gives the rest to others, or fails those whose tokens
        were sent with ``EngineLostError``. The engine's thread goes on. May be called again.

        Requests of engines that are paused or suspended end when those go on.

        Args:
            drain_s: seconds that open requests get to end.
            hurry: asked meanwhile; True gives the rest of the time up.
        """
        deadline = time.monotonic() + drain_s
        if drain_s > 0:
            self._call_in_loop(self._begin_drain)
        while self._thread.is_alive() and time.monotonic() < deadline and not hurry():
            self._thread.join(_LOOK_S)
        self._call_in_loop(self._end)
        self._thread.join()

    def _call_in_loop(self, function: Callable[[], None]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(function)

    def _end(self) -> None:
        assert self._ended is not None, "called in the loop"
        self._ended.set()

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            if self._ready.is_set():
                _LOG.exception("worker %s ended", self.name)
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        with zmq.asyncio.Context() as context, connect(context, self._address, self._security, self._max_bytes) as self._socket:
            self._ready.set()
            tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(each) for each in (self._receive(), self._beat(), self._ended.wait())]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                tasks += [] if self._draining is None else [self._draining]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await self._abort_all()
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(self._socket.send(encode(Disconnect())), _GOODBYE_S)

    async def _send(self, message: Message) -> None:
        await self._socket.send(encode(message))

    async def _beat(self) -> None:
        """Register, and say now and then how the engine is."""
        while True:
            health = self.runner.health()
            if not health.alive and self.runner.failure is not None:
                raise EngineDeadError(f"the engine of {self.name} failed") from self.runner.failure
            if self._unanswered >= _SILENT_BEATS:
                reconnect(self._socket, self._address)
                self._unanswered = 0
            # An engine that registers names its adapters: what it was doing to them when it was given up ends before.
            if self._member is not MemberState.JOINING or (health.alive and not self._loras.is_changing):
                self._unanswered += 1
                # Queued, as long as there is no connection.
                self._socket.send(encode(self._sign_of_life(health)))
                if (silent := self._silence.sent(time.monotonic())) is not None:
                    _LOG.warning(
                        "%s has no answer from %s for %.0f s; is the server up, is the job file its newest?",
                        self.name,
                        self._address,
                        silent,
                    )
            await asyncio.sleep(self._heartbeat_s)

    def _sign_of_life(self, health: EngineHealth) -> Register | Report:
        if self._member is not MemberState.JOINING:
            return Report(is_alive=health.alive, last_step_age_s=health.last_step_age_s, stats=self._stats())
        context = self.runner.engine.context
        return Register(
            protocol=PROTOCOL,
            secret=self._security.secret,
            name=self.name,
            state=self._state,
            max_sequence_length=self.runner.max_sequence_length,
            weight_version=self.runner.engine.weight_version,
            worker=self._id,
            stats=self._stats(),
            registration=self._registration,
            max_requests=context.max_requests,
            cache_tokens=context.cache_tokens,
            loras=self._loras.loads,
        )

    def _stats(self) -> dict[str, float]:
        """What others know how to read."""
        return {name: float(value) for name, value in self.runner.stats().items() if name in FIGURES and math.isfinite(value)}

    async def _receive(self) -> None:
        # As in the coordinator: a future for each message costs more than the message.
        socket = zmq.Socket.shadow(self._socket)
        while True:
            is_over = await self._follow(await self._socket.recv())
            end = time.monotonic() + _TURN_S
            with contextlib.suppress(zmq.Again):
                while not is_over and time.monotonic() < end:
                    is_over = await self._follow(socket.recv(zmq.DONTWAIT))
            if is_over:
                return
            await asyncio.sleep(0)

    async def _follow(self, frame: bytes) -> bool:
        """Do what a message of the coordinator asks for.

        Returns:
            Whether it is the end.
        """
        self._unanswered = 0
        self._silence.heard()
        try:
            message = decode_for_engine(frame)
        except UNREADABLE as error:
            self._num_unread += 1
            if self._num_unread & (self._num_unread - 1) == 0:
                # Ever fewer: another version may send them all day.
                _LOG.warning("message %d of %s that %s cannot read: %s; use one version", self._num_unread, self._address, self.name, error)
            if (number := number_of_request(frame)) is not None:
                # Nobody else answers it.
                self._fail(number, RequestError(None, f"{self.name} cannot read the request: {error}; use one version of mcore-inference"))
            return False
        if isinstance(message, SubmitRequest):
            self._start(message)
        elif isinstance(message, Abort):
            self._abort(message.request_id)
        elif isinstance(message, RegisterAck):
            self._refusal = None
            if self._member is MemberState.JOINING:
                self._member = MemberState.SERVING
        elif isinstance(message, LeaveAck):
            if self._may_leave is not None and message.call == self._leave_call and not self._may_leave.done():
                self._may_leave.set_result(None)
        elif isinstance(message, Refusal):
            if message.message != self._refusal:
                # Not at each heartbeat.
                _LOG.warning("the coordinator at %s refuses %s: %s", self._address, self.name, message.message)
            self._refusal = message.message
            if self._member is not MemberState.JOINING:
                self._member = MemberState.JOINING
                self._registration += 1
                self._loras.give_up()
                await self._abort_all()
        elif isinstance(message, LoadWeights):
            await self._begin_load(message)
        elif isinstance(message, WeightBucket):
            if not await self._loras.take(message, self._send):
                await self._take_bucket(message)
        elif isinstance(message, LoadLora):
            await self._loras.begin(message, self._send)
        elif isinstance(message, UnloadLora):
            self._loras.unload(message, self._send)
        elif isinstance(message, Signal):
            await self._obey(message)
        return isinstance(message, Stop)

    def _begin_drain(self) -> None:
        if self._draining is None:
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        """End when the requests that are here have ended; at once where the coordinator has not taken this engine, or gives it up."""
        if self._member is MemberState.SERVING:
            self._member = MemberState.DRAINING
        if await self._ask_to_leave():
            while self._member is MemberState.DRAINING and self._has_work():
                await asyncio.sleep(_LOOK_S)
            # Behind their last tokens.
            await self._ask_to_leave()
        self._end()

    def _has_work(self) -> bool:
        """Of its own, or of engines that share its experts: one that is no longer at the coordinator is started again, or missed."""
        return bool(self._submitted or self._open or self._turn.num_parts or self.runner.others_have_work)

    async def _ask_to_leave(self) -> bool:
        """Whether the coordinator has read all that was sent before, and all that it sent before was read here; one that does not answer
        is given up."""
        self._leave_call += 1
        acknowledged = self._may_leave = asyncio.get_running_loop().create_future()
        for _ in range(_LEAVE_BEATS):
            if self._member is not MemberState.DRAINING or acknowledged.done():
                break
            # Again, where a connection that was cut had it.
            await self._send(Leave(call=self._leave_call))
            await asyncio.wait([acknowledged], timeout=self._heartbeat_s)
        return acknowledged.done()

    async def _obey(self, signal: Signal) -> None:
        error = ""
        try:
            await self._move(state_after(type(signal), self._state))
        except EngineDeadError:
            raise
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
            _LOG.exception("%s stays %s: a signal failed", self.name, self._state)
        await self._send(SignalAck(call=signal.call, error=error))

    async def _move(self, state: GroupState) -> None:
        """To another state; the engine stays in its own where that fails."""
        if state is not self._state:
            if state is GroupState.STOPPED:
                await self._abort_all()
            elif state is GroupState.RUNNING:
                await self.runner.unpause()
            elif state is GroupState.SUSPENDED:
                await self.runner.suspend()
            elif self._state is GroupState.SUSPENDED:
                await self.runner.resume()
            else:
                await self.runner.pause()
            self._state = state

    async def _abort_all(self) -> None:
        if self._load is not None:
            self._load.give_up()
        tasks = list(self._submitted.values())
        for number in [*self._submitted, *self._open]:
            self._abort(number)
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def _begin_load(self, message: LoadWeights) -> None:
        if self._loading is not None:
            # One that the coordinator has given up.
            if self._load is not None:
                self._load.give_up()
            await self._loading
        loop, self._bucket = asyncio.get_running_loop(), None

        def take(index: int) -> None:
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._acknowledge(message.call, index)))

        self._load = WeightReceiver(message, take)
        self._loading = asyncio.ensure_future(self._run_load(self._load))
        await self._send(WeightAck(call=message.call, index=0))

    async def _take_bucket(self, bucket: WeightBucket) -> None:
        self._bucket = bucket.index
        if self._load is not None and self._load.message.call == bucket.call:
            self._load.put(bucket)
        else:
            await self._acknowledge(bucket.call, bucket.index, self._load_error or "no load is in progress")

    async def _run_load(self, load: WeightReceiver) -> None:
        message, self._load_error = load.message, ""
        try:
            await self.runner.load_weights(load.chunks(), message.version, in_flight=message.in_flight)
        except Exception as error:
            self._load_error = f"{type(error).__name__}: {error}"
        self._load = None
        if self._bucket is not None:
            await self._acknowledge(message.call, self._bucket, self._load_error)

    async def _acknowledge(self, call: int, index: int, error: str = "") -> None:
        """Each bucket once: when the engine takes it, or with the end of the load."""
        if self._bucket == index:
            self._bucket = None
            await self._send(WeightAck(call=call, index=index, error=error, version=self.runner.engine.weight_version))

    # -- requests ----------------------------------------------------------------------------------------------------

    def _start(self, message: SubmitRequest) -> None:
        number, task = message.request_id, asyncio.ensure_future(self._submit(message))
        self._submitted[number] = task
        task.add_done_callback(lambda _: self._submitted.pop(number, None))

    async def _submit(self, message: SubmitRequest) -> None:
        number = message.request_id
        try:
            params = SamplingParams.deserialize(message.sampling_params)
            stream = await self.runner.submit(message.prompt, params, priority=message.priority, stream=message.stream, lora=message.lora)
        except Exception as error:
            self._fail(number, error)
        else:
            self._open[number] = stream
            stream.forward(functools.partial(self._take, number, message.stream))

    def _abort(self, number: int) -> None:
        if (task := self._submitted.pop(number, None)) is not None:
            task.cancel()
        if (stream := self._open.pop(number, None)) is not None:
            stream.abort()

    def _take(self, number: int, is_stream: bool, item: Increment | Exception) -> None:
        """What came of a request."""
        if number not in self._open:
            return
        if isinstance(item, Exception):
            del self._open[number]
            self._fail(number, item)
            return
        best = [list(each.items()) for each in item.top_n_logprobs] if is_stream else []
        if item.record is None:
            if is_stream:
                # A step brings one for each stream.
                part = Partial(request_id=number, tokens=item.tokens, log_probs=item.log_probs, top_n_logprobs=best, text=item.text)
                self._bundle().items.append(part)
            return
        del self._open[number]
        reply = EngineReply(request_id=number, record=item.record.serialize())
        if is_stream:
            reply.tokens, reply.log_probs, reply.top_n_logprobs, reply.text = item.tokens, item.log_probs, best, item.text
        self._bundle().replies.append(reply)

    def _fail(self, number: int, error: Exception) -> None:
        if isinstance(error, EngineDeadError):
            # The worker ends with an engine that failed, and reports one that was closed: by either the coordinator gives the request to
            # another engine, or fails it by this one's name.
            _LOG.warning("request %d is left to the coordinator: the engine of %s is gone", number, self.name)
            return
        transient = isinstance(error, RequestError) and error.is_transient
        text = error.message if isinstance(error, RequestError) else str(error)
        # Behind the tokens that it had before.
        self._send_bundle()
        self._socket.send(encode(Failure(request_id=number, kind=type(error).__name__, message=text, is_transient=transient)))

    def _bundle(self) -> Partials:
        """Of this turn of the loop."""
        if not self._turn.num_parts:
            # Behind the other streams that the step has news of.
            asyncio.get_running_loop().call_soon(self._send_bundle)
        return self._turn

    def _send_bundle(self) -> None:
        """Queued at once, before all that is sent later; nobody waits for the rest."""
        bundle, self._turn = self._turn, Partials(items=[])
        if bundle.num_parts:
            self._send_parts(bundle)

    def _send_parts(self, bundle: Partials) -> None:
        with contextlib.suppress(*_UNWRITABLE):
            frame = encode(bundle)
            # The connection would be cut by a longer message, and with it every other request.
            if len(frame) <= self._max_bytes:
                self._socket.send(frame)
                return
        if bundle.num_parts > 1:
            for half in bundle.halves():
                self._send_parts(half)
        elif bundle.replies:
            self._socket.send(self._reply_frame(bundle.replies[0]))
        else:
            self._socket.send(encode(bundle))

    def _reply_frame(self, reply: EngineReply) -> bytes:
        """Of one request, or why there is none."""
        try:
            frame = encode(reply)
        except _UNWRITABLE as error:
            text = f"the answer cannot be sent: {error}"
        else:
            if len(frame) <= self._max_bytes:
                return frame
            text = f"the answer has {len(frame)} bytes and max_message_bytes={self._max_bytes}; ask for fewer tokens or log-probabilities"
        return encode(Failure(request_id=reply.request_id, kind="RequestError", message=text, is_transient=False))
