# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a coordinator does with each message, without sockets and clocks."""

import logging
from collections import deque

import msgspec

from mcore_inference.coordinator._admission import NO_CONTROL, Admission
from mcore_inference.coordinator._config import CoordinatorConfig
from mcore_inference.coordinator._entries import Client, Engine, Load, Operation, Request
from mcore_inference.coordinator._messages import (
    MAX_NUMBER,
    UNKNOWN,
    Abort,
    AskStatus,
    Connect,
    ConnectAck,
    Disconnect,
    EngineReply,
    Failure,
    Heartbeat,
    Incoming,
    LoadWeights,
    Message,
    Partials,
    Refusal,
    Register,
    RegisterAck,
    Report,
    Signal,
    SignalAck,
    Status,
    Stop,
    SubmitRequest,
    WeightAck,
    WeightBucket,
    WireChunk,
)
from mcore_inference.coordinator._past import PastCounters
from mcore_inference.coordinator._routing import PrefixRouter
from mcore_inference.coordinator._states import GroupState, signals_between, state_after

_DEFAULT_BUDGET = 256
_CHARACTERS_PER_TOKEN = 4
_MAX_BUDGET = 2**32
"""That a request counts with, so that sums of them stay small."""
_LOG = logging.getLogger("mcore_inference.coordinator")
_BUCKET_BYTES = 16 * 2**20
"""Of weights: what each engine and the coordinator hold of a load."""
_MAX_SIGNALS = 1024
"""Signals that wait for the one in progress."""

Outbox = list[tuple[bytes, Message]]


