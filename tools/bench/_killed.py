# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One of several engines is killed under load: what its requests get, and whether the others notice."""

import asyncio
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from mcore_inference import EngineLostError, EngineRunner, SamplingParams
from mcore_inference.coordinator import (
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
)
from tools.bench._scale import Scale
from tools.bench.serve import build

__all__ = ["killed_engine"]

_SECRET, _HEARTBEAT_S, _ENGINE_TIMEOUT_S = "of the bench", 0.25, 2.0


@dataclass(frozen=True, kw_only=True)
class _Load:
    """Streams without end."""

    streams_per_engine: int
    inputs: int
    outputs: int
    seconds: float
    """Before the kill, and after it."""


@dataclass(kw_only=True)
class _Streams:
    """What became of them."""

    tokens: list[float] = field(default_factory=list)
    """When each came."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """When a token came, and how long after the one before in its stream; of streams that ended well."""
    lost: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Of other kinds."""


def work(address: str, name: str, index: int, scale: Scale) -> None:
    """An engine on a GPU of its own, until this process is killed or the engines are stopped."""
    if not scale.small:
        torch.cuda.set_device(index)
    torch.set_num_threads(1)
    engine, _ = build("tiny" if scale.small else "qwen3-8b", scale.kind, 0.05 if scale.small else 20.0)
    security = CoordinatorSecurity(secret=_SECRET)
    with EngineRunner(engine) as runner, EngineWorker(runner, address, name=name, security=security, heartbeat_s=_HEARTBEAT_S) as worker:
        worker.join()


async def _stream(client: InferenceClient, load: _Load, number: int, results: _Streams) -> None:
    prompt = [(7 * number + place) % 500 for place in range(load.inputs)]
    params = SamplingParams(temperature=1.0, num_tokens_to_generate=load.outputs, ignore_eos=True)
    moments: list[float] = []
    try:
        async for increment in await client.submit(prompt, params):
            moments += [time.monotonic()] * len(increment.tokens)
    except EngineLostError as error:
        results.lost.append(str(error))
    except Exception as error:
        results.failures.append(f"{type(error).__name__}: {error}")
    else:
        results.gaps += [(moment, moment - before) for before, moment in itertools.pairwise(moments)]
        if len(moments) != load.outputs:
            results.failures.append(f"{len(moments)} of {load.outputs} tokens came")
    results.tokens += moments


async def _kill(address: str, processes: Mapping[str, BaseProcess], load: _Load) -> dict[str, Any]:
    results, going, numbers = _Streams(), True, itertools.count()

    async def again() -> None:
        while going:
            await _stream(client, load, next(numbers), results)

    async with InferenceClient(address, security=CoordinatorSecurity(secret=_SECRET), heartbeat_s=_HEARTBEAT_S) as client:
        tasks = [asyncio.create_task(again()) for _ in range(load.streams_per_engine * len(processes))]
        # The first answers of each engine are slower than the others.
        await asyncio.sleep(load.seconds)
        begin = time.monotonic()
        await asyncio.sleep(load.seconds)
        name, victim = next(iter(processes.items()))
        before = await client.status()
        open_requests = next(engine.open_requests for engine in before.engines if engine.name == name)
        killed = time.monotonic()
        victim.kill()
        while any(engine.name == name for engine in (await client.status()).engines):
            await asyncio.sleep(0.02)
            if time.monotonic() - killed > 60:
                raise TimeoutError(f"60 s after {name} was killed the coordinator still sends it requests")
        noticed = time.monotonic()
        await asyncio.sleep(load.seconds)
        end = time.monotonic()
        going = False
        await asyncio.gather(*tasks)
        served = {engine.name for engine in (await client.status()).engines}
    engines = len(processes)
    old = sum(begin <= moment < killed for moment in results.tokens) / (killed - begin) / engines
    new = sum(noticed <= moment < end for moment in results.tokens) / (end - noticed) / (engines - 1)
    longest = {
        name: max((gap for moment, gap in results.gaps if first <= moment < last), default=0.0)
        for name, first, last in (("before", begin, killed), ("meanwhile", killed, noticed), ("afterwards", noticed, end))
    }
    return {
        "engines": engines, "streams": load.streams_per_engine * engines, "inputs": load.inputs, "outputs": load.outputs,
        "open_at_the_killed_one": open_requests, "streams_lost_by_its_name": sum(name in text for text in results.lost),
        "noticed_s": round(noticed - killed, 2), "tokens_per_s_per_engine": round(old), "afterwards": round(new),
        # Of streams that ended well: those of the other engines.
        "longest_gap_ms": {name: round(1e3 * gap, 1) for name, gap in longest.items()},
        "median_gap_ms": round(1e3 * statistics.median(gap for _, gap in results.gaps), 2),
        "problems": results.failures[:5] + [text for text in results.lost if name not in text][:5]
        + [f"{lost} is gone, too" for lost in sorted(processes.keys() - served - {name})],
    }  # fmt: skip


def killed_engine(scale: Scale) -> Iterator[dict[str, Any]]:
    """One row."""
    load = _Load(streams_per_engine=4, inputs=16, outputs=64, seconds=1.0)
    if not scale.small:
        load = _Load(streams_per_engine=64, inputs=512, outputs=256, seconds=10.0)
    # Every rank is an engine in a process of its own, so that a kill is one.
    context = multiprocessing.get_context("forkserver")
    security = CoordinatorSecurity(secret=_SECRET)
    settings = CoordinatorConfig(security=security, heartbeat_s=_HEARTBEAT_S, engine_timeout_s=_ENGINE_TIMEOUT_S)
    processes: dict[str, BaseProcess] = {}
    with DataParallelInferenceCoordinator(settings) as coordinator:
        try:
            for index in range(scale.gpus):
                name = f"engine-{index}"
                processes[name] = context.Process(target=work, args=(coordinator.address, name, index, scale), daemon=True)
                processes[name].start()
            coordinator.wait_for_engines(scale.gpus, 180)
            yield {"part": "killed", **asyncio.run(_kill(coordinator.address, processes, load))}
        finally:
            for process in processes.values():
                process.kill()
                process.join()
