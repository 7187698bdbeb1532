# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Clients that hold connections, leave early, or want to be found in the log: over real sockets."""

import asyncio
import contextlib
import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
import uvicorn

from mcore_inference import EngineRunner
from mcore_inference.server import ConnectionLimits, InferenceServer, ServerGroup, ServerLimits, serve
from mcore_inference.server._addresses import RefusalLimiter
from mcore_inference.server._connection import ConnectionGuard
from mcore_parallel.data import ByteTokenizer
from tests.support.journeys import journeys_among

Make = Callable[..., Any]
# Long enough for a client of a busy machine to say what it has come for.
LIMITS = ConnectionLimits(max_connections=8, header_timeout_s=1.2, body_timeout_s=1.5, idle_timeout_s=1.2, write_timeout_s=0.5)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "x", "max_tokens": 2, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def server(make_model: Make, make_engine: Make) -> Iterator[InferenceServer]:
    model = make_model(vocab_size=272, dtype=torch.float32, layers=1)
    with serve(make_engine(model, ByteTokenizer(), max_sequence_length=256), limits=ServerLimits(connections=LIMITS)) as running:
        yield running


@contextlib.contextmanager
def connected(server: InferenceServer) -> Iterator[socket.socket]:
    with socket.create_connection((server.host, server.port), timeout=30) as raw:
        yield raw


def read_all(raw: socket.socket) -> bytes:
    """Until the server closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := raw.recv(65536):
            parts.append(part)
    return b"".join(parts)


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert f"x-request-id: {error['request_id']}".encode() in head.lower()
    return int(head.split()[1]), error


def wait_for_connections(server: InferenceServer, count: int) -> None:
    deadline = time.monotonic() + 30
    while len(server._server.server_state.connections) != count:
        assert time.monotonic() < deadline, server._server.server_state.connections
        time.sleep(0.005)


def dribble(raw: socket.socket, data: bytes) -> bytes:
    """Send a byte now and then, as one who holds connections does, until the server answers."""
    raw.settimeout(0.05)
    for index in range(600):
        with contextlib.suppress(TimeoutError):
            return raw.recv(65536) + read_all(raw)
        with contextlib.suppress(OSError):
            raw.send(data[index % len(data) :][:1])
    raise AssertionError("the server waits for ever")


@pytest.mark.parametrize("start", [b"", b"POST /v1/compl", HEAD])
def test_a_header_that_does_not_end_is_408(server: InferenceServer, start: bytes) -> None:
    with connected(server) as raw:
        raw.sendall(start)
        status, error = error_of(read_all(raw))
    assert (status, error["code"]) == (408, "header_timeout") and "header_timeout_s=1.2" in error["message"]


@pytest.mark.journey
def test_a_header_and_a_body_that_drip_are_408(server: InferenceServer) -> None:
    with connected(server) as raw:
        raw.sendall(HEAD + b"X-Long: ")
        assert error_of(dribble(raw, b"a"))[1]["code"] == "header_timeout"
    with connected(server) as raw:
        raw.sendall(HEAD + b"X-Request-Id: slow-1\r\nContent-Length: 1000000\r\n\r\n")
        status, error = error_of(dribble(raw, b" "))
    assert (status, error["code"], error["request_id"]) == (408, "body_timeout", "slow-1")
    assert httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.journey
def test_a_body_that_nobody_asked_for_is_limited_too(server: InferenceServer) -> None:
    with connected(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        answer = raw.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200")
        begin = time.monotonic()
        raw.settimeout(0.05)
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            while time.monotonic() - begin < 30:
                raw.send(b" ")
                with contextlib.suppress(TimeoutError):
                    if not raw.recv(65536):
                        break
        assert time.monotonic() - begin < 29


@pytest.mark.journey
def test_an_idle_connection_is_closed_and_a_second_request_on_it_is_timed(server: InferenceServer) -> None:
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with connected(server) as raw:
        raw.sendall(whole)
        assert read_all(raw).startswith(b"HTTP/1.1 200")
    with connected(server) as raw:
        # The second request comes with the first, and its body never.
        raw.sendall(whole + HEAD + b"Content-Length: 10\r\n\r\n")
        answer = read_all(raw)
    assert answer.startswith(b"HTTP/1.1 200") and b"HTTP/1.1 408" in answer and b"body_timeout" in answer


def test_an_answer_that_nobody_reads_ends_the_connection() -> None:
    async def endless(scope: Any, receive: Any, send: Any) -> None:
        """Far more than the buffers of two sockets; uvicorn drops what comes after the connection's end."""
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

    async def main() -> None:
        group = ServerGroup("127.0.0.1", 0, 1)
        group.listen()
        listener = group.listener()
        config = uvicorn.Config(endless, http=ConnectionGuard(LIMITS, group.counts()), log_config=None, lifespan="off")
        running = uvicorn.Server(config)
        serving = asyncio.ensure_future(running.serve(sockets=[listener]))
        _, writer = await asyncio.open_connection(*listener.getsockname(), limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while not running.server_state.connections:
            await asyncio.sleep(0.01)
        while running.server_state.connections:
            await asyncio.sleep(0.01)
        writer.close()
        running.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(main(), 30))


