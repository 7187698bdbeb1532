# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine in its thread, seen from event loops."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceEngine,
    EngineDeadError,
    EngineRunner,
    EventType,
    FinishReason,
    InvalidTokenError,
    QueueFullError,
    SamplingParams,
    Status,
    StepFailedError,
    get_asyncio_loop,
)
from mcore_inference.engine import _runner
from mcore_parallel import named_shards
from mcore_parallel.data import ByteTokenizer
from tests.support.held_engine import LONG, TEN, Output, engine_threads

Make = Callable[..., Any]


def test_a_refused_request_raises_in_the_caller_and_the_runner_goes_on(engine: DynamicInferenceEngine) -> None:
    async def main() -> None:
        with EngineRunner(engine) as runner:
            with pytest.raises(InvalidTokenError):
                await runner.submit([], TEN)
            assert len((await (await runner.submit("a", TEN)).record()).generated_tokens) <= 10

    asyncio.run(main())


def test_requests_that_came_during_a_step_are_answered_by_one_call_into_their_loop(
    engine: DynamicInferenceEngine, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(runner: EngineRunner) -> None:
        output.held = True
        first = await runner.submit("abc", LONG)
        await asyncio.to_thread(output.entered.wait, 30)
        tasks = [asyncio.ensure_future(runner.submit([1, 2, number], TEN)) for number in range(8)]
        wrong = asyncio.ensure_future(runner.submit([10**6], TEN))
        await asyncio.sleep(0.1)
        loop, calls = asyncio.get_running_loop(), []
        inner = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *arguments: calls.append(arguments) or inner(*arguments))
        output.entered.clear()
        output.permits.release()
        streams = await asyncio.gather(*tasks)
        with pytest.raises(InvalidTokenError):
            await wrong
        await asyncio.to_thread(output.entered.wait, 30)
        # Nine results, and the first token of the first request.
        assert len([call for call in calls if "_settle_all" in str(call[0])]) == 1
        monkeypatch.undo()
        output.let_go()
        assert [len((await stream.record()).generated_tokens) for stream in streams] == [10] * 8
        first.abort()

    with EngineRunner(engine) as runner:
        asyncio.run(asyncio.wait_for(run(runner), 30))


def test_a_cancelled_submit_leaves_no_request(engine: DynamicInferenceEngine, output: Output) -> None:
    async def main() -> None:
        with EngineRunner(engine) as runner:
            output.held = True
            task = asyncio.ensure_future(runner.submit("a", LONG))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            output.let_go()
            while await runner.call(engine.has_unfinished_requests):
                await asyncio.sleep(0)
            assert engine.finished_counts["abort"] == 1

    asyncio.run(main())


def test_weights_are_loaded_between_steps(engine: DynamicInferenceEngine) -> None:
    async def main() -> None:
        weights = [(shard.name, shard.parameter.detach().clone()) for shard in named_shards(engine.model)]
        with EngineRunner(engine) as runner:
            stream = await runner.submit("a", SamplingParams(num_tokens_to_generate=50, ignore_eos=True))
            await runner.call(lambda: engine.load_weights(weights))
            record = await stream.record()
            assert record.num_generated == 50
            with pytest.raises(ValueError, match="did not come"):
                await runner.call(lambda: engine.load_weights([]))

    asyncio.run(main())


def test_what_was_run_before_a_load_is_answered_before_its_chunks_come(engine: DynamicInferenceEngine) -> None:
    weights = [(shard.name, shard.parameter.detach().clone()) for shard in named_shards(engine.model)]
    is_answered, begin = threading.Event(), threading.Event()

    def chunks() -> Iterator[tuple[str, torch.Tensor]]:
        assert is_answered.wait(20)
        yield from weights

    async def main() -> None:
        with EngineRunner(engine) as runner:
            # Both come while the engine's thread runs another call, and so are run together.
            blocking = asyncio.ensure_future(runner.call(lambda: begin.wait(20)))
            while not runner._begun:
                await asyncio.sleep(0.001)
            before = asyncio.ensure_future(runner.call(lambda: 1))
            load = asyncio.ensure_future(runner.load_weights(chunks()))
            await asyncio.sleep(0)
            begin.set()
            assert await before == 1
            is_answered.set()
            await asyncio.gather(blocking, load)

    asyncio.run(main())


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(engine: DynamicInferenceEngine, output: Output) -> None:
    wanted = engine.generate(["abc"], TEN)[0].generated_tokens

    async def main() -> None:
        with EngineRunner(engine) as runner:
            for _ in range(5):
                output.permits, output.held = threading.Semaphore(0), True
                streams = []
                for _ in range(3):
                    # One step ends, then the thread looks for commands: no request ends before all of them are there.
                    output.permits.release()
                    streams.append(await runner.submit("a", LONG))
                output.error = RuntimeError("out of memory")
                output.let_go()
                for stream in streams:
                    record = await asyncio.wait_for(stream.record(), 30)
                    assert isinstance(record.error, StepFailedError) and "RuntimeError: out of memory" in str(record.error)
                    assert record.status is Status.FAILED and record.finish_reason is FinishReason.ERROR
                    assert [event.type for event in record[-1].events][-2:] == [EventType.ERROR_TRANSIENT, EventType.FAIL]
                output.error = None
                assert await runner.call(lambda: engine.context.allocator.total_used) == 0
                assert (await (await runner.submit("abc", TEN)).record()).generated_tokens == wanted
            assert runner.health().alive and runner.num_failed_steps == 5 and runner.failure is None

    asyncio.run(main())
    assert not engine_threads()


