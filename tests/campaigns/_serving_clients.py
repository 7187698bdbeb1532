# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Clients of the serving campaign, in a process of their own: steady ones, hostile ones, those that leave, slow ones.

libzmq may abort the process that closes a socket within a message, so a hostile client must not share one with the server. One argument
is the plan as JSON; one line of JSON comes back. ``steady``, ``mixed``,
``slow`` and ``sink`` go on until stdin ends.
"""

import asyncio
import contextlib
import errno
import itertools
import json
import math
import os
import random
import socket
import struct
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

__all__ = ["Departure", "http_request", "leave", "main"]

Plan = dict[str, Any]
_LEAVING_TOKENS = 200
"""Of a stream that a client leaves."""
_IP_BIND_ADDRESS_NO_PORT = 24
"""Of Linux: a port is chosen at the connect, so that one may serve several connections."""


def http_request(body: Any, path: str = "/v1/completions") -> bytes:
    """A whole request; the server closes the connection after its answer."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    )
    return head.encode() + b"\r\n" + data


async def _ask(port: int, request: bytes) -> tuple[int, bytes]:
    """Status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


async def _until_stdin_ends() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def _steady(plan: Plan) -> Plan:
    """Good requests at a rate; those that fail or say something else are lost."""
    request = http_request(plan["body"])
    return await _at_rate(plan, lambda port, _: _whole(port, request, plan["text"]))


async def _whole(port: int, request: bytes, wanted: str) -> str | None:
    status, content = await _ask(port, request)
    text = json.loads(content)["choices"][0]["text"] if status == 200 else f"status {status}"
    return None if text == wanted else text


async def _at_rate(plan: Plan, one: Callable[[int, int], Awaitable[str | None]]) -> Plan:
    """Requests at a rate until stdin ends: their times, and what was wrong with their answers.

    Args:
        plan: its ports and rate.
        one: asks a port as the request of this number, and returns what is wrong with the answer, or None.
    """
    seconds, lost, going = array("d"), [], set()

    async def timed(port: int, number: int) -> None:
        begin = time.perf_counter()
        try:
            wrong = await one(port, number)
        except (OSError, LookupError, ValueError, TimeoutError) as error:
            wrong = repr(error)
        seconds.append(time.perf_counter() - begin)
        if wrong is not None:
            lost.append(wrong)

    ended = asyncio.ensure_future(_until_stdin_ends())
    number = 0
    while not ended.done() or number < 20:
        task = asyncio.create_task(timed(plan["ports"][number % len(plan["ports"])], number // len(plan["ports"])))
        going.add(task)
        task.add_done_callback(going.discard)
        number += 1
        await asyncio.sleep(1 / plan["rate"])
    await asyncio.gather(*going)
    ordered = sorted(seconds)
    p50, p99 = (round(1e3 * ordered[int(share * (len(ordered) - 1))], 1) for share in (0.5, 0.99))
    return {"requests": len(ordered), "lost": len(lost), "examples": lost[:3], "p50_ms": p50, "p99_ms": p99}


async def _mixed(plan: Plan) -> Plan:
    """At a rate: whole answers, streams, refusals, and streams that are left."""
    whole, stream = http_request(plan["body"]), http_request({**plan["body"], "stream": True})
    refused, long = http_request({**plan["body"], "max_tokens": -1}), http_request({**plan["body"], "max_tokens": 200, "stream": True})

    async def one(port: int, number: int) -> str | None:
        if number % 4 == 0:
            return await _whole(port, whole, plan["text"])
        if number % 4 == 1:
            status, content = await _ask(port, stream)
            events = [json.loads(line[6:]) for line in content.splitlines() if line.startswith(b"data: {")]
            text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
            return None if text == plan["text"] else f"status {status}, a stream of {text!r}"
        if number % 4 == 2:
            status, _ = await _ask(port, refused)
            return None if status == 422 else f"status {status} for a refusal"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(long)
        await asyncio.wait_for(reader.read(100), 60)
        writer.transport.abort()
        return None

    return await _at_rate(plan, one)


def _mutated(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, dropped or doubled, or the rest cut off; sometimes nothing but random bytes."""
    if draw.random() < 0.2:
        return draw.randbytes(draw.randrange(600))
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 8, 32])):
        at, kind = draw.randrange(len(changed) or 1), draw.randrange(4)
        if kind == 0:
            changed[at : at + 1] = draw.randbytes(1)
        elif kind == 1:
            del changed[at : at + draw.randrange(1, 20)]
        elif kind == 2:
            changed[at:at] = changed[at : at + draw.randrange(1, 40)]
        else:
            changed[at:at] = draw.choice([b"\r\n", b"\0", b"9" * 30, b'{"a":', b"[" * 200, b"\xff\xfe", b"-1", b"1e999", b"null"])
    return bytes(changed[: draw.randrange(len(changed))] if draw.random() < 0.2 and changed else changed)


