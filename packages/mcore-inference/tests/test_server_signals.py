# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Processes that serve, and the signals that end them."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, EngineDeadError, InferenceConfig, PagedAttention
from mcore_inference.server import StopSignals, serve
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.commands import Command

BODY = {"prompt": "x", "temperature": 0, "ignore_eos": True}


def serve_slowly(words: list[str]) -> int:
    """The model pauses in each step, so that a request lasts as long as a test wants; "fail" makes all later steps raise.

    Anything else as the third word is a path: a step waits until it exists.
    """
    pause_s, drain_s, kind = float(words[0]), float(words[1]), words[2]
    torch.set_num_threads(1)
    config = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, vocab_size=272)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention()).eval()
    sizes = InferenceConfig(max_sequence_length=512, num_blocks=64, block_size_tokens=16, max_requests=4, max_tokens=64)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), ByteTokenizer())

    def before(*_: object) -> None:
        time.sleep(pause_s)
        if kind == "fail":
            raise RuntimeError("device lost")
        while kind and not os.path.exists(kind):
            time.sleep(0.01)

    model.register_forward_pre_hook(before)
    with StopSignals() as signals:
        server = serve(engine)
        print(server.url, flush=True)
        try:
            server.wait(signals, drain_s=drain_s)
        except EngineDeadError as error:
            sys.exit(str(error))
    return 0


@dataclass
class Serving:
    process: Command
    url: str
    answers: list[httpx.Response | Exception] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)

    def ask(self, max_tokens: int) -> None:
        """Send a request from a thread of its own, and return once the engine has it."""

        def call() -> None:
            try:
                self.answers.append(httpx.post(f"{self.url}/v1/completions", json={**BODY, "max_tokens": max_tokens}, timeout=60))
            except Exception as error:
                self.answers.append(error)

        before = self.unfinished()
        self.threads.append(threading.Thread(target=call))
        self.threads[-1].start()
        wait_until(lambda: self.unfinished() > before)

    def unfinished(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=60).json()["unfinished_requests"]

    def is_closed(self) -> bool:
        try:
            httpx.get(f"{self.url}/health", timeout=60)
        except httpx.HTTPError:
            return True
        return False

    def end(self) -> tuple[int, str]:
        """Exit status, and what stands in stderr."""
        status = self.process.wait()
        for thread in self.threads:
            thread.join(60)
        return status, self.process.errors


def wait_until(happened) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def serving(pause_s: float, drain_s: float, kind: str = "") -> Iterator[Serving]:
    with Command(serve_slowly, [str(pause_s), str(drain_s), kind]) as process:
        yield Serving(process, process.until("http://").strip())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_end_and_refuses_new_ones(number: signal.Signals, tmp_path: Path) -> None:
    with serving(pause_s=0.0, drain_s=50, kind=str(tmp_path / "go on")) as running:
        running.ask(max_tokens=30)
        os.kill(running.process.pid, number)
        wait_until(running.is_closed)
        assert running.process.is_running(), "it waits for the request"
        (tmp_path / "go on").touch()
        status, errors = running.end()
    assert (status, errors) == (0, "")
    (answer,) = running.answers
    assert isinstance(answer, httpx.Response) and answer.status_code == 200, answer
    assert answer.json()["usage"]["completion_tokens"] == 30


@pytest.mark.journey
def test_at_the_end_of_the_time_requests_get_an_error_and_silent_clients_are_cut() -> None:
    with serving(pause_s=0.05, drain_s=0.3) as running:
        running.ask(max_tokens=500)
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as silent:
            silent.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nContent-Type: application/json\r\n\r\n"
            )
            begin = time.monotonic()
            running.process.terminate()
            status, errors = running.end()
    assert (status, errors) == (0, "") and time.monotonic() - begin < 20
    (answer,) = running.answers
    assert isinstance(answer, httpx.Response) and answer.status_code == 503, answer
    assert json.loads(answer.text)["error"]["code"] == "EngineDeadError"


def test_a_second_signal_ends_the_patience() -> None:
    with serving(pause_s=0.05, drain_s=1000) as running:
        running.ask(max_tokens=500)
        running.process.terminate()
        wait_until(running.is_closed)
        os.kill(running.process.pid, signal.SIGINT)
        status, errors = running.end()
    assert (status, errors) == (0, "")
    assert isinstance(running.answers[0], httpx.Response) and running.answers[0].status_code == 503


def test_an_engine_that_fails_again_and_again_ends_the_process() -> None:
    with serving(pause_s=0.0, drain_s=30, kind="fail") as running:
        for _ in range(3):
            answer = httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=60)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "StepFailedError")
        status, errors = running.end()
    assert status == 1 and "device lost" in errors.splitlines()[-1]


def test_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals.count == 2
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    counts: list[int] = []

    def elsewhere() -> None:
        with StopSignals() as signals:
            counts.append(signals.count)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert counts == [0]
