# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines that leave a coordinator in order: they take no more requests, end those that they have, and are missed by nobody."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("zmq")

from mcore_inference import EngineLostError, EngineRunner, SamplingParams
from mcore_inference.coordinator import (
    CoordinatedRunner,
    CoordinatorConfig,
    DataParallelInferenceCoordinator,
    EngineWorker,
    InferenceClient,
    RemoteStream,
    Status,
)
from mcore_inference.coordinator._messages import (
    AskStatus,
    Disconnect,
    EngineReply,
    Failure,
    Leave,
    LeaveAck,
    Partials,
    Pause,
    Refusal,
    SignalAck,
    SubmitRequest,
    WeightAck,
)
from mcore_parallel.data import ByteTokenizer
from tests.support.coordinator_core import Group, acknowledge, bucket, load, partials, register, reply, submit

Make = Callable[..., Any]
LONG = SamplingParams(num_tokens_to_generate=100, ignore_eos=True, seed=1)
QUICK: dict[str, Any] = {"heartbeat_s": 0.05, "engine_timeout_s": 20.0, "client_timeout_s": 20.0, "signal_timeout_s": 5.0}


def status(group: Group) -> Status:
    group.send(b"c0", AskStatus(call=77))
    return group.got(b"c0", Status)[-1]


# -- the coordinator alone ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("goodbye_is_read", [True, False])
def test_a_draining_engine_keeps_its_requests_and_gets_no_more(goodbye_is_read: bool) -> None:
    group = Group(engines=2, clients=1)
    group.send(b"c0", submit(0, stream=True))
    [(engine, other)] = [pair for pair in ((b"e0", b"e1"), (b"e1", b"e0")) if group.got(pair[0], SubmitRequest)]
    (first,) = group.got(engine, SubmitRequest)
    group.send(engine, Leave(call=5))
    assert [message.call for message in group.got(engine, LeaveAck)] == [5]
    for number in range(1, 20):
        group.send(b"c0", submit(number, [1] * 200))
    assert len(group.got(engine, SubmitRequest)) == 1 and len(group.got(other, SubmitRequest)) == 19
    assert {each.name: each.state for each in status(group).engines}[f"dp-{engine.decode()[1:]}"] == "draining"
    assert group.core.num_engines == 1 and len(group.core.engine_names) == 2
    group.send(engine, partials(first.request_id, ended=[first.request_id]))
    assert [each.request_id for message in group.got(b"c0", Partials) for each in message.replies] == [0]
    if goodbye_is_read:
        group.send(engine, Disconnect())
    else:
        # Its connection was gone before.
        group.lose(engine)
        group.send(engine, Disconnect())
    assert not group.got(b"c0", Failure) and not group.got(b"c0", Refusal)
    assert (status(group).past["lost_engines"], status(group).past["drained_engines"]) == (0, 1)


@pytest.mark.parametrize("goodbye_is_read", [True, False])
def test_what_a_drain_left_goes_to_others_or_fails_by_name(goodbye_is_read: bool) -> None:
    group = Group(engines=2, clients=1)
    for number in range(4):
        group.send(b"c0", submit(number, stream=True))
    numbers = [message.request_id for message in group.got(b"e0", SubmitRequest)]
    assert len(numbers) == 2
    group.send(b"e0", Leave(call=1))
    group.send(b"e0", partials(numbers[0]))
    if goodbye_is_read:
        group.send(b"e0", Disconnect())
    else:
        group.lose(b"e0")
    (failure,) = group.got(b"c0", Failure)
    assert (failure.kind, failure.is_transient) == ("EngineLostError", True)
    why = "its time to drain was over" + ("" if goodbye_is_read else ", or its connection broke")
    assert failure.message == f"engine dp-0 was lost ({why}) and tokens of it were sent"
    assert len(group.got(b"e1", SubmitRequest)) == 3 and status(group).past["lost_engines"] == 1


