# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines of a coordinator that are lost, stuck or frozen, and the requests that they had, over real sockets."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("zmq")

from mcore_inference import EngineLostError, EngineRunner, RankFailedError, SamplingParams
from mcore_inference.coordinator import DataParallelInferenceCoordinator, EngineWorker, InferenceClient, _coordinator
from tests.support.coordinated_engines import serve

Make = Callable[..., Any]
TEN = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True, top_n_logprobs=2)
LONG = SamplingParams(num_tokens_to_generate=400, ignore_eos=True, seed=1)


def test_requests_of_a_lost_engine_go_to_another(runners: list[EngineRunner]) -> None:
    async def ask(coordinator: DataParallelInferenceCoordinator, leaving: EngineWorker) -> None:
        async with InferenceClient(coordinator.address) as client:
            await client.pause_engines()
            whole = [client.add_request(f"whole {index}", TEN) for index in range(6)]
            await client.unpause_engines()
            leaving.close()
            records = await asyncio.gather(*whole)
            assert [len(record.generated_tokens) for record in records] == [10] * 6
            assert coordinator.num_engines == 1

    with ExitStack() as stack:
        coordinator = serve(stack, runners[:1])
        leaving = EngineWorker(runners[1], coordinator.address, name="dp-1", heartbeat_s=0.05)
        coordinator.wait_for_engines(2)
        asyncio.run(ask(coordinator, leaving))


def test_requests_of_an_engine_that_fails_for_good_go_to_another(runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RankFailedError(1, "is gone")

    async def ask(coordinator: DataParallelInferenceCoordinator) -> None:
        async with InferenceClient(coordinator.address) as client:
            await client.pause_engines()
            whole = [client.add_request(f"whole {index}", TEN) for index in range(6)]
            monkeypatch.setattr(runners[1].engine, "step", fail)
            await client.unpause_engines()
            records = await asyncio.gather(*whole)
            assert [len(record.generated_tokens) for record in records] == [10] * 6
            assert coordinator.num_engines == 1 and isinstance(runners[1].failure, RankFailedError)

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners)))


def test_requests_of_an_engine_that_its_owner_closes_go_to_another(runners: list[EngineRunner]) -> None:
    async def ask(coordinator: DataParallelInferenceCoordinator) -> None:
        async with InferenceClient(coordinator.address) as client:
            await client.pause_engines()
            whole = [client.add_request(f"whole {index}", TEN) for index in range(6)]
            await asyncio.sleep(0)
            while not all(runner.health().unfinished_requests for runner in runners):
                await asyncio.sleep(0.01)
            runners[1].close()
            while coordinator.num_engines > 1:
                await asyncio.sleep(0.01)
            await client.unpause_engines()
            records = await asyncio.gather(*whole)
            assert [len(record.generated_tokens) for record in records] == [10] * 6 and runners[1].failure is None

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners)))


def test_a_stream_of_a_lost_engine_fails_with_the_engines_name(runners: list[EngineRunner]) -> None:
    async def ask(coordinator: DataParallelInferenceCoordinator, leaving: EngineWorker) -> None:
        async with InferenceClient(coordinator.address) as client:
            stream = await client.submit("x", LONG)
            async for _ in stream:
                break
            leaving.close()
            with pytest.raises(EngineLostError, match="engine dp-1 was lost"):
                await stream.record()

    with ExitStack() as stack:
        coordinator = serve(stack, [])
        leaving = EngineWorker(runners[1], coordinator.address, name="dp-1", heartbeat_s=0.05)
        coordinator.wait_for_engines(1)
        asyncio.run(ask(coordinator, leaving))


def test_an_engine_that_is_known_to_have_ended_is_lost_at_once(runners: list[EngineRunner]) -> None:
    async def ask(coordinator: DataParallelInferenceCoordinator) -> None:
        async with InferenceClient(coordinator.address) as client:
            stream = await client.submit("x", LONG)
            async for _ in stream:
                break
            coordinator.lose_engine("dp-2", "nobody has that name")
            coordinator.lose_engine("dp-1", "its process was killed")
            with pytest.raises(EngineLostError, match=r"engine dp-1 was lost \(its process was killed\)"):
                await asyncio.wait_for(stream.record(), 10)

    with ExitStack() as stack:
        coordinator = serve(stack, [], engine_timeout_s=100)
        stack.enter_context(EngineWorker(runners[1], coordinator.address, name="dp-1", heartbeat_s=0.05))
        coordinator.wait_for_engines(1)
        asyncio.run(ask(coordinator))
        # It lives, and so it comes back.
        coordinator.wait_for_engines(1)
    coordinator.lose_engine("dp-1", "after the end")


def test_time_in_which_nobody_looked_is_no_time() -> None:
    times = iter([100.0, 100.5, 101.25, 103.25, 7000.0, 7001.0, 7003.0, 7005.5])
    clock = _coordinator._AwakeClock(2.0, lambda: next(times))
    assert [clock.now() for _ in range(7)] == [100.5, 101.25, 103.25, 103.25, 104.25, 106.25, 106.25]


@pytest.mark.journey
def test_a_coordinator_that_was_frozen_loses_neither_engines_nor_clients(runners: list[EngineRunner]) -> None:
    async def ask(coordinator: DataParallelInferenceCoordinator) -> None:
        async with InferenceClient(coordinator.address) as client:
            stream = await client.submit("x", LONG)
            await anext(aiter(stream))
            num_looks = 0

            def read() -> float:
                nonlocal num_looks
                num_looks += 1
                return time.monotonic() + 3600.0

            # As its process sees it that goes on an hour later, before it reads what came meanwhile.
            coordinator._clock._read = read
            record = await stream.record()
            while num_looks < 20:
                await asyncio.sleep(0.01)
            assert len(record.generated_tokens) == 400
            assert (await client.status()).past["lost_engines"] == 0 and coordinator.num_engines == 2

    with ExitStack() as stack:
        asyncio.run(asyncio.wait_for(ask(serve(stack, runners)), 60))


def test_a_stuck_engine_is_given_up_and_comes_back(runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = runners[1]

    async def ask(coordinator: DataParallelInferenceCoordinator) -> None:
        async with InferenceClient(coordinator.address) as client:
            with monkeypatch.context() as patch:
                health = stuck.health()
                patch.setattr(stuck, "health", lambda: type(health)(**{**vars(health), "alive": False}))
                while coordinator.num_engines == 2:
                    await asyncio.sleep(0.01)
            coordinator_engines = coordinator.num_engines
            assert coordinator_engines == 1
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10
            while coordinator.num_engines == 1:
                await asyncio.sleep(0.01)

    with ExitStack() as stack:
        asyncio.run(asyncio.wait_for(ask(serve(stack, runners)), 20))
