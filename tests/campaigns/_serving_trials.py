# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Clients that leave or hold on, oversize requests, and what many requests leave behind."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.campaigns._serving_clients import http_request
from tests.campaigns._serving_service import GOOD, Figures, Service, answer, beside, ended, lost, quiet, started
from tests.campaigns._serving_soak import soaked

__all__ = ["leaving", "memory", "oversize", "slow", "soak"]

_MAX_GROWTH_BYTES = 8 * 2**20
_COMPUTED_S = 300.0
"""That the tokens of slow clients may take."""


def leaving(service: Service, aborts: int, seed: int, seconds: float) -> Figures:
    """Clients that leave, until so many did or the time is over: no block may stay allocated."""
    figures = ended(started("leaving", service.ports, service.cores.others, count=aborts, seed=seed, seconds=seconds))
    left = service.left()
    return {**figures, "blocks_leaked": sum(runner.engine.context.allocator.total_used for runner in service.runners), "problems": left}


def slow(service: Service, clients: int, seconds: float, rate: float) -> Figures:
    """Good requests beside clients that send or read a byte a second, a third of which have 100 tokens computed.

    While those are computed they compare with good requests beside clients that ask for the same and read at once. Afterwards the clients
    only hold on, and good requests compare with those alone.
    """
    alone = _computed(lambda: quiet(service, seconds, rate))
    same = _beside_slow(service, clients, seconds, rate, holds=False)
    holding = _beside_slow(service, clients, seconds, rate, holds=True)
    problems = [problem for figures in (alone, same, holding) for problem in figures.pop("problems")]
    return {
        "slow_clients": clients,
        "good alone": alone,
        "good beside the same work read at once": same["good"],
        "good": holding["good"],
        "good while they only hold on": holding["good afterwards"],
        "p99 to that beside the same work": round(holding["good"]["p99_ms"] / same["good"]["p99_ms"], 2),
        "p99 while they only hold on to that alone": round(holding["good afterwards"]["p99_ms"] / alone["p99_ms"], 2),
        "problems": problems,
    }


def _computed(trial: Callable[[], Figures]) -> Figures:
    """Its figures, and what this process, which serves, computed meanwhile, which hangs less than times on what else the machine does."""
    begin = time.process_time()
    figures = trial()
    return {**figures, "server_cpu_s": round(time.process_time() - begin, 2)}


def _beside_slow(service: Service, clients: int, seconds: float, rate: float, *, holds: bool) -> Figures:
    """Good requests while the clients' tokens are computed, and for as long again when all are."""
    others = started("slow", service.ports, service.cores.others, count=clients, holds=holds, spread_s=seconds / 2)
    try:
        good, _ = beside(service, rate, lambda: time.sleep(seconds))
        deadline = time.monotonic() + _COMPUTED_S
        while (left := service.left()) and time.monotonic() < deadline:
            pass
        afterwards = _computed(lambda: beside(service, rate, lambda: time.sleep(seconds if holds else 0))[0])
    finally:
        ended(others)
    return {"good": good, "good afterwards": afterwards, "problems": lost(good) + lost(afterwards) + left + service.left()}


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
    return requests | {name: http_request(body, path) for name, (path, body) in _oversize_bodies().items()}


def _oversize_bodies() -> dict[str, tuple[str, Any]]:
    """Of the other routes, and lists of much."""
    user = {"role": "user", "content": "x"}
    long, many = {**user, "content": "x" * 2**20}, [user] * 10**5
    parts = {**user, "content": [{"type": "text", "text": "x"}] * 10**5}
    tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(10**4)]
    completions, chat, tokenize = "/v1/completions", "/v1/chat/completions", "/tokenize"
    return {
        "many prompts": (completions, {"prompt": ["x"] * 10**5}),
        "long prompts": (completions, {"prompt": ["x" * 2**15] * 100}),
        "many prompts of tokens": (completions, {"prompt": [[1]] * 10**5}),
        "long prompts of tokens": (completions, {"prompt": [[1] * 2**13] * 100}),
        "chat: long message": (chat, {"messages": [long]}),
        "chat: many messages": (chat, {"messages": many}),
        "chat: many parts": (chat, {"messages": [parts]}),
        "chat: most messages": (chat, {"messages": [{**user, "content": "x" * 100}] * 4096}),
        "chat: many tools": (chat, {"messages": [user], "tools": tools}),
        "chat: n": (chat, {"messages": [user], "n": 10**6}),
        "chat: stop": (chat, {"messages": [user], "stop": ["x"] * 10**5}),
        "tokenize: long prompt": (tokenize, {"prompt": "x" * 2**20}),
        "tokenize: many messages": (tokenize, {"messages": many}),
        "detokenize: many tokens": ("/detokenize", {"tokens": [1] * (2**20 + 1)}),
        "detokenize: wrong tokens": ("/detokenize", {"tokens": [2**31 - 1] * 10**5}),
    }


def oversize(service: Service, repeats: int, limit_ms: float) -> Figures:
    """Each oversize request so many times: the longest time to its whole answer, and the longest of it that was computed.

    The time computed is of this process, which serves and asks and does nothing else: unlike the other it does not hang on what else the
    machine does, and it is what others wait for. It has the limit; the other has ten times as much.
    """
    results, problems = {}, []
    for name, request in _oversize_requests().items():
        seconds, computed, statuses = [], [], set()
        for index in range(repeats):
            begin, computing = time.perf_counter(), time.process_time()
            statuses.add(answer(service.ports[index % 2], request)[0])
            seconds.append(time.perf_counter() - begin)
            computed.append(time.process_time() - computing)
        slowest, dearest = (round(1e3 * max(times), 1) for times in (seconds, computed))
        results[name] = {"status": sorted(statuses), "slowest_ms": slowest, "most_computed_ms": dearest}
        if not all(400 <= status < 500 for status in statuses):
            problems.append(f"oversize {name}: {sorted(statuses)}")
        if dearest > limit_ms or slowest > 10 * limit_ms:
            problems.append(f"oversize {name}: {slowest} ms, of which {dearest} ms were computed; at most {limit_ms:g} may be")
    for port in service.ports:
        if answer(port, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] != 200:
            problems.append("a server is not healthy afterwards")
    return {"repeats": repeats, "requests": results, "problems": problems + service.left()}


def memory(service: Service, requests: int) -> Figures:
    """Resident bytes after a first half, which warms caches, and after the second."""

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    failed, sizes = 0, []
    for _ in range(2):
        failed += ended(started("many", service.ports, service.cores.others, count=requests // 2, body=GOOD))["failed"]
        sizes.append(resident())
    growth = sizes[1] - sizes[0]
    problems = [f"{failed} requests failed"] * bool(failed) + [f"{growth} bytes more after {requests // 2} requests"] * (
        growth > _MAX_GROWTH_BYTES
    )
    return {"requests": requests, "growth_kb_of_the_second_half": growth // 1024, "problems": problems + service.left()}


def soak(service: Service, minutes: float, every_s: float, rate: float) -> Figures:
    """Whole answers, streams, refusals and clients that leave, in turn, for long."""
    figures = soaked(60 * minutes, every_s, lambda sample: beside(service, rate, sample, "mixed"))
    return {**figures, "problems": figures["problems"] + lost(figures["good"]) + service.left()}