def wait_until_idle(server: InferenceServer) -> None:
    deadline = time.monotonic() + 30
    while server.runner.health().unfinished_requests:
        assert time.monotonic() < deadline, "requests go on"
        time.sleep(0.005)


def post(**fields: Any) -> bytes:
    body = json.dumps({"prompt": "x", "ignore_eos": True, **fields}).encode()
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.fixture
def steps(server: InferenceServer) -> Iterator[threading.Semaphore]:
    """The engine takes a step for each release, so that no request ends before the test has done its part; all at the end."""
    assert isinstance(server.runner, EngineRunner)
    released = threading.Semaphore(0)

    def wait(*_: Any) -> None:
        assert released.acquire(timeout=60)

    hook = server.runner.engine.model.register_forward_pre_hook(wait)
    yield released
    hook.remove()
    released.release(1000)


def ask_together(
    server: InferenceServer, request: bytes, number: int, steps: threading.Semaphore, stack: contextlib.ExitStack
) -> list[socket.socket]:
    """Clients whose requests the engine all has; one that a slow machine refused for the server's limits asks again."""

    def ask() -> socket.socket:
        client = stack.enter_context(connected(server))
        client.sendall(request)
        return client

    clients = [ask() for _ in range(number)]
    while server.runner.health().unfinished_requests < number:
        for client in select.select(clients, [], [], 0)[0]:
            if client.recv(32, socket.MSG_PEEK).startswith(b"HTTP/1.1 408"):
                clients[clients.index(client)] = ask()
        steps.release()
        # Far fewer steps than a request has tokens, within those limits.
        time.sleep(0.05)
    return clients


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_closes_its_half_and_reads_holds_no_place_in_the_engine(
    server: InferenceServer, steps: threading.Semaphore, streamed: bool
) -> None:
    """What it sent last tells a client that left from one that reads on in no way: its request ends."""
    assert isinstance(server.runner, EngineRunner)
    aborted = server.runner.engine.finished_counts["abort"]
    with contextlib.ExitStack() as stack:
        clients = ask_together(server, post(max_tokens=200, stream=streamed), 4, steps, stack)
        if streamed:
            steps.release(8)
            for client in clients:
                assert client.recv(100)
        for client in clients:
            client.shutdown(socket.SHUT_WR)
        wait_for_connections(server, 0)
        # Fewer than a request has left.
        steps.release(100)
        wait_until_idle(server)
        steps.release(100)
        for client in clients:
            read_all(client)
    assert server.runner.engine.finished_counts["abort"] == aborted + 4
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_client_that_reads_nothing_holds_no_place_in_the_engine(server: InferenceServer) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            raw.connect((server.host, server.port))
            # More than its buffer takes.
            raw.sendall(post(max_tokens=200, stream=True, logprobs=20, n=2))
        wait_until_idle(server)
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 1}, timeout=30)
        assert answer.status_code == 200
    wait_for_connections(server, 0)


def test_only_streamed_requests_cost_something_a_token(server: InferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, streamed = server.runner.submit, []

    async def spy(*arguments: Any, **named: Any) -> Any:
        streamed.append(named["stream"])
        return await submit(*arguments, **named)

    monkeypatch.setattr(server.runner, "submit", spy)
    for stream in (None, False, True):
        body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "stream": stream, "return_token_ids": True, "logprobs": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body)
        assert answer.status_code == 200
        if not stream:
            assert len(answer.json()["choices"][0]["token_ids"]) == len(answer.json()["choices"][0]["logprobs"]["tokens"]) == 4
    assert streamed == [False, False, True]


