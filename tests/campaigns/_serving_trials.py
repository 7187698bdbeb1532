# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Clients that leave or hold on, oversize requests, and what many requests leave behind."""

import gc
import os
import statistics
import time
from pathlib import Path
from typing import Any

from tests.campaigns._serving_clients import http_request
from tests.campaigns._serving_service import GOOD, Figures, Service, answer, beside, ended, lost, started
from tests.campaigns._serving_soak import soaked

__all__ = ["leaving", "memory", "oversize", "slow", "soak"]

_MAX_GROWTH_BYTES = 8 * 2**20


def leaving(service: Service, aborts: int, seed: int, seconds: float) -> Figures:
    """Clients that leave, until so many did or the time is over: no block may stay allocated."""
    figures = ended(started("leaving", service.ports, service.cores.others, count=aborts, seed=seed, seconds=seconds))
    left = service.left()
    return {**figures, "blocks_leaked": sum(runner.engine.context.allocator.total_used for runner in service.runners), "problems": left}


def slow(service: Service, clients: int, seconds: float, rate: float) -> Figures:
    """Good requests beside clients that send or read a byte a second."""
    holding = started("slow", service.ports, service.cores.others, count=clients)
    try:
        steady, _ = beside(service, rate, lambda: time.sleep(seconds))
    finally:
        ended(holding)
    return {"slow_clients": clients, "good": steady, "problems": lost(steady) + service.left()}


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


def oversize(service: Service, repeats: int, limit_ms: float) -> Figures:
    """Each oversize request so many times: the median of the time to its whole answer."""
    results, problems = {}, []
    for name, request in _oversize_requests().items():
        seconds, statuses = [], set()
        for index in range(repeats):
            begin = time.perf_counter()
            statuses.add(answer(service.ports[index % 2], request)[0])
            seconds.append(time.perf_counter() - begin)
        results[name] = {"status": sorted(statuses), "median_ms": round(1e3 * statistics.median(seconds), 1)}
        if not all(400 <= status < 500 for status in statuses):
            problems.append(f"oversize {name}: {sorted(statuses)}")
        if results[name]["median_ms"] > limit_ms:
            problems.append(f"oversize {name}: {results[name]['median_ms']} ms")
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
