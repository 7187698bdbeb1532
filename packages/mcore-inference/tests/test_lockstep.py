# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A runner over two tensor-parallel ranks: what one rank decides, the other repeats."""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineDeadError,
    EngineRunner,
    FinishReason,
    IncompleteWeightsError,
    InferenceConfig,
    LockstepConfig,
    PagedAttention,
    RankFailedError,
    SamplingParams,
    StructuredOutput,
    StructuredOutputError,
    WeightLoadError,
    WeightSlice,
    follow_runner,
)
from mcore_inference.engine import _rank_link, _weight_broadcast
from mcore_inference.engine._rank_link import RankLink
from mcore_inference.server import serve, serve_runner
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.lent_weights import lent

World = Callable[..., list[Any]]
CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=384, init_method_std=0.3)
PATIENT = LockstepConfig(join_timeout_s=50, silence_timeout_s=20)
QUICK = LockstepConfig(join_timeout_s=50, silence_timeout_s=3, step_timeout_s=20)
LONG = SamplingParams(num_tokens_to_generate=200, ignore_eos=True, seed=3)


def make_engine(groups: ProcessGroups, seed: int = 0, **sizes: int) -> DynamicInferenceEngine:
    model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64, seed=seed).eval()
    config = InferenceConfig(**{"max_sequence_length": 256, "num_blocks": 60, "block_size_tokens": 8, "max_tokens": 64} | sizes)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, config), ByteTokenizer())


def split_engine(**sizes: int) -> DynamicInferenceEngine:
    return make_engine(ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False)), **sizes)


def weights_of(engine: DynamicInferenceEngine) -> list[tuple[str, Tensor]]:
    return [(shard.name, shard.parameter.detach()) for shard in named_shards(engine.model)]


@contextlib.contextmanager
def expects_rank_failure(rank: int, words: str) -> Iterator[None]:
    with pytest.raises(RankFailedError, match=words) as caught:
        yield
    assert caught.value.rank == rank


def slow_down(engine: DynamicInferenceEngine, seconds: float) -> None:
    engine.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))


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


# -- over HTTP -----------------------------------------------------------------------------------------------------------


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


# -- weights and memory --------------------------------------------------------------------------------------------------


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


# -- failures ------------------------------------------------------------------------------------------------------------


def peer_pid() -> int:
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    return int(pids[1 - dist.get_rank()])


def check_killed() -> float:
    engine, pid = split_engine(), peer_pid()
    if engine.model.groups.tp.rank == 1:
        slow_down(engine, 0.01)
        follow_runner(engine, PATIENT)
    with serve(engine) as server:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as stream:
            lines = stream.iter_lines()
            next(lines)
            begin = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            rest = "".join(lines)
            seconds = time.monotonic() - begin
        assert "RankFailedError" in rest and "tp rank 1 is gone" in rest
        health = httpx.get(f"{server.url}/health")
        assert health.status_code == 503 and health.json()["status"] == "dead"
        late = httpx.post(f"{server.url}/v1/completions", json={"prompt": "b"})
        assert late.status_code == 503 and late.json()["error"]["code"] == "RankFailedError"
        with pytest.raises(EngineDeadError, match="tp rank 1 is gone"):
            server.wait()
    return seconds


@pytest.mark.world(2)
def test_a_killed_rank_fails_what_is_open_and_turns_health_red(world: World) -> None:
    seconds, _ = world(check_killed, doomed=(1,))
    assert seconds < 5


def check_frozen() -> float:
    engine, pid = split_engine(), peer_pid()
    if engine.model.groups.tp.rank == 1:
        with expects_rank_failure(0, "tp rank 0 (was silent|is gone)"):
            follow_runner(engine, QUICK)
        return 0.0

    with serve_runner(lambda: EngineRunner(engine, lockstep=QUICK), ByteTokenizer()) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "b"}, timeout=30).status_code == 200
        os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        # The step hangs in the model, where nobody answers.
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "b"}, timeout=30)
        seconds = time.monotonic() - begin
        assert answer.status_code == 503 and "tp rank 1 was silent for 3 s" in answer.text
        os.kill(pid, signal.SIGCONT)
    return seconds


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_silent_rank_is_named_while_the_step_hangs(world: World) -> None:
    seconds, _ = world(check_frozen)
    # Of its silence, not of the step.
    assert seconds < 18


