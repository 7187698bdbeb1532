# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Messages that are nearly right, from engines and clients that are known: the coordinator refuses or serves, and never ends."""

import random
from collections import Counter
from typing import Any

import msgspec
import pytest

pytest.importorskip("zmq")

from mcore_inference.coordinator import CoordinatorConfig, GroupState
from mcore_inference.coordinator._core import CoordinatorCore
from mcore_inference.coordinator._messages import (
    Abort,
    AskStatus,
    Disconnect,
    EngineReply,
    Failure,
    Heartbeat,
    Incoming,
    Leave,
    LoadLora,
    LoadWeights,
    Message,
    Partials,
    Pause,
    Resume,
    SignalAck,
    Stop,
    SubmitRequest,
    Suspend,
    UnloadLora,
    Unpause,
    WeightAck,
    WeightBucket,
    decode_incoming,
    encode,
)
from tests.support.coordinator_core import bucket, connect, load, partials, register, reply, report, submit

CLIENTS, ENGINES = (b"c0", b"c1"), (b"e0", b"e1", b"e2")
_INTEGERS = (-1, 0, 1, 2, 5, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63))
_ODD = (*_INTEGERS, 1.5, float("inf"), float("nan"), "", "running", "x" * 100, b"", [], {}, [[]], {"a": {}}, None, True)


def samples(draw: random.Random, numbers: list[int]) -> list[Message]:
    """One valid message of each kind; numbers are often those that the coordinator gave last."""
    number, name = draw.choice(numbers), draw.choice(["sql", "chat"])
    loras = {name: "other"} if draw.random() < 0.2 else {}
    return [
        connect(), register(f"dp-{draw.randrange(4)}", worker=f"w{draw.randrange(4)}", weight_version=draw.randrange(3), loras=loras),
        submit(draw.randrange(8), draw.choice(["text", [1, 2, 3]]), stream=draw.random() < 0.5, lora=draw.choice([None, name])),
        reply(number), partials(number), LoadLora(call=9, name=name, rank=2, alpha=1.0), UnloadLora(call=10, name=name),
        bucket(draw.randrange(3), draw.choice(["", "whole", "whole", "aborted"]), call=9),
        Failure(request_id=number, kind="RequestError", message="x", is_transient=False), Abort(request_id=draw.randrange(8)),
        Pause(call=1), Unpause(call=2), Suspend(call=3), Resume(call=4), SignalAck(call=number), Heartbeat(), AskStatus(call=5),
        load(6, draw.choice([-1, 3])), bucket(draw.randrange(3), draw.choice(["", "whole", "aborted"]), call=6),
        WeightAck(call=number, index=draw.randrange(3), error=draw.choice(["", "bad"]), version=draw.choice([-1, 3])),
        report(1.0, is_alive=draw.random() < 0.9, age=0.5),
    ]  # fmt: skip


def mutated(frame: bytes, draw: random.Random) -> bytes:
    """A frame with other values in place of some of its own, or another byte, or an end that is missing."""
    values: Any = msgspec.msgpack.decode(frame)
    for _ in range(draw.randrange(1, 3)):
        at = values
        # Now and then a value inside of a value.
        while draw.random() < 0.3 and (inner := [each for each in at if isinstance(each, list) and each]):
            at = draw.choice(inner)
        at[draw.randrange(len(at))] = draw.choice(_ODD)
    data = bytearray(msgspec.msgpack.encode(values))
    if draw.random() < 0.2:
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.randrange(len(data))] if draw.random() < 0.05 else data)


