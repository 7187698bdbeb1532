# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Frames between clients, a coordinator and engines: too long ones, and what is no message, over real sockets."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

zmq, msgspec = pytest.importorskip("zmq"), pytest.importorskip("msgspec")

from mcore_inference import CoordinatorError, EngineRunner, RequestError, SamplingParams  # noqa: E402
from mcore_inference.coordinator import (  # noqa: E402
    CoordinatedRunner,
    CoordinatorConfig,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
)
from mcore_inference.coordinator._messages import (  # noqa: E402
    PROTOCOL,
    Connect,
    ConnectAck,
    EngineReply,
    Failure,
    Heartbeat,
    Partial,
    Partials,
    Refusal,
    Register,
    RegisterAck,
    Report,
    SubmitRequest,
    decode_for_client,
    decode_for_engine,
    decode_incoming,
    encode,
    number_of_request,
)
from tests.support.coordinated_engines import LONG, TEN, join, start, ten  # noqa: E402

Make = Callable[..., Any]


def raw_client(stack: ExitStack, address: str) -> Any:
    context = stack.enter_context(zmq.Context())
    client = context.socket(zmq.DEALER)
    stack.callback(client.close, linger=0)
    client.rcvtimeo = 5000
    client.connect(address)
    # A Connect, without a control secret, which it may leave out.
    client.send(b"\x93\x01" + bytes([PROTOCOL]) + b"\xa0")
    assert isinstance(decode_for_client(client.recv()), ConnectAck)
    return client


