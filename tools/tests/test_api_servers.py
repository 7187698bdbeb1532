# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Several processes that answer HTTP at one address: they count as one, and what becomes of the service when one ends or hangs."""

import asyncio
import contextlib
import functools
import json
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from mcore_inference import EngineDeadError, EngineRunner
from mcore_inference.coordinator import (
    CoordinatedRunner,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
)
from mcore_inference.server import ConnectionLimits, GroupMember, InferenceServer, ServerGroup, ServerLimits, StopSignals, serve_runner
from mcore_inference.server._group import _FIRST_STATUS, _ROW
from mcore_parallel.data import ByteTokenizer
from mcore_tools.recipes import override, recipe
from mcore_tools.serving import ApiServers, ApiServersError, CoordinatedEngines, _api_servers, build_engine
from tests.support.world import start_server

NUM_SERVERS, MAX_CONNECTIONS = 2, 40
LONG = 200
KEY = {"Authorization": "Bearer key"}
CLIENT = httpx.Client(timeout=60)


def serve_tiny(run: Callable[[], CoordinatedRunner], member: GroupMember) -> InferenceServer:
    limits = ServerLimits(connections=ConnectionLimits(max_connections=MAX_CONNECTIONS))
    return serve_runner(run, ByteTokenizer(), model_name="tiny", limits=limits, token="key", member=member)


def end(run: object, member: object) -> InferenceServer:
    os._exit(3)


def refuse(run: object, member: object) -> InferenceServer:
    raise ValueError("no such parser")


@pytest.fixture(scope="module")
def coordinator() -> Iterator[DataParallelInferenceCoordinator]:
    """With one engine, of this process."""
    sizes = ("model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=272", "train.dtype=float32")
    config = override(recipe("gpt_tiny"), [*sizes, "train.seq_len=256"])
    torch.manual_seed(0)
    engine = build_engine(config, ByteTokenizer(), "cpu")
    with (
        DataParallelInferenceCoordinator() as coordinator,
        EngineRunner(engine) as runner,
        EngineWorker(runner, coordinator.address, name="dp-0"),
    ):
        coordinator.wait_for_engines(1)
        yield coordinator


class Service:
    """API servers, and what waits for them, in a thread."""

    def __init__(self, serve: Any, coordinator: DataParallelInferenceCoordinator, drain_s: float) -> None:
        self.engines = CoordinatedEngines(coordinator.address, CoordinatorSecurity())
        # Nobody listens to signals: tests count.
        self.signals = StopSignals()
        self.group = ServerGroup("127.0.0.1", 0, NUM_SERVERS)
        self.servers = ApiServers(serve, self.group, drain_s=drain_s)
        self.error: Exception | None = None
        self.is_open = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with self.servers:
                self.servers.wait(self.engines, self.signals, on_open=self.is_open.set)
        except Exception as error:
            self.error = error

    @property
    def processes(self) -> list[Any]:
        return [server.process for server in self.servers._servers]

    def num_answers(self) -> list[int]:
        """Of each server."""
        return [sum(self.group.cells[index * _ROW + _FIRST_STATUS : (index + 1) * _ROW]) for index in range(NUM_SERVERS)]

    def join(self, timeout_s: float = 60.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def service(coordinator: DataParallelInferenceCoordinator, serve: Any = serve_tiny, *, drain_s: float = 60.0) -> Iterator[Service]:
    """Processes are forked from the worlds' server, which has torch loaded."""
    start_server()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_api_servers, "_SPAWNED", multiprocessing.get_context("forkserver"))
        running = Service(serve, coordinator, drain_s)
        try:
            yield running
        finally:
            running.signals.count += 2
            running.join()


@pytest.fixture(scope="module")
def running(coordinator: DataParallelInferenceCoordinator) -> Iterator[Service]:
    with service(coordinator) as running:
        assert running.is_open.wait(60), running.error
        yield running