class _Fuzz:
    """A core with clients and engines, and the numbers that it gave last."""

    def __init__(self, seed: int) -> None:
        self.draw, self.now, self.seen = random.Random(seed), 0.0, Counter[str]()
        self.begin()

    def begin(self) -> None:
        self.core, self.numbers = CoordinatorCore(CoordinatorConfig(), seed=0), [0]
        for peer in CLIENTS:
            self.core.receive(peer, connect(), self.now)
        for index, peer in enumerate(ENGINES):
            self.core.receive(peer, register(f"dp-{index}", worker=f"w{index}"), self.now)

    def take(self, outbox: list[tuple[bytes, Message]]) -> None:
        for peer, message in outbox:
            encode(message)
            engine = self.core._group.engines.get(peer)
            if isinstance(message, SubmitRequest) and engine is not None and message.request_id in engine.requests:
                assert message.lora is None or message.lora in engine.loras
            self.numbers += [number for name in ("call", "request_id") if isinstance(number := getattr(message, name, None), int)]
        self.numbers = self.numbers[-8:]

    def step(self) -> None:
        draw = self.draw
        self.now += draw.choice([0.0, 0.0, 0.01, 1.0])
        rare = [Stop(call=7), Disconnect(), Leave(call=8)] if draw.random() < 0.02 else []
        message: Any = draw.choice(rare or samples(draw, self.numbers))
        peer = draw.choice(CLIENTS if isinstance(message, _OF_CLIENTS) or draw.random() < 0.1 else ENGINES)
        frame = encode(message)
        try:
            incoming: Incoming = decode_incoming(frame if draw.random() < 0.4 else mutated(frame, draw))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.seen["refused"] += 1
            return
        self.seen[type(incoming).__name__] += 1
        self.take(self.core.receive(peer, incoming, self.now))
        if draw.random() < 0.05:
            self.take(self.core.tick(self.now))
        if draw.random() < 0.1:
            self.go_on()
        self.seen["loaded adapters"] += len(self.core._group.loras)
        if draw.random() < 0.01:
            self.take(self.core.unreachable(draw.choice(CLIENTS + ENGINES), self.now))
        if self.core.state is GroupState.STOPPED or draw.random() < 0.005:
            self.begin()
        else:
            self.come_back()

    def go_on(self) -> None:
        """What a client and the engines say next of adapters: by chance alone no load would come to its end."""
        call = self.core._loras._call
        if call is not None and not call.is_whole:
            self.take(self.core.receive(call.client, bucket(call.index + 1, "whole", call.call), self.now))
        for peer, engine in list(self.core._group.engines.items()):
            if (change := engine.change) is not None:
                done = SignalAck(call=change.number) if change.lora is None else WeightAck(call=change.number, index=change.index)
                self.take(self.core.receive(peer, done, self.now))

    def come_back(self) -> None:
        """Those that were given up join again, as they do."""
        for peer in CLIENTS:
            if not self.core.knows(peer):
                self.take(self.core.receive(peer, connect(), self.now))
        for index, peer in enumerate(ENGINES):
            if not self.core.knows(peer):
                self.take(self.core.receive(peer, register(f"dp-{index}", worker=f"w{index}"), self.now))


_OF_CLIENTS = (SubmitRequest, Abort, Pause, Unpause, Suspend, Resume, Stop, AskStatus, LoadWeights, WeightBucket, LoadLora, UnloadLora)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("num_messages", "seeds"), [(10_000, range(4)), pytest.param(250_000, range(4, 8), marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_nearly_valid_messages_of_known_peers_never_end_the_coordinator(num_messages: int, seeds: range) -> None:
    seen = Counter[str]()
    for seed in seeds:
        fuzz = _Fuzz(seed)
        for _ in range(num_messages):
            fuzz.step()
        seen += fuzz.seen
        for outbox in (fuzz.core.tick(fuzz.now + 1000.0), fuzz.core.tick(fuzz.now + 2000.0)):
            fuzz.take(outbox)
        assert fuzz.core.num_open_requests == 0 and fuzz.core.num_engines == 0
    kinds = {kind.__name__ for kind in (*_OF_CLIENTS, EngineReply, Failure, Partials, SignalAck, WeightAck, Heartbeat, Disconnect, Leave)}
    assert (
        kinds | {"Register", "Connect", "Report", "loaded adapters"} <= set(+seen)
        and 0.1 < seen["refused"] / num_messages / len(seeds) < 0.8
    ), seen
