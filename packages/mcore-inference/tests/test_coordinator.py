# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A coordinator over real sockets, with engines of a tiny model."""

import asyncio
import dataclasses
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

zmq = pytest.importorskip("zmq")

from mcore_inference import (  # noqa: E402
    CoordinatorError,
    EngineDeadError,
    EngineLostError,
    EngineRunner,
    InvalidTokenError,
    MaxSequenceLengthOverflowError,
    RankFailedError,
    SamplingParams,
    WeightLoadError,
    WeightSlice,
)
from mcore_inference.coordinator import (  # noqa: E402
    CoordinatedRunner,
    CoordinatorConfig,
    CoordinatorSecurity,
    DataParallelInferenceCoordinator,
    EngineWorker,
    GroupState,
    InferenceClient,
    _coordinator,
    is_loopback,
)
from mcore_inference.coordinator._messages import Message, Partials, encode  # noqa: E402
from mcore_inference.coordinator._peer import Silence  # noqa: E402
from mcore_parallel import named_shards  # noqa: E402
from mcore_parallel.data import ByteTokenizer  # noqa: E402

Make = Callable[..., Any]
TEN = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True, top_n_logprobs=2)
LONG = SamplingParams(num_tokens_to_generate=400, ignore_eos=True, seed=1)
# A busy machine is silent for a second now and then; only who looks at silence has a short time-out.
QUICK = {"heartbeat_s": 0.05, "engine_timeout_s": 20.0, "client_timeout_s": 20.0, "signal_timeout_s": 5.0}


@pytest.fixture
def runners(make_model: Make, make_engine: Make) -> Iterator[list[EngineRunner]]:
    """Two engines of equal weights."""
    with ExitStack() as stack:
        model = lambda: make_model(vocab_size=272, dtype=torch.float32, layers=1)  # noqa: E731
        yield [stack.enter_context(EngineRunner(make_engine(model(), ByteTokenizer(), max_sequence_length=512))) for _ in range(2)]


def serve(stack: ExitStack, runners: list[EngineRunner], **settings: Any) -> DataParallelInferenceCoordinator:
    coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**{**QUICK, **settings})))
    for index, runner in enumerate(runners):
        security = coordinator.config.security
        stack.enter_context(EngineWorker(runner, coordinator.address, name=f"dp-{index}", security=security, heartbeat_s=0.05))
    coordinator.wait_for_engines(len(runners))
    return coordinator


def test_answers_are_those_of_one_engine(runners: list[EngineRunner], make_model: Make, make_engine: Make) -> None:
    prompts = [f"prompt {index}" for index in range(8)]
    alone = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=512)
    wanted = alone.generate(prompts, TEN)

    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            assert client.max_sequence_length == 512
            records = await asyncio.gather(*(client.add_request(prompt, TEN) for prompt in prompts))
            for record, reference in zip(records, wanted, strict=True):
                assert record.generated_tokens == reference.generated_tokens
                assert record.generated_text == reference.generated_text
                assert record.generated_log_probs == pytest.approx(reference.generated_log_probs, abs=1e-5)
                assert record.latency is not None and record.latency > 0
            assert (await client.add_request(prompts[1], TEN, priority=3)).merge().priority == 3
            with pytest.raises(ValueError, match="priority="):
                await client.submit(prompts[0], TEN, priority=0.5)  # type: ignore[arg-type]
            stream = await client.submit(prompts[0], TEN, priority=-1)
            tokens, text, best = [], "", []
            async for increment in stream:
                tokens, text, best = tokens + increment.tokens, text + increment.text, best + increment.top_n_logprobs
            assert (tokens, text) == (wanted[0].generated_tokens, wanted[0].generated_text)
            [whole] = [increment async for increment in await client.submit(prompts[0], TEN, stream=False)]
            assert (whole.tokens, whole.text) == (wanted[0].generated_tokens, wanted[0].generated_text)
            assert [set(each) for each in best] == [set(each) for each in wanted[0].generated_top_n_logprobs]
            status = await client.status()
            assert {engine.name for engine in status.engines} == {"dp-0", "dp-1"}
            assert [engine.finished_requests for engine in status.engines] == [pytest.approx(5.5, abs=1.6)] * 2

    with ExitStack() as stack:
        coordinator = serve(stack, runners)
        asyncio.run(ask(coordinator.address))
        assert coordinator.num_open_requests == 0


