# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A runner over two tensor-parallel ranks: what one rank decides, the other repeats."""

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist

from mcore_inference import (
    DynamicInferenceEngine,
    EngineRunner,
    FinishReason,
    IncompleteWeightsError,
    SamplingParams,
    StructuredOutput,
    StructuredOutputError,
    WeightLoadError,
    WeightSlice,
    follow_runner,
)
from mcore_inference.engine import _weight_broadcast
from mcore_inference.server import serve
from mcore_parallel import ProcessGroups
from tests.support.lent_weights import lent
from tests.support.lockstep_engines import LONG, PATIENT, make_engine, num_groups, slow_down, split_engine, weights_of

World = Callable[..., list[Any]]


# -- forms -------------------------------------------------------------------------------------------------------------


def check_forms() -> list[Any]:
    """A core that is busy makes masks of this rank seem slow; a form that takes too much work does on all ranks."""
    engine = split_engine()
    if engine.model.groups.tp.rank == 1:
        hours = itertools.count(0, 3600)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(time, "thread_time", lambda: float(next(hours)))
            follow_runner(engine, PATIENT)
        return []

    async def ask(runner: EngineRunner, regex: str, seed: int) -> list[Any]:
        form = SamplingParams(num_tokens_to_generate=12, seed=seed, structured_output=StructuredOutput(regex=regex))
        record = await (await runner.submit("what a", form, stream=False)).record()
        return [record.generated_text, record.finish_reason, type(record.error)]

    async def main() -> list[Any]:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            costly = [await ask(runner, "x(a{900}){1000}", seed) for seed in range(3)]
            # The last of these are near what a mask may take.
            near = [await ask(runner, f"x(a{{{count}}}){{1000}}", 0) for count in (100, 200, 300, 400)]
            answers = [*costly, *near, await ask(runner, "[ab]{4}", 1)]
            assert runner.failure is None and runner.health().alive
            return answers

    return asyncio.run(main())


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_mask_that_takes_too_much_ends_its_request_on_all_ranks_alike(world: World) -> None:
    answers = world(check_forms)[0]
    assert answers[:3] == [["x", FinishReason.ERROR, StructuredOutputError]] * 3
    assert all(text.startswith("x") for text, _, _ in answers[3:-1])
    assert len(answers[-1][0]) == 4 and answers[-1][1] is FinishReason.STOP


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def ask_all(url: str) -> list[Any]:
    """Answers that depend on every kind of setting, some of them at once."""
    # A second to import, which each rank of the other tests would pay as well.
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        plain = client.completions.create(model="mcore", prompt=["one", "two", "three"], max_tokens=12, temperature=0.8, seed=1, n=2)
        chat = client.chat.completions.create(
            model="mcore",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=10,
            seed=2,
            stream=True,
            logit_bias={"65": 3.0},
            frequency_penalty=0.5,
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chat)
        formed = client.completions.create(
            model="mcore", prompt="x", max_tokens=20, seed=4, extra_body={"structured_outputs": {"regex": "[ab]{4}"}, "priority": -3}
        )
        return [[choice.text for choice in plain.choices], streamed, formed.choices[0].text]


def check_served() -> Any:
    engine = split_engine()
    if engine.model.groups.tp.rank == 1:
        follow_runner(engine, PATIENT)
        return engine.step_count, dict(engine.finished_counts), engine.num_in_flight, engine.context.get_kvcache_utilization_stats()
    with serve(engine) as server:
        answers = ask_all(server.url)
        slow_down(engine, 0.005)
        # A client that leaves in the middle of a stream.
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        ) as gone:
            next(gone.iter_lines())
        deadline = time.monotonic() + 30
        while server.runner.health().unfinished_requests:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert engine.finished_counts["abort"] == 1
        assert ask_all(server.url) == answers
        assert httpx.get(f"{server.url}/health").status_code == 200
    with serve(make_engine(ProcessGroups.single())) as server:
        assert ask_all(server.url) == answers
    return engine.step_count, dict(engine.finished_counts), engine.num_in_flight, engine.context.get_kvcache_utilization_stats()


