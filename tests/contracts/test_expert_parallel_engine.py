# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Data-parallel engines that share the experts of one mixture: tokens of each are those of one process, and none steps alone."""

import asyncio
import dataclasses
import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineRunner,
    ExecutionConfig,
    InferenceConfig,
    LockstepConfig,
    MtpSpeculation,
    NgramSpeculation,
    PagedAttention,
    RankFailedError,
    SamplingParams,
    StaticInferenceEngine,
    follow_runner,
)
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import MegatronLocal
from tests.support.decode_graphs import serve_as_on_a_gpu
from tests.support.mixtures import compare_records
from tests.support.world import run

World = Callable[..., list[Any]]
CONFIG = TransformerConfig(
    num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=64, init_method_std=0.3
)
MIXTURE = MoEConfig(num_moe_experts=6, moe_router_topk=2, moe_layer_freq=(1, 0, 1), moe_shared_expert_intermediate_size=8)
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9], [30, 5, 3, 3, 3]]
PATIENT = LockstepConfig(join_timeout_s=50, silence_timeout_s=20)
QUICK = LockstepConfig(join_timeout_s=50, silence_timeout_s=2, step_timeout_s=3)
LONG = SamplingParams(num_tokens_to_generate=20, ignore_eos=True, seed=3)
SHORT = dataclasses.replace(LONG, num_tokens_to_generate=8)


def make_engine(groups: ProcessGroups, seed: int = 0, execution: ExecutionConfig | None = None, **fields: Any) -> DynamicInferenceEngine:
    experts = moe_feed_forward(dataclasses.replace(MIXTURE, **fields))
    model = GPTModel(CONFIG, groups, feed_forward=experts, attention_core=PagedAttention(), dtype=torch.float64, seed=seed).eval()
    # Too few blocks for all: requests are preempted on a rank of their own.
    sizes = InferenceConfig(max_sequence_length=40, num_blocks=12, block_size_tokens=4, max_tokens=8, max_requests=4)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)


def shared_engine(ranks: int = 2, seed: int = 0, execution: ExecutionConfig | None = None, **fields: Any) -> DynamicInferenceEngine:
    return make_engine(ProcessGroups.build(ParallelPlan(dp=ranks, ep=ranks)), seed, execution, **fields)


def settings(count: int) -> list[SamplingParams]:
    return [SamplingParams(temperature=float(i % 2), num_tokens_to_generate=5 + 2 * i, return_log_probs=True, seed=i) for i in range(count)]


Answers = list[tuple[list[int], list[float]]]
"""Tokens and their log-probabilities, for each prompt."""


def whole_answers(prompts: list[list[int]], seed: int = 0, **fields: Any) -> Answers:
    """Of a whole model in this process."""
    records = make_engine(ProcessGroups.single(), seed, **fields).generate(prompts, settings(len(prompts)))
    return [(record.generated_tokens, record.generated_log_probs) for record in records]


def check_equal(engine: DynamicInferenceEngine, prompts: list[list[int]], seed: int = 0, expected: Answers | None = None) -> list[int]:
    """Tokens of this rank's prompts are those of a whole model."""
    ours = engine.generate(prompts, settings(len(prompts)))
    theirs = whole_answers(prompts, seed) if expected is None else expected
    for one, (tokens, log_probs) in zip(ours, theirs, strict=True):
        assert one.generated_tokens == tokens
        torch.testing.assert_close(one.generated_log_probs, log_probs, rtol=1e-10, atol=1e-10)
    return [record.num_generated for record in ours]


def check_uneven(options: dict[str, Any], every: Answers, first: Answers, rest: Answers) -> tuple[list[list[int]], int, dict[str, float]]:
    engine = shared_engine(**options)
    rank = dist.get_rank()
    counts = [
        check_equal(engine, [PROMPTS, []][rank], expected=[every, []][rank]),
        check_equal(engine, [[], PROMPTS[:1]][rank], expected=[[], first][rank]),
        check_equal(engine, PROMPTS[rank:], expected=[every, rest][rank]),
    ]
    stats = engine.stats()
    before = engine.step_count, stats["computed_tokens"]
    # A round of ranks that have nothing to do.
    assert engine.step() == [] and (engine.step_count, engine.stats()["computed_tokens"]) == before
    return counts, engine.num_preemptions, stats


@functools.cache
def uneven_answers() -> tuple[Answers, Answers, Answers]:
    return whole_answers(PROMPTS), whole_answers(PROMPTS[:1]), whole_answers(PROMPTS[1:])


