# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests in flight while engines are killed, suspended, or get new weights."""

import asyncio
import contextlib
import itertools
import math
import multiprocessing
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from typing import Any

from mcore_inference import EngineLostError, EngineRunner, SamplingParams
from mcore_inference.coordinator import CoordinatorConfig, CoordinatorSecurity, DataParallelInferenceCoordinator, InferenceClient
from mcore_inference.coordinator._core import CoordinatorCore
from mcore_parallel import named_shards
from tests.campaigns._serving_engine import HEARTBEAT_S, make_model, most_probable, work

__all__ = ["Fates", "killed_engines", "suspended", "swapped_weights"]

Figures = dict[str, Any]
_SECRET = "of the campaign"
_ENGINE_TIMEOUT_S = 2.0
_RETRIES = 4
"""More than engines that a request may meet just before each is killed."""
_LIMIT_S = 5.0
_STREAMS = 4


@contextlib.asynccontextmanager
async def _loaded(count: int, one: Callable[[int], Awaitable[None]]) -> AsyncIterator[None]:
    """``count`` workers that call ``one`` again and again; at the end each finishes what it does."""
    going = True

    async def worker(first: int) -> None:
        for index in itertools.count(first, count):
            if not going:
                return
            await one(index)

    tasks = [asyncio.create_task(worker(index)) for index in range(count)]
    try:
        yield
    finally:
        going = False
        await asyncio.gather(*tasks)


def _greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, num_tokens_to_generate=count, ignore_eos=True)


# -- kills -------------------------------------------------------------------------------------------------------------


@dataclass
class Fates:
    """What became of the requests beside the kills."""

    whole: int = 0
    streams: int = 0
    failures: int = 0
    problems: list[str] = field(default_factory=list)
    killed: dict[str, float] = field(default_factory=dict)
    """When each engine was killed."""
    held: dict[int, list[str]] = field(default_factory=dict)
    """Engines that were lost with a request, by its number."""
    after_last_s: list[float] = field(default_factory=list)
    """Of each request that a killed engine held, from the kill to its end; from the last kill where its next engine was killed too."""
    after_first_s: list[float] = field(default_factory=list)
    """The same from the first."""
    survivors_s: list[float] = field(default_factory=list)
    """Of each other request that was open at a kill, from its beginning to its end."""

    def note_end(self, number: int, begin: float, end: float) -> None:
        """A request has ended, well or not."""
        moments = [self.killed[name] for name in self.held.get(number, []) if name in self.killed]
        if moments:
            self.after_last_s.append(end - max(moments))
            self.after_first_s.append(end - min(moments))
        elif any(begin < moment < end for moment in self.killed.values()):
            self.survivors_s.append(end - begin)

    def late(self) -> list[str]:
        """What took too long, or was not measured."""
        measured = {
            "from the kill of its engine to the end of a request": self.after_last_s,
            "for one of an engine that lived": self.survivors_s,
        }
        late = [f"{seconds:.1f} s {what}" for what, each in measured.items() for seconds in each if seconds > _LIMIT_S]
        return late if self.after_last_s or not self.killed else [*late, "no killed engine held a request"]

    async def one(self, client: InferenceClient, index: int, wanted: list[int]) -> None:
        """A request of a client: whole ones must succeed, streams may fail by name of a killed engine."""
        streamed, begin = index % 2 == 1, time.monotonic()
        self.streams, self.whole = self.streams + streamed, self.whole + (not streamed)
        request = await client.submit([1, index % 4], _greedy(60), stream=streamed)
        try:
            record = await request.record()
        except EngineLostError as error:
            self.failures += 1
            name = re.search(r"engine (dp-\d+)", str(error))
            if not streamed or name is None or name[1] not in self.killed:
                self.problems.append(f"a {'stream' if streamed else 'whole request'} failed: {error}")
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")
        else:
            if record.generated_tokens != wanted:
                self.problems.append("other tokens than those of one engine")
        self.note_end(request.request_id, begin, time.monotonic())


def _note_holders(core: CoordinatorCore, held: dict[int, list[str]]) -> None:
    """From now on each engine that is lost is noted at the requests that it has then."""
    lose = core._lose

    def noting(peer: bytes, reason: str, now: float, *, tell: bool = True) -> None:
        engine = core._group.engines.get(peer)
        for attempt in () if engine is None else engine.requests:
            held.setdefault(core._requests._attempts[attempt].message.request_id, []).append(engine.name)
        lose(peer, reason, now, tell=tell)

    core._lose = noting  # type: ignore[method-assign]


