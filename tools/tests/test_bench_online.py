# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Servers under random arrivals: what is sent, what is measured, and what counts as failed."""

import contextlib
import json
import math
import shlex
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tools.bench._load import Answer, PoissonLoad, percentile, run_load, summary
from tools.bench._online import BEHIND, OURS, online_rows, replica_rows, with_online_ratios

LOAD = PoissonLoad(rate=100.0, num_requests=12, inputs=8, outputs=4, vocab_size=64)
Write = Callable[[bytes], Any]


def run_scripted(load: PoissonLoad, complete: Callable[[dict[str, Any], Write], None], timeout_s: float = 5.0, num_clients: int = 1) -> Any:
    """The row of a load on a server whose completions are written by ``complete``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            assert self.path == "/v1/models"
            content = json.dumps({"data": [{"id": "scripted"}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            # A client may be gone.
            with contextlib.suppress(OSError):
                complete(body, lambda data: self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data)))
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        # A connection that finds five others waiting is tried again a second later.
        request_queue_size = 128
        daemon_threads = False

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            return run_load(f"http://127.0.0.1:{server.server_port}", load, timeout_s=timeout_s, num_clients=num_clients)
        finally:
            server.shutdown()
            thread.join()


def event(text: str | None = None, tokens: int | None = None) -> bytes:
    content: dict[str, Any] = {"choices": [] if text is None else [{"text": text}]}
    if tokens is not None:
        content["usage"] = {"completion_tokens": tokens}
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def test_equal_loads_are_the_same_requests_and_gaps_follow_the_rate() -> None:
    load = PoissonLoad(rate=50.0, num_requests=2000, inputs=20, outputs=10, vocab_size=100, seed=3)
    rows = load.arrivals()
    assert rows == load.arrivals() and rows != PoissonLoad(**{**vars(load), "seed": 4}).arrivals()
    times = [due for due, _, _ in rows]
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    # Exponential: the deviation is the mean; 5 standard errors.
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert abs(mean * 50 - 1) < 5 / 2000**0.5 and abs(deviation / mean - 1) < 0.2
    assert {len(prompt) for _, prompt, _ in rows} == set(range(10, 31)) and {outputs for _, _, outputs in rows} == set(range(5, 16))
    assert all(16 <= token < 100 for _, prompt, _ in rows for token in prompt)
    for bad in ({"rate": 0.0}, {"num_requests": 0}, {"outputs": 0}, {"vocab_size": 4}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            PoissonLoad(**{**vars(load), **bad})


def test_percentiles_are_values_that_occurred() -> None:
    assert [percentile(list(range(1, 101)), p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0 and percentile([1.0, 2.0], 99) == 2.0


@pytest.mark.journey
def test_the_first_token_and_the_gaps_are_timed_as_they_come() -> None:
    def complete(body: dict[str, Any], write: Write) -> None:
        assert body["model"] == "scripted" and body["stream"] and body["ignore_eos"]
        time.sleep(0.1)
        for _ in range(body["max_tokens"] - 1):
            write(event("x"))
            time.sleep(0.03)
        # An event in two parts, and one without text, which is no token.
        last = event("y")
        write(last[:9])
        write(last[9:] + event(""))
        # Whoever takes the end for a token is late by much more than a slow machine.
        time.sleep(2)
        write(event(tokens=body["max_tokens"]) + b"data: [DONE]\n\n")

    row = run_scripted(LOAD, complete, timeout_s=30.0)
    assert row["completed"] == LOAD.num_requests and row["failed"] == 0 and "errors" not in row
    assert 95 < row["ttft_ms_p50"] < 1900 and row["ttft_ms_p50"] <= row["ttft_ms_p99"]
    assert row["itl_ms_p50"] > 25 and row["tpot_ms_p50"] > 25
    tokens = sum(outputs for _, _, outputs in LOAD.arrivals())
    assert row["out_tok_s"] == pytest.approx(tokens / row["s"], rel=0.01)


def test_times_of_a_row_are_those_of_its_answers() -> None:
    steady = Answer(begun=1.0, chunks=[1.1, 1.13, 1.16, 1.19], num_tokens=4)
    # Its chunks hold two tokens each.
    late = Answer(begun=1.5, chunks=[1.75, 1.81], num_tokens=4)
    row = summary(replace(LOAD, num_requests=3), [steady, late, Answer(begun=2.0, chunks=[9.0], error="cut off")])
    assert (row["completed"], row["failed"], row["s"], row["out_tok_s"]) == (2, 1, 0.81, 9.9)
    assert (row["ttft_ms_p50"], row["ttft_ms_p99"]) == (100.0, 250.0)
    assert (row["itl_ms_p50"], row["itl_ms_p99"]) == (30.0, 60.0)
    assert (row["tpot_ms_p50"], row["tpot_ms_p99"]) == (20.0, 30.0)


@pytest.mark.journey
def test_answers_that_are_short_cut_off_wrong_or_late_fail_by_what_they_lack() -> None:
    faults = iter(["short", "error", "silent", "late"])

    def complete(body: dict[str, Any], write: Write) -> None:
        fault = next(faults, None)
        if fault == "late":
            time.sleep(4)
        if fault != "silent":
            write(event("x"))
        if fault == "error":
            write(b'data: {"error": {"message": "no memory"}}\n\n')
        else:
            write(event(tokens=0 if fault == "short" else body["max_tokens"]))

    row = run_scripted(LOAD, complete, timeout_s=3.0)
    assert (row["completed"], row["failed"]) == (LOAD.num_requests - 4, 4)
    reasons = " ".join(row["errors"])
    assert (
        len(row["errors"]) == 4
        and "no text came" in reasons
        and "0 tokens came" in reasons
        and "no memory" in reasons
        and "no end within 3 s" in reasons
    )


def test_several_clients_send_each_request_once_and_at_once() -> None:
    load = replace(LOAD, rate=math.inf, num_requests=7)
    assert {due for due, _, _ in load.arrivals()} == {0.0}
    prompts, all_there = [], threading.Barrier(load.num_requests)

    def complete(body: dict[str, Any], write: Write) -> None:
        prompts.append(body["prompt"])
        all_there.wait(30)
        write(event("x") + event(tokens=body["max_tokens"]))

    row = run_scripted(load, complete, timeout_s=60.0, num_clients=3)
    assert sorted(prompts) == sorted(prompt for _, prompt, _ in load.arrivals())
    assert (row["completed"], row["failed"], row["rate"]) == (7, 0, None)
    assert json.loads(json.dumps(row, allow_nan=False)) == row


def test_a_client_that_ends_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.bench._load.sys.executable", "false")
    with pytest.raises(RuntimeError, match=r"clients of the load ended at their start, with \[1, 1\]"):
        run_scripted(LOAD, lambda body, write: None, num_clients=2)


# Its parts have tests of their own: engines of two processes in test_serve.py, loads and rows above.
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_engines_behind_a_coordinator_are_measured_beside_one() -> None:
    load = PoissonLoad(rate=math.inf, num_requests=6, inputs=12, outputs=6, vocab_size=512)
    bare, *rows = replica_rows(f"{OURS} --device cpu --memory-gb 0.05 --api-server-count 2", "tiny", [load], 120.0, 2)
    assert (bare["by"], bare["n"]) == ("mcore, no server", 6)
    assert bare["out_tok_s"] == pytest.approx(sum(outputs for _, _, outputs in load.arrivals()) / bare["s"], rel=0.05)
    assert [(row["by"], row["engines"], row["n"]) for row in rows] == [("mcore", 1, 6), (BEHIND, 1, 6), (BEHIND, 2, 12)]
    for row in rows:
        assert row["completed"] == row["n"] and row["failed"] == 0 and row["itl_ms_p99"] >= row["itl_ms_p50"] > 0
        assert row["of_engine"] == round(row["out_tok_s"] / row["engines"] / bare["out_tok_s"], 3)
    for row in rows[1:]:
        assert row["scaling"] == round(row["out_tok_s"] / rows[0]["out_tok_s"], 3)


@pytest.mark.journey
def test_our_server_answers_every_request_and_a_server_that_ends_is_a_row_with_its_words() -> None:
    broken = f"{shlex.quote(sys.executable)} -c 'raise SystemExit(\"no such model {{model}}\")'"
    load = PoissonLoad(rate=20.0, num_requests=8, inputs=12, outputs=6, vocab_size=512)
    ours = f"{OURS} --device cpu --memory-gb 0.05"
    rows = with_online_ratios(online_rows([("mcore", ours), ("peer", ours), ("broken", broken)], "tiny", [load], 60.0))
    own, peer, wrong = rows
    assert own["completed"] == peer["completed"] == 8 and own["failed"] == 0
    assert own["ttft_ms_p50"] > 0 and own["itl_ms_p99"] >= own["itl_ms_p50"] > 0
    assert peer["mcore_itl_ms_p50_ratio"] == round(own["itl_ms_p50"] / peer["itl_ms_p50"], 3) and "mcore_itl_ms_p50_ratio" not in own
    assert "exit code 1" in wrong["error"] and "no such model tiny" in wrong["error"]