def test_requests_wait_for_an_engine_while_the_last_one_drains() -> None:
    group = Group(CoordinatorConfig(no_engine_timeout_s=10.0, engine_timeout_s=1e3, client_timeout_s=1e3), engines=1, clients=1)
    group.send(b"c0", submit(0))
    (first,) = group.got(b"e0", SubmitRequest)
    group.send(b"e0", Leave(call=1))
    group.send(b"c0", submit(1))
    group.send(b"c0", submit(2))
    assert status(group).waiting_requests == 2 and not group.got(b"c0", Failure)
    group.send(b"c0", load())
    assert [message.message for message in group.got(b"c0", Refusal)] == ["there is no engine to load weights into"]
    group.send(b"e1", register("dp-1"))
    assert len(group.got(b"e1", SubmitRequest)) == 2 and len(group.got(b"e0", SubmitRequest)) == 1
    group.send(b"e0", reply(first.request_id))
    group.send(b"e0", Disconnect())
    assert [message.request_id for message in group.got(b"c0", EngineReply)] == [0]
    # And where none comes, they fail as without any engine.
    group.send(b"e1", Leave(call=1))
    group.send(b"c0", submit(3))
    group.wait(11.0)
    assert [(each.request_id, each.message) for each in group.got(b"c0", Failure)] == [(3, "there was no engine for 10 s")]


def test_a_stale_engine_is_no_reason_to_fail_while_the_one_with_the_weights_drains() -> None:
    group = Group(engines=1, clients=1)
    group.send(b"c0", load(version=3))
    acknowledge(group, b"e0")
    group.send(b"c0", bucket(1, "whole"))
    acknowledge(group, b"e0")
    group.send(b"e0", Leave(call=1))
    group.send(b"c0", submit(0))
    assert status(group).waiting_requests == 1
    # One without them is as the only one left: by name, and not with other weights.
    group.send(b"e1", register("dp-1"))
    assert [each.kind for each in group.got(b"c0", Failure)] == ["StaleWeightsError"]


def test_a_signal_and_a_load_do_not_miss_who_drained() -> None:
    group = Group(engines=2, clients=1)
    group.send(b"e0", Leave(call=1))
    group.send(b"c0", Pause(call=4))
    (number,) = {message.call for peer in (b"e0", b"e1") for message in group.got(peer, Pause)}
    group.send(b"e1", SignalAck(call=number))
    assert not group.got(b"c0", SignalAck)
    group.send(b"e0", Disconnect())
    assert [message.call for message in group.got(b"c0", SignalAck)] == [4] and not group.got(b"c0", Refusal)

    group = Group(engines=2, clients=1)
    group.send(b"c0", load())
    acknowledge(group, b"e0", b"e1")
    group.send(b"c0", bucket(1))
    acknowledge(group, b"e1")
    group.send(b"e0", Leave(call=1))
    group.send(b"e0", Disconnect())
    group.send(b"c0", bucket(2, "whole"))
    acknowledge(group, b"e1")
    last = group.got(b"c0", WeightAck)[-1]
    assert last.is_over and not last.error and not group.got(b"c0", Refusal)


def test_a_load_whose_last_engine_drained_says_that_nobody_has_the_weights() -> None:
    group = Group(engines=1, clients=1)
    group.send(b"c0", load())
    acknowledge(group, b"e0")
    group.send(b"e0", Leave(call=1))
    group.send(b"e0", Disconnect())
    assert [each.message for each in group.got(b"c0", Refusal)] == ["engines were lost while weights were loaded (dp-0: it left)"]


# -- with sockets and engines ------------------------------------------------------------------------------------------


