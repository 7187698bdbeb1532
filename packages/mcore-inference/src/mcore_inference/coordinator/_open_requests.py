# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests on their way from clients to engines and back."""

from collections import deque

import msgspec

from mcore_inference.coordinator._config import CoordinatorConfig
from mcore_inference.coordinator._entries import Client, Engine, Request
from mcore_inference.coordinator._group import Group
from mcore_inference.coordinator._messages import MAX_FIGURES, Abort, EngineReply, Failure, Partials, Refusal, SubmitRequest
from mcore_inference.coordinator._routing import PrefixRouter
from mcore_inference.coordinator._states import GroupState
from mcore_inference.sampling import request_seed

_DEFAULT_BUDGET = 256
_CHARACTERS_PER_TOKEN = 4
_MAX_BUDGET = 1024
"""Of an answer that a request counts with: a chat that names no length may take all that is left, and takes some hundreds of tokens."""
_STOPPED = "the engines were stopped"


class OpenRequests:
    """Requests without an answer, each at an engine or waiting for one.

    Args:
        group: whose engines serve them.
        config: limits.
        seed: request n of those without a seed gets one of this and n, whichever engine draws its answer.
    """

    def __init__(self, group: Group, config: CoordinatorConfig, *, seed: int) -> None:
        self._group, self._config = group, config
        self._seed, self._num_seeded = seed, 0
        self._attempts: dict[int, Request] = {}
        self._homeless: deque[Request] = deque()
        self._router = PrefixRouter()

    def __len__(self) -> int:
        return len(self._attempts) + len(self._homeless)

    @property
    def num_homeless(self) -> int:
        """Those that wait for an engine."""
        return len(self._homeless)

    # -- of clients --------------------------------------------------------------------------------------------------

    def submit(self, peer: bytes, client: Client, message: SubmitRequest, now: float) -> None:
        number, limit, send = message.request_id, self._config.max_open_requests, self._group.send
        if number in client.requests:
            # The request that has the number goes on; its answer must stay the only one, so this is no Failure.
            send(peer, Refusal(call=-1, message=f"request_id={number} is in use"))
        elif self._group.state is GroupState.STOPPED:
            send(peer, Failure(request_id=number, kind="EngineDeadError", message="the engines are stopped", is_transient=False))
        elif len(self) >= limit:
            text = f"{limit} requests are open and max_open_requests={limit}; try again later"
            send(peer, Failure(request_id=number, kind="QueueFullError", message=text, is_transient=True))
        elif message.lora is not None and message.lora not in self._group.loras:
            text = f"lora={message.lora!r} is not loaded; {self._group.loaded_loras}"
            send(peer, Failure(request_id=number, kind="UnknownLoraError", message=text, is_transient=False))
        else:
            budget = message.sampling_params.get("num_tokens_to_generate")
            budget = min(budget, _MAX_BUDGET) if isinstance(budget, int) and budget >= 0 else _DEFAULT_BUDGET
            length = len(message.prompt) // (_CHARACTERS_PER_TOKEN if isinstance(message.prompt, str) else 1)
            self._give_seed(message)
            request = Request(client=peer, message=message, tokens=length + budget, arrived=now)
            client.requests[number] = request
            self._route(request, now)

    def _give_seed(self, message: SubmitRequest) -> None:
        """To one that brings none: engines, which each count their own, would draw the same answers."""
        settings = message.sampling_params
        # No settings have as many as a message may hold; an engine refuses those by name.
        if settings.get("seed") is None and len(settings) < MAX_FIGURES:
            settings["seed"] = request_seed(self._seed, self._num_seeded)
            self._num_seeded += 1

    def num_using(self, lora: str) -> int:
        """Open requests of an adapter."""
        return sum(request.message.lora == lora for request in (*self._attempts.values(), *self._homeless))

    def drop(self, request: Request) -> None:
        """Nobody waits for a request any more."""
        if request.engine is None:
            self._homeless.remove(request)
            return
        self._take(request.engine, request.attempt)
        self._group.send(request.engine, Abort(request_id=request.attempt))

    # -- of engines --------------------------------------------------------------------------------------------------

    def finish(self, peer: bytes, engine: Engine, message: EngineReply | Failure, now: float) -> None:
        """An engine's last word on a request; one whose queue is full leaves it to those that did not say so."""
        if isinstance(message, Failure) and message.kind == "QueueFullError" and (request := self._attempts.get(message.request_id)):
            others = request.full_engines | {peer}
            if request.engine == peer and not others.issuperset(self._group.eligible()):
                self._take(peer, message.request_id)
                request.full_engines = others
                self._route(request, now)
                return
        client = self._end(peer, engine, message)
        if client is not None:
            self._group.send(client, message)

    def forward(self, peer: bytes, engine: Engine, message: Partials) -> None:
        """Tokens and ends of a step to the clients of its requests, each under the client's number."""
        by_client: dict[bytes, Partials] = {}
        for part in message.items:
            request = self._attempts.get(part.request_id) if part.request_id in engine.requests else None
            if request is not None and request.message.stream:
                request.started = True
                part.request_id = request.message.request_id
                by_client.setdefault(request.client, Partials(items=[])).items.append(part)
        for reply in message.replies:
            client = self._end(peer, engine, reply)
            if client is not None:
                by_client.setdefault(client, Partials(items=[])).replies.append(reply)
        for client, parts in by_client.items():
            self._group.send(client, parts)

    def refuse(self, peer: bytes, attempt: int, text: str) -> None:
        """End a request that could not be sent to its engine."""
        request = self._take(peer, attempt)
        if request is not None:
            self._fail(request, "RequestError", text, is_transient=False)

    def lose(self, peer: bytes, engine: Engine, reason: str, now: float, *, tell: bool) -> None:
        """An engine is gone: its requests go to others where that changes nothing for the client, and endangers no other engine."""
        self._router.forget(peer)
        for attempt in list(engine.requests):
            request = self._attempts.pop(attempt)
            if self._group.is_stopping:
                self._fail(request, "EngineDeadError", _STOPPED)
                continue
            # A form is compiled by native code, which may have ended the engine. One that leaves by itself (tell=False) was not ended.
            is_suspect = tell and request.message.sampling_params.get("structured_output") is not None
            if request.started or is_suspect or request.retries >= self._config.max_retries:
                why = "tokens of it were sent" if request.started else f"max_retries={self._config.max_retries}"
                if is_suspect:
                    why = "its structured_output may be what ended it"
                self._fail(request, "EngineLostError", f"engine {engine.name} was lost ({reason}) and {why}")
            else:
                request.retries += 1
                request.full_engines.clear()
                self._route(request, now)

    def forget_prefixes(self) -> None:
        """Engines get other weights, and with them empty caches."""
        self._router.forget_all()

    # -- of all ------------------------------------------------------------------------------------------------------

    def route_homeless(self, now: float) -> None:
        group = self._group
        if not group.eligible() and (not group.serving or group.is_loading or group.current()):
            return
        homeless, self._homeless = self._homeless, deque()
        for request in sorted(homeless, key=lambda request: request.message.priority):
            self._route(request, now)

    def fail_late(self, now: float) -> None:
        """End those that have waited for an engine for too long. One that is there and is given its adapters is waited for as long as that
        takes, which has a time-out of its own."""
        limit, group = self._config.no_engine_timeout_s, self._group
        if group.current() and not group.eligible():
            for request in self._homeless:
                request.arrived = now
        while self._homeless and now - self._homeless[0].arrived > limit:
            self._fail(self._homeless.popleft(), "EngineLostError", f"there was no engine for {limit:g} s")

    def stop(self) -> None:
        """End all, with the engines."""
        for request in [*self._attempts.values(), *self._homeless]:
            self._fail(request, "EngineDeadError", _STOPPED)
        self._attempts.clear()
        self._homeless.clear()

    def _route(self, request: Request, now: float) -> None:
        group = self._group
        engines = group.eligible()
        if not engines:
            request.engine = None
            request.full_engines.clear()
            if group.serving and not group.is_loading and not group.current():
                text = f"no engine has the weights of version {group.loaded}, which were loaded last, since one was lost; load them again"
                self._fail(request, "StaleWeightsError", text)
            else:
                request.arrived = now
                self._homeless.append(request)
            return
        loads = {peer: group.engines[peer].load for peer in engines if peer not in request.full_engines}
        lora = request.message.lora
        # Keys and values are those of one load of an adapter.
        load = "" if lora is None else group.loras[lora].load
        peer = request.engine = self._router.choose(request.message.prompt, loads, load)
        request.attempt = group.next_number()
        engine = group.engines[peer]
        # No answer is longer, whatever was asked for.
        tokens = engine.requests[request.attempt] = min(request.tokens, max(1, engine.max_sequence_length))
        engine.open_tokens += tokens
        self._attempts[request.attempt] = request
        group.send(peer, msgspec.structs.replace(request.message, request_id=request.attempt))

    def _end(self, peer: bytes, engine: Engine, message: EngineReply | Failure) -> bytes | None:
        """Take down the end of a request, which gets its client's number; None when nobody waits for it."""
        request = self._take(peer, message.request_id)
        if request is None:
            return None
        engine.finished += 1
        message.request_id = request.message.request_id
        del self._group.clients[request.client].requests[message.request_id]
        return request.client

    def _take(self, peer: bytes, attempt: int) -> Request | None:
        """The request of an attempt, which is over; None when it is not this engine's."""
        engine = self._group.engines[peer]
        tokens = engine.requests.pop(attempt, None)
        if tokens is None:
            return None
        engine.open_tokens -= tokens
        return self._attempts.pop(attempt)

    def _fail(self, request: Request, kind: str, message: str, *, is_transient: bool = True) -> None:
        """End a request that no engine holds."""
        client = self._group.clients.get(request.client)
        if client is not None:
            number = request.message.request_id
            del client.requests[number]
            self._group.send(request.client, Failure(request_id=number, kind=kind, message=message, is_transient=is_transient))
