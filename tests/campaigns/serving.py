# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Servers under attack: hostile bytes, clients that leave or hold on, oversize requests, killed engines, suspends, new weights, long use.

A tiny engine serves twice, by its own HTTP server and by one over a coordinator. Every client is in a process of its own. Where there are
eight cores and more, servers, clients whose requests are timed, and all other clients have cores of their own.

python -m tests.campaigns.serving --frames 100000 --output docs/benchmarks/serving_trust.json
python -m tests.campaigns.serving --only-attack --engine-processes 1 --frames 1000000 --attack-seconds 30 --seconds 30 --rate 50 \\
    --attackers 4 --rounds 5 --output docs/benchmarks/serving_attack_cores.json
python -m tests.campaigns.serving --soak-minutes 120 --rate 5 --output docs/benchmarks/serving_soak.json
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
from tests.campaigns._serving_changes import killed_engines, suspended, swapped_weights
from tests.campaigns._serving_clients import http_request
from tests.campaigns._serving_cores import FEWEST, Cores, assigned, physical_core
from tests.campaigns._serving_engine import engines_apart, make_engine
from tests.campaigns._serving_soak import soaked
from tools.bench._record import record

__all__ = ["main"]

Figures = dict[str, Any]
_GOOD = {"prompt": "a good request", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
_MAX_GROWTH_BYTES = 8 * 2**20


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
def _service(cores: Cores, max_refused_per_s: float | None = None, engine_processes: int = 0) -> Iterator[Service]:
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
        texts = {json.loads(_answer(port, http_request(_GOOD))[1])["choices"][0]["text"] for port in service.ports}
        assert len(texts) == 1, texts
        yield dataclasses.replace(service, text=texts.pop())


def _answer(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body of a request whose connection the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        with contextlib.suppress(ConnectionError):
            raw.sendall(request)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(65536):
                answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, body


# -- clients in processes of their own ---------------------------------------------------------------------------------


def _start(kind: str, ports: Sequence[int], cores: Sequence[int], **plan: Any) -> subprocess.Popen[str]:
    everything = {"kind": kind, "ports": list(ports), "cores": list(cores), **plan}
    command = [sys.executable, "-m", "tests.campaigns._serving_clients", json.dumps(everything)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _end(client: subprocess.Popen[str]) -> Figures:
    """Ends its stdin and reads its figures."""
    said, _ = client.communicate()
    if client.returncode:
        raise RuntimeError(f"a client of the campaign ended with {client.returncode}")
    return json.loads(said)


def _beside(service: Service, rate: float, attack: Callable[[], Any], kind: str = "steady") -> tuple[Figures, Any]:
    """The steady requests' figures while ``attack`` runs, and what it returned."""
    steady = _start(kind, service.ports, service.cores.good, rate=rate, body=_GOOD, text=service.text)
    try:
        result = attack()
    finally:
        figures = _end(steady)
    return figures, result


# -- trials ------------------------------------------------------------------------------------------------------------


def _quiet(service: Service, seconds: float, rate: float) -> Figures:
    figures, _ = _beside(service, rate, lambda: time.sleep(seconds))
    return {**figures, "problems": _lost(figures)}


def _lost(steady: Figures) -> list[str]:
    return [f"{steady['lost']} good requests lost: {steady['examples']}"] if steady["lost"] else []


def _flood(
    cores: Sequence[int],
    ports: list[int],
    coordinator_port: int,
    frames: int,
    seed: int,
    seconds: float,
    attackers: int,
    rates: tuple[float, float] = (0, 0),
) -> list[Figures]:
    """Messages to a coordinator's port and to HTTP ports, at once and at rates of their own; 0 for as fast as may be."""
    plan = {"count": frames // 2, "seed": seed, "seconds": seconds}
    http = _start("hostile_http", ports, cores, attackers=attackers, per_s=rates[1], **plan)
    return [_end(_start("hostile_coordinator", [coordinator_port], cores, per_s=rates[0], **plan)), _end(http)]


def _elsewhere(service: Service, hostile: Figures, rate: float, seed: int, attackers: int) -> Figures:
    """What the senders of ``hostile`` alone cost the good requests: they send as much, as fast, to a process that drops it."""
    sink = _start("sink", [], service.cores.others)
    assert sink.stdout is not None
    try:
        http, coordinator = json.loads(sink.stdout.readline())
        counts, seconds = (hostile["frames"], hostile["http_requests"]), hostile["attack_s"]

        def attack() -> list[Figures]:
            rates = counts[0] / seconds, counts[1] / seconds
            return _flood(service.cores.others, [http], coordinator, 2 * max(counts), seed, seconds, attackers, rates)

        steady, (frames_sent, requests_sent) = _beside(service, rate, attack)
    finally:
        sunk = _end(sink)
    sent = {"frames": frames_sent["count"], "http_requests": requests_sent["count"], "sink_cpu_s": sunk["cpu_s"]}
    return {**sent, "good": steady, "problems": _lost(steady) + service.left()}


def _attacked(service: Service, options: argparse.Namespace) -> dict[str, Figures]:
    """Without attack, under one, and beside its senders, in turn; and how the good requests' p99 compare, by the median round."""
    names = "without attack", "hostile bytes", "senders elsewhere"
    rounds: list[list[Figures]] = []
    for number in range(options.rounds):
        seed = options.seed + number
        quiet = _quiet(service, options.seconds, options.rate)
        hostile = _hostile(service, options.frames, options.rate, seed, options.attack_seconds, options.attackers)
        rounds.append([quiet, hostile, _elsewhere(service, hostile, options.rate, seed, options.attackers)])
    trials: dict[str, Figures] = {}
    for name, figures in zip(names, zip(*rounds, strict=True), strict=True):
        problems = [problem for each in figures for problem in each.pop("problems")]
        trials[name] = {**figures[0], "problems": problems} if options.rounds == 1 else {"rounds": list(figures), "problems": problems}
    p99 = [[quiet["p99_ms"], hostile["good"]["p99_ms"], sent["good"]["p99_ms"]] for quiet, hostile, sent in rounds]
    ratios = {name: round(statistics.median(row[index] / row[0] for row in p99), 2) for index, name in enumerate(names) if index}
    return {**trials, "p99 to that without attack": {**ratios, "problems": []}}


def _hostile(service: Service, frames: int, rate: float, seed: int, seconds: float, attackers: int) -> Figures:
    """Half of the messages to the HTTP ports, half to the coordinator's."""

    def attack() -> list[Figures]:
        return _flood(service.cores.others, service.ports, service.coordinator_port, frames, seed, seconds, attackers)

    begin, used = time.monotonic(), time.process_time()
    steady, (frames_sent, requests_sent) = _beside(service, rate, attack)
    used, attack_s = time.process_time() - used, time.monotonic() - begin
    problems = _lost(steady) + service.left()
    sent = frames_sent["count"] + requests_sent["count"]
    return {
        "frames": frames_sent["count"],
        "http_requests": requests_sent["count"],
        "http_statuses": requests_sent["statuses"],
        "attack_s": round(attack_s, 2),
        "per_s": round(sent / attack_s, 1),
        "server_cpu_s": round(used, 2),
        "good": steady,
        "problems": problems
        + [f"{count} answers {status}" for status, count in requests_sent["statuses"].items() if status.startswith("5")],
    }


def _leaving(service: Service, aborts: int, seed: int) -> Figures:
    figures = _end(_start("leaving", service.ports, service.cores.others, count=aborts, seed=seed))
    left = service.left()
    return {**figures, "blocks_leaked": sum(runner.engine.context.allocator.total_used for runner in service.runners), "problems": left}


def _slow(service: Service, clients: int, seconds: float, rate: float) -> Figures:
    slow = _start("slow", service.ports, service.cores.others, count=clients)
    try:
        steady, _ = _beside(service, rate, lambda: time.sleep(seconds))
    finally:
        _end(slow)
    return {"slow_clients": clients, "good": steady, "problems": _lost(steady) + service.left()}


def _oversize_requests() -> dict[str, bytes]:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    whole = 5 * 2**20
    fields: dict[str, Any] = {
        "prompt": "x" * 2**20,
        "prompt of tokens": [1] * 2**18,
        "n": 10**6,
        "stop": ["x"] * 10**5,
        "stop of one": "x" * 10**6,
        "logit_bias": {str(token): 1.0 for token in range(10**5)},
        "max_tokens": 10**12,
        "max_tokens of many digits": int("9" * 4000),
        "logprobs": 10**9,
        "stop_token_ids": list(range(10**5)),
        "metadata": {str(index): "x" for index in range(10**5)},
        "nested": None,
    }
    requests = {
        "header": head + b"X-Long: " + b"x" * 2**20 + b"\r\n\r\n",
        "headers": head + b"".join(b"X-%d: x\r\n" % index for index in range(10**5)) + b"\r\n",
        "path": b"GET /" + b"x" * 2**20 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "body declared": head + b"Content-Length: 1000000000000\r\n\r\n" + b" " * 1000,
        "body": head + b"Content-Length: %d\r\n\r\n" % whole + b" " * whole,
        "chunk": head + b"Transfer-Encoding: chunked\r\n\r\nffffffffff\r\n" + b" " * 17 * 2**20,
    }
    for name, value in fields.items():
        if name == "nested":
            data = b'{"prompt": ' + b"[" * 10**6 + b"1" + b"]" * 10**6 + b"}"
            requests[name] = head + b"Content-Length: %d\r\n\r\n" % len(data) + data
        else:
            requests[name] = http_request({"prompt": "x", name.partition(" of ")[0]: value})
    return requests


def _oversize(service: Service, repeats: int, limit_ms: float) -> Figures:
    """Each oversize request so many times: the median of the time to its whole answer."""
    results, problems = {}, []
    for name, request in _oversize_requests().items():
        seconds, statuses = [], set()
        for index in range(repeats):
            begin = time.perf_counter()
            statuses.add(_answer(service.ports[index % 2], request)[0])
            seconds.append(time.perf_counter() - begin)
        results[name] = {"status": sorted(statuses), "median_ms": round(1e3 * statistics.median(seconds), 1)}
        if not all(400 <= status < 500 for status in statuses):
            problems.append(f"oversize {name}: {sorted(statuses)}")
        if results[name]["median_ms"] > limit_ms:
            problems.append(f"oversize {name}: {results[name]['median_ms']} ms")
    for port in service.ports:
        if _answer(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] != 200:
            problems.append("a server is not healthy afterwards")
    return {"repeats": repeats, "requests": results, "problems": problems + service.left()}


def _memory(service: Service, requests: int) -> Figures:
    """Resident bytes after a first half, which warms caches, and after the second."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    failed, sizes = 0, []
    for _ in range(2):
        failed += _end(_start("many", service.ports, service.cores.others, count=requests // 2, body=_GOOD))["failed"]
        sizes.append(resident())
    growth = sizes[1] - sizes[0]
    problems = [f"{failed} requests failed"] * bool(failed) + [f"{growth} bytes more after {requests // 2} requests"] * (
        growth > _MAX_GROWTH_BYTES
    )
    return {"requests": requests, "growth_kb_of_the_second_half": growth // 1024, "problems": problems + service.left()}


def _soak(service: Service, minutes: float, every_s: float, rate: float) -> Figures:
    """Whole answers, streams, refusals and clients that leave, in turn, for long."""
    figures = soaked(60 * minutes, every_s, lambda sample: _beside(service, rate, sample, "mixed"))
    return {**figures, "problems": figures["problems"] + _lost(figures["good"]) + service.left()}


def _run(options: argparse.Namespace, cores: Cores) -> Figures:
    trials: dict[str, Figures] = {}
    if options.soak_minutes:
        with _service(cores, options.max_refused_per_s) as service:
            return {"soak": _soak(service, options.soak_minutes, options.sample_seconds, options.rate)}
    with _service(cores, options.max_refused_per_s, options.engine_processes) as service:
        if options.only_attack:
            return _attacked(service, options)
        trials["without attack"] = _quiet(service, options.seconds, options.rate)
        trials["hostile bytes"] = _hostile(service, options.frames, options.rate, options.seed, options.attack_seconds, options.attackers)
        trials["clients that leave"] = _leaving(service, options.aborts, options.seed)
        trials["slow clients"] = _slow(service, options.slow_clients, options.seconds, options.rate)
        trials["oversize requests"] = _oversize(service, options.repeats, options.oversize_ms)
        trials["suspends"] = suspended(service.runners[0], options.swaps, options.seed)
        trials["weights"] = swapped_weights(service.runners[0], options.swaps, options.seed)
        trials["memory"] = _memory(service, options.requests)
    trials["killed engines"] = killed_engines(options.kills, options.seed)
    return trials


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign, write its figures, return 1 where something was lost, leaked or late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in {
        "frames": 100_000,
        "aborts": 2000,
        "kills": 50,
        "swaps": 200,
        "repeats": 20,
        "slow-clients": 100,
        "requests": 5000,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seconds", type=float, default=30, help="of the trial without attack, and of the slow clients")
    parser.add_argument("--oversize-ms", type=float, default=50, help="limit of the median time to refuse an oversize request")
    parser.add_argument("--rate", type=float, default=20, help="good requests a second")
    parser.add_argument("--attackers", type=int, default=1, help="connections with hostile bytes at once, all of one address")
    parser.add_argument("--attack-seconds", type=float, default=0, help="end the attack then, whatever was sent; 0 to send all --frames")
    parser.add_argument("--rounds", type=int, default=1, help="of --only-attack, whose trials take turns")
    parser.add_argument("--max-refused-per-s", type=float, default=None, help="as of ConnectionLimits; good clients have another address")
    parser.add_argument(
        "--only-attack", action="store_true", help="the trials without attack, of hostile bytes, and of their senders alone"
    )
    parser.add_argument(
        "--engine-processes",
        type=int,
        default=0,
        help="of --only-attack: serve by so many engines behind a coordinator, as --data-parallel does",
    )
    parser.add_argument("--soak-minutes", type=float, default=0, help="serve a steady load for so long, and nothing else")
    parser.add_argument("--sample-seconds", type=float, default=30, help="of the soak, between two looks at memory, tasks and descriptors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.soak_minutes and 60 * options.soak_minutes < 8 * options.sample_seconds:
        parser.error(f"--soak-minutes {options.soak_minutes:g} has less than 8 samples; lower --sample-seconds {options.sample_seconds:g}")
    if options.engine_processes and not options.only_attack:
        parser.error(f"--engine-processes {options.engine_processes} is of --only-attack; the other trials look into the engines")
    torch.set_num_threads(1)
    start, load, available = time.monotonic(), os.getloadavg()[0], os.sched_getaffinity(0)
    cores = assigned(available, {core: physical_core(core) for core in available})
    # Threads and processes that are started from here on are bound with this one.
    os.sched_setaffinity(0, cores.server)
    trials = _run(options, cores)
    problems = [f"{name}: {problem}" for name, trial in trials.items() for problem in trial.pop("problems")]
    # What else the machine does shows in every time.
    places = dataclasses.asdict(cores) if len(available) >= FEWEST else "all parts share all cores"
    machine = {"cores": len(available), "cores_of": places, "load_average_before": round(load, 1)}
    figures = {**machine, **trials, "problems": problems, "seconds": round(time.monotonic() - start, 1)}
    print(json.dumps(figures, indent=1))
    if options.output:
        record(options.output, figures)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