def test_connections_beyond_the_limit_are_503_and_come_free_again(server: InferenceServer) -> None:
    wait_for_connections(server, 0)
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connected(server))
        wait_for_connections(server, 8)
        with connected(server) as one_more:
            status, error = error_of(read_all(one_more))
        assert (status, error["code"]) == (503, "too_many_connections") and "max_connections=8" in error["message"]
    wait_for_connections(server, 0)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_leaves_within_the_body_is_no_traceback(server: InferenceServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        with connected(server) as raw:
            raw.sendall(HEAD + b"X-Request-Id: gone-1\r\nContent-Length: 1000\r\n\r\n{")
            wait_for_connections(server, 1)
            time.sleep(0.05)
        deadline = time.monotonic() + 30
        while not any("gone-1" in record.message for record in caplog.records):
            assert time.monotonic() < deadline
            time.sleep(0.005)
    (line,) = [record.message for record in caplog.records if "gone-1" in record.message]
    assert line.startswith("request_id=gone-1 POST '/v1/completions' 499")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]


def test_request_ids_go_in_and_out_and_into_the_log(server: InferenceServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mcore_inference.server"), httpx.Client(base_url=server.url) as http:
        own = http.post("/v1/completions", content=b"{", headers={"content-type": "application/json", "x-request-id": "job-7"})
        assert own.headers["x-request-id"] == own.json()["error"]["request_id"] == "job-7"
        request_ids = [http.get("/v1/models").headers["x-request-id"] for _ in range(2)]
        assert request_ids[0] != request_ids[1] and all(len(number) == 36 for number in request_ids)
        for bad in ("x" * 129, "two words", "a\tb", ""):
            assert http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req-")
        assert http.get("/nowhere").json()["error"]["request_id"].startswith("req-")
        stream = {"prompt": "x", "max_tokens": 2, "stream": True}
        assert http.post("/v1/completions", json=stream, headers={"x-request-id": "job-8"}).headers["x-request-id"] == "job-8"
        # The line of a request is written once its answer is out.
        while not any("request_id=job-8" in record.message for record in caplog.records):
            time.sleep(0.01)
    lines = [record.message for record in caplog.records]
    assert any(line.startswith("request_id=job-7 POST '/v1/completions' 400 ") for line in lines)
    assert any(line.startswith("request_id=job-8 POST '/v1/completions' 200 ") for line in lines)


def test_statuses_are_counted(server: InferenceServer) -> None:
    def count() -> float:
        return server_count(httpx.get(f"{server.url}/metrics").text, "404")

    before = count()
    httpx.get(f"{server.url}/nowhere")
    assert count() == before + 1


def server_count(text: str, status: str) -> float:
    name = f'mcore_inference_http_responses_total{{status="{status}"}} '
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize(
    "bad",
    [
        {"max_connections": 0},
        {"max_connections": 1.0},
        {"header_timeout_s": 0},
        {"body_timeout_s": float("nan")},
        {"idle_timeout_s": True},
        {"max_refused_per_s": 0},
        {"penalty_s": 0},
    ],
)
def test_limits_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        ConnectionLimits(**bad)


def test_a_body_that_is_no_http_is_400_while_the_application_answers(server: InferenceServer, caplog: pytest.LogCaptureFixture) -> None:
    """The route of /health asks for no body and answers at once, so both answers want the connection."""
    with caplog.at_level(logging.ERROR), connected(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: odd-1\r\nTransfer-Encoding: chunked\r\n\r\nnot hex\r\n")
        status, error = error_of(read_all(raw))
        assert (status, error["code"], error["request_id"]) == (400, "invalid_http", "odd-1")
        wait_for_connections(server, 0)
    assert not caplog.records


def test_a_body_that_is_no_http_behind_the_answer_cuts_the_connection(server: InferenceServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), connected(server) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        raw.sendall(b"not hex\r\n")
        assert b"HTTP" not in read_all(raw)
        wait_for_connections(server, 0)
    assert not caplog.records


@pytest.mark.journey
def test_requests_that_are_no_http_fill_no_log(server: InferenceServer, caplog: pytest.LogCaptureFixture) -> None:
    def send(count: int) -> None:
        for _ in range(count):
            with connected(server) as raw:
                raw.sendall(b"no HTTP\r\n\r\n")
                assert error_of(read_all(raw))[0] == 400

    # Whatever other tests have sent is more than a second ago.
    time.sleep(1.1)
    with caplog.at_level(logging.WARNING, "uvicorn.error"):
        begin = time.monotonic()
        send(40)
        seconds = time.monotonic() - begin
        time.sleep(1.1)
        send(1)
    lines = [record.getMessage() for record in caplog.records if record.name == "uvicorn.error"]
    assert 2 <= len(lines) <= 2 + seconds and lines[0].startswith("Invalid HTTP request received.")
    left_out = sum(int(line.partition("(")[2].split()[0]) for line in lines[1:] if "(" in line)
    assert len(lines) + left_out == 41 and all(line.endswith("more since this was last said)") for line in lines[1:] if "(" in line)


def test_a_prompt_of_more_tokens_than_fit_reaches_no_engine(server: InferenceServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.runner, "submit", None)
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1] * 257, "max_tokens": 1})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "257 tokens and max_sequence_length=256" in answer.json()["error"]["message"]