@pytest.mark.journey
@pytest.mark.world(2)
def test_openais_client_gets_the_tokens_of_one_rank_and_both_ranks_end_alike(world: World) -> None:
    one, two = world(check_served)
    assert one == two
    assert one[0] > 20 and one[2] == 0


# -- weights and memory ------------------------------------------------------------------------------------------------


def check_updates() -> list[int]:
    engine = split_engine()
    # Chunks of many buckets.
    _weight_broadcast._BUCKET_BYTES = 16384
    if engine.model.groups.tp.rank == 1:
        follow_runner(engine, PATIENT)
        return [engine.weight_version, engine.step_count]
    fresh = make_engine(ProcessGroups.single(), seed=1)
    new = weights_of(fresh)
    params = SamplingParams(num_tokens_to_generate=12, seed=5, ignore_eos=True)
    [expected] = make_engine(ProcessGroups.single()).generate(["abc"], params)
    [renewed] = fresh.generate(["abc"], params)

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            stream = await runner.submit("abc", params)
            increments = aiter(stream)
            await anext(increments)
            # Nothing is lost by a pause or a suspension.
            await runner.suspend()
            assert engine.is_suspended and engine.context.cache.pages.untyped_storage().size() == 0
            late = await runner.submit("abc", params, stream=False)
            await runner.resume()
            await runner.unpause()
            async for increment in increments:
                record = increment.record
            assert record is not None and record.generated_tokens == expected.generated_tokens
            assert (await late.record()).generated_tokens == expected.generated_tokens
            for number, policy in enumerate(("recompute", "keep", "drain"), start=1):
                stream = await runner.submit("abc", params)
                await anext(aiter(stream))
                parts = [
                    (name, WeightSlice(tensor=tensor[at : at + 11].clone(), offsets=(at, *(0,) * (tensor.dim() - 1))))
                    for name, tensor in (new if number % 2 else weights_of(make_engine(ProcessGroups.single())))
                    for at in range(0, len(tensor), 11)
                ]
                await runner.load_weights(lent(parts[::-1]), in_flight=policy)
                record = await stream.record()
                assert len(record.generated_tokens) == 12 and record.error is None
                after = await (await runner.submit("abc", params)).record()
                assert after.generated_tokens == (renewed if number % 2 else expected).generated_tokens
                assert after.weight_versions == [(number, 12)]
            # What both ranks refuse before anything is copied leaves the weights.
            with pytest.raises(WeightLoadError, match="no parameter of the model"):
                await runner.load_weights([("nothing", torch.zeros(1))])
            after = await (await runner.submit("abc", params)).record()
            assert after.generated_tokens == renewed.generated_tokens
            # Twice the rows of the second rank alone: the first would have gone on.
            name, tensor = next((name, tensor) for name, tensor in new if "embedding" in name)
            half = WeightSlice(tensor=tensor[-4:], offsets=(len(tensor) - 4, 0))
            with pytest.raises(WeightLoadError, match="tp rank 1 refused the weights: WeightLoadError: .* came twice"):
                await runner.load_weights([*new, (name, half)])
            assert not engine.can_step
            waiting = await runner.submit("abc", params)
            with pytest.raises(WeightLoadError, match="is a NoneType"):
                await runner.load_weights([*new[:-1], (new[-1][0], None)])  # type: ignore[list-item]
            with pytest.raises(IncompleteWeightsError):
                await runner.call(engine.weights.check_complete)
            await runner.load_weights(new, version=9)
            record = await waiting.record()
            assert (record.generated_tokens, record.weight_versions) == (renewed.generated_tokens, [(9, 12)])

    asyncio.run(main())
    return [engine.weight_version, engine.step_count]


@pytest.mark.journey
@pytest.mark.world(2)
def test_weights_and_suspensions_reach_both_ranks_and_a_load_that_one_refuses_fails_on_both(world: World) -> None:
    one, two = world(check_updates)
    assert one == two and one[0] == 9


def check_runners_in_turn() -> Any:
    engine = split_engine()
    for _ in range(2):
        if engine.model.groups.tp.rank == 1:
            follow_runner(engine, PATIENT)
        else:
            asyncio.run(leave_requests_open(engine))
        assert not engine.has_unfinished_requests()
    utilization = engine.context.get_kvcache_utilization_stats()
    return engine.step_count, dict(engine.finished_counts), utilization


