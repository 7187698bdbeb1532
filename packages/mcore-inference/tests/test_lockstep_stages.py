# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A runner over the stages of a pipeline, with tensor parallelism and without: the first rank decides, the others repeat it."""

import asyncio
import dataclasses
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineDeadError,
    EngineRunner,
    ExecutionConfig,
    InferenceConfig,
    LockstepConfig,
    PagedAttention,
    RankFailedError,
    SamplingParams,
    StepFailedError,
    WeightLoadError,
    WeightSlice,
    follow_runner,
)
from mcore_inference.engine import _weight_broadcast
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.lent_weights import lent

World = Callable[..., list[Any]]
CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.3)
PATIENT = LockstepConfig(join_timeout_s=50, silence_timeout_s=20)
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9]]


def make_engine(groups: ProcessGroups, seed: int = 0, *, run_ahead: bool | None = None) -> DynamicInferenceEngine:
    config = dataclasses.replace(CONFIG, num_layers=max(CONFIG.num_layers, groups.pp.size))
    model = GPTModel(config, groups, attention_core=PagedAttention(), dtype=torch.float64, seed=seed).eval()
    sizes = InferenceConfig(max_sequence_length=256, num_blocks=60, block_size_tokens=8, max_tokens=64)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=ExecutionConfig(run_ahead=run_ahead))


def split_engine(tp: int, pp: int) -> DynamicInferenceEngine:
    return make_engine(ProcessGroups.build(ParallelPlan(tp=tp, pp=pp, sequence_parallel=False)))


def weights_of(engine: DynamicInferenceEngine) -> list[tuple[str, Tensor]]:
    return [(shard.name, shard.parameter.detach()) for shard in named_shards(engine.model)]


def settings() -> list[SamplingParams]:
    return [SamplingParams(temperature=float(i % 2), top_p=0.9, num_tokens_to_generate=6, seed=i) for i in range(4)]


async def answers(runner: EngineRunner) -> list[list[int]]:
    streams = [await runner.submit(prompt, params) for prompt, params in zip(PROMPTS, settings(), strict=True)]
    return [(await stream.record()).generated_tokens for stream in streams]