class _Service:
    """A coordinator with two engines."""

    def __init__(self, stack: ExitStack, make_model: Make, make_engine: Make) -> None:
        self.coordinator = stack.enter_context(DataParallelInferenceCoordinator(CoordinatorConfig(**QUICK)))
        self.runners = [
            stack.enter_context(
                EngineRunner(
                    make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=512)
                )
            )
            for _ in range(2)
        ]
        self.workers = [
            stack.enter_context(EngineWorker(runner, self.coordinator.address, name=f"dp-{index}", heartbeat_s=0.05))
            for index, runner in enumerate(self.runners)
        ]
        self.coordinator.wait_for_engines(2)

    def slow_down(self, index: int, seconds: float) -> None:
        """Steps of an engine take so much longer."""
        step = self.runners[index].engine.step
        self.runners[index].engine.step = lambda: (time.sleep(seconds), step())[1]  # type: ignore[method-assign]

    def step_by_step(self) -> threading.Semaphore:
        """Each engine steps once for a permit of both, so that no request ends before the test has done its part."""
        permits = threading.Semaphore(0)
        for runner in self.runners:
            step = runner.engine.step
            runner.engine.step = lambda step=step: (permits.acquire(timeout=60), step())[1]  # type: ignore[method-assign]
        return permits

    @asynccontextmanager
    async def streams(
        self, count: int, permits: threading.Semaphore | None = None
    ) -> AsyncIterator[tuple[InferenceClient, list["_Reader"]]]:
        """A client and streams of it that have begun, with ``permits`` in as few steps as that takes."""
        async with InferenceClient(self.coordinator.address) as client:
            readers = [_Reader(await client.submit(f"prompt {number}", LONG)) for number in range(count)]
            while not all(reader.tokens for reader in readers):
                if permits is not None:
                    permits.release()
                await asyncio.sleep(0.005 if permits is None else 0.05)
            yield client, readers


class _Reader:
    """Reads a stream to its end, as a task."""

    def __init__(self, stream: RemoteStream) -> None:
        self.tokens: list[int] = []
        self.end = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: RemoteStream) -> list[int]:
        async for increment in stream:
            self.tokens += increment.tokens
            if increment.record is not None:
                return increment.record.generated_tokens
        raise AssertionError("a stream ends with its record")


@pytest.fixture
def service(make_model: Make, make_engine: Make) -> Iterator[_Service]:
    with ExitStack() as stack:
        yield _Service(stack, make_model, make_engine)


def states(state: Status) -> dict[str, str]:
    return {engine.name: engine.state for engine in state.engines}


def open_requests(state: Status) -> dict[str, int]:
    return {engine.name: engine.open_requests for engine in state.engines}


def test_no_stream_is_lost_when_an_engine_drains_under_load(service: _Service) -> None:
    permits = service.step_by_step()

    async def ask() -> None:
        async with service.streams(12, permits) as (client, readers):
            assert open_requests(await client.status()) == {"dp-0": 6, "dp-1": 6}
            closing = asyncio.ensure_future(asyncio.to_thread(service.workers[0].close, 30.0))
            while states(await client.status())["dp-0"] != "draining":
                await asyncio.sleep(0.005)
            later = [_Reader(await client.submit(f"later {number}", LONG)) for number in range(6)]
            counts = open_requests(await client.status())
            assert counts["dp-1"] == 12 and counts["dp-0"] == 6, counts
            permits.release(10_000)
            for reader in [*readers, *later]:
                assert await reader.end == reader.tokens and len(reader.tokens) == 100
            await closing
            after = await client.status()
            assert [engine.name for engine in after.engines] == ["dp-1"]
            assert (after.past["lost_engines"], after.past["drained_engines"]) == (0, 1)

    asyncio.run(ask())
    assert service.workers[0].join(0) and not service.runners[0].engine.has_unfinished_requests()


@pytest.mark.journey
def test_what_does_not_end_in_time_is_told_and_the_rest_retried(service: _Service) -> None:
    service.slow_down(0, 0.2)

    async def ask() -> None:
        async with service.streams(2) as (client, readers):
            whole = [client.add_request("whole", LONG) for _ in range(2)]
            await asyncio.sleep(0.1)
            begin = time.monotonic()
            await asyncio.to_thread(service.workers[0].close, 0.4)
            # Its requests would take 20 s.
            assert 0.35 < time.monotonic() - begin < 15.0
            ends = await asyncio.gather(*(reader.end for reader in readers), return_exceptions=True)
            (lost,) = [end for end in ends if isinstance(end, Exception)]
            assert isinstance(lost, EngineLostError) and "dp-0 was lost (its time to drain was over" in str(lost)
            assert all(len(record.generated_tokens) == 100 for record in await asyncio.gather(*whole))

    asyncio.run(ask())