@pytest.mark.world(2)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.journey),
        {"moe_token_dispatcher_type": "allgather"},
        {"execution": ExecutionConfig(speculation=NgramSpeculation())},
    ],
    ids=["alltoall", "allgather", "ngrams"],
)
def test_two_ranks_with_uneven_load_give_the_tokens_of_one_process(world: World, options: dict[str, Any]) -> None:
    every, first, rest = uneven_answers()
    (one, preempted, _), (two, _, stats) = world(check_uneven, options=options, every=every, first=first, rest=rest)
    assert [len(counts) for counts in one] == [5, 0, 5] and [len(counts) for counts in two] == [0, 1, 4]
    assert preempted > 0
    # Only steps with a request count.
    assert stats["generated_tokens"] == sum(map(sum, two))


SPLIT = {
    "tp2-ep4": (ParallelPlan(tp=2, dp=2, ep=4, etp=1, sequence_parallel=False), {"num_moe_experts": 8}),
    "tp2-ep2-etp2": (ParallelPlan(tp=2, dp=2, ep=2, etp=2, sequence_parallel=False), {"moe_token_dispatcher_type": "allgather"}),
    "pp2-ep2": (ParallelPlan(pp=2, dp=2, ep=2), {}),
}


# -- recorded steps ------------------------------------------------------------------------------------------------------


def check_recorded(plan: ParallelPlan, fields: dict[str, Any], options: dict[str, Any], expected: list[list[Answers]]) -> list[Any]:
    """The sizes that this rank replayed, and its counters."""
    replayed, routed = serve_as_on_a_gpu(), [0]
    groups = ProcessGroups.build(plan)
    engine, place = make_engine(groups, execution=ExecutionConfig(**options), **fields), groups.dp.rank

    def count(_: object, inputs: tuple[Any, ...]) -> None:
        if inputs[1].equal_lengths:
            routed[0] += int(inputs[1].valid.sum())

    engine.model.layers["0"].mlp.register_forward_pre_hook(count)
    for prompts, answers in zip(RECORDED[place], expected[place], strict=True):
        check_equal(engine, prompts, expected=answers)
    assert engine.stats()["used_blocks"] == 0
    sizes, rows = zip(*replayed, strict=True)
    # Padding goes to no expert.
    assert routed == [sum(rows)]
    return [sizes, place, engine.step_count, sum(engine.cuda_graph_request_count_map.values())]


RECORDED = [(PROMPTS, [], PROMPTS[:4]), ([], PROMPTS[:1], PROMPTS[3:])]
"""Prompts of two engines, one idle and then the other; each is preempted when it has five."""
RECORDED_LAYOUTS = {
    "ep2": (2, ParallelPlan(dp=2, ep=2), {}),
    "etp2": (2, ParallelPlan(dp=2, ep=1, etp=2), {}),
    "tp2-ep4": (4, *SPLIT["tp2-ep4"]),
}


@pytest.mark.journey
@pytest.mark.parametrize(
    ("name", "run_ahead"),
    [
        # Both on whole experts; on slices and on ranks of two kinds the one that decides more.
        pytest.param(name, run_ahead, marks=() if run_ahead or name == "ep2" else pytest.mark.slow)
        for name in RECORDED_LAYOUTS
        for run_ahead in (False, True)
    ],
)
def test_ranks_replay_recordings_of_the_same_sizes_and_give_the_tokens_of_one_process(name: str, run_ahead: bool) -> None:
    num_ranks, plan, fields = RECORDED_LAYOUTS[name]
    expected = [[whole_answers(prompts, **fields) for prompts in rounds] for rounds in RECORDED]
    inputs = {"plan": plan, "fields": fields, "options": {"run_ahead": run_ahead}, "expected": expected}
    results = run(check_recorded, num_ranks, **inputs)
    sizes = results[0][0]
    assert len(sizes) > 20 and {1, 4} <= set(sizes) and all(result[0] == sizes for result in results)
    for _, place, num_steps, num_graph_steps in results:
        # The first engine has most of the steps; dummy ones count nowhere.
        assert 0 < num_graph_steps < num_steps and (num_graph_steps < len(sizes) or place == 0)