def killed_engines(kills: int, seed: int, until: float = math.inf) -> Figures:
    """Two engine processes under load, one of them killed again and again, and replaced; ended early at the time ``until``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaigns._serving_engine"])
    security = CoordinatorSecurity(secret=_SECRET)
    settings = CoordinatorConfig(security=security, heartbeat_s=HEARTBEAT_S, engine_timeout_s=_ENGINE_TIMEOUT_S, max_retries=_RETRIES)
    processes: dict[str, BaseProcess] = {}
    with DataParallelInferenceCoordinator(settings) as coordinator:

        def start() -> None:
            name = f"dp-{start.__dict__.setdefault('numbers', itertools.count()).__next__()}"
            processes[name] = context.Process(target=work, args=(coordinator.address, name, _SECRET), daemon=True)
            processes[name].start()

        try:
            start()
            start()
            coordinator.wait_for_engines(2, 120)
            requests = asyncio.run(_kill(coordinator, processes, start, kills, random.Random(seed), until))
        finally:
            for process in processes.values():
                process.kill()
                process.join()
    problems, lived = requests.problems + requests.late(), sorted(requests.survivors_s)
    return {
        "kills": len(requests.killed),
        "engine_timeout_s": _ENGINE_TIMEOUT_S,
        "max_retries": _RETRIES,
        "whole_requests": requests.whole,
        "streams": requests.streams,
        "typed_failures_of_streams": requests.failures,
        "held_by_a_killed_engine": len(requests.after_last_s),
        "slowest_end_after_its_kill_s": round(max(requests.after_last_s, default=0), 2),
        "slowest_end_after_the_first_of_its_kills_s": round(max(requests.after_first_s, default=0), 2),
        "survivors": {"requests": len(lived)}
        | {f"p{share}_s": round(lived[share * (len(lived) - 1) // 100], 2) for share in (50, 99, 100) if lived},
        "problems": problems[:5],
    }


async def _kill(
    coordinator: DataParallelInferenceCoordinator,
    processes: dict[str, BaseProcess],
    start: Callable[[], None],
    kills: int,
    rng: random.Random,
    until: float,
) -> Fates:
    requests = Fates()
    _note_holders(coordinator._core, requests.held)
    async with InferenceClient(coordinator.address, security=CoordinatorSecurity(secret=_SECRET), heartbeat_s=HEARTBEAT_S) as client:
        wanted = [(await client.add_request([1, last], _greedy(60))).generated_tokens for last in range(4)]
        async with _loaded(6, lambda index: requests.one(client, index, wanted[index % 4])):
            for _ in range(kills):
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                if time.monotonic() > until:
                    break
                name = rng.choice(sorted(processes))
                requests.killed[name] = time.monotonic()
                process = processes.pop(name)
                process.kill()
                await asyncio.to_thread(process.join)
                start()
                while {engine.name for engine in (await client.status()).engines} != set(processes):
                    await asyncio.sleep(0.05)
                    if time.monotonic() - requests.killed[name] > 60:
                        raise TimeoutError(f"60 s after {name} was killed the engines are {(await client.status()).engines}")
        if open_requests := coordinator.num_open_requests:
            requests.problems.append(f"{open_requests} requests are left open")
    return requests


# -- suspends and weights ----------------------------------------------------------------------------------------------


def suspended(runner: EngineRunner, suspends: int, seed: int) -> Figures:
    """Streams while the engine is suspended and resumed: their tokens are those of the model."""
    model, rng, problems, count = make_model(), random.Random(seed), [], itertools.count()

    async def one(index: int) -> None:
        record = await (await runner.submit([7, index % 250], _greedy(120))).record()
        next(count)
        tokens = [7, index % 250, *record.generated_tokens]
        if len(tokens) != 122 or most_probable(model, tokens)[1:-1] != tokens[2:]:
            problems.append(f"request {index} has other tokens")

    async def run() -> None:
        async with _loaded(_STREAMS, one):
            for _ in range(suspends):
                await asyncio.sleep(rng.uniform(0, 0.05))
                await runner.suspend()
                await runner.resume()
                await runner.unpause()

    asyncio.run(run())
    return {"suspends": suspends, "requests": next(count), "problems": problems[:5]}


def swapped_weights(runner: EngineRunner, swaps: int, seed: int) -> Figures:
    """Streams while weights are loaded by each policy: every token is one of the weights that it is stamped with.

    ``keep`` loads equal weights under a new version, since old keys and values with new weights have no reference.
    """
    models = [make_model(0), make_model(1)]
    chunks = [[(shard.name, shard.parameter.detach()) for shard in named_shards(model)] for model in models]
    rng, problems, of_version, policies = random.Random(seed), [], {0: 0}, dict[int, str]()
    counts = {"requests": 0, "requests_of_several_versions": 0}

    async def one(index: int) -> None:
        prompt = [7, 7, 7, 7, 7, 7, 7, 7, index % 8]
        record = await (await runner.submit(prompt, _greedy(rng.randrange(20, 120)))).record()
        stamps, tokens = [tuple(stamp) for stamp in record.weight_versions], prompt + record.generated_tokens
        counts["requests"] += 1
        counts["requests_of_several_versions"] += len(stamps) > 1
        versions = [version for version, _ in stamps]
        if versions != sorted(set(versions)) or sum(each for _, each in stamps) != len(record.generated_tokens):
            problems.append(f"stamps {stamps} of {len(record.generated_tokens)} tokens")
        if any(policies[version] == "drain" for version in range(versions[0] + 1, versions[-1] + 1)):
            problems.append(f"stamps {stamps} go beyond a drain")
        best, at = [most_probable(model, tokens) for model in models], len(prompt)
        for version, number in stamps:
            if best[of_version[version]][at - 1 : at + number - 1] != tokens[at : at + number]:
                problems.append(f"tokens of version {version} are not those of its weights")
            at += number

    async def run() -> None:
        async with _loaded(_STREAMS, one):
            for version in range(1, swaps + 1):
                await asyncio.sleep(rng.uniform(0, 0.08))
                policy = rng.choice(["recompute", "keep", "drain"])
                which = of_version[version - 1] ^ (policy != "keep")
                of_version[version], policies[version] = which, policy
                await runner.load_weights(chunks[which], version, in_flight=policy)  # type: ignore[arg-type]
        await runner.load_weights(chunks[0], swaps + 1)

    asyncio.run(asyncio.wait_for(run(), math.inf if swaps > 20 else 100))
    return {"swaps": swaps, **counts, "problems": problems[:5]}
