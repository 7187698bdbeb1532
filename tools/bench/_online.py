# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Servers of one model, each in a process of its own, under the same random arrivals; as a program, mcore's server of random weights."""

import argparse
import asyncio
import contextlib
import functools
import json
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from mcore_inference import DynamicInferenceEngine, SamplingParams
from tools.bench._load import PoissonLoad, run_load, served_model

if TYPE_CHECKING:
    from mcore_inference.coordinator import CoordinatedRunner
    from mcore_inference.server import GroupMember, InferenceServer, ServerLimits

OURS = f"{shlex.quote(sys.executable)} -m tools.bench._online --model {{model}} --port {{port}}"
BEHIND = "mcore, coordinator"
_STOP_S = 60.0


class Numerals:
    """A tokenizer whose every token is one visible character, so that each gives a chunk of a stream.

    Args:
        vocab_size: ids.
    """

    eod = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        return [ord(character) % self.vocab_size for character in text]

    def detokenize(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in ids)


@contextlib.contextmanager
def started(command: str, *, model: str, timeout_s: float) -> Iterator[str]:
    """A server's address once it says its model; its process ends with the block.

    Args:
        command: with ``{model}`` and ``{port}`` to be filled in.
        model: by its name among ``MODELS``.
        timeout_s: for its start.

    Raises:
        RuntimeError: it ended or did not come up in time; with the end of what it wrote.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        words = shlex.split(command.format(model=model, port=port))
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + timeout_s
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    state = "did not answer" if process.poll() is None else f"ended with exit code {process.returncode}"
                    raise RuntimeError(f"{words[0]} {state} within {timeout_s:g} s: {log.read()[-600:].decode(errors='replace')}")
                time.sleep(0.1)
            yield url
        finally:
            _stop(process)


def online_rows(servers: Sequence[tuple[str, str]], model: str, loads: Sequence[PoissonLoad], timeout_s: float) -> list[dict[str, Any]]:
    """One row a server and load, printed as it comes, servers one after the other; each is warmed up by a quarter of the first load, drawn
    anew.

    Args:
        servers: (name, command) of each.
        model: by its name among ``MODELS``.
        loads: of every server.
        timeout_s: for a server's start, and for each request.
    """
    rows = []
    for name, command in servers:
        row: dict[str, Any] = {"by": name, "model": model, "mode": "online"}
        begun = time.perf_counter()
        try:
            with started(command, model=model, timeout_s=timeout_s) as url:
                row["startup_s"] = round(time.perf_counter() - begun, 1)
                warm_up = replace(loads[0], num_requests=max(2, loads[0].num_requests // 4), seed=loads[0].seed + 1)
                run_load(url, warm_up, timeout_s=timeout_s)
                for load in loads:
                    rows.append({**row, **run_load(url, load, timeout_s=timeout_s)})
                    print(json.dumps(rows[-1]), flush=True)
        except (RuntimeError, OSError, ValueError) as error:
            rows.append({**row, "error": str(error)[-800:]})
            print(json.dumps(rows[-1]), flush=True)
    return rows


def with_online_ratios(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Peers' rows with mcore's times as parts of theirs, at the same rate: below 1 mcore is faster."""
    times = ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99")
    ours = {(row["model"], row.get("rate")): row for row in rows if row["by"] == "mcore"}
    result = []
    for row in rows:
        own = ours.get((row["model"], row.get("rate")), {})
        shares = {f"mcore_{name}_ratio": round(own[name] / row[name], 3) for name in times if row.get(name) and own.get(name)}
        result.append({**row, **(shares if row["by"] != "mcore" else {})})
    return result


