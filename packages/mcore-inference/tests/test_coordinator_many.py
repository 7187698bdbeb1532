# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ten thousand requests through a coordinator's sockets to engines that answer at once; one of them drains in between."""

import asyncio
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")

from mcore_inference import CoordinatorError, SamplingParams  # noqa: E402
from mcore_inference.coordinator import (  # noqa: E402
    CoordinatorConfig,
    DataParallelInferenceCoordinator,
    InferenceClient,
)
from mcore_inference.coordinator._messages import (  # noqa: E402
    ConnectAck,
    Disconnect,
    EngineReply,
    Leave,
    LeaveAck,
    Partial,
    Partials,
    SubmitRequest,
    decode_for_client,
    decode_for_engine,
    encode,
)
from tests.support.coordinator_core import connect, register, submit  # noqa: E402

NUM_REQUESTS = 10_000


class Engine:
    """Answers a request with the token that it was given, and drains after so many."""

    def __init__(self, address: str, name: str, drains_after: int = NUM_REQUESTS + 1) -> None:
        self._address, self._name, self._drains_after = address, name, drains_after
        self.seen = Counter[int]()
        self.attempts = Counter[int]()
        self.has_left = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 1000
            socket.connect(self._address)
            socket.send(encode(register(self._name)))
            while not self._closing.is_set() and not self.has_left:
                if socket.poll(20):
                    self._take(socket, decode_for_engine(socket.recv()))

    def _take(self, socket: Any, message: Any) -> None:
        if isinstance(message, LeaveAck):
            socket.send(encode(Disconnect()))
            self.has_left = True
        if not isinstance(message, SubmitRequest):
            return
        number, token = message.request_id, message.prompt[0]
        self.seen[token] += 1
        self.attempts[number] += 1
        end = EngineReply(request_id=number, record={"token": token})
        if message.stream:
            first = Partial(request_id=number, tokens=[token], log_probs=[], top_n_logprobs=[], text="")
            socket.send(encode(Partials(items=[first])))
            socket.send(encode(Partials(items=[], replies=[end])))
        else:
            socket.send(encode(end))
        if self.seen.total() == self._drains_after:
            socket.send(encode(Leave(call=1)))


@pytest.mark.journey
def test_ten_thousand_requests_are_answered_once_each_by_one_engine_each() -> None:
    began, ended = Counter[int](), Counter[int]()
    with ExitStack() as stack:
        settings: dict[str, Any] = {"engine_timeout_s": 60.0, "client_timeout_s": 60.0}
        coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**settings)))
        engines = [Engine(coordinator.address, "dp-0", NUM_REQUESTS // 10)]
        engines += [Engine(coordinator.address, f"dp-{number}") for number in (1, 2)]
        for engine in engines:
            stack.callback(engine.close)
        coordinator.wait_for_engines(3)
        context = stack.enter_context(zmq.Context())
        socket = stack.enter_context(context.socket(zmq.DEALER))
        socket.linger, socket.sndhwm, socket.rcvhwm = 0, 0, 0
        socket.connect(coordinator.address)
        socket.send(encode(connect()))
        assert isinstance(decode_for_client(socket.recv()), ConnectAck)
        sent = 0
        while ended.total() < NUM_REQUESTS:
            # A thousand at a time, so that engines answer while more come.
            while sent < NUM_REQUESTS and sent - ended.total() < 1000:
                socket.send(encode(submit(sent, [sent], stream=sent % 2 == 0)))
                sent += 1
            assert socket.poll(20_000), f"{NUM_REQUESTS - ended.total()} requests have no answer"
            message: Any = decode_for_client(socket.recv())
            assert isinstance(message, EngineReply | Partials), message
            began.update(part.request_id for part in getattr(message, "items", []))
            for reply in message.replies if isinstance(message, Partials) else [message]:
                assert reply.record == {"token": reply.request_id}
                ended[reply.request_id] += 1
        assert not socket.poll(100), "nothing comes behind the last answer"
        assert coordinator.num_open_requests == 0 and coordinator.num_engines == 2
    assert set(ended) == set(range(NUM_REQUESTS)) and set(ended.values()) == {1}
    assert set(began) == set(range(0, NUM_REQUESTS, 2)) and set(began.values()) == {1}
    seen = sum((engine.seen for engine in engines), Counter[int]())
    assert set(seen.values()) == {1} and seen.total() == NUM_REQUESTS
    assert all(set(engine.attempts.values()) == {1} for engine in engines)
    assert engines[0].has_left and NUM_REQUESTS // 10 <= engines[0].seen.total() < NUM_REQUESTS // 4


def test_a_record_of_another_version_ends_its_request_and_not_the_client() -> None:
    async def main(address: str) -> None:
        async with InferenceClient(address, timeout_s=20.0) as client:
            for _ in range(2):
                with pytest.raises(CoordinatorError, match="the answer of an engine was not understood .*; use one version"):
                    await asyncio.wait_for(client.add_request([5], SamplingParams(num_tokens_to_generate=2)), 10)

    with ExitStack() as stack:
        coordinator = stack.enter_context(DataParallelInferenceCoordinator(config=CoordinatorConfig()))
        stack.callback(Engine(coordinator.address, "dp-0").close)
        coordinator.wait_for_engines(1)
        asyncio.run(main(coordinator.address))