def test_what_a_full_engine_refuses_is_answered_by_another(make_model: Make, make_engine: Make) -> None:
    engines = [make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer()) for _ in range(2)]

    async def ask(address: str, full: EngineRunner) -> None:
        await full.pause()
        async with InferenceClient(address) as client:
            answers = [client.add_request("alike " * 8, TEN) for _ in range(12)]
            deadline = time.monotonic() + 30.0
            while sum(answer.done() for answer in answers) < 10 and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert [answer.done() and len(answer.result().generated_tokens) for answer in answers].count(10) == 10
            await full.unpause()
            assert all([len((await answer).generated_tokens) == 10 for answer in answers])

    with ExitStack() as stack:
        full = stack.enter_context(EngineRunner(engines[0], max_waiting_requests=2, stall_timeout_s=100.0))
        coordinator = serve(stack, [full, stack.enter_context(EngineRunner(engines[1]))])
        asyncio.run(ask(coordinator.address, full))


def test_a_message_has_the_tokens_of_a_step_of_all_streams(runners: list[EngineRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(message: Message) -> bytes:
        if isinstance(message, Partials):
            sizes.append(len(message.items))
        return encode(message)

    async def ask(runner: CoordinatedRunner) -> None:
        async def one(prompt: str) -> None:
            stream = await runner.submit(prompt, SamplingParams(num_tokens_to_generate=40, ignore_eos=True))
            tokens, text = [], ""
            async for increment in stream:
                tokens, text = tokens + increment.tokens, text + increment.text
            assert increment.record is not None
            assert len(tokens) == 40 and (tokens, text) == (increment.record.generated_tokens, increment.record.generated_text)

        await asyncio.gather(*(one(f"prompt {number}") for number in range(8)))
        assert runner.health().unfinished_requests == 0

    monkeypatch.setattr("mcore_inference.coordinator._worker.encode", counted)
    with ExitStack() as stack:
        coordinator = serve(stack, runners[:1])
        asyncio.run(ask(stack.enter_context(CoordinatedRunner(coordinator.address))))
    # The last token of a stream comes with its record.
    assert sum(sizes) <= 8 * 39 and len(sizes) < sum(sizes) / 2, sizes


def test_refusals_of_engines_reach_the_client_and_end_one_request(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(MaxSequenceLengthOverflowError, match="max_sequence_length=512"):
                await client.add_request([1] * 600, TEN)
            with pytest.raises(InvalidTokenError):
                await client.add_request([], TEN)
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners).address))


def test_a_cancelled_request_is_aborted_and_others_go_on(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        async with InferenceClient(address) as client:
            await client.pause_engines()
            requests = [client.add_request("x", TEN) for _ in range(4)]
            await asyncio.sleep(0.1)
            requests[1].cancel()
            await client.unpause_engines()
            records = await asyncio.gather(*requests, return_exceptions=True)
            assert [isinstance(record, asyncio.CancelledError) for record in records] == [False, True, False, False]
            status = await client.status()
            assert sum(engine.open_requests for engine in status.engines) == 0

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners).address))
        deadline = time.monotonic() + 30
        while any(runner.engine.has_unfinished_requests() for runner in runners):
            assert time.monotonic() < deadline
            time.sleep(0.01)


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


def weights_of(engine: Any) -> list[tuple[str, torch.Tensor]]:
    return [(shard.name, shard.parameter.detach().clone()) for shard in named_shards(engine.model)]


@pytest.fixture
def renewed(make_model: Make, make_engine: Make) -> Any:
    """An engine of other weights."""
    return make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1, seed=1), ByteTokenizer(), max_sequence_length=512)


