# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Signals to the engines of a coordinator: they pause, free their cache, and end, over real sockets."""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch

pytest.importorskip("zmq")

from mcore_inference import CoordinatorError, EngineDeadError, EngineRunner, SamplingParams
from mcore_inference.coordinator import (
    CoordinatorConfig,
    DataParallelInferenceCoordinator,
    EngineWorker,
    GroupState,
    InferenceClient,
)
from tests.support.coordinated_engines import QUICK, serve

Make = Callable[..., Any]
TEN = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True, top_n_logprobs=2)
LONG = SamplingParams(num_tokens_to_generate=400, ignore_eos=True, seed=1)


def test_paused_engines_do_not_step_and_lose_nothing(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client, InferenceClient(address) as other:
            streams = [await client.submit("x", LONG) for _ in range(2)]
            await client.pause_engines()
            # Twice changes nothing, from another client too.
            await other.pause_engines()
            steps = [runner.engine.step_count for runner in runners]
            late = other.add_request("late", TEN)
            await asyncio.sleep(0.15)
            assert [runner.engine.step_count for runner in runners] == steps
            assert not late.done() and all(runner.health().alive for runner in runners)
            await other.unpause_engines()
            records = [await stream.record() for stream in streams]
            assert [len(record.generated_tokens) for record in records] == [400, 400]
            assert all(record.num_preemptions == 0 for record in records)
            assert len((await late).generated_tokens) == 10

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners).address))


@pytest.mark.journey
def test_suspended_engines_hold_no_cache_and_lose_nothing(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            wanted = (await client.add_request("x", LONG)).generated_tokens
            stream = await client.submit("x", LONG)
            async for _ in stream:
                break
            await client.suspend_engines()
            assert all(runner.engine.is_suspended for runner in runners)
            assert all(runner.engine.context.cache.pages.untyped_storage().size() == 0 for runner in runners)
            late = client.add_request("late", TEN)
            await client.resume_engines()
            assert (await stream.record()).generated_tokens == wanted
            assert len((await late).generated_tokens) == 10

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners).address))


def test_a_resume_that_fails_on_one_engine_leaves_all_suspended_and_may_be_sent_again(
    runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            await client.suspend_engines()
            with monkeypatch.context() as full:

                def fail() -> None:
                    raise torch.OutOfMemoryError("no room")

                full.setattr(runners[1].engine, "resume", fail)
                with pytest.raises(CoordinatorError, match=r"resume failed, .* stay suspended \(dp-1: OutOfMemoryError: no room\)"):
                    await client.resume_engines()
            assert (await client.status()).state == "suspended"
            await client.resume_engines()
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10
            assert {engine.name for engine in (await client.status()).engines} == {"dp-0", "dp-1"}

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners).address))


def test_stop_fails_what_is_open_and_ends_workers(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            request = client.add_request("x", LONG)
            await asyncio.sleep(0)
            await client.stop_engines()
            with pytest.raises(EngineDeadError, match="stopped"):
                await request
            with pytest.raises(EngineDeadError, match="stopped"):
                await client.add_request("x", TEN)
            with pytest.raises(CoordinatorError, match="unpause is not possible while the engines are stopped"):
                await client.unpause_engines()

    with DataParallelInferenceCoordinator(CoordinatorConfig(**QUICK)) as coordinator:
        workers = [EngineWorker(runner, coordinator.address, name=f"dp-{at}", heartbeat_s=0.05) for at, runner in enumerate(runners)]
        coordinator.wait_for_engines(2)
        asyncio.run(ask(coordinator.address))
        assert coordinator.state is GroupState.STOPPED
        assert all(worker.join(30) for worker in workers)