class CoordinatorCore:
    """Clients, engines and requests of one coordinator. Each method returns the messages to send, with the identity of whom to.

    Args:
        config: time-outs, limits, the job's secret.
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        self._config = config
        self._admission = Admission(config.security)
        self.state = GroupState.RUNNING
        self._engines: dict[bytes, Engine] = {}
        self._clients: dict[bytes, Client] = {}
        self._attempts: dict[int, Request] = {}
        self._homeless: deque[Request] = deque()
        """Requests that wait for an engine."""
        self._router = PrefixRouter(config.prefix_slack_tokens)
        self._past = PastCounters()
        self._num_lost = 0
        """Engines that left or were lost."""
        self._num_refused_peers = 0
        self.num_refused_messages = 0
        """That were not understood, too long, or of strangers; whoever reads the socket counts them."""
        self._operation: Operation | None = None
        self._signals: deque[tuple[bytes, Signal]] = deque()
        self._number = 0
        self._version: int | None = None
        """Of the weights of the last load, in progress or over."""
        self._loaded: int | None = None
        """Of the weights of the last load that ended well; None for those that engines start with."""
        self._context = 0
        """The longest sequence that every engine takes; while there is none, of those that were there last, for requests that wait."""
        self._outbox: Outbox = []

    @property
    def engine_names(self) -> frozenset[str]:
        """Of the engines that take requests; from any thread."""
        return frozenset(engine.name for engine in list(self._engines.values()))

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    @property
    def num_open_requests(self) -> int:
        return len(self._attempts) + len(self._homeless)

    # -- events ------------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, message: Incoming, now: float) -> Outbox:
        """What follows from a message of a peer at a time in seconds."""
        if isinstance(message, Register):
            self._register(peer, message, now)
        elif isinstance(message, Connect):
            self._connect(peer, message, now)
        elif peer in self._engines:
            self._from_engine(peer, message, now)
        elif peer in self._clients:
            self._from_client(peer, message, now)
        elif not isinstance(message, Disconnect):
            self._send(peer, UNKNOWN)
        return self._flush()

    def knows(self, peer: bytes) -> bool:
        """Whether a peer is an engine or a client."""
        return peer in self._engines or peer in self._clients

    def tick(self, now: float) -> Outbox:
        """What follows from the time: lost engines, clients that are gone, signals without an answer, requests without an engine."""
        limits = self._config
        for peer, engine in list(self._engines.items()):
            if now - engine.heard > limits.engine_timeout_s:
                self._lose(peer, f"it was silent for {now - engine.heard:.1f} s", now)
        for peer, client in list(self._clients.items()):
            if now - client.heard > limits.client_timeout_s:
                self._forget_client(peer, now)
        operation = self._operation
        if operation is not None and now > operation.deadline:
            timeout_s = limits.signal_timeout_s if operation.load is None else limits.load_timeout_s
            if operation.load is not None and not operation.waiting:
                self._give_load_up(operation, operation.load, f"the client sent no weights for {timeout_s:g} s", now)
            else:
                for peer in sorted(operation.waiting):
                    self._lose(peer, f"it did not answer {_name(operation.signal)} within {timeout_s:g} s", now)
        while self._homeless and now - self._homeless[0].arrived > limits.no_engine_timeout_s:
            self._fail(self._homeless.popleft(), "EngineLostError", f"there was no engine for {limits.no_engine_timeout_s:g} s")
        return self._flush()

    def unreachable(self, peer: bytes, now: float) -> Outbox:
        """What follows when a message could not be sent to a peer."""
        if peer in self._engines:
            self._lose(peer, "its connection is gone", now)
        self._forget_client(peer, now)
        return self._flush()

    def unsendable(self, peer: bytes, message: Message) -> Outbox:
        """What follows when a message could not be written, such as one that was nested just as deep as could be read."""
        text = "a message of it is nested too deep"
        if isinstance(message, SubmitRequest) and peer in self._engines:
            request = self._take(peer, message.request_id)
            if request is not None:
                self._fail(request, "RequestError", text, is_transient=False)
        elif isinstance(message, EngineReply):
            self._send(peer, Failure(request_id=message.request_id, kind="RequestError", message=text, is_transient=False))
        return self._flush()

    def lose(self, name: str, reason: str, now: float) -> Outbox:
        """What follows when somebody knows that the engines of a name are gone."""
        for peer in [peer for peer, engine in self._engines.items() if engine.name == name]:
            self._lose(peer, reason, now)
        return self._flush()

    # -- peers -------------------------------------------------------------------------------------------------------

    def _admits(self, peer: bytes, greeting: Connect | Register) -> bool:
        refusal = self._admission.refusal(greeting)
        if refusal is not None:
            self._num_refused_peers += 1
            self._send(peer, Refusal(call=-1, message=refusal))
        return refusal is None

    def _connect(self, peer: bytes, message: Connect, now: float) -> None:
        if peer in self._engines or not self._admits(peer, message):
            return
        client = self._clients.setdefault(peer, Client(heard=now, may_control=False))
        client.heard, client.may_control = now, self._admission.may_control(message)
        self._send(peer, ConnectAck(max_sequence_length=self._shortest_context()))

    def _register(self, peer: bytes, message: Register, now: float) -> None:
        if peer in self._clients or not self._admits(peer, message):
            return
        known = self._engines.get(peer)
        if known is not None and message.worker and (known.worker, known.registration) == (message.worker, message.registration):
            # It asked more than once before it was heard.
            known.heard = now
            self._send(peer, RegisterAck())
            return
        if not self._frees_name(peer, message, now):
            return
        self._past.check_growth(self._past.take_back(message.worker), message.stats)
        self._engines[peer] = Engine(
            name=message.name,
            max_sequence_length=message.max_sequence_length,
            heard=now,
            weight_version=message.weight_version,
            worker=message.worker,
            registration=message.registration,
            stats=message.stats,
        )
        if not self._is_loading and not self._eligible():
            _LOG.error(
                "%s has weights of version %d, and no engine those of version %d, which were loaded last: requests are refused until "
                "weights are loaded again",
                message.name,
                message.weight_version,
                self._loaded,
            )
        self._send(peer, RegisterAck())
        target = self.state if self._operation is None else self._operation.target
        for signal in signals_between(GroupState(message.state), target):
            self._number += 1
            self._send(peer, signal(call=self._number))
        self._route_homeless(now)

    def _frees_name(self, peer: bytes, message: Register, now: float) -> bool:
        """Whether no other engine has the name of one that registers. Where it is that engine itself, what it had is given to others."""
        for other, engine in list(self._engines.items()):
            if other == peer or (message.worker and engine.worker == message.worker):
                # It began anew, or comes by another connection, and knows nothing of what it had.
                self._lose(other, "it registered again", now, tell=False)
            elif engine.name == message.name:
                # Finds out now whether its connection is gone; the new one asks again a heartbeat later.
                self._send(other, Heartbeat())
                text = f"name={message.name!r} is that of an engine that is here; give each engine a name of its own (--name, EngineWorker)"
                self._num_refused_peers += 1
                self._send(peer, Refusal(call=-1, message=text))
                return False
        return True

    def _lose(self, peer: bytes, reason: str, now: float, *, tell: bool = True) -> None:
        """An engine is gone: its requests go to others where that changes nothing for the client, and endangers no other engine."""
        engine = self._engines.pop(peer, None)
        if engine is None:
            # The loss of another one ended a stop, and with it all engines.
            return
        self._past.add(engine.worker, engine.stats)
        self._num_lost += 1
        if tell:
            self._send(peer, Refusal(call=-1, message=f"you were given up: {reason}; register again"))
        for attempt in list(engine.requests):
            request = self._attempts.pop(attempt)
            # A form is compiled by native code, which may have ended the engine. One that leaves by itself (tell=False) was not ended.
            is_suspect = tell and request.message.sampling_params.get("structured_output") is not None
            if request.started or is_suspect or request.retries >= self._config.max_retries:
                why = "tokens of it were sent" if request.started else f"max_retries={self._config.max_retries}"
                if is_suspect:
                    why = "its structured_output may be what ended it"
                self._fail(request, "EngineLostError", f"engine {engine.name} was lost ({reason}) and {why}")
            else:
                request.retries += 1
                self._route(request, now)
        operation = self._operation
        if operation is None:
            return
        engines = {} if operation.load is None else operation.load.engines
        if peer in operation.waiting or peer in engines:
            operation.lost.append(f"{engine.name}: {reason}")
            engines.pop(peer, None)
            if peer in operation.waiting or not engines:
                operation.waiting.discard(peer)
                self._finish_operation(now)

    def _forget_client(self, peer: bytes, now: float) -> None:
        client = self._clients.pop(peer, None)
        operation = self._operation
        if client is not None and operation is not None and operation.load is not None and operation.client == peer:
            self._give_load_up(operation, operation.load, "the client is gone", now)
        for request in () if client is None else list(client.requests.values()):
            self._drop(request)

    # -- clients -----------------------------------------------------------------------------------------------------

    def _from_client(self, peer: bytes, message: Incoming, now: float) -> None:
        client = self._clients[peer]
        client.heard = now
        if isinstance(message, SubmitRequest):
            self._submit(peer, client, message, now)
        elif isinstance(message, Abort):
            request = client.requests.pop(message.request_id, None)
            if request is not None:
                self._drop(request)
        elif isinstance(message, Heartbeat):
            self._send(peer, Heartbeat())
        elif isinstance(message, Signal):
            if not client.may_control:
                self._send(peer, Refusal(call=message.call, message=f"{_name(message)} {NO_CONTROL}"))
            elif len(self._signals) >= _MAX_SIGNALS:
                self._send(peer, Refusal(call=message.call, message=f"{_MAX_SIGNALS} signals wait already"))
            else:
                self._signals.append((peer, message))
                self._next_signal(now)
        elif isinstance(message, AskStatus):
            self._send(peer, self._status(message.call, now))
        elif isinstance(message, WeightBucket):
            self._take_bucket(peer, message, now)
        elif isinstance(message, Disconnect):
            self._forget_client(peer, now)

    def _submit(self, peer: bytes, client: Client, message: SubmitRequest, now: float) -> None:
        number, limit = message.request_id, self._config.max_open_requests
        if number in client.requests:
            # The request that has the number goes on; its answer must stay the only one, so this is no Failure.
            self._send(peer, Refusal(call=-1, message=f"request_id={number} is in use"))
        elif self.state is GroupState.STOPPED:
            self._send(peer, Failure(request_id=number, kind="EngineDeadError", message="the engines are stopped", is_transient=False))
        elif self.num_open_requests >= limit:
            text = f"{limit} requests are open and max_open_requests={limit}; try again later"
            self._send(peer, Failure(request_id=number, kind="QueueFullError", message=text, is_transient=True))
        else:
            budget = message.sampling_params.get("num_tokens_to_generate")
            budget = min(budget, _MAX_BUDGET) if isinstance(budget, int) and budget >= 0 else _DEFAULT_BUDGET
            length = len(message.prompt) // (_CHARACTERS_PER_TOKEN if isinstance(message.prompt, str) else 1)
            request = Request(client=peer, message=message, tokens=length + budget, arrived=now)
            client.requests[number] = request
            self._route(request, now)

    def _route(self, request: Request, now: float) -> None:
        engines = self._eligible()
        if not engines:
            request.engine = None
            if self._engines and not self._is_loading:
                text = f"no engine has the weights of version {self._loaded}, which were loaded last, since one was lost; load them again"
                self._fail(request, "StaleWeightsError", text)
            else:
                request.arrived = now
                self._homeless.append(request)
            return
        load = {peer: self._engines[peer].open_tokens for peer in engines}
        peer = request.engine = self._router.choose(request.message.prompt, load)
        self._number += 1
        request.attempt = self._number
        engine = self._engines[peer]
        engine.requests[request.attempt] = request.tokens
        engine.open_tokens += request.tokens
        self._attempts[request.attempt] = request
        self._send(peer, msgspec.structs.replace(request.message, request_id=request.attempt))

    @property
    def _is_loading(self) -> bool:
        return self._operation is not None and self._operation.load is not None

    def _eligible(self) -> list[bytes]:
        """Engines that take requests: those with the weights of the last load, or of the last one that ended well."""
        for version in (self._version, self._loaded):
            peers = [peer for peer, engine in self._engines.items() if version is None or engine.weight_version == version]
            if peers:
                return peers
        return []

    def _route_homeless(self, now: float) -> None:
        if not self._eligible() and (not self._engines or self._is_loading):
            return
        homeless, self._homeless = self._homeless, deque()
        for request in homeless:
            self._route(request, now)

    def _drop(self, request: Request) -> None:
        """Nobody waits for a request any more."""
        if request.engine is None:
            self._homeless.remove(request)
            return
        self._take(request.engine, request.attempt)
        self._send(request.engine, Abort(request_id=request.attempt))

    def _fail(self, request: Request, kind: str, message: str, *, is_transient: bool = True) -> None:
        """End a request that no engine holds."""
        client = self._clients.get(request.client)
        if client is not None:
            number = request.message.request_id
            del client.requests[number]
            self._send(request.client, Failure(request_id=number, kind=kind, message=message, is_transient=is_transient))

    # -- engines -----------------------------------------------------------------------------------------------------

    def _take(self, peer: bytes, attempt: int) -> Request | None:
        """The request of an attempt, which is over; None when it is not this engine's."""
        engine = self._engines[peer]
        tokens = engine.requests.pop(attempt, None)
        if tokens is None:
            return None
        engine.open_tokens -= tokens
        return self._attempts.pop(attempt)

    def _from_engine(self, peer: bytes, message: Incoming, now: float) -> None:
        engine = self._engines[peer]
        engine.heard = now
        if isinstance(message, Partials):
            self._forward(engine, message)
        elif isinstance(message, EngineReply | Failure):
            request = self._take(peer, message.request_id)
            if request is not None:
                engine.finished += 1
                del self._clients[request.client].requests[request.message.request_id]
                message.request_id = request.message.request_id
                self._send(request.client, message)
        elif isinstance(message, SignalAck):
            operation = self._operation
            if operation is not None and operation.number == message.call:
                operation.waiting.discard(peer)
                self._finish_operation(now)
        elif isinstance(message, WeightAck):
            self._weights_taken(peer, engine, message, now)
        elif isinstance(message, Report):
            self._take_report(peer, engine, message, now)
        elif isinstance(message, Heartbeat):
            self._send(peer, Heartbeat())
        elif isinstance(message, Disconnect):
            self._lose(peer, "it left", now, tell=False)

    def _take_report(self, peer: bytes, engine: Engine, report: Report, now: float) -> None:
        self._past.check_growth(engine.stats, report.stats)
        engine.stats, engine.last_step_age_s = report.stats, report.last_step_age_s
        if report.is_alive:
            self._send(peer, Heartbeat())
        else:
            age = "" if report.last_step_age_s is None else f" for {report.last_step_age_s:.1f} s"
            self._lose(peer, f"it makes no progress{age}", now)

    def _forward(self, engine: Engine, message: Partials) -> None:
        """Tokens of a step to the clients of its streams, each under the client's number."""
        by_client: dict[bytes, Partials] = {}
        for part in message.items:
            request = self._attempts.get(part.request_id) if part.request_id in engine.requests else None
            if request is not None and request.message.stream:
                request.started = True
                part.request_id = request.message.request_id
                by_client.setdefault(request.client, Partials(items=[])).items.append(part)
        for client, parts in by_client.items():
            self._send(client, parts)

    # -- signals -----------------------------------------------------------------------------------------------------

    def _next_signal(self, now: float) -> None:
        """Begin signals until one has to wait for engines."""
        while self._signals and self._operation is None:
            client, signal = self._signals.popleft()
            if isinstance(signal, LoadWeights):
                self._begin_load(client, signal, now)
                continue
            try:
                target = state_after(type(signal), self.state)
            except ValueError as error:
                self._send(client, Refusal(call=signal.call, message=str(error)))
                continue
            if target is self.state:
                self._send(client, SignalAck(call=signal.call))
                continue
            self._number += 1
            self._operation = Operation(
                signal=signal,
                client=client,
                number=self._number,
                target=target,
                waiting=set(self._engines),
                deadline=now + self._config.signal_timeout_s,
            )
            for peer in self._engines:
                self._send(peer, type(signal)(call=self._number))
            self._finish_operation(now)

    def _finish_operation(self, now: float) -> None:
        operation = self._operation
        if operation is None or operation.waiting:
            return
        if operation.load is not None:
            self._advance_load(operation, operation.load, now)
            return
        self._operation, self.state = None, operation.target
        if isinstance(operation.signal, Stop):
            for request in [*self._attempts.values(), *self._homeless]:
                self._fail(request, "EngineDeadError", "the engines were stopped")
            self._attempts.clear()
            self._homeless.clear()
            for engine in self._engines.values():
                self._past.add(engine.worker, engine.stats)
            self._num_lost += len(self._engines)
            self._engines.clear()
        if operation.lost:
            text = f"{_name(operation.signal)} took effect without engines that were lost ({'; '.join(operation.lost)})"
            self._send(operation.client, Refusal(call=operation.signal.call, message=text))
        else:
            self._send(operation.client, SignalAck(call=operation.signal.call))
        self._next_signal(now)

    # -- weights -----------------------------------------------------------------------------------------------------

    def _begin_load(self, client: bytes, message: LoadWeights, now: float) -> None:
        if self.state is GroupState.STOPPED or not self._engines:
            text = "the engines are stopped" if self.state is GroupState.STOPPED else "there is no engine to load weights into"
            self._send(client, Refusal(call=message.call, message=text))
            return
        # A load that failed had a number too: an engine that took it may be away, and come back.
        newest = max(self._version or 0, self._loaded or 0, *(engine.weight_version for engine in self._engines.values()))
        version = message.version if message.version >= 0 else newest + 1
        if version > MAX_NUMBER:
            text = f"no version follows {newest}, the largest; give the load a version"
            self._send(client, Refusal(call=message.call, message=text))
            return
        self._number += 1
        self._version = version
        deadline = now + self._config.load_timeout_s
        self._operation = Operation(
            signal=message,
            client=client,
            number=self._number,
            target=self.state,
            waiting=set(self._engines),
            deadline=deadline,
            load=Load(version=version, engines={peer: engine.name for peer, engine in self._engines.items()}),
        )
        timeout_s = self._config.load_timeout_s
        for peer in self._engines:
            self._send(peer, LoadWeights(call=self._number, version=version, in_flight=message.in_flight, timeout_s=timeout_s))

    def _take_bucket(self, client: bytes, bucket: WeightBucket, now: float) -> None:
        operation = self._operation
        load = None if operation is None else operation.load
        if operation is None or load is None or operation.client != client or operation.signal.call != bucket.call or load.end:
            self._send(client, Refusal(call=bucket.call, message="no load waits for these weights"))
        elif bucket.end == "aborted":
            self._give_load_up(operation, load, "the client gave it up", now)
        elif operation.waiting or bucket.index != load.index + 1:
            text = f"bucket {bucket.index} came instead of {load.index + 1}, or before that was asked for"
            self._send(client, Refusal(call=bucket.call, message=text))
        else:
            self._send_bucket(operation, load, bucket.chunks, bucket.end, now)

    def _send_bucket(self, operation: Operation, load: Load, chunks: list[WireChunk], end: str, now: float) -> None:
        load.index, load.end = load.index + 1, end
        operation.waiting, operation.deadline = set(load.engines), now + self._config.load_timeout_s
        for peer in load.engines:
            self._send(peer, WeightBucket(call=operation.number, index=load.index, chunks=chunks, end=end))  # type: ignore[arg-type]

    def _weights_taken(self, peer: bytes, engine: Engine, message: WeightAck, now: float) -> None:
        if message.version >= 0:
            engine.weight_version = message.version
        operation = self._operation
        load = None if operation is None else operation.load
        if operation is None or load is None or operation.number != message.call or load.index != message.index:
            return
        if peer in operation.waiting:
            # Those of a load that is given up only say so.
            if message.error and load.end != "aborted":
                load.errors.append(f"{engine.name}: {message.error}")
            operation.waiting.discard(peer)
            self._finish_operation(now)

    def _give_load_up(self, operation: Operation, load: Load, reason: str, now: float) -> None:
        """Let engines forget a load; those that have begun to copy wait for another."""
        if not load.end:
            load.errors.append(reason)
            self._finish_operation(now)

    def _advance_load(self, operation: Operation, load: Load, now: float) -> None:
        """All engines have the last bucket: ask for the next, or end."""
        call = operation.signal.call
        if load.errors and not load.end and load.engines:
            self._send_bucket(operation, load, [], "aborted", now)
        elif load.end or not load.engines:
            self._operation = None
            if load.end == "whole" and load.engines and not load.errors:
                self._loaded = load.version
            if operation.lost and not load.errors:
                lost = "; ".join(operation.lost)
                self._send(operation.client, Refusal(call=call, message=f"engines were lost while weights were loaded ({lost})"))
            else:
                error = "; ".join(sorted([*load.errors, *operation.lost]))
                self._send(operation.client, WeightAck(call=call, index=load.index, version=load.version, error=error, is_over=True))
            self._next_signal(now)
            # Behind the next signal: where that is a load too, they wait for it.
            self._route_homeless(now)
        else:
            operation.deadline = now + self._config.load_timeout_s
            size = min(_BUCKET_BYTES, self._config.max_message_bytes // 2)
            self._send(operation.client, WeightAck(call=call, index=load.index, version=load.version, bucket_bytes=size))

    def _status(self, call: int, now: float) -> Status:
        return Status(
            call=call,
            state=self.state,
            waiting_requests=len(self._homeless),
            max_sequence_length=self._shortest_context(),
            engines=[engine.status(now) for engine in self._engines.values()],
            past={
                **self._past.sums,
                "lost_engines": self._num_lost,
                "refused_peers": self._num_refused_peers,
                "refused_messages": self.num_refused_messages,
            },
        )

    def _shortest_context(self) -> int:
        self._context = min((engine.max_sequence_length for engine in self._engines.values()), default=self._context)
        return self._context

    # -- sending -----------------------------------------------------------------------------------------------------

    def _send(self, peer: bytes, message: Message) -> None:
        self._outbox.append((peer, message))

    def _flush(self) -> Outbox:
        outbox, self._outbox = self._outbox, []
        return outbox


def _name(signal: Signal) -> str:
    return "load_weights" if isinstance(signal, LoadWeights) else type(signal).__name__.lower()