def test_a_request_outside_of_the_failed_step_goes_on(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_requests=1)
    layer = engine.model.output = Output(engine.model.output)
    wanted = engine.generate(["b"], TEN)[0].generated_tokens

    async def main() -> None:
        with EngineRunner(engine) as runner:
            layer.held = True
            layer.permits.release()
            first = await runner.submit("a", LONG)
            # The engine has one place, so the other one waits.
            adding = asyncio.ensure_future(runner.submit("b", TEN))
            layer.permits.release()
            second = await adding
            layer.error, layer.once = RuntimeError("once"), True
            layer.let_go()
            assert isinstance((await asyncio.wait_for(first.record(), 30)).error, StepFailedError)
            assert (await asyncio.wait_for(second.record(), 30)).generated_tokens == wanted

    asyncio.run(main())


def test_steps_that_fail_one_after_the_other_end_the_runner(engine: DynamicInferenceEngine, output: Output) -> None:
    async def main() -> None:
        runner = EngineRunner(engine, max_failed_steps=3)
        output.error = RuntimeError("device lost")
        for _ in range(3):
            stream = await runner.submit("a", LONG)
            assert isinstance((await asyncio.wait_for(stream.record(), 30)).error, StepFailedError)
        while engine_threads():
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="device lost"):
            await runner.submit("a", TEN)
        health = runner.health()
        assert not health.alive and "device lost" in (health.failure or "")
        runner.close()

    asyncio.run(main())


def test_a_full_queue_refuses(engine: DynamicInferenceEngine, output: Output) -> None:
    async def main() -> None:
        with EngineRunner(engine, max_waiting_requests=1) as runner:
            output.held = True
            first = await runner.submit("a", TEN)
            assert await asyncio.to_thread(output.entered.wait, 30)
            # Both come between two steps, so that nobody takes the first of them out of the queue before.
            waiting, refused = (asyncio.ensure_future(runner.submit(prompt, TEN)) for prompt in "bc")
            await asyncio.sleep(0.01)
            output.let_go()
            with pytest.raises(QueueFullError, match="1 requests wait and max_waiting_requests=1"):
                await refused
            for stream in (first, await waiting):
                assert (await stream.record()).num_generated

    asyncio.run(main())
    with pytest.raises(ValueError, match="max_failed_steps=0"):
        EngineRunner(engine, max_failed_steps=0)


def test_a_step_that_hangs_shows_in_health(engine: DynamicInferenceEngine, output: Output) -> None:
    one = SamplingParams(num_tokens_to_generate=1)

    async def main() -> None:
        with EngineRunner(engine, stall_timeout_s=0.05) as runner:
            output.held = True
            stream = await runner.submit("a", one)
            while runner.health().alive:
                await asyncio.sleep(0.01)
            output.let_go()
            await stream.record()
            assert runner.health().alive
        output.permits, output.held = threading.Semaphore(0), True
        output.entered.clear()
        runner = EngineRunner(engine)
        await runner.submit("a", one)
        assert await asyncio.to_thread(output.entered.wait, 30)
        with pytest.raises(TimeoutError, match=r"timeout_s=0\.01"):
            runner.close(timeout_s=0.01)
        output.let_go()
        runner.close()

    asyncio.run(main())