def until(holds: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def complete(service: Service, number: int, *, tokens: int = 8) -> tuple[str, str, str]:
    """A stream by a connection of its own: id of the request, id of the completion, and its text, once it is whole."""
    body = {"prompt": f"prompt {number}", "max_tokens": tokens, "seed": number, "temperature": 1.0, "ignore_eos": True, "stream": True}
    texts, ends, ids = [], 0, set()
    with CLIENT.stream("POST", f"{service.group.url}/v1/completions", json=body, headers={"Connection": "close", **KEY}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                ends += 1
            elif line:
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                ids.add(chunk["id"])
                texts.append(chunk["choices"][0]["text"])
        assert ends == 1
        (number_of_completion,) = ids
        return answer.headers["x-request-id"], number_of_completion, "".join(texts)


def get(service: Service, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """By a connection of its own, so by whichever server is free."""
    return CLIENT.get(f"{service.group.url}{path}", headers={"Connection": "close", **(headers or {})})


def are_all_asked(service: Service, before: list[int]) -> bool:
    """Whether each server gave answers since it had given so many."""
    return all(after > own for after, own in zip(service.num_answers(), before, strict=True))


def metric(service: Service, name: str) -> float:
    for line in get(service, "/metrics", KEY).text.splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    return 0.0


@pytest.mark.journey
def test_requests_are_spread_and_every_stream_is_whole_under_an_id_of_its_own(running: Service) -> None:
    before = running.num_answers()
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(functools.partial(complete, running), range(36)))
        until(lambda: sum(running.num_answers()) - sum(before) == 36, "all are counted")
        # Those that have fewer take the next, if they get a core: on a machine that is full that may be one for long.
        until(lambda: all(pool.map(functools.partial(complete, running), range(12))) and are_all_asked(running, before), "both answer")
    for ids in list(zip(*answers, strict=True))[:2]:
        assert len(set(ids)) == 36
    # Whichever answers: the same text for the same seed.
    assert complete(running, 5)[2] == answers[5][2] and len({text for *_, text in answers}) > 30


def test_whichever_answers_metrics_are_of_all_and_so_are_models_and_health(running: Service) -> None:
    complete(running, 1)
    until(lambda: metric(running, "mcore_inference_open_requests") == 0, "it has ended")
    name = 'mcore_inference_http_responses_total{status="200"}'
    before = running.num_answers()
    values = [metric(running, name) for _ in range(40)]
    until(lambda: get(running, "/health").status_code == 200 and are_all_asked(running, before), "both were asked")
    # Each counts those before, all but one that may not have returned yet; so may the first, which counts one less then.
    assert all(values[0] + number - 1 <= value <= values[0] + number + 1 for number, value in enumerate(values))
    # Engines report at a heartbeat.
    until(lambda: metric(running, "mcore_inference_generated_tokens_total") >= 8, "its tokens are counted")
    models = {get(running, "/v1/models", KEY).text for _ in range(20)}
    assert len(models) == 1
    assert {get(running, "/v1/models").status_code for _ in range(8)} == {401}
    assert {get(running, "/health").status_code for _ in range(8)} == {200}


def test_the_limit_on_connections_is_that_of_all_together(running: Service) -> None:
    counts = running.group.counts()
    until(lambda: counts.connections == 0, "none is left of other tests")
    with contextlib.ExitStack() as stack:
        for number in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection((running.group.host, running.group.port)))
            until(lambda number=number: counts.connections == number + 1, "it is open")
        answer = get(running, "/health")
        assert answer.status_code == 503 and f"max_connections={MAX_CONNECTIONS}" in answer.text
    until(lambda: counts.connections == 0, "all are closed")
    assert get(running, "/health").status_code == 200


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.journey)])
def test_a_server_that_ends_or_hangs_is_replaced_and_its_requests_end(
    how: signal.Signals,
    running: Service,
    coordinator: DataParallelInferenceCoordinator,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_api_servers, "_HUNG_S", 2.0)
    monkeypatch.setattr(_api_servers, "_EARLY_S", 0.0)
    answered = sum(running.num_answers())
    with ThreadPoolExecutor(MAX_CONNECTIONS) as pool, caplog.at_level(logging.ERROR, "mcore_tools.serving"):
        streams = []
        while not all(running.group.cells[index * _ROW] for index in range(NUM_SERVERS)):
            streams.append(pool.submit(complete, running, len(streams), tokens=LONG))
            time.sleep(0.05)
        until(lambda: coordinator.num_open_requests > 0, "they are under way")
        lost, other = running.processes
        os.kill(lost.pid, how)
        words = "ended with exit code -9" if how is signal.SIGKILL else "gave no sign of life for 2 s"
        until(lambda: f"API server 0 (process {lost.pid}) {words} and is started again" in caplog.text, "it is missed")
        # A connection that waited for nobody in particular is answered meanwhile.
        assert get(running, "/health").status_code == 200
        ends = [stream.exception(60) for stream in streams]
    assert all(error is None or isinstance(error, httpx.TransportError) for error in ends), ends
    assert 0 < sum(error is None for error in ends) < len(ends)
    # Those of the lost one are given up, and not computed to their end for nobody: the engine is free.
    until(lambda: coordinator.num_open_requests == 0, "nobody waits for anything")
    until(lambda: running.servers._servers[0].is_ready, "another took its place")
    assert running.processes[0].pid != lost.pid and running.processes[1].pid == other.pid
    until(lambda: running.group.counts().connections == 0, "those of the lost one do not count, and the other's are closed")
    assert sum(running.num_answers()) >= answered
    with ThreadPoolExecutor(12) as pool:
        assert len(list(pool.map(functools.partial(complete, running), range(12)))) == 12


