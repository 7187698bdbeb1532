# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests that arrive at random at an OpenAI-compatible server, and how long its tokens take; as a program, one client of several."""

import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

_GREATEST_CHUNK = 2**24


@dataclass(frozen=True, kw_only=True)
class PoissonLoad:
    """Requests of one run: equal fields give equal arrivals, prompts and lengths, whichever server takes them."""

    rate: float
    """Requests/s on average; gaps between arrivals are exponential. Infinite for all at once."""
    num_requests: int
    inputs: int
    """Mean tokens of a prompt; lengths are uniform between half and one and a half times as many."""
    outputs: int
    """Mean new tokens, likewise."""
    vocab_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"rate={self.rate} must be above 0 requests/s")
        for name, least in (("num_requests", 1), ("inputs", 1), ("outputs", 1), ("vocab_size", 32)):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}={value} must be at least {least}")

    def arrivals(self) -> list[tuple[float, list[int], int]]:
        """Of each request: seconds from the start, prompt, new tokens."""
        rng, now, rows = random.Random(self.seed), 0.0, []
        for _ in range(self.num_requests):
            now += rng.expovariate(self.rate)
            inputs, outputs = (rng.randint(max(1, mean // 2), mean + mean // 2) for mean in (self.inputs, self.outputs))
            # The first ids are special tokens of many vocabularies.
            rows.append((now, [rng.randrange(16, self.vocab_size) for _ in range(inputs)], outputs))
        return rows


@dataclass
class Answer:
    """One request as its client saw it; times in seconds."""

    begun: float
    chunks: list[float] = field(default_factory=list)
    """When each chunk with tokens came."""
    num_tokens: int = 0
    """As the server counts them."""
    error: str = ""


def run_load(url: str, load: PoissonLoad, *, timeout_s: float = 600.0, num_clients: int | None = None) -> dict[str, Any]:
    """Send the requests at their times, wait for all, and sum up.

    Args:
        url: of the server, without ``/v1``.
        load: what is sent.
        timeout_s: for each request; later ones count as failed.
        num_clients: processes that send them, each its share; None for one of eight cores, since reading a stream takes a client about as
            long as writing it takes a server.

    Returns:
        ``completed``, ``failed`` (and ``errors``, some of their messages), ``s`` from the first arrival to the last token, ``out_tok_s``,
        and in ms the 50th and 99th percentile of the time to the first token, of the gaps between chunks of a stream (``itl``), and of
        the mean time of a request's later tokens (``tpot``).

    Raises:
        OSError: no server is there.
        ValueError: it does not say its model.
        RuntimeError: a client ended.
    """
    model = asyncio.run(served_model(url))
    num_clients = max(1, len(os.sched_getaffinity(0)) // 8) if num_clients is None else num_clients
    if num_clients == 1:
        return summary(load, asyncio.run(_answers(url, model, load.arrivals(), time.perf_counter(), timeout_s)))
    plan = {"url": url, "model": model, "load": asdict(load), "timeout_s": timeout_s, "num_clients": num_clients}
    command = [sys.executable, "-m", "tools.bench._load"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(subprocess.Popen([*command, json.dumps({**plan, "number": n})], **pipes)) for n in range(num_clients)
        ]
        stack.callback(lambda: [client.kill() for client in clients])
        starts = [client.stdin for client in clients if client.stdin is not None]
        results = [client.stdout for client in clients if client.stdout is not None]
        # Their prompts are made.
        if not all(result.readline() for result in results):
            raise RuntimeError(f"clients of the load ended at their start, with {[client.wait() for client in clients]}")
        # One clock for all processes of a machine.
        begun = str(time.perf_counter())
        for start in starts:
            start.write(begun)
            start.close()
        texts = [result.read() for result in results]
        if codes := [code for client in clients if (code := client.wait())]:
            raise RuntimeError(f"clients of the load ended with {codes}")
    return summary(load, [Answer(**answer) for text in texts for answer in json.loads(text)])


def main() -> None:
    """One client: makes its requests, says so, and sends them from the time that comes back; prints the answers."""
    plan = json.loads(sys.argv[1])
    rows = PoissonLoad(**plan["load"]).arrivals()[plan["number"] :: plan["num_clients"]]
    print(flush=True)
    begun = float(sys.stdin.read())
    answers = asyncio.run(_answers(plan["url"], plan["model"], rows, begun, plan["timeout_s"]))
    print(json.dumps([asdict(answer) for answer in answers]))


async def _answers(url: str, model: str, rows: Sequence[tuple[float, list[int], int]], begun: float, timeout_s: float) -> list[Answer]:
    async def one(due: float, prompt: list[int], outputs: int) -> Answer:
        await asyncio.sleep(max(0.0, begun + due - time.perf_counter()))
        body = {
            "model": model, "prompt": prompt, "max_tokens": outputs, "temperature": 1.0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer = Answer(time.perf_counter())
        try:
            await asyncio.wait_for(_stream(url, body, answer), timeout_s)
            if answer.num_tokens != outputs:
                answer.error = f"{answer.num_tokens} tokens came and {outputs} were asked for"
        except TimeoutError:
            answer.error = f"no end within {timeout_s:g} s"
        except (OSError, ValueError, EOFError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        return answer

    return await asyncio.gather(*(one(*row) for row in rows))


def summary(load: PoissonLoad, answers: Sequence[Answer]) -> dict[str, Any]:
    """One row; times are those of completed requests."""
    good = [answer for answer in answers if not answer.error]
    row: dict[str, Any] = {
        "rate": load.rate if math.isfinite(load.rate) else None, "n": load.num_requests, "isl": load.inputs, "osl": load.outputs,
        "completed": len(good), "failed": len(answers) - len(good),
    }  # fmt: skip
    if errors := sorted({answer.error for answer in answers if answer.error}):
        row["errors"] = errors[:5]
    if not good:
        return row
    seconds = max(answer.chunks[-1] for answer in good) - min(answer.begun for answer in good)
    row |= {"s": round(seconds, 3), "out_tok_s": round(sum(answer.num_tokens for answer in good) / seconds, 1)}
    values = {
        "ttft": [answer.chunks[0] - answer.begun for answer in good],
        "itl": [after - before for answer in good for before, after in itertools.pairwise(answer.chunks)],
        "tpot": [
            (answer.chunks[-1] - answer.chunks[0]) / (answer.num_tokens - 1)
            for answer in good
            if answer.num_tokens > 1 and len(answer.chunks) > 1
        ],
    }
    for name, numbers in values.items():
        for percent in (50, 99):
            row[f"{name}_ms_p{percent}"] = round(1e3 * percentile(numbers, percent), 3) if numbers else None
    return row


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed."""
    ordered = sorted(values)
    # Whole numbers: 0.99 times 100 is not 99.
    return ordered[max(0, -(-len(ordered) * int(percent * 100) // 10_000) - 1)]


async def served_model(url: str) -> str:
    """The first name of ``/v1/models``.

    Raises:
        OSError: no server is there.
        ValueError: it answers something else.
    """
    async with contextlib.aclosing(_exchange(url, "GET", "/v1/models")) as parts:
        content = b"".join([part async for part in parts])
    try:
        return str(json.loads(content)["data"][0]["id"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{url}/v1/models names no model: {content[:200]!r}") from error


async def _stream(url: str, body: dict[str, Any], answer: Answer) -> None:
    line = b""
    async with contextlib.aclosing(_exchange(url, "POST", "/v1/completions", body)) as parts:
        async for part in parts:
            *lines, line = (line + part).split(b"\n")
            for text in lines:
                event = text.strip().removeprefix(b"data:").strip()
                if not text.startswith(b"data:") or event == b"[DONE]":
                    continue
                chunk = json.loads(event)
                if "error" in chunk:
                    raise ValueError(str(chunk["error"])[:200])
                if chunk.get("usage"):
                    answer.num_tokens = int(chunk["usage"]["completion_tokens"])
                if any(choice.get("text") or choice.get("token_ids") for choice in chunk.get("choices", ())):
                    answer.chunks.append(time.perf_counter())
    if not answer.chunks:
        raise ValueError("no text came")


async def _exchange(url: str, method: str, path: str, body: object = None) -> AsyncGenerator[bytes, None]:
    """The content of an answer as it comes: HTTP/1.1 by hand, since a client library costs more than a small server takes for a token."""
    address = urlsplit(url)
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{method} {path} HTTP/1.1", f"Host: {address.netloc}", "Connection: close", f"Content-Length: {len(data)}"]
    head += ["Content-Type: application/json"] if data else []
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        parts = _chunks(reader) if any("chunked" in field for field in fields if field.lower().startswith("transfer-encoding:")) else None
        if status.split()[1] != "200":
            content = b"".join([part async for part in parts]) if parts is not None else await reader.read()
            raise ValueError(f"{status.split(maxsplit=1)[1]}: {content[:200].decode(errors='replace')}")
        if parts is None:
            while part := await reader.read(_GREATEST_CHUNK):
                yield part
        else:
            async for part in parts:
                yield part
    finally:
        writer.transport.abort()
        # The loop closes the socket in its next round.
        await asyncio.sleep(0)


async def _chunks(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        if size > _GREATEST_CHUNK:
            raise ValueError(f"a chunk of {size} bytes is no part of a stream of tokens")
        yield (await reader.readexactly(size + 2))[:-2]


if __name__ == "__main__":
    main()