def check_recorded_weights() -> tuple[tuple[int, ...], list[int]]:
    """New weights, and a suspension in the middle of steps that were decided."""
    fresh = [(shard.name, shard.parameter.detach()) for shard in named_shards(make_engine(ProcessGroups.single(), 1).model)]
    [long] = make_engine(ProcessGroups.single(), 1).generate(PROMPTS[:1], LONG)
    replayed = serve_as_on_a_gpu()
    engine, rank = shared_engine(), dist.get_rank()
    engine.load_weights(fresh)
    dist.barrier()

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            if rank == 0:
                stream = await runner.submit(PROMPTS[0], LONG)
                await anext(aiter(stream))
            await asyncio.to_thread(dist.barrier)
            if rank == 1:
                await runner.suspend()
                assert engine.peers is not None and not engine.peers.num_left
                await runner.resume()
                await runner.unpause()
            else:
                assert (await stream.record()).generated_tokens == long.generated_tokens
            await asyncio.to_thread(dist.barrier)
            assert runner.failure is None

    asyncio.run(main())
    return tuple(size for size, _ in replayed), [engine.step_count, sum(engine.cuda_graph_request_count_map.values())]


@pytest.mark.journey
@pytest.mark.world(2)
def test_recorded_steps_go_on_after_new_weights_and_a_suspension(world: World) -> None:
    (one, counts), (two, idle) = world(check_recorded_weights)
    # One prompt in three steps; all other steps are recorded, also where nothing is to be done.
    assert one == two and len(one) >= 19 and counts[1] >= counts[0] - 3 and idle == [0, 0]


def check_expert_slices() -> None:
    check_equal(make_engine(ProcessGroups.build(ParallelPlan(dp=2, ep=1, etp=2))), PROMPTS[dist.get_rank() :])


@pytest.mark.world(2)
def test_ranks_that_hold_slices_of_each_expert_step_together_too(world: World) -> None:
    world(check_expert_slices)


def check_weights() -> None:
    engine, rank = shared_engine(), dist.get_rank()
    fresh = [(shard.name, shard.parameter.detach()) for shard in named_shards(make_engine(ProcessGroups.single(), 1).model)]
    if rank == 0:
        engine.load_weights(fresh)
    with pytest.raises(RuntimeError, match="no rank can step: ep rank 1 has weight_version=0 and ep rank 0 1; load the same"):
        engine.generate(PROMPTS[:1])
    if rank == 1:
        engine.load_weights(fresh)
    check_equal(engine, PROMPTS[rank * 4 :], seed=1)
    if rank == 1:
        engine.suspend()
    with pytest.raises(RuntimeError, match="ep rank 1 is suspended"):
        engine.generate(PROMPTS[:1])
    engine.resume()
    check_equal(engine, PROMPTS[: 4 * rank], seed=1)


@pytest.mark.world(2)
def test_no_rank_steps_before_all_have_the_new_weights_and_their_memory(world: World) -> None:
    world(check_weights)


def check_refused() -> None:
    with pytest.raises(ValueError, match="use_graphs=True: graphs need a GPU, blocks of a multiple of 16 tokens.*leave it at None"):
        shared_engine(execution=ExecutionConfig(use_graphs=True))
    with pytest.raises(ValueError, match=r"drops tokens .*moe_expert_capacity_factor=None"):
        shared_engine(moe_expert_capacity_factor=1.0)
    engine = shared_engine()
    with pytest.raises(ValueError, match="ep=2 shares experts .* use DynamicInferenceEngine"):
        StaticInferenceEngine(engine.model, max_batch_size=2)
    with pytest.raises(ValueError, match="experts over ep=2 etp=1, which every rank has to step with"):
        MegatronLocal(DynamicInferenceEngine(engine.model, engine.context, ByteTokenizer()))
    with pytest.raises(ValueError, match="MtpSpeculation runs the experts of its heads at times of its own, and ep=2"):
        shared_engine(execution=ExecutionConfig(speculation=MtpSpeculation()))


@pytest.mark.world(2)
def test_what_ranks_that_share_experts_cannot_do_is_refused_by_name(world: World) -> None:
    world(check_refused)


# What the two engines are given, first and then.
ROUNDS = [(PROMPTS, []), (PROMPTS[:1], PROMPTS[1:3])]


def check_split(plan: ParallelPlan, fields: dict[str, Any], expected: list[list[Answers]]) -> tuple[int, list[int]]:
    """Two engines of two ranks each."""
    groups = ProcessGroups.build(plan)
    engine, place = make_engine(groups, **fields), groups.dp.rank
    for prompts, answers in zip(ROUNDS[place], expected[place], strict=True):
        check_equal(engine, prompts, expected=answers)
    return place, [engine.step_count, engine.num_preemptions]


