# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who may reach a coordinator, and those who may not, over real sockets."""

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")

from mcore_inference import CoordinatorError, EngineRunner, SamplingParams  # noqa: E402
from mcore_inference.coordinator import (  # noqa: E402
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
    is_loopback,
)
from tests.support.coordinated_engines import serve  # noqa: E402

Make = Callable[..., Any]
TEN = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True, top_n_logprobs=2)
LONG = SamplingParams(num_tokens_to_generate=400, ignore_eos=True, seed=1)


def test_strangers_are_refused(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        with pytest.raises(CoordinatorError, match="secret is not that of this job"):
            await InferenceClient(address).start()
        with pytest.raises(CoordinatorError, match="use `async with"):
            InferenceClient(address).add_request("x")
        async with InferenceClient(address, security=CoordinatorSecurity(secret="s3")) as client:
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10

    with ExitStack() as stack:
        coordinator = serve(stack, runners[:1], security=CoordinatorSecurity(secret="s3"))
        with EngineWorker(runners[1], coordinator.address, heartbeat_s=0.05) as stranger:
            deadline = time.monotonic() + 30
            while stranger.refusal is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stranger.refusal == "secret is not that of this job"
        asyncio.run(ask(coordinator.address))
        assert coordinator.num_engines == 1


def test_encrypted_sockets_need_the_coordinators_key(runners: list[EngineRunner]) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())

    async def ask(address: str) -> None:
        with pytest.raises(CoordinatorError, match="is a coordinator there"):
            await InferenceClient(address, timeout_s=0.3).start()
        async with InferenceClient(address, security=CoordinatorSecurity(secret="s3", public_key=public)) as client:
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10

    with ExitStack() as stack:
        keys = CoordinatorSecurity(secret="s3", public_key=public, secret_key=secret)
        asyncio.run(ask(serve(stack, runners[:1], security=keys).address))


ATTACK = """
import random, sys, zmq
draw = random.Random(0)
for index in range(200):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 100
        socket.connect(sys.argv[1])
        # Arrays of unknown kinds, deep ones, numbers of known messages with anything behind, too much.
        size = 2**21 if index % 50 == 49 else draw.randrange(64)
        frame = draw.choice([draw.randbytes(size), bytes([0x91]) * size, bytes([0x92, draw.randrange(24)]) + draw.randbytes(size)])
        socket.send_multipart([frame] * draw.choice([1, 1, 1, 2]))
"""


@pytest.mark.journey
def test_random_bytes_and_long_messages_harm_nobody(runners: list[EngineRunner]) -> None:
    draw = random.Random(0)

    async def ask(address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        # In a process of its own: libzmq itself may abort where a socket is closed within a message.
        attack = subprocess.Popen([sys.executable, "-c", ATTACK, address])
        async with InferenceClient(address) as client:
            for _ in range(100):
                with socket.create_connection((host, int(port)), timeout=5) as raw:
                    raw.sendall(draw.choice([b"", b"\xff\0\0\0\0\0\0\0\1\x7f\3"]) + draw.randbytes(draw.randrange(300)))
                    assert len((await client.add_request("x", TEN)).generated_tokens) == 10
            while attack.poll() is None:
                assert len((await client.add_request("x", TEN)).generated_tokens) == 10
            assert len((await client.status()).engines) == 1

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners[:1], max_message_bytes=2**20).address))


FLOOD = """
import sys, time, zmq
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.linger, dealer.sndhwm, dealer.rcvhwm = 1000, 100_000, 100_000
    dealer.connect(sys.argv[1])
    begin = time.monotonic()
    for _ in range(10_000):
        dealer.send(b"\\x91\\x0f")
    replies = 0
    while dealer.poll(1500):
        assert b"you are not known here" in dealer.recv()
        replies += 1
    print(replies, time.monotonic() - begin)
"""


@pytest.mark.journey
def test_a_flood_of_a_stranger_is_answered_a_hundred_times_a_second_and_loses_no_engine(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        attack = subprocess.Popen([sys.executable, "-c", FLOOD, address], stdout=subprocess.PIPE, text=True)
        async with InferenceClient(address) as client:
            while attack.poll() is None:
                assert len((await client.add_request("x", TEN)).generated_tokens) == 10
        said, _ = attack.communicate()
        replies, seconds = map(float, said.split())
        assert 100 <= replies <= 100 + 100 * seconds and replies < 5000

    with ExitStack() as stack:
        # Heartbeats that waited for the flood would be late.
        asyncio.run(ask(serve(stack, runners[:1], engine_timeout_s=0.6).address))


def test_an_address_of_loopback_is_told_from_all_others() -> None:
    hosts = {
        True: ("127.0.0.1", "127.9.9.9", "::1", "localhost"),
        False: ("0.0.0.0", "::", "", "192.0.2.1", "[::1]", "127.0.0.1:80", "127.1"),
    }
    assert {host: is_loopback(host) for each in hosts.values() for host in each} == {host: here for here in hosts for host in hosts[here]}


def test_bad_keys_and_addresses_are_refused(runners: list[EngineRunner]) -> None:
    with pytest.raises(ValueError, match="public_key must be 40 characters"):
        CoordinatorSecurity(public_key="short")
    for key in ("~" * 40, "#" * 40):
        # No Z85, and of five digits whose number has more than 32 bits.
        with pytest.raises(ValueError, match="public_key must be 40 characters of Z85"):
            CoordinatorSecurity(public_key=key)
    with pytest.raises(ValueError, match="secret_key without public_key"):
        CoordinatorSecurity(secret_key="0" * 40)
    with pytest.raises(ValueError, match="address='nowhere'"):
        EngineWorker(runners[0], "nowhere")
    with pytest.raises(ValueError, match="address='nowhere'"):
        asyncio.run(InferenceClient("nowhere").start())
    for address in ("tcp://127.0.0.1", "tcp://host", "tcp://", "//127.0.0.1:5"):
        with pytest.raises(ValueError, match="is none; it looks like tcp://127.0.0.1:5000"):
            asyncio.run(InferenceClient(address).start())
    for address in ("tcp://192.0.2.1:5", "tcp://host:5", "tcp://[2001:db8::1]:5", "tcp://127.0.0.1:0;192.0.2.1:5", "tipc://{1,0,0}"):
        with pytest.raises(ValueError, match="is reached over a network, where secrets would go in the clear; give security with the"):
            asyncio.run(InferenceClient(address, security=CoordinatorSecurity(secret="s3")).start())
    with pytest.raises(ValueError, match="in the clear"):
        EngineWorker(runners[0], "tcp://192.0.2.1:5")
    with pytest.raises(ValueError, match="address=5 is a int; give a string"):
        asyncio.run(InferenceClient(5).start())  # type: ignore[arg-type]
    with DataParallelInferenceCoordinator() as first, pytest.raises(OSError, match="in use"):
        DataParallelInferenceCoordinator(CoordinatorConfig(port=int(first.address.rsplit(":", 1)[1]))).start()
