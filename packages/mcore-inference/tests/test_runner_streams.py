# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Streams of requests of an engine in its thread."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from mcore_inference import (
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    EngineDeadError,
    EngineRunner,
    FinishReason,
    Increment,
    RequestStream,
    SamplingParams,
    Status,
)
from mcore_parallel.data import ByteTokenizer
from tests.support.held_engine import LONG, TEN, Output, engine_threads

Make = Callable[..., Any]


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