def test_a_drain_that_is_hurried_ends_at_once(service: _Service) -> None:
    service.slow_down(0, 0.2)
    hurry = threading.Event()

    async def ask() -> None:
        async with service.streams(2) as (_, readers):
            closing = asyncio.ensure_future(asyncio.to_thread(service.workers[0].close, 60.0, hurry=hurry.is_set))
            await asyncio.sleep(0.2)
            assert not closing.done()
            hurry.set()
            # Its requests would take 20 s.
            await asyncio.wait_for(closing, 15.0)
            ends = await asyncio.gather(*(reader.end for reader in readers), return_exceptions=True)
            assert sum(isinstance(end, EngineLostError) for end in ends) == 1

    asyncio.run(ask())


@pytest.mark.journey
def test_the_health_of_a_server_says_that_the_last_engines_drain(service: _Service) -> None:
    for index in range(2):
        service.slow_down(index, 0.05)
    closing = []

    async def ask(runner: CoordinatedRunner) -> None:
        streams = [await runner.submit(f"prompt {number}", LONG) for number in range(4)]
        # An engine that has none yet would have left at once.
        while min((stats["open_requests"] for stats in runner.engine_stats().values()), default=0) < 1:
            await asyncio.sleep(0.02)
        for worker in service.workers:
            closing.append(asyncio.ensure_future(asyncio.to_thread(worker.close, 30.0)))
        while runner.stats()["draining_engines"] < 2:
            await asyncio.sleep(0.02)
        assert runner.stats()["engines"] == 0
        assert all(stats["draining"] == 1.0 for stats in runner.engine_stats().values())
        health = runner.health()
        assert not health.alive and health.failure == "all engines are draining"
        assert [len((await stream.record()).generated_tokens) for stream in streams] == [100] * 4
        await asyncio.gather(*closing)

    with CoordinatedRunner(service.coordinator.address) as runner:
        asyncio.run(ask(runner))


@pytest.mark.parametrize("freezes", ["pause", "suspend"])
def test_requests_of_a_paused_engine_that_drains_end_when_it_goes_on(service: _Service, freezes: str) -> None:
    async def ask() -> None:
        async with service.streams(4) as (client, readers):
            await (client.pause_engines() if freezes == "pause" else client.suspend_engines())
            had = [len(reader.tokens) for reader in readers]
            closing = asyncio.ensure_future(asyncio.to_thread(service.workers[0].close, 30.0))
            await asyncio.sleep(0.3)
            assert not closing.done() and [len(reader.tokens) for reader in readers] == had
            # A signal is for an engine that drains, too.
            await (client.unpause_engines() if freezes == "pause" else client.resume_engines())
            for reader in readers:
                assert await reader.end == reader.tokens and len(reader.tokens) == 100
            await asyncio.wait_for(closing, 30.0)

    asyncio.run(ask())


def test_a_paused_engine_without_requests_leaves_at_once(service: _Service) -> None:
    async def ask() -> None:
        async with InferenceClient(service.coordinator.address) as client:
            await client.suspend_engines()
            begin = time.monotonic()
            await asyncio.to_thread(service.workers[0].close, 30.0)
            assert time.monotonic() - begin < 15.0
            await client.resume_engines()
            assert len((await client.add_request("x", LONG)).generated_tokens) == 100

    asyncio.run(ask())


def test_an_engine_whose_coordinator_is_gone_does_not_wait_for_it(make_model: Make, make_engine: Make) -> None:
    with ExitStack() as stack:
        service = _Service(stack, make_model, make_engine)
        service.coordinator.close()
        begin = time.monotonic()
        service.workers[0].close(0.5)
        assert time.monotonic() - begin < 5.0