class _Pace:
    """Holds a sender back to a rate; 0 for none."""

    def __init__(self, per_s: float) -> None:
        self._per_s, self._began = per_s, time.monotonic()

    def wait(self, sent: int) -> None:
        if self._per_s:
            time.sleep(max(0.0, self._began + sent / self._per_s - time.monotonic()))


def _hostile_http(plan: Plan) -> Plan:
    """Mutated requests and random bytes from an address of its own, a connection each; the statuses that came back."""
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logit_bias": {"5": 1.0}, "stop": ["a", "b"]}
    more = {"n": 2, "seed": 3, "top_p": 0.9, "logprobs": 2, "response_format": {"type": "json_object"}, "stream": True}
    samples = [
        http_request({"prompt": "x", "max_tokens": 2, **more}),
        http_request(chat, "/v1/chat/completions"),
        http_request({"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0}),
        http_request({"prompt": "some words"}, "/tokenize"),
        http_request({"tokens": [65, 66]}, "/detokenize"),
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n0\r\n\r\n",
    ]
    end = time.monotonic() + (plan.get("seconds") or math.inf)
    draw, statuses, pace = random.Random(plan["seed"]), Counter[str](), _Pace(plan["per_s"])
    for sent in range(plan["count"]):
        pace.wait(sent)
        if time.monotonic() > end:
            break
        with socket.socket() as raw:
            raw.settimeout(20)
            with contextlib.suppress(OSError):
                # Else each connection that this side closes keeps a port of the address for a minute.
                raw.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            with contextlib.suppress(OSError):
                # A system whose loopback has one address takes that.
                raw.bind((f"127.0.0.{2 + plan['number']}", 0))
            try:
                raw.connect(("127.0.0.1", draw.choice(plan["ports"])))
            except OSError:
                statuses["not connected"] += 1
                continue
            status = "none"
            with contextlib.suppress(OSError):
                raw.sendall(_mutated(draw.choice(samples), draw))
                if draw.random() < 0.7:
                    raw.shutdown(socket.SHUT_WR)
                    answer = raw.recv(4096)
                    status = answer[9:12].decode("latin1") if answer.startswith(b"HTTP/1.1 ") else "none"
            statuses[status] += 1
    return {"count": statuses.total() - statuses["not connected"], "statuses": dict(statuses)}


def _hostile_coordinator(plan: Plan) -> Plan:
    """Frames like those of clients and engines, mutated, and random bytes below the framing."""
    draw, encode = random.Random(plan["seed"]), msgspec.msgpack.encode
    samples = [
        [1, 2, ""], [3, 0, [1, 2, 3], {"num_tokens_to_generate": 3}, True, 0], [4, 0, {}, [], [], [], ""], [5, 1], [6, 1], [7, 1], [8, 1],
        [9, 1], [12, 0, "RequestError", "x", False], [13, 0], [14, [[0, [1], [0.5], [], "x"]]], [15], [16],
        [17, 2, "", "dp-9", "running", 64], [20, 1],
    ]  # fmt: skip
    port, context, sent, pace = plan["ports"][0], zmq.Context(), 0, _Pace(plan["per_s"])
    end = time.monotonic() + (plan.get("seconds") or math.inf)
    while sent < plan["count"] and time.monotonic() < end:
        pace.wait(sent)
        if draw.random() < 0.05:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
                raw.sendall(draw.choice([b"", b"\xff\0\0\0\0\0\0\0\1\x7f\3"]) + draw.randbytes(draw.randrange(300)))
            sent += 1
            continue
        try:
            dealer = context.socket(zmq.DEALER)
        except zmq.ZMQError as error:
            if error.errno != errno.EMFILE:
                raise
            # As many as may be still deliver what they hold.
            time.sleep(0.01)
            continue
        with dealer:
            # A server that refuses the connection leaves nobody to send to.
            dealer.linger, dealer.sndtimeo = 1000, 100
            dealer.connect(f"tcp://127.0.0.1:{port}")
            # Unmutated messages come from strangers too: the job's secret is not in them.
            for _ in range(draw.randrange(1, 20)):
                frame = encode(draw.choice(samples))
                frame = frame if draw.random() < 0.1 else _mutated(frame, draw)
                sent += 1
                try:
                    dealer.send_multipart([frame] * draw.choice([1, 1, 1, 2]))
                except zmq.Again:
                    break
    context.term()
    return {"count": sent}


def _sink(_: Plan) -> Plan:
    """Ports of nobody: one answers every connection 400, one drops all messages. Their numbers are the first line."""
    listener, router = socket.create_server(("127.0.0.1", 0), backlog=128), zmq.Context().socket(zmq.ROUTER)

    def refuse() -> None:
        while True:
            raw, _ = listener.accept()
            with raw, contextlib.suppress(OSError):
                raw.settimeout(1)
                raw.recv(65536)
                raw.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    def drop() -> None:
        while True:
            router.recv_multipart()

    port = router.bind_to_random_port("tcp://127.0.0.1")
    for each in (refuse, drop):
        threading.Thread(target=each, daemon=True).start()
    print(json.dumps([listener.getsockname()[1], port]), flush=True)
    sys.stdin.read()
    return {"cpu_s": round(time.process_time(), 2)}


@dataclass(frozen=True)
class Departure:
    """How a client leaves."""

    streams: bool
    choices: int
    cut: int
    """Pieces of the stream that it reads first; 0 to read nothing."""
    pause_s: float
    """That it waits where it reads nothing."""
    resets: bool

    @classmethod
    def draw(cls, draw: random.Random) -> "Departure":
        """Within a stream at any of its tokens, more often early, or while it waits for an answer; half of them by a reset."""
        streams = draw.random() < 0.8
        cut = round(_LEAVING_TOKENS ** draw.random()) if streams and draw.random() < 0.8 else 0
        return cls(streams, draw.choice([1, 1, 3]), cut, draw.uniform(0, 0.02), draw.random() < 0.5)


async def _read_pieces(reader: asyncio.StreamReader, count: int) -> int:
    """So many pieces of a stream, or fewer where it ends."""
    pieces = 0
    with contextlib.suppress(ConnectionError):
        while pieces < count and (line := await reader.readline()):
            pieces += line.startswith(b"data: {")
    return pieces


async def leave(plan: Plan) -> Plan:
    """Clients that leave, eight at a time: how many did, and how many of them within their stream."""
    draw, gate, left, cuts, refused = random.Random(plan["seed"]), asyncio.Semaphore(8), 0, list[int](), 0
    end = time.monotonic() + plan["seconds"]

    async def one(port: int, departure: Departure) -> None:
        nonlocal left, refused
        async with gate:
            if time.monotonic() > end:
                return
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = {"prompt": "leaving", "max_tokens": _LEAVING_TOKENS, "ignore_eos": True}
            writer.write(http_request({**body, "stream": departure.streams, "n": departure.choices}))
            if departure.cut:
                pieces = await _read_pieces(reader, departure.cut)
                if pieces == departure.cut:
                    cuts.append(pieces)
                else:
                    refused += 1
            else:
                await asyncio.sleep(departure.pause_s)
            if departure.resets:
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            left += 1

    departures = [Departure.draw(draw) for _ in range(plan["count"])]
    ports = itertools.cycle(plan["ports"])
    await asyncio.gather(*(one(next(ports), departure) for departure in departures))
    pieces = sorted(cuts)
    quantiles = {f"p{share}": pieces[share * (len(pieces) - 1) // 100] for share in (10, 50, 90, 100) if pieces}
    return {"count": left, "left_within_their_stream": len(cuts), "tokens_read_before": quantiles, "streams_that_ended_before": refused}


async def _slow(plan: Plan) -> Plan:
    """Connections that send a byte a second of header or body, or read one a second of a stream; they come one after the other.

    Without ``holds`` only those that ask for a stream, which read it at once: the same work, and nothing held.
    """
    request = http_request({"prompt": "slow", "max_tokens": 100, "ignore_eos": True, "stream": True})

    async def one(index: int) -> None:
        begun = (0, request.index(b"\r\n\r\n") + 4, len(request))[index % 3]
        await asyncio.sleep(plan["spread_s"] * index / plan["count"])
        if not plan["holds"]:
            if begun == len(request):
                await _ask(plan["ports"][index % len(plan["ports"])], request)
            return
        while True:
            with contextlib.suppress(OSError):
                await hold(index, begun)
            # Who takes too long to send is cut off, and comes again; a stream is not asked for twice.
            if begun == len(request):
                return
            await asyncio.sleep(1)

    async def hold(index: int, sent: int) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.setblocking(False)
            await loop.sock_connect(raw, ("127.0.0.1", plan["ports"][index % len(plan["ports"])]))
            await loop.sock_sendall(raw, request[:sent])
            while True:
                await asyncio.sleep(1)
                if sent < len(request):
                    await loop.sock_sendall(raw, request[sent : sent + 1])
                    sent += 1
                else:
                    await loop.sock_recv(raw, 1)

    tasks = [asyncio.create_task(one(index)) for index in range(plan["count"])]
    await _until_stdin_ends()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return {"count": plan["count"]}


async def _many(plan: Plan) -> Plan:
    """So many good requests, four at once, streams and whole answers and refusals in turn."""
    bodies = [{**plan["body"], "stream": True}, plan["body"], {**plan["body"], "max_tokens": -1}]
    left, failed = iter(range(plan["count"])), 0

    async def worker() -> None:
        nonlocal failed
        for index in left:
            body = {**bodies[index % 3], "prompt": f"request {index}"}
            status, _ = await _ask(plan["ports"][index % len(plan["ports"])], http_request(body))
            failed += status != (422 if index % 3 == 2 else 200)

    await asyncio.gather(*(worker() for _ in range(4)))
    return {"count": plan["count"], "failed": failed}


_KINDS: dict[str, Callable[[Plan], Plan | Awaitable[Plan]]] = {
    "steady": _steady,
    "hostile_http": _hostile_http,
    "hostile_coordinator": _hostile_coordinator,
    "sink": _sink,
    "leaving": leave,
    "slow": _slow,
    "many": _many,
    "mixed": _mixed,
}


def main() -> None:
    """Do what the plan says and print what came of it."""
    plan = json.loads(sys.argv[1])
    os.sched_setaffinity(0, plan["cores"])
    result = _KINDS[plan["kind"]](plan)
    if not isinstance(result, dict):
        result = asyncio.run(result)  # type: ignore[arg-type]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
