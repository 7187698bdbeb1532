# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A coordinator without sockets, and the messages of its engines and clients."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from mcore_inference.coordinator import CoordinatorConfig
from mcore_inference.coordinator._core import CoordinatorCore
from mcore_inference.coordinator._messages import (
    PROTOCOL,
    Connect,
    EngineReply,
    LoadWeights,
    Message,
    Partial,
    Partials,
    Register,
    Report,
    SubmitRequest,
    WeightAck,
    WeightBucket,
    WireChunk,
    decode_incoming,
    encode,
)

__all__ = ["CONFIG", "Group", "acknowledge", "bucket", "connect", "load", "partials", "register", "reply", "report", "submit"]

CONFIG = CoordinatorConfig()


def submit(number: int, prompt: str | list[int] = "x", budget: int = 8, *, stream: bool = False, lora: str | None = None) -> SubmitRequest:
    return SubmitRequest(request_id=number, prompt=prompt, sampling_params={"num_tokens_to_generate": budget}, stream=stream, lora=lora)


def register(name: str = "dp", state: str = "running", **more: Any) -> Register:
    return Register(protocol=PROTOCOL, secret="", name=name, state=state, **{"max_sequence_length": 64, "max_requests": 8, **more})


def connect(control_secret: str = "") -> Connect:
    return Connect(protocol=PROTOCOL, secret="", control_secret=control_secret)


def report(tokens: float, *, is_alive: bool = True, age: float | None = None) -> Report:
    return Report(is_alive=is_alive, last_step_age_s=age, stats={"generated_tokens": tokens, "used_blocks": 1.0})


def reply(number: int) -> EngineReply:
    return EngineReply(request_id=number, record={})


def partials(*numbers: int, ended: Sequence[int] = ()) -> Partials:
    """A token each, and the ends of others."""
    items = [Partial(request_id=number, tokens=[number], log_probs=[], top_n_logprobs=[], text="") for number in numbers]
    return Partials(items=items, replies=[reply(number) for number in ended])


class Group:
    """A core with the messages that each peer got."""

    def __init__(self, config: CoordinatorConfig = CONFIG, engines: int = 0, clients: int = 0) -> None:
        self.core, self.now = CoordinatorCore(config, seed=0), 0.0
        self.inbox: dict[bytes, list[Message]] = defaultdict(list)
        for index in range(engines):
            self.send(b"e%d" % index, register(f"dp-{index}"))
        for index in range(clients):
            self.send(b"c%d" % index, connect())
        self.inbox.clear()

    def send(self, peer: bytes, message: Any) -> None:
        self._take(self.core.receive(peer, decode_incoming(encode(message)), self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self._take(self.core.tick(self.now))

    def lose(self, peer: bytes) -> None:
        self._take(self.core.unreachable(peer, self.now))

    def _take(self, outbox: list[tuple[bytes, Message]]) -> None:
        for peer, message in outbox:
            self.inbox[peer].append(message)

    def got(self, peer: bytes, kind: type[Message]) -> list[Any]:
        return [message for message in self.inbox[peer] if isinstance(message, kind)]


def load(call: int = 1, version: int = -1) -> LoadWeights:
    return LoadWeights(call=call, version=version, in_flight="recompute")


def bucket(index: int, end: Any = "", call: int = 1) -> WeightBucket:
    data = WireChunk(name="w", dtype="float32", shape=[1], offsets=None, data=b"abcd")
    return WeightBucket(call=call, index=index, chunks=[] if end == "aborted" else [data], end=end)


def acknowledge(group: Group, *peers: bytes, error: str = "") -> None:
    """What these engines got last of a load."""
    for peer in peers:
        last = [message for message in group.inbox[peer] if isinstance(message, LoadWeights | WeightBucket)][-1]
        index, end = getattr(last, "index", 0), getattr(last, "end", "")
        version = group.got(peer, LoadWeights)[-1].version if end == "whole" and not error else -1
        group.send(peer, WeightAck(call=last.call, index=index, error=error, version=version))