@pytest.mark.parametrize(
    "policy", ["recompute", pytest.param("keep", marks=pytest.mark.journey), pytest.param("drain", marks=pytest.mark.journey)]
)
def test_weights_reach_all_engines_while_they_serve(runners: list[EngineRunner], renewed: Any, policy: Any) -> None:
    new, old = weights_of(renewed), weights_of(runners[0].engine)
    [expected] = renewed.generate(["abc"], TEN)

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            params = dataclasses.replace(LONG, num_tokens_to_generate=150)
            streams = [await client.submit(f"{index}", params) for index in range(4)]
            for stream in streams:
                await anext(aiter(stream))
            assert await client.load_weights(new, in_flight=policy) == 1
            for record in await asyncio.gather(*(client.add_request("abc", TEN) for _ in range(4))):
                assert record.generated_tokens == expected.generated_tokens
                assert record.weight_versions == [(1, 10)]
            for stream in streams:
                record = await stream.record()
                assert record.error is None and len(record.generated_tokens) == 150
                assert {version for version, _ in record.weight_versions} == ({0} if policy == "drain" else {0, 1})
            if policy != "keep":
                return
            # Boxes of parameters, backwards, with a number of the caller's, however requests go on.
            rows = [
                (name, WeightSlice(tensor=tensor[at : at + 1], offsets=(at, *(0,) * (tensor.dim() - 1))))
                for name, tensor in old
                for at in reversed(range(len(tensor)))
            ]
            assert await client.load_weights(rows, version=7) == 7
            assert [engine.weight_version for engine in (await client.status()).engines] == [7, 7]

    with ExitStack() as stack:
        # Many buckets, into which no parameter fits whole.
        asyncio.run(main(serve(stack, runners, max_message_bytes=8192).address))
    for runner in runners:
        for (_, tensor), (_, loaded) in zip(old if policy == "keep" else new, weights_of(runner.engine), strict=True):
            assert torch.equal(tensor, loaded)


def test_an_engine_that_refuses_weights_is_named_and_none_is_half_loaded_after_the_next(runners: list[EngineRunner], renewed: Any) -> None:
    new = weights_of(renewed)
    [expected] = renewed.generate(["abc"], TEN)
    load, failures = runners[1].engine.load_weights, [RuntimeError("the disk is full")]

    def fail_once(chunks: Any, *arguments: Any, **named: Any) -> None:
        chunks = iter(chunks)
        next(chunks)
        if failures:
            raise failures.pop()
        load([new[0], *chunks], *arguments, **named)

    runners[1].engine.load_weights = fail_once  # type: ignore[method-assign]

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(ValueError, match="in_flight='both'"):
                await client.load_weights(new, in_flight="both")  # type: ignore[arg-type]
            with pytest.raises(WeightLoadError, match="dp-1: RuntimeError: the disk is full$"):
                await client.load_weights(new)
            with pytest.raises(WeightLoadError, match=r"dp-0: WeightLoadError: nothing is no parameter of the model.*dp-1: "):
                await client.load_weights([("nothing", torch.zeros(1))])

            def broken() -> Iterator[tuple[str, torch.Tensor]]:
                yield from new[:2]
                raise OSError("the file is gone")

            with pytest.raises(OSError, match="the file is gone"):
                await client.load_weights(broken())
            assert (await client.status()).state == "running"
            assert await client.load_weights(new, version=3) == 3
            for record in await asyncio.gather(*(client.add_request("abc", TEN) for _ in range(4))):
                assert (record.generated_tokens, record.weight_versions) == (expected.generated_tokens, [(3, 10)])

    with ExitStack() as stack:
        asyncio.run(main(serve(stack, runners, max_message_bytes=600_000).address))


