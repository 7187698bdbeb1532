# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine in its thread, seen from event loops."""

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    EngineDeadError,
    EngineRunner,
    EventType,
    FinishReason,
    Increment,
    InvalidTokenError,
    QueueFullError,
    RequestStream,
    SamplingParams,
    Status,
    StepFailedError,
    get_asyncio_loop,
)
from mcore_inference.engine import _runner
from mcore_parallel import named_shards
from mcore_parallel.data import ByteTokenizer

Make = Callable[..., Any]
TEN = SamplingParams(num_tokens_to_generate=10, seed=1, return_log_probs=True, top_n_logprobs=1)
LONG = SamplingParams(num_tokens_to_generate=400, ignore_eos=True)


@pytest.fixture
def engine(make_model: Make, make_engine: Make) -> DynamicInferenceEngine:
    return make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), ByteTokenizer(), max_sequence_length=512)


class Output(torch.nn.Module):
    """The model's output layer. While ``held`` each step waits in it for a permit, so that a test decides when the engine advances."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.error, self.held, self.once = inner, None, False, False
        self.entered, self.permits = threading.Event(), threading.Semaphore(0)

    def forward(self, *arguments: Any) -> Any:
        if self.held:
            self.entered.set()
            assert self.permits.acquire(timeout=30)
        if error := self.error:
            self.error = None if self.once else error
            raise error
        return self.inner(*arguments)

    def let_go(self) -> None:
        """End the step that waits, if one does, and all later ones at once."""
        self.held = False
        self.permits.release()


@pytest.fixture
def output(engine: DynamicInferenceEngine) -> Output:
    """The output layer of ``engine``."""
    layer = engine.model.output = Output(engine.model.output)
    return layer


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mcore-engine"]


def test_increments_join_to_the_record_and_to_a_run_without_thread(engine: DynamicInferenceEngine) -> None:
    wanted = engine.generate(["abc"], TEN)[0]

    async def main() -> None:
        with EngineRunner(engine) as runner:
            streams = [await runner.submit(prompt, TEN) for prompt in ("abc", "other", "abc")]
            for stream in streams:
                tokens, text, values, best = [], "", [], []
                async for increment in stream:
                    tokens += increment.tokens
                    values += increment.log_probs
                    best += increment.top_n_logprobs
                    text += increment.text
                record = increment.record
                assert record is not None
                assert (tokens, text) == (record.generated_tokens, record.generated_text)
                assert (values, best) == (record.generated_log_probs, record.generated_top_n_logprobs)
                if stream is not streams[1]:
                    assert tokens == wanted.generated_tokens
            assert runner.health().alive and runner.health().last_step_age_s is None

    asyncio.run(main())
    assert not engine_threads()


def test_a_slow_reader_gets_what_came_meanwhile_in_one_increment(engine: DynamicInferenceEngine) -> None:
    async def main() -> None:
        with EngineRunner(engine) as runner:
            stream = await runner.submit("abc", TEN)
            while runner.health().unfinished_requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0)
            [increment] = [each async for each in stream]
            record = increment.record
            assert record is not None and len(increment.tokens) == 10
            assert (increment.tokens, increment.text) == (record.generated_tokens, record.generated_text)
            assert (increment.log_probs, increment.top_n_logprobs) == (record.generated_log_probs, record.generated_top_n_logprobs)
            # What came before an error comes first.
            first, broken = Increment(tokens=[1]), RequestStream(lambda _: None, asyncio.get_running_loop())
            broken.put(first)
            broken.put(EngineDeadError("gone"))
            increments = aiter(broken)
            assert await anext(increments) is first
            with pytest.raises(EngineDeadError, match="gone"):
                await anext(increments)

    asyncio.run(main())


def test_a_stream_may_be_forwarded_what_came_before_included(engine: DynamicInferenceEngine) -> None:
    async def run(runner: EngineRunner, pause_s: float) -> list[Increment | Exception]:
        got: list[Increment | Exception] = []
        stream = await runner.submit("abc", TEN)
        await asyncio.sleep(pause_s)
        stream.forward(got.append)
        while not got or getattr(got[-1], "record", None) is None:
            await asyncio.sleep(0.01)
        return got

    with EngineRunner(engine) as runner:
        for pause_s in (0.0, 0.3):
            got = asyncio.run(asyncio.wait_for(run(runner, pause_s), 30))
            increments = [item for item in got if isinstance(item, Increment)]
            assert len(increments) == len(got) and increments[-1].record is not None
            assert [token for item in increments for token in item.tokens] == increments[-1].record.generated_tokens


@pytest.mark.journey
def test_what_is_not_streamed_comes_in_one_increment(engine: DynamicInferenceEngine) -> None:
    [wanted] = engine.generate(["abc"], TEN)

    async def main() -> None:
        with EngineRunner(engine) as runner:
            streamed, whole = await runner.submit("abc", LONG), await runner.submit("abc", TEN, stream=False)
            [increment] = [increment async for increment in whole]
            assert increment.tokens == wanted.generated_tokens
            assert increment.log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-5)
            assert increment.text == wanted.generated_text
            assert increment.record is not None
            assert len([increment async for increment in streamed]) > 1

    asyncio.run(main())


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_step_looks_at_the_streams_that_it_brought_tokens_and_at_no_other(make_model: Make, make_engine: Make, run_ahead: bool) -> None:
    """Neither those of waiting requests, nor whole ones before their end."""
    engine = make_engine(make_model(vocab_size=272, layers=1), ByteTokenizer(), max_requests=2, run_ahead=run_ahead)
    params = SamplingParams(num_tokens_to_generate=5, ignore_eos=True, temperature=0.0)
    visits = Counter[int]()

    async def main() -> None:
        with EngineRunner(engine) as runner:
            for name in ("_grown", "_ended"):
                look = getattr(runner, name)
                setattr(runner, name, lambda records, look=look: (visits.update(record.request_id for record in records), look(records))[1])
            await runner.pause()
            streams = [await runner.submit("abc", params, stream=number != 3) for number in range(12)]
            gone = await runner.submit("abc", params)
            gone.abort()
            await runner.unpause()
            increments = [[increment async for increment in stream] for stream in streams]
            for parts in increments:
                record = parts[-1].record
                assert record is not None and "".join(part.text for part in parts) == record.generated_text
                assert [token for part in parts for token in part.tokens] == record.generated_tokens and len(record.generated_tokens) == 5
            # One of the last step of each, which ends it.
            assert visits == {stream.request_id: 1 if stream.whole else 5 for stream in streams} | {gone.request_id: 1}

    asyncio.run(main())


@pytest.mark.parametrize("run_ahead", [False, True])
def test_streams_of_requests_that_give_way_join_to_their_records(make_model: Make, make_engine: Make, run_ahead: bool) -> None:
    """Increments are made in the loop's thread, of lists that the engine's thread goes on to fill."""
    engine = make_engine(
        make_model(vocab_size=272, layers=1), ByteTokenizer(), num_blocks=8, block_size_tokens=4, watermark=0.0, run_ahead=run_ahead
    )
    params = SamplingParams(num_tokens_to_generate=18, ignore_eos=True, seed=1, return_log_probs=True, top_n_logprobs=2)

    async def main() -> None:
        with EngineRunner(engine) as runner:
            await runner.pause()
            streams = [await runner.submit("abcd", params) for _ in range(4)]
            await runner.unpause()
            for stream in streams:
                parts = [increment async for increment in stream]
                record = parts[-1].record
                assert record is not None and len(record.generated_tokens) == 18
                assert [token for part in parts for token in part.tokens] == record.generated_tokens
                assert [value for part in parts for value in part.log_probs] == record.generated_log_probs
                assert [best for part in parts for best in part.top_n_logprobs] == record.generated_top_n_logprobs
                assert "".join(part.text for part in parts) == record.generated_text

    asyncio.run(main())
    assert engine.num_preemptions > 0


def test_a_refused_request_raises_in_the_caller_and_the_runner_goes_on(engine: DynamicInferenceEngine) -> None:
    async def main() -> None:
        with EngineRunner(engine) as runner:
            with pytest.raises(InvalidTokenError):
                await runner.submit([], TEN)
            assert len((await (await runner.submit("a", TEN)).record()).generated_tokens) <= 10

    asyncio.run(main())


def test_an_abort_behind_the_end_wakes_nobody() -> None:
    async def aborted(end: Increment | Exception) -> list[int]:
        aborts: list[int] = []
        stream = RequestStream(aborts.append, asyncio.get_running_loop())
        stream.request_id = 7
        stream.put(Increment(tokens=[1]))
        stream.abort()
        stream.put(end)
        stream.abort()
        return aborts

    assert asyncio.run(aborted(Increment(record=DynamicInferenceRequestRecord()))) == [7]
    assert asyncio.run(aborted(EngineDeadError("it failed"))) == [7]


def test_abort_ends_the_stream_and_frees_the_request(engine: DynamicInferenceEngine, output: Output) -> None:
    async def main() -> None:
        with EngineRunner(engine) as runner:
            output.held = True
            stream = await runner.submit("a", LONG)
            stream.abort()
            output.let_go()
            record = await stream.record()
            assert record.finish_reason is FinishReason.ABORT and record.num_generated < 400
            stream.abort()
            assert await runner.call(lambda: engine.context.allocator.total_used) == 0

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


def test_a_stream_that_was_read_to_its_end_ends_again(engine: DynamicInferenceEngine) -> None:
    async def check(runner: EngineRunner) -> None:
        stream = await runner.submit([1, 2, 3], TEN)
        record = await stream.record()
        assert record.status is Status.COMPLETED and [increment async for increment in stream] == []
        with pytest.raises(RuntimeError, match="read before"):
            await stream.record()
        open_stream = await runner.submit([1, 2, 3], LONG)
        await asyncio.to_thread(runner.close)
        with pytest.raises(EngineDeadError):
            await open_stream.record()
        assert [increment async for increment in open_stream] == []

    with EngineRunner(engine) as runner:
        asyncio.run(asyncio.wait_for(check(runner), 30))