@pytest.mark.journey
@pytest.mark.world(4)
@pytest.mark.parametrize("name", [pytest.param("tp2-ep4", marks=pytest.mark.slow), "tp2-ep2-etp2", "pp2-ep2"])
def test_engines_of_several_ranks_that_share_experts_give_the_tokens_of_one_process(world: World, name: str) -> None:
    plan, fields = SPLIT[name]
    by_place = {0: [], 1: []}
    expected = [[whole_answers(prompts, **fields) for prompts in rounds] for rounds in ROUNDS]
    for place, figures in world(check_split, plan=plan, fields=fields, expected=expected):
        by_place[place].append(figures)
    # Ranks of one engine make the same steps, those of two engines need not.
    assert all(one == other for one, other in by_place.values())
    assert by_place[0][0][0] != by_place[1][0][0] and by_place[0][0][1] > 0


# -- runners -------------------------------------------------------------------------------------------------------------


def slow_down(engine: DynamicInferenceEngine, seconds: float = 0.01) -> None:
    engine.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))


async def tokens_of(runner: EngineRunner, prompt: list[int]) -> list[int]:
    return (await (await runner.submit(prompt, SHORT)).record()).generated_tokens


def check_runners() -> int:
    engine, rank = shared_engine(3), dist.get_rank()
    slow_down(engine)
    whole = make_engine(ProcessGroups.single())
    expected = [record.generated_tokens for record in whole.generate(PROMPTS, SHORT)]
    [long] = whole.generate(PROMPTS[:1], LONG)

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            # One has five requests, one none; then the others begin while all are idle.
            for number, busy in enumerate(([0], [1], [0, 1, 2], [2])):
                if rank in busy:
                    prompts = PROMPTS if number == 0 else PROMPTS[rank : rank + 2]
                    answers = await asyncio.gather(*[tokens_of(runner, prompt) for prompt in prompts])
                    assert answers == [expected[PROMPTS.index(prompt)] for prompt in prompts]
                await asyncio.to_thread(dist.barrier)
            if rank == 0:
                stream = await runner.submit(PROMPTS[0], LONG)
                increments = aiter(stream)
                await anext(increments)
            await asyncio.to_thread(dist.barrier)
            if rank == 1:
                # No request of its own, and yet the others wait.
                await runner.suspend()
            await asyncio.to_thread(dist.barrier)
            if rank == 0:
                assert engine.peers is not None
                while engine.peers.last.steps:
                    await asyncio.sleep(0.01)
                await asyncio.sleep(0.1)
                steps = engine.step_count
                await asyncio.sleep(0.3)
                assert engine.step_count == steps and engine.num_in_flight == 1 and runner.health().alive
            await asyncio.to_thread(dist.barrier)
            if rank == 1:
                await runner.resume()
                await runner.unpause()
            if rank == 0:
                async for increment in increments:
                    record = increment.record
                assert record is not None and record.generated_tokens == long.generated_tokens
            await asyncio.to_thread(dist.barrier)
            assert runner.failure is None and runner.health().alive
            assert engine.peers is not None
            while engine.peers.last.steps:
                await asyncio.sleep(0.01)

    asyncio.run(main())
    fresh = make_engine(ProcessGroups.single(), 1)
    engine.load_weights([(shard.name, shard.parameter.detach()) for shard in named_shards(fresh.model)])
    [renewed] = fresh.generate(PROMPTS[:1], SHORT)

    async def again() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            assert rank or await tokens_of(runner, PROMPTS[0]) == renewed.generated_tokens
            await asyncio.to_thread(dist.barrier)

    asyncio.run(again())
    return engine.step_count


@pytest.mark.journey
@pytest.mark.world(3)
def test_runners_take_requests_of_their_own_and_pause_together(world: World) -> None:
    one, two, three = world(check_runners)
    assert one > two > 0 and three > 0