def test_an_engine_that_is_lost_in_a_load_is_named_and_the_others_have_the_weights(runners: list[EngineRunner], renewed: Any) -> None:
    new = weights_of(renewed)

    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        yield from new[:-1]
        worker.close()
        time.sleep(0.2)
        yield new[-1]

    async def main(address: str) -> None:
        async with InferenceClient(address) as client:
            with pytest.raises(CoordinatorError, match=r"lost while weights were loaded \(dp-1: (it left|its connection is gone)\)"):
                await client.load_weights(slowly())
            status = await client.status()
            assert [(engine.name, engine.weight_version) for engine in status.engines] == [("dp-0", 1)]
            # The one that missed the load may come back, and gets no request before the next one.
            with EngineWorker(runners[1], address, name="dp-1", heartbeat_s=0.05):
                while len((await client.status()).engines) < 2:
                    await asyncio.sleep(0.01)
                records = await asyncio.gather(*(client.add_request("abc", TEN) for _ in range(4)))
                assert all(record.weight_versions == [(1, 10)] for record in records)
                assert await client.load_weights(new) == 2
                assert [engine.weight_version for engine in (await client.status()).engines] == [2, 2]

    with ExitStack() as stack:
        coordinator = serve(stack, runners[:1])
        worker = stack.enter_context(EngineWorker(runners[1], coordinator.address, name="dp-1", heartbeat_s=0.05))
        coordinator.wait_for_engines(2)
        asyncio.run(main(coordinator.address))


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


def test_strangers_are_refused(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        with pytest.raises(CoordinatorError, match="secret is not that of this job"):
            await InferenceClient(address).start()
        with pytest.raises(CoordinatorError, match="use `async with"):
            InferenceClient(address).add_request("x")
        async with InferenceClient(address, security=CoordinatorSecurity(secret="s3")) as client:
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10

    with ExitStack() as stack:
        coordinator = serve(stack, runners[:1], security=CoordinatorSecurity(secret="s3"))
        with EngineWorker(runners[1], coordinator.address, heartbeat_s=0.05) as stranger:
            deadline = time.monotonic() + 30
            while stranger.refusal is None and time.monotonic() < deadline:
                time.sleep(0.01)
            assert stranger.refusal == "secret is not that of this job"
        asyncio.run(ask(coordinator.address))
        assert coordinator.num_engines == 1


def test_encrypted_sockets_need_the_coordinators_key(runners: list[EngineRunner]) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())

    async def ask(address: str) -> None:
        with pytest.raises(CoordinatorError, match="is a coordinator there"):
            await InferenceClient(address, timeout_s=0.3).start()
        async with InferenceClient(address, security=CoordinatorSecurity(secret="s3", public_key=public)) as client:
            assert len((await client.add_request("x", TEN)).generated_tokens) == 10

    with ExitStack() as stack:
        keys = CoordinatorSecurity(secret="s3", public_key=public, secret_key=secret)
        asyncio.run(ask(serve(stack, runners[:1], security=keys).address))


def test_an_engine_without_an_answer_says_so_and_no_more_once_it_has_one(
    runners: list[EngineRunner], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until(is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)

    monkeypatch.setattr("mcore_inference.coordinator._peer._SILENT_S", 0.1)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        # One that takes the connection and says nothing, as a coordinator of another key does.
        with EngineWorker(runners[0], f"tcp://127.0.0.1:{port}", name="dp-0", heartbeat_s=0.05) as worker:
            until(lambda: caplog.text.count("dp-0 has no answer") >= 2)
            assert re.search(rf"from tcp://127.0.0.1:{port} for \d+ s; is the server up, is the job file its newest\?", caplog.text)
            listener.close()
            stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(port=port, **QUICK))).wait_for_engines(1, 30)
            until(lambda: worker._silence._since is None)


def test_warnings_of_a_silence_come_ever_later_and_begin_anew_with_another_one() -> None:
    silence = Silence()
    dues = [now for now in range(300) if silence.sent(float(now)) is not None]
    assert dues == [5, 10, 20, 40, 80, 140, 200, 260]
    silence.heard()
    assert [now for now in range(300, 312) if silence.sent(float(now)) is not None] == [305, 310]


