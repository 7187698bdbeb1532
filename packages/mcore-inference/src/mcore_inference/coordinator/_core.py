# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a coordinator does with each message, without sockets and clocks."""

import logging

from mcore_inference.coordinator._admission import NO_CONTROL, Admission
from mcore_inference.coordinator._config import CoordinatorConfig
from mcore_inference.coordinator._entries import Client, Engine
from mcore_inference.coordinator._group import Group, Outbox
from mcore_inference.coordinator._loras import Loras
from mcore_inference.coordinator._messages import (
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
    Leave,
    LeaveAck,
    LoadLora,
    Message,
    Partials,
    Refusal,
    Register,
    RegisterAck,
    Report,
    Signal,
    SignalAck,
    Status,
    SubmitRequest,
    UnloadLora,
    WeightAck,
    WeightBucket,
)
from mcore_inference.coordinator._open_requests import OpenRequests
from mcore_inference.coordinator._operations import Operations, name_of
from mcore_inference.coordinator._states import GroupState, MemberState, signals_between

_LOG = logging.getLogger("mcore_inference.coordinator")


class CoordinatorCore:
    """Clients, engines and requests of one coordinator. Each method returns the messages to send, with the identity of whom to.

    Args:
        config: time-outs, limits, the job's secret.
        seed: of requests that bring none.
    """

    def __init__(self, config: CoordinatorConfig, *, seed: int) -> None:
        self._config = config
        self._admission = Admission(config.security)
        self._group = Group()
        self._send = self._group.send
        self._requests = OpenRequests(self._group, config, seed=seed)
        self._operations = Operations(self._group, self._requests, config)
        self._loras = Loras(self._group, self._requests, config, seed=seed)
        self._num_refused_peers = 0
        self.num_refused_messages = 0
        """That were not understood, too long, or of strangers; whoever reads the socket counts them."""
        self._context = 0
        """The longest sequence that every engine takes; while there is none, of those that were there last, for requests that wait."""

    @property
    def state(self) -> GroupState:
        """Of all engines, between two signals."""
        return self._group.state

    @property
    def engine_names(self) -> frozenset[str]:
        """Of the engines that are here, draining or not; from any thread."""
        return frozenset(engine.name for engine in list(self._group.engines.values()))

    @property
    def num_engines(self) -> int:
        return len(self._group.serving)

    @property
    def num_open_requests(self) -> int:
        return len(self._requests)

    # -- events ------------------------------------------------------------------------------------------------------

    def receive(self, peer: bytes, message: Incoming, now: float) -> Outbox:
        """What follows from a message of a peer at a time in seconds."""
        if isinstance(message, Register):
            self._register(peer, message, now)
        elif isinstance(message, Connect):
            self._connect(peer, message, now)
        elif peer in self._group.engines:
            self._from_engine(peer, message, now)
        elif peer in self._group.clients:
            self._from_client(peer, message, now)
        elif not isinstance(message, Disconnect):
            self._send(peer, UNKNOWN)
        return self._group.flush()

    def knows(self, peer: bytes) -> bool:
        """Whether a peer is an engine or a client."""
        return peer in self._group.engines or peer in self._group.clients

    def tick(self, now: float) -> Outbox:
        """What follows from the time: lost engines, clients that are gone, signals without an answer, requests without an engine."""
        limits = self._config
        for peer, engine in list(self._group.engines.items()):
            if now - engine.heard > limits.engine_timeout_s:
                self._lose(peer, f"it was silent for {now - engine.heard:.1f} s", now)
        for peer, client in list(self._group.clients.items()):
            if now - client.heard > limits.client_timeout_s:
                self._forget_client(peer, now)
        for peer, reason in (*self._operations.late(now), *self._loras.late(now)):
            self._lose(peer, reason, now)
        self._requests.fail_late(now)
        return self._group.flush()

    def unreachable(self, peer: bytes, now: float) -> Outbox:
        """What follows when a message could not be sent to a peer."""
        engine = self._group.engines.get(peer)
        if engine is not None:
            # The goodbye of one that drains may not have been read yet.
            drains = engine.state is MemberState.DRAINING
            reason = "its time to drain was over, or its connection broke" if drains else "its connection is gone"
            self._lose(peer, reason, now, has_ended=True, is_drained=drains and not engine.requests)
        self._forget_client(peer, now)
        return self._group.flush()

    def unsendable(self, peer: bytes, message: Message) -> Outbox:
        """What follows when a message could not be written."""
        text = "a message of it cannot be written"
        if isinstance(message, SubmitRequest) and peer in self._group.engines:
            self._requests.refuse(peer, message.request_id, text)
        elif isinstance(message, EngineReply):
            self._send(peer, Failure(request_id=message.request_id, kind="RequestError", message=text, is_transient=False))
        elif isinstance(message, Partials) and message.replies:
            # It is one of them.
            self._send(peer, Partials(items=message.items))
            for reply in message.replies:
                self._send(peer, reply)
        return self._group.flush()

    def lose(self, name: str, reason: str, now: float) -> Outbox:
        """What follows when somebody knows that the engines of a name are gone."""
        for peer in [peer for peer, engine in self._group.engines.items() if engine.name == name]:
            self._lose(peer, reason, now, has_ended=True)
        return self._group.flush()

    # -- peers -------------------------------------------------------------------------------------------------------

    def _admits(self, peer: bytes, greeting: Connect | Register) -> bool:
        refusal = self._admission.refusal(greeting)
        if refusal is not None:
            self._num_refused_peers += 1
            self._send(peer, Refusal(call=-1, message=refusal))
        return refusal is None

    def _connect(self, peer: bytes, message: Connect, now: float) -> None:
        if peer in self._group.engines or not self._admits(peer, message):
            return
        client = self._group.clients.setdefault(peer, Client(heard=now, may_control=False))
        client.heard, client.may_control = now, self._admission.may_control(message)
        self._send(peer, ConnectAck(max_sequence_length=self._shortest_context()))

    def _register(self, peer: bytes, message: Register, now: float) -> None:
        if peer in self._group.clients or not self._admits(peer, message):
            return
        known = self._group.engines.get(peer)
        if known is not None and message.worker and (known.worker, known.registration) == (message.worker, message.registration):
            # It asked more than once before it was heard.
            known.heard = now
            self._send(peer, RegisterAck())
            return
        if not self._frees_name(peer, message, now):
            return
        if (reason := self._loras.refusal(message.worker)) is not None:
            self._num_refused_peers += 1
            self._send(peer, Refusal(call=-1, message=reason))
            return
        self._group.past.check_growth(self._group.past.take_back(message.worker), message.stats)
        self._group.engines[peer] = Engine(
            name=message.name,
            max_sequence_length=message.max_sequence_length,
            heard=now,
            weight_version=message.weight_version,
            worker=message.worker,
            registration=message.registration,
            stats=message.stats,
            max_requests=message.max_requests,
            cache_tokens=message.cache_tokens,
            loras=dict(message.loras),
        )
        self._group.newest = max(self._group.newest, message.weight_version)
        if not self._group.is_loading and not self._group.current():
            _LOG.error(
                "%s has weights of version %d, and no engine those of version %d, which were loaded last: requests are refused until "
                "weights are loaded again",
                message.name,
                message.weight_version,
                self._group.loaded,
            )
        self._send(peer, RegisterAck())
        target = self.state if self._group.operation is None else self._group.operation.target
        for signal in signals_between(GroupState(message.state), target):
            self._send(peer, signal(call=self._group.next_number()))
        self._loras.add_engine(peer, now)
        self._requests.route_homeless(now)

    def _frees_name(self, peer: bytes, message: Register, now: float) -> bool:
        """Whether no other engine has the name of one that registers. Where it is that engine itself, what it had is given to others."""
        for other, engine in list(self._group.engines.items()):
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

    def _lose(self, peer: bytes, reason: str, now: float, *, tell: bool = True, has_ended: bool = False, is_drained: bool = False) -> None:
        """An engine is gone, or given up: nobody waits for it."""
        engine = self._group.remove_engine(peer, is_drained=is_drained)
        if engine is None:
            # The loss of another one ended a stop, and with it all engines.
            return
        if tell:
            self._send(peer, Refusal(call=-1, message=f"you were given up: {reason}; register again"))
        self._requests.lose(peer, engine, reason, now, tell=tell)
        self._operations.lose(peer, engine, reason, now, has_ended=has_ended, is_drained=is_drained)
        self._loras.lose(peer, engine, reason, now, is_drained=is_drained)

    def _forget_client(self, peer: bytes, now: float) -> None:
        client = self._group.clients.pop(peer, None)
        if client is None:
            return
        self._operations.forget_client(peer, now)
        self._loras.forget_client(peer, now)
        for request in list(client.requests.values()):
            self._requests.drop(request)

    # -- clients -----------------------------------------------------------------------------------------------------

    def _from_client(self, peer: bytes, message: Incoming, now: float) -> None:
        client = self._group.clients[peer]
        client.heard = now
        if isinstance(message, SubmitRequest):
            self._requests.submit(peer, client, message, now)
        elif isinstance(message, Abort):
            request = client.requests.pop(message.request_id, None)
            if request is not None:
                self._requests.drop(request)
        elif isinstance(message, Heartbeat):
            self._send(peer, Heartbeat())
        elif isinstance(message, Signal | LoadLora | UnloadLora):
            if not client.may_control:
                self._send(peer, Refusal(call=message.call, message=f"{name_of(message)} {NO_CONTROL}"))
            elif isinstance(message, Signal):
                self._operations.add(peer, message, now)
            else:
                self._loras.add(peer, message, now)
        elif isinstance(message, AskStatus):
            self._send(peer, self._status(message.call, now))
        elif isinstance(message, WeightBucket):
            if self._loras.takes(peer, message.call):
                self._loras.take_bucket(message, now)
            elif message.end != "aborted" or not self._loras.drop_waiting(peer, message.call):
                self._operations.take_bucket(peer, message, now)
        elif isinstance(message, Disconnect):
            self._forget_client(peer, now)

    # -- engines -----------------------------------------------------------------------------------------------------

    def _from_engine(self, peer: bytes, message: Incoming, now: float) -> None:
        engine = self._group.engines[peer]
        engine.heard = now
        if isinstance(message, Partials):
            self._requests.forward(peer, engine, message)
        elif isinstance(message, EngineReply | Failure):
            self._requests.finish(peer, engine, message, now)
        elif isinstance(message, SignalAck):
            is_of_lora, reason = self._loras.acknowledge(peer, engine, message, now)
            if not is_of_lora and not self._operations.acknowledge(peer, engine, message, now) and message.error:
                reason = f"a signal failed there: {message.error}"
            if reason is not None:
                # It is not what the others are.
                self._lose(peer, reason, now)
        elif isinstance(message, WeightAck):
            self._operations.weights_taken(peer, engine, message, now)
            if (reason := self._loras.weights_taken(peer, engine, message, now)) is not None:
                self._lose(peer, reason, now)
        elif isinstance(message, Report):
            self._take_report(peer, engine, message, now)
        elif isinstance(message, Heartbeat):
            self._send(peer, Heartbeat())
        elif isinstance(message, Leave):
            engine.state = MemberState.DRAINING
            self._send(peer, LeaveAck(call=message.call))
        elif isinstance(message, Disconnect):
            is_drained = engine.state is MemberState.DRAINING and not engine.requests
            reason = "it left" if is_drained or engine.state is MemberState.SERVING else "its time to drain was over"
            self._lose(peer, reason, now, tell=False, has_ended=True, is_drained=is_drained)

    def _take_report(self, peer: bytes, engine: Engine, report: Report, now: float) -> None:
        self._group.past.check_growth(engine.stats, report.stats)
        engine.stats, engine.last_step_age_s = report.stats, report.last_step_age_s
        if report.is_alive:
            self._send(peer, Heartbeat())
        else:
            age = "" if report.last_step_age_s is None else f" for {report.last_step_age_s:.1f} s"
            self._lose(peer, f"it makes no progress{age}", now)

    # -- status ------------------------------------------------------------------------------------------------------

    def _status(self, call: int, now: float) -> Status:
        return Status(
            call=call,
            state=self.state,
            waiting_requests=self._requests.num_homeless,
            max_sequence_length=self._shortest_context(),
            engines=[engine.status(now) for engine in self._group.engines.values()],
            past={
                **self._group.past.sums,
                "lost_engines": self._group.num_lost,
                "drained_engines": self._group.num_drained,
                "refused_peers": self._num_refused_peers,
                "refused_messages": self.num_refused_messages,
            },
            loras=list(self._group.loras),
        )

    def _shortest_context(self) -> int:
        self._context = min((engine.max_sequence_length for engine in self._group.serving.values()), default=self._context)
        return self._context