def test_a_frame_is_as_long_as_its_kind_may_be(runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[int] = []

    def counted(frame: bytes) -> Any:
        longest.append(len(frame))
        return decode_incoming(frame)

    monkeypatch.setattr("mcore_inference.coordinator._coordinator.decode_incoming", counted)
    with ExitStack() as stack:
        coordinator = start(stack, max_message_bytes=2**22)
        join(stack, runners[0], coordinator)
        coordinator.wait_for_engines(1)
        client = raw_client(stack, coordinator.address)
        # A heartbeat with something behind it, of two megabytes.
        client.send(b"\x92\x0f" + bytes(2**21))
        refusal = decode_for_client(client.recv())
        assert isinstance(refusal, Refusal) and "a message of 2097154 bytes is longer than its kind may be" in refusal.message
        # A request may be as long, and is read; what is longer than all may be cuts the connection, and the next one is a stranger's.
        client.send(b"\x92\x03" + bytes(2**21))
        refusal = decode_for_client(client.recv())
        assert isinstance(refusal, Refusal) and "was not understood" in refusal.message
        client.send(b"\x92\x03" + bytes(2**23))
        deadline = time.monotonic() + 10
        while not client.poll(50):
            assert time.monotonic() < deadline
            client.send(encode(Heartbeat()))
        assert isinstance(decode_for_client(client.recv()), Refusal)
        # Nothing of a stranger's long greeting is read.
        client.send(b"\x94\x01" + bytes(2**17))
        assert isinstance(decode_for_client(client.recv()), Refusal)
        asyncio.run(ten(stack.enter_context(CoordinatedRunner(coordinator.address))))
        assert 2**21 < max(longest) < 2**22 and sum(size > 2**17 for size in longest) == 1


def test_a_request_above_eight_mebibytes_is_refused_before_it_is_sent() -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            for prompt in (2 * [0, 2**20] * 2**20, "\u4e00" * 2**22):
                with pytest.raises(RequestError, match=r"it has \d{7,8} bytes and a request has at most 8388608; shorten the prompt"):
                    await client.submit(prompt, TEN)
            assert (await client.status()).waiting_requests == 0

    with ExitStack() as stack:
        asyncio.run(ask(start(stack).address))


@pytest.mark.journey
def test_requests_and_answers_that_are_too_long_fail_alone(runners: list[EngineRunner]) -> None:
    best = SamplingParams(num_tokens_to_generate=200, ignore_eos=True, return_log_probs=True, top_n_logprobs=5)

    async def ask(runner: CoordinatedRunner) -> None:
        long = await runner.submit("y", LONG)
        with pytest.raises(RequestError, match=r"it has \d+ bytes and max_message_bytes=8192; shorten the prompt"):
            await runner.submit("x" * 9000, TEN)
        with pytest.raises(RequestError, match=r"the answer has \d+ bytes and max_message_bytes=8192; ask for fewer"):
            await (await runner.submit("x", best, stream=False)).record()
        await ten(runner)
        assert len((await long.record()).generated_tokens) == 400
        assert runner.stats()["lost_engines"] == 0

    with ExitStack() as stack:
        coordinator = start(stack, max_message_bytes=8192)
        join(stack, runners[0], coordinator, max_message_bytes=8192)
        coordinator.wait_for_engines(1)
        runner = stack.enter_context(CoordinatedRunner(coordinator.address, max_message_bytes=8192))
        asyncio.run(asyncio.wait_for(ask(runner), 30))
        with pytest.raises(ValueError, match="max_message_bytes=0 must be"):
            CoordinatedRunner(coordinator.address, max_message_bytes=0)
        with pytest.raises(ValueError, match="max_message_bytes=0 must be"):
            EngineWorker(runners[1], coordinator.address, max_message_bytes=0)


@pytest.mark.parametrize(("num_items", "num_replies"), [(30, 0), (0, 30), (7, 24), (25, 6)])
def test_a_bundle_that_longer_numbers_make_too_long_is_sent_in_parts(num_items: int, num_replies: int) -> None:
    items = [Partial(request_id=2**40 + i, tokens=[i] * 60, log_probs=[], top_n_logprobs=[], text="") for i in range(num_items)]
    replies = [EngineReply(request_id=2**41 + i, record={"tokens": [i] * 60}) for i in range(num_replies)]
    limit = len(encode(Partials(items=items, replies=replies))) - 65
    # It was shorter where the engine's numbers have a byte, not nine.
    assert limit > len(encode(Partials(items=items, replies=replies))) - 8 * (num_items + num_replies)
    sent: list[list[bytes]] = []
    socket: Any = SimpleNamespace(send_multipart=lambda frames, flags: sent.append(frames))
    coordinator = DataParallelInferenceCoordinator(CoordinatorConfig(max_message_bytes=limit))
    coordinator._deliver(socket, [(b"c0", Partials(items=items, replies=replies)), (b"c1", Heartbeat())])
    assert [peer for peer, _ in sent] == [b"c0", b"c0", b"c1"] and all(len(frame) <= limit + 64 for _, frame in sent)
    parts: list[Any] = [decode_for_client(frame) for _, frame in sent[:2]]
    assert [each for part in parts for each in (*part.items, *part.replies)] == [*items, *replies]


def open_router(stack: ExitStack, receive_ms: int) -> tuple["zmq.Socket[bytes]", str]:
    """The socket of one that has taken the coordinator's place, and its address."""
    router = stack.enter_context(zmq.Context()).socket(zmq.ROUTER)
    stack.callback(router.close, linger=0)
    router.rcvtimeo = receive_ms
    return router, f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


@pytest.mark.journey
def test_an_engine_takes_no_longer_message_than_it_was_told(runners: list[EngineRunner]) -> None:
    """Whoever has taken the coordinator's place sends what it likes."""
    with ExitStack() as stack:
        router, address = open_router(stack, 5000)
        worker = stack.enter_context(EngineWorker(runners[0], address, heartbeat_s=0.05, max_message_bytes=2**16))
        peer, frame = router.recv_multipart()
        assert isinstance(decode_incoming(frame), Register)
        router.send_multipart([peer, b"\x92\x13" + bytes(2**17)])
        # Another connection, of the same worker.
        deadline = time.monotonic() + 10
        while (another := router.recv_multipart())[0] == peer:
            assert time.monotonic() < deadline
        message = decode_incoming(another[1])
        assert isinstance(message, Register) and message.worker == decode_incoming(frame).worker and not worker.join(0)


UNREAD = {"a kind of a later version": b"\x92\x63\x01", "no UTF-8": b"\x93\x13\x00\xa1\xff", "no message": b"\xc1"}


def test_frames_that_are_no_messages_end_neither_an_engine_nor_a_client(
    runners: list[EngineRunner], caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has taken the coordinator's place, or is one of another version, sends what it likes."""
    with ExitStack() as stack:
        router, address = open_router(stack, 20_000)

        def answer(kind: type, *frames: bytes) -> Any:
            """To the next message of this kind."""
            while not isinstance(message := decode_incoming((received := router.recv_multipart())[1]), kind):
                pass
            for frame in frames:
                router.send_multipart([received[0], frame])
            return message

        with EngineWorker(runners[0], address, name="dp-0", heartbeat_s=0.05) as worker:
            answer(Register, *UNREAD.values(), encode(RegisterAck()))
            # Behind them it was taken.
            answer(Report)
            assert not worker.join(0) and caplog.text.count(f"of {address} that dp-0 cannot read") == 2

        async def ask() -> None:
            client = InferenceClient(address, timeout_s=20)
            await asyncio.gather(client.start(), asyncio.to_thread(answer, Connect, encode(ConnectAck(max_sequence_length=8))))
            for frame in UNREAD.values():
                request = client.add_request([1, 2], TEN)
                await asyncio.to_thread(answer, SubmitRequest, frame)
                with pytest.raises(CoordinatorError, match="was not understood .*; use one version"):
                    await request
            request = client.add_request([1, 2], TEN)
            number = (await asyncio.to_thread(answer, SubmitRequest)).request_id
            assert number == len(UNREAD)
            request.cancel()
            await client.stop()

        asyncio.run(asyncio.wait_for(ask(), 50))


def test_a_request_that_an_engine_cannot_read_fails_by_its_number(runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        router, address = open_router(stack, 20_000)
        with EngineWorker(runners[0], address, name="dp-0", heartbeat_s=0.05):
            peer, _ = router.recv_multipart()
            numbers = (0, 127, 200, 2**15, 2**40, 2**62)
            whole = [encode(SubmitRequest(request_id=number, prompt=[1], sampling_params={}, stream=True)) for number in numbers]
            assert [number_of_request(frame) for frame in whole] == list(numbers)
            # Without a number, cut within it, of another kind, and none.
            others = (b"\x96\x03", b"\x96\x03\xce\x01", b"\x96\x03\xa1a", b"\x96\x03\xff", b"\x92\x0d\x05", b"\xc1", b"")
            assert {number_of_request(frame) for frame in others} == {None}
            # A field more than this version has; and a request that only begins.
            for frame in (encode(RegisterAck()), *others[:4], *(b"\x97" + frame[1:] + b"\x01" for frame in whole), b"\x96\x03\x09"):
                router.send_multipart([peer, frame])
            failures: list[Failure] = []
            while len(failures) <= len(numbers):
                message = decode_incoming(router.recv_multipart()[1])
                failures += [message] if isinstance(message, Failure) else []
            assert [failure.request_id for failure in failures] == [*numbers, 9]
            assert {failure.kind for failure in failures} == {"RequestError"}
            assert all(failure.message.startswith("dp-0 cannot read the request: ") for failure in failures)

    def unread(frame: bytes) -> Any:
        if number_of_request(frame) is not None:
            raise msgspec.DecodeError("it has a field of a later version")
        return decode_for_engine(frame)

    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(RequestError, match="dp-0 cannot read the request: it has a field of a later version; use one version of"):
                await client.add_request([1, 2], TEN)

    monkeypatch.setattr("mcore_inference.coordinator._worker.decode_for_engine", unread)
    with DataParallelInferenceCoordinator() as coordinator, EngineWorker(runners[0], coordinator.address, name="dp-0"):
        coordinator.wait_for_engines(1)
        asyncio.run(asyncio.wait_for(ask(coordinator.address), 30))
        assert not coordinator.num_open_requests