def check_interrupted() -> int:
    """Ctrl-C on the rank that follows, whose process lives on."""
    engine = split_engine()
    if engine.model.groups.tp.rank == 0:

        async def main() -> None:
            with EngineRunner(engine, lockstep=PATIENT) as runner:
                stream = await runner.submit("a", LONG)
                with expects_rank_failure(1, "tp rank 1 ended: KeyboardInterrupt in its process"):
                    await stream.record()

        asyncio.run(main())
        return engine.step_count
    step = engine.step

    def interrupted() -> Any:
        if engine.step_count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step()

    engine.step = interrupted  # type: ignore[method-assign]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        follow_runner(engine, PATIENT)
    return engine.step_count


@pytest.mark.world(2)
def test_a_rank_that_is_interrupted_is_named_at_once_and_steps_no_more(world: World) -> None:
    assert max(world(check_interrupted)) < LONG.num_tokens_to_generate


def check_one_sided_failures() -> None:
    engine = split_engine()
    rank = engine.model.groups.tp.rank
    failing: list[int] = []

    def fail(*_: Any) -> None:
        if failing and failing.pop():
            raise RuntimeError(f"broken on rank {rank}")

    engine.model.register_forward_pre_hook(fail)
    dist.barrier()
    if rank == 1:
        # Both ranks fail in the fourth step, this one alone in the eighth.
        steps = iter(range(1, 100))
        step = engine.step

        def counted() -> Any:
            failing[:] = [next(steps) in (4, 8)]
            return step()

        engine.step = counted  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="tp rank 1 (failed in|is not in) step 8: RuntimeError: broken on rank 1"):
            follow_runner(engine, QUICK)
        return
    steps = iter(range(1, 100))
    step = engine.step

    def counted() -> Any:
        failing[:] = [next(steps) == 4]
        return step()

    engine.step = counted  # type: ignore[method-assign]

    async def main() -> None:
        with EngineRunner(engine, lockstep=QUICK) as runner:
            record = await (await runner.submit("a", LONG)).record()
            assert "broken on rank 0" in str(record.error) and runner.health().alive
            with expects_rank_failure(1, "step 8: RuntimeError: broken on rank 1"):
                await (await runner.submit("a", LONG)).record()
            assert not runner.health().alive

    asyncio.run(main())


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_step_that_fails_everywhere_ends_its_requests_and_one_that_fails_on_a_rank_the_engine(world: World) -> None:
    world(check_one_sided_failures)


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def check_first_rank_fails() -> float:
    engine = split_engine()
    quick = LockstepConfig(join_timeout_s=50, silence_timeout_s=3, step_timeout_s=20)
    num_before = num_groups()
    if engine.model.groups.tp.rank == 1:
        # It waits in the model for the first rank, which is not coming.
        with pytest.raises(EngineDeadError, match="tp rank 0 failed in step 4: RuntimeError: broken"):
            follow_runner(engine, quick)
        assert num_groups() == num_before
        return 0.0
    steps, step = iter(range(1, 100)), engine.step

    def broken() -> Any:
        if next(steps) == 4:
            raise RuntimeError("broken")
        return step()

    engine.step = broken  # type: ignore[method-assign]

    async def main() -> float:
        with EngineRunner(engine, lockstep=quick) as runner:
            begin = time.monotonic()
            with expects_rank_failure(0, "tp rank 0 failed in step 4: RuntimeError: broken"):
                await (await runner.submit("a", LONG)).record()
            return time.monotonic() - begin

    seconds = asyncio.run(main())
    assert num_groups() == num_before
    return seconds


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_step_that_fails_on_the_first_rank_alone_is_blamed_on_it_and_leaves_no_group_open(world: World) -> None:
    seconds, _ = world(check_first_rank_fails)
    # Of its silence, not of the step.
    assert seconds < 18


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