@pytest.mark.journey
def test_the_http_server_speaks_to_a_coordinator_as_to_one_engine(runners: list[EngineRunner]) -> None:
    httpx = pytest.importorskip("httpx")
    from mcore_inference.server import serve_runner

    with ExitStack() as stack:
        coordinator = serve(stack, runners)
        server = stack.enter_context(serve_runner(lambda: CoordinatedRunner(coordinator.address), ByteTokenizer()))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
        body = {"prompt": "x", "max_tokens": 10, "temperature": 0.0}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 10
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]) == answer["choices"][0]["text"]
        long = client.post("/v1/completions", json={"prompt": [1] * 600, "max_tokens": 4})
        assert long.status_code == 400 and long.json()["error"]["code"] == "context_length_exceeded"
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 512
        assert "mcore_inference_engines 2.0" in client.get("/metrics").text
        coordinator.close()
        deadline = time.monotonic() + 10
        while client.get("/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)


ATTACK = """
import random, sys, zmq
draw = random.Random(0)
for index in range(200):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 100
        socket.connect(sys.argv[1])
        # Arrays of unknown kinds, deep ones, numbers of known messages with anything behind, too much.
        size = 2**21 if index % 50 == 49 else draw.randrange(64)
        frame = draw.choice([draw.randbytes(size), bytes([0x91]) * size, bytes([0x92, draw.randrange(24)]) + draw.randbytes(size)])
        socket.send_multipart([frame] * draw.choice([1, 1, 1, 2]))
"""


@pytest.mark.journey
def test_random_bytes_and_long_messages_harm_nobody(runners: list[EngineRunner]) -> None:
    draw = random.Random(0)

    async def ask(address: str) -> None:
        host, port = address.removeprefix("tcp://").split(":")
        # In a process of its own: libzmq itself may abort where a socket is closed within a message.
        attack = subprocess.Popen([sys.executable, "-c", ATTACK, address])
        async with InferenceClient(address) as client:
            for _ in range(100):
                with socket.create_connection((host, int(port)), timeout=5) as raw:
                    raw.sendall(draw.choice([b"", b"\xff\0\0\0\0\0\0\0\1\x7f\3"]) + draw.randbytes(draw.randrange(300)))
                    assert len((await client.add_request("x", TEN)).generated_tokens) == 10
            while attack.poll() is None:
                assert len((await client.add_request("x", TEN)).generated_tokens) == 10
            assert len((await client.status()).engines) == 1

    with ExitStack() as stack:
        asyncio.run(ask(serve(stack, runners[:1], max_message_bytes=2**20).address))


FLOOD = """
import sys, time, zmq
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.linger, dealer.sndhwm, dealer.rcvhwm = 1000, 100_000, 100_000
    dealer.connect(sys.argv[1])
    begin = time.monotonic()
    for _ in range(10_000):
        dealer.send(b"\\x91\\x0f")
    replies = 0
    while dealer.poll(1500):
        assert b"you are not known here" in dealer.recv()
        replies += 1
    print(replies, time.monotonic() - begin)
"""


@pytest.mark.journey
def test_a_flood_of_a_stranger_is_answered_a_hundred_times_a_second_and_loses_no_engine(runners: list[EngineRunner]) -> None:
    async def ask(address: str) -> None:
        attack = subprocess.Popen([sys.executable, "-c", FLOOD, address], stdout=subprocess.PIPE, text=True)
        async with InferenceClient(address) as client:
            while attack.poll() is None:
                assert len((await client.add_request("x", TEN)).generated_tokens) == 10
        said, _ = attack.communicate()
        replies, seconds = map(float, said.split())
        assert 100 <= replies <= 100 + 100 * seconds and replies < 5000

    with ExitStack() as stack:
        # Heartbeats that waited for the flood would be late.
        asyncio.run(ask(serve(stack, runners[:1], engine_timeout_s=0.6).address))


def test_a_server_that_was_there_before_its_engines_serves_once_they_are(runners: list[EngineRunner]) -> None:
    httpx = pytest.importorskip("httpx")
    from mcore_inference.server import serve_runner

    body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True}
    with ExitStack() as stack:
        coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**QUICK)))
        server = stack.enter_context(serve_runner(lambda: CoordinatedRunner(coordinator.address), ByteTokenizer()))
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=20))
        early = client.post("/v1/completions", json=body)
        assert early.status_code == 503 and early.json()["error"]["code"] == "no_engine"
        stack.enter_context(EngineWorker(runners[0], coordinator.address, name="late", heartbeat_s=0.05))
        coordinator.wait_for_engines(1)
        end = time.monotonic() + 20
        while (answer := client.post("/v1/completions", json=body)).status_code == 503:
            assert time.monotonic() < end, "the server does not see the engine"
            time.sleep(0.1)
        assert answer.json()["usage"]["completion_tokens"] == 4