def test_a_request_that_hangs_on_its_way_in_shows_in_health_and_a_function_does_not(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only command of an idle engine, such as a form whose compilation does not end."""
    entered, may_end, add = threading.Event(), threading.Event(), engine.add_request

    def hang(*arguments: Any, **options: Any) -> Any:
        entered.set()
        assert may_end.wait(30)
        return add(*arguments, **options)

    monkeypatch.setattr(engine, "add_request", hang)

    async def main() -> None:
        with EngineRunner(engine, stall_timeout_s=0.05) as runner:
            task = asyncio.ensure_future(runner.submit("a", SamplingParams(num_tokens_to_generate=1)))
            assert await asyncio.to_thread(entered.wait, 30)
            while (health := runner.health()).alive:
                await asyncio.sleep(0.01)
            assert health.last_step_age_s is not None and health.last_step_age_s > 0.05 and not health.unfinished_requests
            may_end.set()
            await (await task).record()
            while not runner.health().alive:
                await asyncio.sleep(0.01)
            # To free or take a cache, and to load weights, may take longer than a step.
            entered.clear()
            may_end.clear()
            call = asyncio.ensure_future(runner.call(lambda: (entered.set(), may_end.wait(30))))
            assert await asyncio.to_thread(entered.wait, 30)
            await asyncio.sleep(0.2)
            assert (health := runner.health()).alive and health.last_step_age_s is not None and health.last_step_age_s > 0.05
            monkeypatch.setattr(_runner, "_LONG_CALL_S", 0.1)
            assert not runner.health().alive
            may_end.set()
            await call

    asyncio.run(main())


def test_many_short_commands_are_no_long_one(engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests that came at once; each takes less than a step may."""
    clock, ages = itertools.count(0, 1), list[float | None]()
    with EngineRunner(engine, stall_timeout_s=3.5) as runner:

        async def main() -> None:
            started, may_begin = threading.Event(), threading.Event()
            first = asyncio.ensure_future(runner.call(lambda: (started.set(), may_begin.wait(30))))
            assert await asyncio.to_thread(started.wait, 30)
            monkeypatch.setattr(_runner, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
            calls = [asyncio.ensure_future(runner.call(lambda: ages.append(runner.health().last_step_age_s))) for _ in range(20)]
            await asyncio.sleep(0)
            may_begin.set()
            await asyncio.gather(first, *calls)

        asyncio.run(main())
    assert len(ages) == 20 and all(age is not None and age < 3.5 for age in ages[1:])


def test_an_engine_that_hangs_is_given_up_by_whoever_sees_it(
    engine: DynamicInferenceEngine, output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcore_inference.engine._runner._LAST_STEP_S", 0.05)

    async def main() -> None:
        runner = EngineRunner(engine)
        output.held = True
        running = await runner.submit("a", TEN)
        assert await asyncio.to_thread(output.entered.wait, 30)
        waiting = asyncio.ensure_future(runner.submit("b", TEN))
        await asyncio.sleep(0.01)
        runner.fail(error := EngineDeadError("its step hangs"))
        for answer in (running.record(), waiting, runner.submit("c", TEN)):
            with pytest.raises(EngineDeadError, match="its step hangs"):
                await answer
        assert runner.failure is error and not runner.health().alive
        # It waits for no step that may have no end, and is told the first reason.
        runner.close()
        runner.fail(EngineDeadError("another"))
        assert runner.failure is error
        output.let_go()
        runner._thread.join(10)
        assert not runner._thread.is_alive()

    asyncio.run(main())


def test_only_a_step_that_may_compile_or_is_of_a_cpu_may_take_a_minute(
    engine: DynamicInferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineRunner(engine) as runner, EngineRunner(engine, stall_timeout_s=7) as given:
        assert runner.stall_timeout_s == 60
        monkeypatch.setattr(engine.context, "device", torch.device("cuda"))
        assert runner.stall_timeout_s == 60
        engine._executor.is_warm = True
        assert runner.stall_timeout_s == 3.5 and given.stall_timeout_s == 7
        monkeypatch.setattr(engine.context, "device", torch.device("cpu"))
        assert runner.stall_timeout_s == 60


def test_close_ends_open_streams(engine: DynamicInferenceEngine, output: Output) -> None:
    async def main() -> None:
        runner = EngineRunner(engine)
        output.held = True
        stream = await runner.submit("a", LONG)
        assert await asyncio.to_thread(output.entered.wait, 30)
        with pytest.raises(TimeoutError):
            runner.close(timeout_s=0)
        output.let_go()
        runner.close()
        runner.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await stream.record()
        with pytest.raises(EngineDeadError, match="closed"):
            await runner.submit("a", TEN)
        assert not engine.has_unfinished_requests()

    asyncio.run(main())


def test_the_loop_of_a_thread_is_kept_until_closed() -> None:
    loop = get_asyncio_loop()
    assert get_asyncio_loop() is loop
    others: list[asyncio.AbstractEventLoop] = []
    thread = threading.Thread(target=lambda: others.append(get_asyncio_loop()))
    thread.start()
    thread.join()
    assert others[0] is not loop
    others[0].close()

    async def running() -> bool:
        return get_asyncio_loop() is asyncio.get_running_loop()

    assert loop.run_until_complete(running())
    loop.close()
    fresh = get_asyncio_loop()
    assert fresh is not loop and not fresh.is_closed()
    assert get_asyncio_loop(loop) is loop
    fresh.close()
    asyncio.set_event_loop(None)