def check_hanging_load() -> float:
    """After its first bucket a rank takes no more, though it is alive."""
    engine = split_engine()
    _weight_broadcast._BUCKET_BYTES = 4096
    impatient = LockstepConfig(join_timeout_s=50, silence_timeout_s=2, step_timeout_s=1.5)

    def stuck(chunks: Iterator[Any]) -> None:
        next(chunks)
        time.sleep(60)

    culprit = "tp rank 1 did not take bucket 2 of load_weights within 1.5 s"
    if engine.model.groups.tp.rank == 1:
        engine.weights.load = stuck  # type: ignore[method-assign,assignment]
        with pytest.raises(EngineDeadError, match=culprit):
            follow_runner(engine, impatient)
        return 0.0
    new = weights_of(make_engine(ProcessGroups.single(), seed=1))

    async def main() -> float:
        with EngineRunner(engine, lockstep=impatient) as runner:
            begin = time.monotonic()
            with expects_rank_failure(1, culprit):
                await runner.load_weights(new)
            assert not runner.health().alive
            return time.monotonic() - begin

    return asyncio.run(main())


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_takes_no_weights_is_named(world: World) -> None:
    seconds, _ = world(check_hanging_load)
    assert seconds < 8


def test_joining_a_silent_rank_takes_its_time_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits = [100.0], list[float]()

    class Stuck:
        """A thread that does not end."""

        def join(self, timeout: float) -> None:
            waits.append(timeout)
            now[0] += timeout

    link = object.__new__(RankLink)
    link._threads = cast(Any, [Stuck(), Stuck()])
    monkeypatch.setattr(_rank_link, "time", SimpleNamespace(monotonic=lambda: now[0]))
    link.join(2.0)
    assert waits == [2.0, 0.0]


def check_other_tokens() -> None:
    engine = split_engine()
    if engine.model.groups.tp.rank == 1:
        take = engine.take_finished

        def wrong() -> Any:
            records = take()
            for record in records:
                record.requests[-1].generated_tokens[-1] += 1
            return records

        engine.take_finished = wrong  # type: ignore[method-assign]
        with pytest.raises(EngineDeadError, match="tp rank 1 is not in step 3: drew other tokens"):
            follow_runner(engine, PATIENT)
        return

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner, expects_rank_failure(1, "drew other tokens"):
            # Its own answer may be out before the other rank's step is compared.
            for _ in range(20):
                await (await runner.submit("a", SamplingParams(num_tokens_to_generate=3, ignore_eos=True))).record()

    asyncio.run(main())


@pytest.mark.world(2)
def test_ranks_that_draw_other_tokens_are_not_served_from(world: World) -> None:
    world(check_other_tokens)


def check_alone() -> None:
    engine = split_engine()
    impatient = LockstepConfig(join_timeout_s=1)
    if engine.model.groups.tp.rank == 1:
        with pytest.raises(ValueError, match=r"tp rank 1 of 2, and rank 0 runs the engine; call follow_runner"):
            EngineRunner(engine)
        time.sleep(2)
        return
    with pytest.raises(ValueError, match="makes the EngineRunner"):
        follow_runner(engine)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] of 2 did not all come within join_timeout_s=1"):
        EngineRunner(engine, lockstep=impatient)


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_does_not_come_is_named(world: World) -> None:
    world(check_alone)


def test_patience_is_positive() -> None:
    for field in ("join_timeout_s", "silence_timeout_s", "step_timeout_s"):
        with pytest.raises(ValueError, match=f"{field}=0 must be a number"):
            LockstepConfig(**{field: 0})