def engine_row(command: str, model: str, load: PoissonLoad, timeout_s: float) -> dict[str, Any]:
    """All requests of a load at once, by an engine in a process without a server.

    Args:
        command: of mcore's server, as of ``online_rows``.
        model: by its name among ``MODELS``.
        load: whose prompts and lengths.
        timeout_s: for all.
    """
    row = {"by": "mcore, no server", "model": model, "engines": 1}
    words = [*shlex.split(command.format(model=model, port=0)), "--load", json.dumps(asdict(load))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {**row, "error": f"no end within {timeout_s:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {**row, **(json.loads(lines[-1]) if lines else {"error": (done.stderr or done.stdout)[-800:]})}


def replica_rows(command: str, model: str, loads: Sequence[PoissonLoad], timeout_s: float, num_engines: int) -> list[dict[str, Any]]:
    """Rows of an engine alone, of its server, of one behind a coordinator, and of several: each engine gets the loads.

    Args:
        command: of mcore's server, as of ``online_rows``.
        model: by its name among ``MODELS``.
        loads: for an engine; several get so many times the rate and the requests.
        timeout_s: as of ``online_rows``.
        num_engines: of the last server.

    Returns:
        As of ``online_rows``, with ``engines``; ``scaling`` is output tokens/s beside those of the first server, and of loads that come at
        once ``of_engine`` beside those of as many engines without a server.
    """
    bare = [engine_row(command, model, load, timeout_s) for load in loads]
    rows: list[dict[str, Any]] = []
    for name, words, count in (
        ("mcore", "", 1),
        (BEHIND, " --data-parallel 1", 1),
        (BEHIND, f" --data-parallel {num_engines}", num_engines),
    ):
        scaled = [replace(load, rate=load.rate * count, num_requests=load.num_requests * count) for load in loads]
        measured = [{**row, "engines": count} for row in online_rows([(name, command + words)], model, scaled, timeout_s)]
        for row, first in zip(measured, rows, strict=False):
            if row.get("out_tok_s") and first.get("out_tok_s"):
                row["scaling"] = round(row["out_tok_s"] / first["out_tok_s"], 3)
        for row, engine in zip(measured, bare, strict=False):
            if row.get("out_tok_s") and row["rate"] is None and engine.get("out_tok_s"):
                row["of_engine"] = round(row["out_tok_s"] / count / engine["out_tok_s"], 3)
        rows += measured
    return bare + rows


def _answers(url: str) -> bool:
    try:
        asyncio.run(asyncio.wait_for(served_model(url), 5.0))
    except (OSError, ValueError, EOFError, TimeoutError):
        return False
    return True


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _generated(engine: DynamicInferenceEngine, load: PoissonLoad) -> dict[str, Any]:
    """Requests of a load by an engine, after a quarter of them drawn anew."""
    for each in (replace(load, num_requests=max(2, load.num_requests // 4), seed=load.seed + 1), load):
        rows = each.arrivals()
        params = [SamplingParams(temperature=1.0, num_tokens_to_generate=outputs, ignore_eos=True) for _, _, outputs in rows]
        begun = time.perf_counter()
        records = engine.generate([prompt for _, prompt, _ in rows], params)
        seconds = time.perf_counter() - begun
    shape = {"n": load.num_requests, "isl": load.inputs, "osl": load.outputs}
    return {**shape, "s": round(seconds, 3), "out_tok_s": round(sum(record.num_generated for record in records) / seconds, 1)}


def _warm_up(engine: DynamicInferenceEngine) -> None:
    if engine.context.device.type == "cuda":
        engine.warm_up()


def _limits() -> "ServerLimits":
    """None that the load meets."""
    from mcore_inference.server import ConnectionLimits, ServerLimits

    return ServerLimits(max_waiting_requests=None, connections=ConnectionLimits(max_connections=2**16))


def _serve_member(run: "Callable[[], CoordinatedRunner]", member: "GroupMember", *, model: str) -> "InferenceServer":
    from mcore_inference.server import serve_runner
    from tools.bench.serve import MODELS

    return serve_runner(run, Numerals(MODELS[model].vocab_size), model_name=model, limits=_limits(), member=member)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve random weights until a signal, or work for a coordinator."""
    from mcore_inference.server import ServerGroup, StopSignals, serve
    from mcore_tools.serving import ApiServers, EngineLayout, Job, coordinated, frozen_heap, short_turns, work_for
    from tools.bench.serve import MODELS, build

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", required=True, choices=sorted(MODELS))
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--device", default=None)
    parser.add_argument("--memory-gb", type=float, default=30.0)
    parser.add_argument("--data-parallel", type=int, help="engines in processes of their own, as of `mcore serve`")
    parser.add_argument("--api-server-count", type=int, default=1, help="processes that answer HTTP, with --data-parallel")
    parser.add_argument("--join", metavar="ADDRESS", type=Job.named, help="work for the coordinator there instead of serving HTTP")
    parser.add_argument("--name", default="engine")
    parser.add_argument("--load", help="of a PoissonLoad as JSON: serve nobody, generate its requests at once and print how long it took")
    words = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(words)
    tokenizer = Numerals(MODELS[options.model].vocab_size)
    limits = _limits()
    if options.join is not None:
        engine, _ = build(options.model, options.device, options.memory_gb, tokenizer=tokenizer)
        _warm_up(engine)
        with short_turns(), frozen_heap():
            raise SystemExit(work_for(engine, options.join, options.name, limits))
    if options.load is not None:
        engine, _ = build(options.model, options.device, options.memory_gb)
        print(json.dumps(_generated(engine, PoissonLoad(**json.loads(options.load)))))
        return
    with contextlib.ExitStack() as stack:
        # As `mcore serve` does.
        stack.enter_context(short_turns())
        signals = stack.enter_context(StopSignals())
        if options.data_parallel is None:
            engine, _ = build(options.model, options.device, options.memory_gb, tokenizer=tokenizer)
            _warm_up(engine)
            server = serve(engine, port=options.port, model_name=options.model, limits=limits)
        else:
            command = [sys.executable, "-m", "tools.bench._online", *words]
            count = options.api_server_count
            group = stack.enter_context(contextlib.closing(ServerGroup("127.0.0.1", options.port, count)))
            serve_member = functools.partial(_serve_member, model=options.model)
            servers = stack.enter_context(ApiServers(serve_member, group, drain_s=0.0)) if count > 1 else None
            replicas = coordinated(command, count=options.data_parallel, layout=EngineLayout(), is_stopped=lambda: signals.count > 0)
            if (engines := stack.enter_context(replicas)) is None:
                return
            if servers is not None:
                stack.enter_context(frozen_heap())
                servers.wait(engines, signals)
                return
            server = serve_member(engines, group.member(0))
        stack.enter_context(frozen_heap())
        stack.enter_context(server).wait(signals, drain_s=0.0)


if __name__ == "__main__":
    main()