def test_a_client_outlives_a_coordinator_that_is_restarted(runners: list[EngineRunner]) -> None:
    async def ask(stack: ExitStack, first: DataParallelInferenceCoordinator) -> None:
        port = int(first.address.rsplit(":", 1)[1])
        async with InferenceClient(first.address, timeout_s=5, heartbeat_s=0.05) as client:
            with EngineWorker(runners[0], first.address, heartbeat_s=0.05):
                await asyncio.to_thread(first.wait_for_engines, 1)
                first.close()
                second = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(port=port, **QUICK)))
                await asyncio.to_thread(second.wait_for_engines, 1)
                for _ in range(100):
                    try:
                        record = await client.add_request("x", TEN)
                        break
                    except CoordinatorError:
                        await asyncio.sleep(0.05)
                assert len(record.generated_tokens) == 10

    with ExitStack() as stack:
        asyncio.run(ask(stack, stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**QUICK)))))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"host": "192.0.2.1"}, "host='192.0.2.1' is reachable from other machines"),
        ({"host": "192.0.2.1", "security": CoordinatorSecurity(secret="s")}, "both keys"),
        *(
            ({"host": host}, "stands for all addresses of this machine, and others .*; give the one")
            for host in ("0.0.0.0", "::", "*", "0", "0.0", "::ffff:0.0.0.0")
        ),
        ({"port": 70000}, "port=70000 must be an integer from 0 to 65535"),
        ({"engine_timeout_s": 1.0}, "engine_timeout_s=1.0 must be at least twice heartbeat_s=1.0"),
        ({"max_retries": -1}, "max_retries=-1"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CoordinatorConfig(**fields)


def test_an_address_of_loopback_is_told_from_all_others() -> None:
    hosts = {
        True: ("127.0.0.1", "127.9.9.9", "::1", "localhost"),
        False: ("0.0.0.0", "::", "", "192.0.2.1", "[::1]", "127.0.0.1:80", "127.1"),
    }
    assert {host: is_loopback(host) for each in hosts.values() for host in each} == {host: here for here in hosts for host in hosts[here]}


def test_bad_keys_and_addresses_are_refused(runners: list[EngineRunner]) -> None:
    with pytest.raises(ValueError, match="public_key must be 40 characters"):
        CoordinatorSecurity(public_key="short")
    for key in ("~" * 40, "#" * 40):
        # No Z85, and of five digits whose number has more than 32 bits.
        with pytest.raises(ValueError, match="public_key must be 40 characters of Z85"):
            CoordinatorSecurity(public_key=key)
    with pytest.raises(ValueError, match="secret_key without public_key"):
        CoordinatorSecurity(secret_key="0" * 40)
    with pytest.raises(ValueError, match="address='nowhere'"):
        EngineWorker(runners[0], "nowhere")
    with pytest.raises(ValueError, match="address='nowhere'"):
        asyncio.run(InferenceClient("nowhere").start())
    for address in ("tcp://127.0.0.1", "tcp://host", "tcp://", "//127.0.0.1:5"):
        with pytest.raises(ValueError, match="is none; it looks like tcp://127.0.0.1:5000"):
            asyncio.run(InferenceClient(address).start())
    for address in ("tcp://192.0.2.1:5", "tcp://host:5", "tcp://[2001:db8::1]:5", "tcp://127.0.0.1:0;192.0.2.1:5", "tipc://{1,0,0}"):
        with pytest.raises(ValueError, match="is reached over a network, where secrets would go in the clear; give security with the"):
            asyncio.run(InferenceClient(address, security=CoordinatorSecurity(secret="s3")).start())
    with pytest.raises(ValueError, match="in the clear"):
        EngineWorker(runners[0], "tcp://192.0.2.1:5")
    with pytest.raises(ValueError, match="address=5 is a int; give a string"):
        asyncio.run(InferenceClient(5).start())  # type: ignore[arg-type]
    with DataParallelInferenceCoordinator() as first, pytest.raises(OSError, match="in use"):
        DataParallelInferenceCoordinator(CoordinatorConfig(port=int(first.address.rsplit(":", 1)[1]))).start()