def check_split_runners(plan: ParallelPlan, fields: dict[str, Any], expected: list[list[int]]) -> tuple[int, int]:
    """The first rank of each engine runs it, the others follow."""
    groups = ProcessGroups.build(plan)
    engine, place = make_engine(groups, **fields), groups.dp.rank
    # Groups that only their members make are named by how many each of them is in.
    leaders, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]] if groups.pp.size > 1 else [[0, 2], [1, 3]])
    if groups.tp_pp.rank:
        follow_runner(engine, PATIENT)
        return place, engine.step_count

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            for busy in ([0], [1], [0, 1]):
                if place in busy:
                    prompts = PROMPTS[place::2]
                    answers = await asyncio.gather(*[tokens_of(runner, prompt) for prompt in prompts])
                    assert answers == expected[place::2]
                await asyncio.to_thread(dist.barrier, leaders)
            if place == 1:
                await runner.suspend()
                await runner.resume()
                await runner.unpause()
            else:
                assert await tokens_of(runner, PROMPTS[1]) == expected[1]
            await asyncio.to_thread(dist.barrier, leaders)
            assert runner.failure is None

    asyncio.run(main())
    return place, engine.step_count


@pytest.mark.journey
@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["tp2-ep4", pytest.param("pp2-ep2", marks=pytest.mark.slow)])
def test_runners_of_several_ranks_share_experts(world: World, name: str) -> None:
    plan, fields = SPLIT[name]
    expected = [record.generated_tokens for record in make_engine(ProcessGroups.single(), **fields).generate(PROMPTS, SHORT)]
    steps = sorted(world(check_split_runners, plan=plan, fields=fields, expected=expected))
    assert steps[0] == steps[1] and steps[2] == steps[3] and steps[0][1] > 8 < steps[2][1]


def check_killed(recorded: bool) -> float:
    if recorded:
        serve_as_on_a_gpu()
    engine, rank = shared_engine(3), dist.get_rank()
    # No answer is ready before one is killed.
    slow_down(engine, 0.05)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(3)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))

    async def main() -> float:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            stream = await runner.submit(PROMPTS[1], dataclasses.replace(LONG, num_tokens_to_generate=39))
            await anext(aiter(stream))
            await asyncio.to_thread(dist.barrier)
            begin = time.monotonic()
            if rank == 0:
                os.kill(int(pids[1]), signal.SIGKILL)
            with pytest.raises(RankFailedError, match="ep rank 1 is gone") as caught:
                await stream.record()
            assert caught.value.rank == 1 and not runner.health().alive
            with pytest.raises(RankFailedError, match="ep rank 1 is gone"):
                await runner.submit(PROMPTS[0], LONG)
            return time.monotonic() - begin

    return asyncio.run(main())


@pytest.mark.world(3)
@pytest.mark.parametrize("recorded", [False, True])
def test_a_killed_rank_is_named_by_all_others(world: World, recorded: bool) -> None:
    one, _, three = world(check_killed, doomed=(1,), recorded=recorded)
    assert max(one, three) < 10


def check_closed() -> float:
    """One ends while the other is in the middle of steps that both have decided."""
    engine, rank = shared_engine(), dist.get_rank()
    slow_down(engine)

    async def main() -> float:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            stream = await runner.submit(PROMPTS[1 - rank], dataclasses.replace(LONG, num_tokens_to_generate=36))
            increments = aiter(stream)
            await anext(increments)
            await asyncio.to_thread(dist.barrier)
            begin = time.monotonic()
            if rank == 1:
                runner.close()
                return time.monotonic() - begin
            with pytest.raises(RankFailedError, match="ep rank 1 was closed"):
                async for _ in increments:
                    pass
            return time.monotonic() - begin

    return asyncio.run(main())


@pytest.mark.world(2)
def test_a_runner_that_is_closed_makes_the_steps_that_others_wait_in(world: World) -> None:
    assert max(world(check_closed)) < 15


def check_absent() -> None:
    engine, rank = shared_engine(), dist.get_rank()
    assert engine.peers is not None
    engine.peers.open(QUICK)
    if rank == 0:
        with pytest.raises(RankFailedError, match="ep rank 1 did not come to the next step within 3 s"):
            engine.generate(PROMPTS[:1])
    dist.barrier()
    if rank == 1:
        with pytest.raises(RankFailedError, match="ep rank 1 did not come"):
            engine.generate([])


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_stays_away_is_named(world: World) -> None:
    world(check_absent)