@pytest.mark.journey
def test_a_signal_lets_open_streams_end_and_refuses_new_connections(coordinator: DataParallelInferenceCoordinator) -> None:
    with service(coordinator) as ending, ThreadPoolExecutor(8) as pool:
        assert ending.is_open.wait(60), ending.error
        streams = [pool.submit(complete, ending, number, tokens=LONG) for number in range(8)]
        until(lambda: coordinator.num_open_requests == 8, "all are under way")
        processes = ending.processes
        ending.signals.count = 1
        until(lambda: refused(ending), "nobody listens")
        assert all(len(stream.result(60)[2]) >= 1 for stream in streams)
        ending.join()
        assert ending.error is None and [process.exitcode for process in processes] == [0, 0]


@pytest.mark.journey
def test_two_signals_at_once_end_the_patience(coordinator: DataParallelInferenceCoordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    async def control(call: Callable[[InferenceClient], Any]) -> None:
        async with InferenceClient(coordinator.address) as client:
            await call(client)

    # Servers that wait for the end of their streams are not killed.
    monkeypatch.setattr(_api_servers, "_LAST_ANSWERS_S", 50.0)
    with service(coordinator, drain_s=1000.0) as ending, ThreadPoolExecutor(8) as pool:
        assert ending.is_open.wait(60), ending.error
        asyncio.run(control(InferenceClient.pause_engines))
        try:
            streams = [pool.submit(complete, ending, number) for number in range(8)]
            until(lambda: coordinator.num_open_requests == 8, "all are under way")
            processes = ending.processes
            ending.signals.count = 2
            errors = [str(stream.exception(60)) for stream in streams]
            assert all("EngineDeadError" in error for error in errors), errors
            ending.join()
        finally:
            asyncio.run(control(InferenceClient.unpause_engines))
        assert ending.error is None and [process.exitcode for process in processes] == [0, 0]


def refused(service: Service) -> bool:
    try:
        socket.create_connection((service.group.host, service.group.port)).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.journey
def test_when_engines_are_given_up_open_requests_are_told_and_all_servers_end(coordinator: DataParallelInferenceCoordinator) -> None:
    with service(coordinator) as ending, ThreadPoolExecutor(8) as pool:
        assert ending.is_open.wait(60), ending.error
        streams = [pool.submit(complete, ending, number, tokens=LONG) for number in range(8)]
        until(lambda: coordinator.num_open_requests == 8, "all are under way")
        processes = ending.processes
        ending.engines.fail("all engines are given up")
        for stream in streams:
            assert "all engines are given up" in str(stream.exception(60))
        ending.join()
        assert isinstance(ending.error, EngineDeadError) and "all engines are given up" in str(ending.error)
        assert [process.exitcode for process in processes] == [75, 75]


def test_a_server_hangs_after_many_looks_without_a_beat_and_not_after_all_were_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_api_servers, "_HUNG_S", 1.0)
    with contextlib.closing(ServerGroup("127.0.0.1", 0, 1)) as group:
        server: Any = _api_servers._ApiServer(end, group.member(0), 0.0)
        server.process, server.is_ready = SimpleNamespace(exitcode=None, pid=7), True
        server._pipe = SimpleNamespace(send=lambda message: None)
        server.open(CoordinatedEngines("tcp://127.0.0.1:1", CoordinatorSecurity()))
        for _ in range(3):
            group.counts().beat()
            # An hour between two looks says nothing.
            begin = time.monotonic()
            monkeypatch.setattr(time, "monotonic", lambda begin=begin: begin + 3600.0)
            assert [server.look() for _ in range(9)] == [None] * 9
        ends = [server.look() for _ in range(3)]
        assert "API server 0 (process 7) gave no sign of life for 1 s" in ends


def test_servers_that_end_again_and_again_end_the_service_by_name(
    coordinator: DataParallelInferenceCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    with service(coordinator, end) as ending:
        ending.join()
        assert isinstance(ending.error, ApiServersError)
        assert "ended with exit code 3, 3 times within a minute of its start; nothing is served any more" in str(ending.error)
        assert refused(ending) and not ending.is_open.is_set()


def test_what_a_server_refuses_at_its_start_is_refused_in_its_words(coordinator: DataParallelInferenceCoordinator) -> None:
    with service(coordinator, refuse) as ending:
        ending.join()
        assert isinstance(ending.error, ValueError) and str(ending.error) == "no such parser"