# -- addresses -----------------------------------------------------------------------------------------------------------


def test_an_address_is_over_its_limit_until_time_has_passed() -> None:
    limiter = RefusalLimiter(0.5)
    for second in range(5):
        assert not limiter.is_over("a", second / 100)
        limiter.count("a", second / 100)
    assert limiter.is_over("a", 0.05) and not limiter.is_over("b", 0.05)
    assert limiter.is_over("a", 1.9) and not limiter.is_over("a", 2.1)
    # Those that were refused last stay known, and no more than so many.
    for number in range(5000):
        limiter.count(str(number), 3.0)
    assert len(limiter._left) == 4096 and "4999" in limiter._left and "a" not in limiter._left


def connected_from(server: InferenceServer, address: str) -> Any:
    return contextlib.closing(socket.create_connection((server.host, server.port), timeout=30, source_address=(address, 0)))


REFUSED = {
    "no HTTP": (b"\0\1\2 nothing\r\n\r\n", b"HTTP/1.1 400"),
    "4xx of the application": (HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\n{]", b"HTTP/1.1 400"),
    "half a request": (HEAD + b"Content-Le", b""),
    "half a body": (HEAD + b"Content-Length: 10\r\n\r\n{", b""),
}


@pytest.mark.parametrize("kind", journeys_among(REFUSED, "no HTTP"))
def test_connections_of_an_address_that_is_refused_too_often_are_held_unread(make_model: Make, make_engine: Make, kind: str) -> None:
    request, begin = REFUSED[kind]
    limits = ConnectionLimits(max_refused_per_s=0.3, penalty_s=0.2, max_connections=8)
    model = make_model(vocab_size=272, dtype=torch.float32, layers=1)
    good = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with serve(make_engine(model, ByteTokenizer(), max_sequence_length=256), limits=ServerLimits(connections=limits)) as running:
        for _ in range(3):
            with connected_from(running, "127.0.0.2") as raw:
                raw.sendall(request)
                raw.shutdown(socket.SHUT_WR)
                assert read_all(raw).startswith(begin)
                wait_for_connections(running, 0)
        start = time.monotonic()
        with connected_from(running, "127.0.0.2") as raw:
            raw.sendall(good)
            assert read_all(raw) == b"" and time.monotonic() - start > 0.15
        # Others are served, and so is that address when it has been quiet.
        with connected_from(running, "127.0.0.1") as raw:
            raw.sendall(good)
            assert read_all(raw).startswith(b"HTTP/1.1 200")
        if kind != "no HTTP":
            return
        time.sleep(max(0.0, start + 3.4 - time.monotonic()))
        with connected_from(running, "127.0.0.2") as raw:
            raw.sendall(good)
            assert read_all(raw).startswith(b"HTTP/1.1 200")


def test_more_connections_than_may_be_held_are_closed_at_once(make_model: Make, make_engine: Make) -> None:
    limits = ConnectionLimits(max_refused_per_s=0.001, penalty_s=60, max_connections=8)
    model = make_model(vocab_size=272, dtype=torch.float32, layers=1)
    with serve(make_engine(model, ByteTokenizer(), max_sequence_length=256), limits=ServerLimits(connections=limits)) as running:
        with connected_from(running, "127.0.0.2") as raw:
            raw.sendall(b"\0\r\n\r\n")
            read_all(raw)
        wait_for_connections(running, 0)
        with connected_from(running, "127.0.0.2"), connected_from(running, "127.0.0.2"), connected_from(running, "127.0.0.2") as third:
            assert read_all(third) == b""
            # The end of the server does not wait for the two.
            start = time.monotonic()
            running.close()
            assert time.monotonic() - start < 20