def check_failed_step() -> None:
    engine, rank = shared_engine(), dist.get_rank()
    mixture = engine.model.layers["2"]

    def fail(*_: Any) -> None:
        if rank == 1:
            raise ArithmeticError("broken")

    mixture.register_forward_pre_hook(fail)

    async def main() -> None:
        # Rank 0 may hang in the exchange, and yet its request ends.
        reason = "ep rank 1 failed in a step: ArithmeticError: broken"
        with EngineRunner(engine, lockstep=PATIENT) as runner, pytest.raises(RankFailedError, match=reason):
            await tokens_of(runner, PROMPTS[0])

    asyncio.run(main())


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_fails_in_the_middle_of_a_step_is_named_by_both(world: World) -> None:
    world(check_failed_step)


# -- on GPUs -------------------------------------------------------------------------------------------------------------

ON_GPUS = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=32, vocab_size=128, init_method_std=0.2
)


def check_graphs(plan: ParallelPlan, fields: dict[str, Any]) -> tuple[int, dict[int, int]]:
    """Tokens compared, and replays."""
    groups, single = ProcessGroups.build(plan), ProcessGroups.single()
    experts = moe_feed_forward(MoEConfig(num_moe_experts=8, moe_router_topk=2, **fields))
    halves = GPTModel(ON_GPUS, single, feed_forward=experts, dtype=torch.bfloat16)
    reference = GPTModel(ON_GPUS, single, feed_forward=experts, dtype=torch.float64).eval()
    reference.load_state_dict(halves.state_dict())
    place = {"device": "cuda", "dtype": torch.bfloat16}
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, block_size_tokens=16, num_blocks=64)
    params = SamplingParams(temperature=0, num_tokens_to_generate=12, ignore_eos=True, return_log_probs=True)
    prompts = [prompt[:9] for prompt in (*PROMPTS, [5, 4])]
    # One is idle, then the other, then both work.
    rounds = [(prompts, [], prompts[:4]), ([], prompts[:1], prompts[3:])][groups.dp.rank]
    records, replays = [], {}
    for use_graphs in (True, False):
        model = GPTModel(ON_GPUS, groups, feed_forward=experts, attention_core=PagedAttention(), **place).eval()
        engine = DynamicInferenceEngine(
            model, DynamicInferenceContext.for_model(model, sizes), execution=ExecutionConfig(use_graphs=use_graphs)
        )
        records.append([record for texts in rounds for record in engine.generate(texts, params)])
        replays = replays or engine.cuda_graph_request_count_map
        dist.barrier()
        engine.close()
    return compare_records(reference, [text for texts in rounds for text in texts], *records), replays


@pytest.mark.gpu
@pytest.mark.parametrize("fields", [{}, {"moe_token_dispatcher_type": "allgather"}], ids=["alltoall", "allgather"])
def test_graphs_of_ranks_that_share_experts_give_the_tokens_of_plain_steps(fields: dict[str, Any]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for compared, replays in run(check_graphs, 2, backend="nccl", timeout_s=120.0, plan=ParallelPlan(dp=2, ep=2), fields=fields):
        assert compared >= 16 and sum(replays.values()) > 20 and set(replays) <= {1, 2, 4, 8}


@pytest.mark.gpu
def test_graphs_of_engines_of_two_ranks_that_share_experts_give_the_tokens_of_plain_steps() -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 GPUs")
    for compared, replays in run(check_graphs, 4, backend="nccl", timeout_s=120.0, plan=SPLIT["tp2-ep4"][0], fields={}):
        assert compared >= 16 and sum(replays.values()) > 20


def check_tensor_parallel_graphs(plan: ParallelPlan) -> int:
    """Replays of an engine whose ranks hold the same tokens."""
    experts = moe_feed_forward(MoEConfig(num_moe_experts=8, moe_router_topk=2))
    place = {"device": "cuda", "dtype": torch.bfloat16}
    model = GPTModel(ON_GPUS, ProcessGroups.build(plan), feed_forward=experts, attention_core=PagedAttention(), **place).eval()
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, block_size_tokens=16, num_blocks=64)
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
    engine.generate(PROMPTS, SamplingParams(temperature=0, num_tokens_to_generate=12, ignore_eos=True))
    dist.barrier()
    engine.close()
    return sum(engine.cuda_graph_request_count_map.values())


@pytest.mark.gpu
@pytest.mark.parametrize("cut", [{"ep": 2, "etp": 1}, {"ep": 1, "etp": 2}], ids=str)
def test_steps_of_tensor_parallel_mixtures_are_graphs(cut: dict[str, int]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    plan = ParallelPlan(tp=2, sequence_parallel=False, **cut)
    assert min(run(check_tensor_parallel_graphs, 2, backend="nccl", timeout_s=120.0, plan=plan)) > 8