def check_served(tp: int, pp: int) -> Any:
    engine = split_engine(tp, pp)
    # Chunks of many buckets.
    _weight_broadcast._BUCKET_BYTES = 32768
    if dist.get_rank():
        with pytest.raises(ValueError, match=rf"this is rank {dist.get_rank()} \(tp . of stage .\) of {tp * pp}, and rank 0 runs"):
            EngineRunner(engine)
        follow_runner(engine, PATIENT)
        return engine.step_count, engine.weight_version, dict(engine.finished_counts)
    first, second = (make_engine(ProcessGroups.single(), seed=seed) for seed in (0, 1))
    expected = [[record.generated_tokens for record in whole.generate(PROMPTS, settings())] for whole in (first, second)]
    assert expected[0] != expected[1]

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            assert await answers(runner) == expected[0]
            await runner.suspend()
            assert engine.is_suspended
            await runner.resume()
            await runner.unpause()
            assert await answers(runner) == expected[0]
            # What no stage has copied a part of leaves the weights.
            with pytest.raises(WeightLoadError, match="nothing is no parameter"):
                await runner.load_weights([("nothing", torch.zeros(1))])
            assert await answers(runner) == expected[0]
            await runner.load_weights(weights_of(second), version=7)
            assert await answers(runner) == expected[1]
            # Each buffer begins with a weight of the first stage, and ends with one of the last.
            parts = [(name, WeightSlice(tensor=tensor, offsets=(0,) * tensor.dim())) for name, tensor in weights_of(first)]
            third = -(-len(parts) // 3)
            await runner.load_weights(lent([part for at in range(third) for part in parts[at::third]]), version=8)
            assert await answers(runner) == expected[0]
            await runner.load_weights(weights_of(second), version=7)
            assert await answers(runner) == expected[1]
            # Rows that only the last rank holds come twice.
            name, tensor = next((name, tensor) for name, tensor in weights_of(first) if name == "output.weight")
            twice = (name, WeightSlice(tensor=tensor[-1:], offsets=(len(tensor) - 1, 0)))
            last = rf"rank {tp * pp - 1} \(tp {tp - 1} of stage {pp - 1}\)"
            with pytest.raises(WeightLoadError, match=rf"{last} refused the weights: WeightLoadError: .* came twice"):
                await runner.load_weights([*weights_of(first), twice])
            assert not engine.can_step
            await runner.load_weights(weights_of(first))
            assert await answers(runner) == expected[0]

    asyncio.run(main())
    return engine.step_count, engine.weight_version, dict(engine.finished_counts)


@pytest.mark.journey
@pytest.mark.world(2)
def test_two_stages_behind_a_runner_draw_the_tokens_of_one_rank_and_get_its_weights(world: World) -> None:
    ranks = world(functools.partial(check_served, 1, 2))
    assert ranks[0][0] > 20 and ranks == ranks[:1] * 2


@pytest.mark.journey
@pytest.mark.world(4)
def test_two_stages_of_two_tp_ranks_do_so_too(world: World) -> None:
    ranks = world(functools.partial(check_served, 2, 2))
    assert ranks[0][0] > 20 and ranks == ranks[:1] * 4


def check_killed(doomed: int) -> float:
    engine = split_engine(2, 2)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(4)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    if dist.get_rank():
        with pytest.raises(EngineDeadError, match=rf"rank {doomed} \(tp {doomed % 2} of stage {doomed // 2}\) is gone"):
            follow_runner(engine, PATIENT)
        return 0.0

    async def main() -> float:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            engine.model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
            stream = await runner.submit([1], SamplingParams(num_tokens_to_generate=200, ignore_eos=True))
            await anext(aiter(stream))
            begin = time.monotonic()
            os.kill(int(pids[doomed]), signal.SIGKILL)
            with pytest.raises(RankFailedError, match="is gone") as caught:
                await stream.record()
            assert caught.value.rank == doomed
            return time.monotonic() - begin

    return asyncio.run(main())


@pytest.mark.parametrize("doomed", [1, pytest.param(3, marks=pytest.mark.journey)])
@pytest.mark.world(4)
def test_a_killed_rank_of_any_stage_is_named_and_the_others_end(world: World, doomed: int) -> None:
    seconds = world(functools.partial(check_killed, doomed), doomed=(doomed,))
    assert seconds[0] < 5 and seconds.count(0.0) == 2 and seconds[doomed] is None


def check_named(engine: DynamicInferenceEngine, patience: LockstepConfig, doomed: int, what: str) -> None:
    """All requests, and the engine on every rank, end by the name of the one that is to blame."""
    if dist.get_rank():
        with pytest.raises(EngineDeadError, match=what):
            follow_runner(engine, patience)
        return

    async def main() -> None:
        runner = EngineRunner(engine, lockstep=patience)
        streams = [await runner.submit(prompt, SamplingParams(num_tokens_to_generate=20, ignore_eos=True)) for prompt in PROMPTS]
        for stream in streams:
            with pytest.raises(RankFailedError, match=what) as caught:
                await stream.record()
            assert caught.value.rank == doomed
        assert not runner.health().alive

    asyncio.run(main())


def check_hung(doomed: int, run_ahead: bool | None) -> None:
    engine = make_engine(ProcessGroups.build(ParallelPlan(pp=4)), run_ahead=run_ahead)
    patience = LockstepConfig(join_timeout_s=50, silence_timeout_s=16, step_timeout_s=8)
    if dist.get_rank() == doomed:
        passes = itertools.count()
        engine.model.register_forward_pre_hook(lambda *_: threading.Event().wait() if next(passes) == 5 else None)
    what = rf"rank {doomed} \(tp 0 of stage {doomed}\) did not end step"
    check_named(engine, patience, doomed, what)


@pytest.mark.slow
@pytest.mark.parametrize(("doomed", "run_ahead"), [(0, None), (1, None), (2, None), (3, None), (2, False)])
@pytest.mark.world(4)
def test_a_stage_that_hangs_is_named_and_not_those_that_wait_for_it(world: World, doomed: int, run_ahead: bool | None) -> None:
    world(functools.partial(check_hung, doomed, run_ahead))


def check_broken_pass(plan: dict[str, int], doomed: int, run_ahead: bool | None) -> float:
    """Seconds on the first rank from the pass that breaks on another, or on itself, to the error that names it."""
    engine = make_engine(ProcessGroups.build(ParallelPlan(**plan, sequence_parallel=False)), run_ahead=run_ahead)
    patience, begin = LockstepConfig(join_timeout_s=50, silence_timeout_s=40), time.monotonic()
    if dist.get_rank() == doomed:
        passes = itertools.count()

        def fail(*_: Any) -> None:
            if next(passes) == 5:
                raise torch.OutOfMemoryError("no room for a pass")

        engine.model.register_forward_pre_hook(fail)
    tp = plan.get("tp", 1)
    what = rf"rank {doomed} \(tp {doomed % tp} of stage {doomed // tp}\) failed in step \d+: OutOfMemoryError: no room for a pass"
    check_named(engine, patience, doomed, what)
    return time.monotonic() - begin


@pytest.mark.parametrize("run_ahead", [None, False])
@pytest.mark.parametrize("doomed", [0, 1])
@pytest.mark.world(2)
def test_a_stage_whose_pass_fails_is_named_with_its_error_and_no_time_out(world: World, doomed: int, run_ahead: bool | None) -> None:
    seconds, _ = world(functools.partial(check_broken_pass, {"pp": 2}, doomed, run_ahead))
    assert seconds < 30


@pytest.mark.parametrize(
    ("plan", "doomed"),
    [({"pp": 4}, 2), pytest.param({"tp": 2, "pp": 2}, 3, marks=pytest.mark.journey)],
    ids=["between stages", "one of two tp ranks"],
)
@pytest.mark.world(4)
def test_so_is_one_that_stages_on_both_sides_or_its_tp_rank_wait_for(world: World, plan: dict[str, int], doomed: int) -> None:
    seconds = world(functools.partial(check_broken_pass, plan, doomed, None))
    assert seconds[0] < 30


def check_no_pass_after_a_broken_one() -> None:
    engine = split_engine(1, 2)
    if dist.get_rank():
        # Nothing comes, so that a pass would wait.
        return
    hook = engine.model.register_forward_pre_hook(lambda *_: 1 // 0)
    engine.add_request([1, 2, 3])
    with pytest.raises(ZeroDivisionError):
        engine.step()
    hook.remove()
    engine.add_request([1, 2, 3])
    with pytest.raises(RuntimeError, match=r"a pass through the model failed on stage 0 of 2, where others wait for it; end the processes"):
        engine.step()


@pytest.mark.world(2)
def test_a_stage_that_left_a_pass_computes_no_other_beside_those_that_wait(world: World) -> None:
    world(check_no_pass_after_a_broken_one)


def check_failed_draws(run_ahead: bool | None) -> tuple[int, dict[str, int]]:
    """Steps that the last stage cannot draw fail on both alike, and take no other requests with them."""
    engine = make_engine(ProcessGroups.build(ParallelPlan(pp=2)), run_ahead=run_ahead)
    if dist.get_rank():
        sampler = engine._executor.draws.sampler

        def failing(work: Callable[..., Any], doomed: int) -> Callable[..., Any]:
            calls = itertools.count()

            def run(*inputs: Any) -> Any:
                if next(calls) == doomed:
                    raise torch.OutOfMemoryError("no room for a draw")
                return work(*inputs)

            return run

        sampler.draw = failing(sampler.draw, 2)  # type: ignore[method-assign]
        sampler.score = failing(sampler.score, 1)  # type: ignore[method-assign]
        follow_runner(engine, PATIENT)
        return engine.step_count, dict(engine.finished_counts)

    async def main() -> None:
        expected = [record.generated_tokens for record in make_engine(ProcessGroups.single()).generate(PROMPTS, settings())]
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            streams = [await runner.submit(prompt, params) for prompt, params in zip(PROMPTS, settings(), strict=True)]
            records = [await stream.record() for stream in streams]
            failed = [isinstance(record.error, StepFailedError) for record in records]
            assert any(failed) and all("could not draw" in str(record.error) for record in records if record.error)
            assert [record.generated_tokens for record in records if not record.error] == [
                tokens for tokens, is_failed in zip(expected, failed, strict=True) if not is_failed
            ]
            # Steps that score prompts alone; a prompt of one token has nothing to score.
            scored = SamplingParams(num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False)
            records = [await (await runner.submit(prompt, scored)).record() for prompt in PROMPTS]
            assert [len(record.prompt_log_probs or ()) for record in records] == [2, 0, 0, 1]
            assert [isinstance(record.error, StepFailedError) for record in records] == [False, False, True, False]
            assert runner.num_failed_steps == 2 and await answers(runner) == expected

    asyncio.run(main())
    return engine.step_count, dict(engine.finished_counts)


@pytest.mark.parametrize("run_ahead", [None, False])
@pytest.mark.world(2)
def test_a_step_that_cannot_be_drawn_fails_on_all_stages_alike(world: World, run_ahead: bool | None) -> None:
    one, two = world(functools.partial(check_failed_draws, run_ahead))
    assert one == two