async def leave_requests_open(engine: DynamicInferenceEngine) -> None:
    with EngineRunner(engine, lockstep=PATIENT) as runner:
        [whole] = make_engine(ProcessGroups.single()).generate(["abc"], dataclasses.replace(LONG, num_tokens_to_generate=20))
        record = await (await runner.submit("abc", dataclasses.replace(LONG, num_tokens_to_generate=20))).record()
        assert record.generated_tokens == whole.generated_tokens
        # One ends when nothing is left to step for, the others with the runner.
        alone = await runner.submit("b", LONG)
        await anext(aiter(alone))
        alone.abort()
        assert (await alone.record()).finish_reason is FinishReason.ABORT
        await runner.pause()
        await runner.submit("waits", LONG)
        await runner.unpause()
        await anext(aiter(await runner.submit("runs", LONG)))


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_closed_runner_leaves_both_ranks_alike_for_the_next_one(world: World) -> None:
    one, two = world(check_runners_in_turn)
    assert one == two


def check_tokenizer() -> Any:
    engine = split_engine()
    if engine.model.groups.tp.rank == 1:
        follow_runner(engine, PATIENT)
        return engine.has_unfinished_requests(), sum(engine.finished_counts.values())

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner, pytest.MonkeyPatch.context() as patched:
            other = await runner.submit("other", dataclasses.replace(LONG, num_tokens_to_generate=20), stream=False)
            # Of this rank alone.
            patched.setattr(engine.tokenizer, "detokenize", lambda ids: 1 // 0)
            record = await (await runner.submit("abc", LONG)).record()
            assert isinstance(record.error, ZeroDivisionError) and record.finish_reason is FinishReason.ERROR
            patched.undo()
            assert (await other.record()).num_generated == 20
            assert (await (await runner.submit("abc", dataclasses.replace(LONG, num_tokens_to_generate=5))).record()).generated_text

    asyncio.run(main())
    assert engine.finished_counts["error"] >= 1
    return engine.has_unfinished_requests(), sum(engine.finished_counts.values())


@pytest.mark.world(2)
def test_a_tokenizer_that_fails_in_a_stream_ends_its_request_on_both_ranks(world: World) -> None:
    one, two = world(check_tokenizer)
    assert one == two == (False, 3)


def check_memory() -> None:
    engine = split_engine()
    if engine.model.groups.tp.rank == 1:
        resume, tries = engine.resume, []

        def fail_once() -> None:
            tries.append(1)
            if len(tries) == 1:
                raise torch.OutOfMemoryError("others use it")
            resume()

        engine.resume = fail_once  # type: ignore[method-assign]
        follow_runner(engine, PATIENT)
        return

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            await runner.suspend()
            with pytest.raises(RuntimeError, match="resume failed on tp rank 1: OutOfMemoryError: others use it"):
                await runner.resume()
            assert engine.is_suspended
            await runner.resume()
            await runner.unpause()
            params = SamplingParams(num_tokens_to_generate=20, ignore_eos=True)
            assert len((await (await runner.submit("a", params)).record()).generated_tokens) == 20

    asyncio.run(main())


@pytest.mark.world(2)
def test_where_one_rank_has_no_memory_all_stay_suspended(world: World) -> None:
    world(check_memory)


def check_second_runner() -> list[list[int]]:
    engine = split_engine()
    params = SamplingParams(num_tokens_to_generate=8, ignore_eos=True, seed=3)

    async def answer() -> list[int]:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            return (await (await runner.submit("abc", params)).record()).generated_tokens

    num_before, answers = num_groups(), []
    for number in range(3):
        # Who comes first must not find the addresses of the group before; each rank is first once.
        dist.barrier()
        if engine.model.groups.tp.rank == number % 2:
            time.sleep(0.3)
        if engine.model.groups.tp.rank == 1:
            follow_runner(engine, PATIENT)
        else:
            answers.append(asyncio.run(answer()))
        assert num_groups() == num_before
    return answers


@pytest.mark.world(2)
def test_a_closed_runner_leaves_the_engine_to_the_next_one(world: World) -> None:
    (first, second, third), _ = world(check_second_runner)
    assert len(first) == 8 and first == second == third
