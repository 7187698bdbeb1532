# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Two servers of a tiny engine, and requests and clients of them in processes of their own."""

import contextlib
import dataclasses
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_inference import EngineRunner
from mcore_inference.coordinator import (
    CoordinatedRunner,
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
)
from mcore_inference.server import ConnectionLimits, InferenceServer, ServerLimits, serve, serve_runner
from mcore_parallel.data import ByteTokenizer
from mcore_tools.serving import frozen_heap, short_turns
from tests.campaigns._serving_clients import http_request
from tests.campaigns._serving_cores import Cores
from tests.campaigns._serving_engine import engines_apart, make_engine

__all__ = ["GOOD", "Figures", "Service", "answer", "beside", "ended", "lost", "quiet", "served", "started"]

Figures = dict[str, Any]
GOOD = {"prompt": "a good request", "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Service:
    """Two servers, and what they must leave free."""

    runners: list[EngineRunner]
    coordinator: DataParallelInferenceCoordinator
    ports: list[int]
    """Of HTTP: of the first engine itself, and of the coordinator over the second; or of one over engines of other processes only."""
    cores: Cores
    text: str = ""
    """What a good request is answered."""

    @property
    def coordinator_port(self) -> int:
        return int(self.coordinator.address.rsplit(":", 1)[1])

    def left(self) -> list[str]:
        """What is still held when nobody asks for anything: waited for up to 10 s, because an abort takes a step."""
        deadline = time.monotonic() + 10
        while True:
            held = [
                f"engine {index}: {runner.engine.context.allocator.total_used} blocks"
                for index, runner in enumerate(self.runners)
                if runner.engine.context.allocator.total_used
            ]
            held += [
                f"engine {index} has requests"
                for index, runner in enumerate(self.runners)
                if runner.engine.has_unfinished_requests() or runner.health().unfinished_requests
            ]
            held += [f"{self.coordinator.num_open_requests} open at the coordinator"] if self.coordinator.num_open_requests else []
            if not held or time.monotonic() > deadline:
                return held
            time.sleep(0.02)


@contextlib.contextmanager
def served(cores: Cores, max_refused_per_s: float | None = None, engine_processes: int = 0) -> Iterator[Service]:
    """The servers, over engines of this process or over so many processes of one engine each."""
    limits = ServerLimits(connections=ConnectionLimits(max_refused_per_s=max_refused_per_s))
    security = CoordinatorSecurity(secret="of the campaign")
    with contextlib.ExitStack() as stack:
        runners: list[EngineRunner] = []
        servers: list[InferenceServer] = []
        if not engine_processes:
            servers.append(stack.enter_context(serve(make_engine(), limits=limits)))
            assert isinstance(servers[0].runner, EngineRunner)
            runners += [servers[0].runner, stack.enter_context(EngineRunner(make_engine()))]
        coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(security=security)))
        if engine_processes:
            stack.enter_context(engines_apart(engine_processes, coordinator.address, security.secret))
        else:
            stack.enter_context(EngineWorker(runners[1], coordinator.address, name="dp-0", security=security))
        coordinator.wait_for_engines(engine_processes or 1, 120)
        over = serve_runner(lambda: CoordinatedRunner(coordinator.address, security=security), ByteTokenizer(), limits=limits)
        servers.append(stack.enter_context(over))
        service = Service(runners, coordinator, [server.port for server in servers], cores)
        # As in the process of mcore serve.
        stack.enter_context(short_turns())
        stack.enter_context(frozen_heap())
        texts = {json.loads(answer(port, http_request(GOOD))[1])["choices"][0]["text"] for port in service.ports}
        assert len(texts) == 1, texts
        yield dataclasses.replace(service, text=texts.pop())


def answer(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body of a request whose connection the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(request)
        received = b""
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(65536):
                received += part
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


def started(kind: str, ports: Sequence[int], cores: Sequence[int], **plan: Any) -> subprocess.Popen[str]:
    """A process of clients of a kind, on these cores."""
    everything = {"kind": kind, "ports": list(ports), "cores": list(cores), **plan}
    command = [sys.executable, "-m", "tests.campaigns._serving_clients", json.dumps(everything)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ended(client: subprocess.Popen[str]) -> Figures:
    """Ends its stdin and reads its figures."""
    said, _ = client.communicate()
    if client.returncode:
        raise RuntimeError(f"a client of the campaign ended with {client.returncode}")
    return json.loads(said)


def beside(service: Service, rate: float, attack: Callable[[], Any], kind: str = "steady") -> tuple[Figures, Any]:
    """The steady requests' figures while ``attack`` runs, and what it returned."""
    steady = started(kind, service.ports, service.cores.good, rate=rate, body=GOOD, text=service.text)
    try:
        result = attack()
    finally:
        figures = ended(steady)
    return figures, result


def quiet(service: Service, seconds: float, rate: float) -> Figures:
    """Good requests and nothing else."""
    figures, _ = beside(service, rate, lambda: time.sleep(seconds))
    return {**figures, "problems": lost(figures)}


def lost(steady: Figures) -> list[str]:
    """The problem that good requests were lost."""
    return [f"{steady['lost']} good requests lost: {steady['examples']}"] if steady["lost"] else []
