# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines whose experts move between ranks by their loads, and have copies: tokens and log-probabilities are those of one process."""

import asyncio
import dataclasses
import functools
import json
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineRunner,
    ExecutionConfig,
    ExpertBalancing,
    InferenceConfig,
    PagedAttention,
    RankFailedError,
    SamplingParams,
    WeightLoadError,
    add_redundant_experts,
    follow_runner,
)
from mcore_inference.decoder import fp8_parameters
from mcore_inference.engine._weights import ModelWeights
from mcore_moe import MoEConfig, MoELayer, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel
from tests.contracts.test_expert_parallel_engine import (
    CONFIG,
    LONG,
    MIXTURE,
    ON_GPUS,
    PATIENT,
    PROMPTS,
    Answers,
    check_equal,
    make_engine,
    settings,
)
from tests.support.decode_graphs import serve_as_on_a_gpu
from tests.support.mixtures import compare_records
from tests.support.world import run

World = Callable[..., list[Any]]
BALANCING = ExpertBalancing(num_redundant_experts=2, interval_steps=6)
EP2 = ParallelPlan(dp=2, ep=2)


def skewed_engine(groups: ProcessGroups, seed: int = 0, balancing: ExpertBalancing | None = None, **fields: Any) -> DynamicInferenceEngine:
    """Nearly all tokens choose two experts of one rank: the first two, by the weights of another seed the last two."""
    weight_dtype = fields.pop("weight_dtype", None)
    execution = ExecutionConfig(expert_balancing=balancing, log_interval_steps=1)
    if weight_dtype is None:
        engine = make_engine(groups, seed, execution, moe_router_bias=True, **fields)
    else:
        experts = moe_feed_forward(dataclasses.replace(MIXTURE, moe_router_bias=True, **fields))
        model = GPTModel(CONFIG, groups, feed_forward=experts, attention_core=PagedAttention(), dtype=torch.float64, seed=seed).eval()
        sizes = InferenceConfig(max_sequence_length=40, num_blocks=12, block_size_tokens=4, max_requests=4, weight_dtype=weight_dtype)
        engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)
    with torch.no_grad():
        for shard in named_shards(engine.model):
            if shard.name.endswith("router.bias"):
                shard.parameter[slice(2) if seed == 0 else slice(-2, None)] = 2.0
    return engine


def skewed_weights(seed: int) -> list[tuple[str, Tensor]]:
    return [(shard.name, shard.parameter.detach()) for shard in named_shards(skewed_engine(ProcessGroups.single(), seed).model)]


def answers_of(prompts: list[list[int]], seed: int = 0, **fields: Any) -> Answers:
    """Of a whole model in this process."""
    records = skewed_engine(ProcessGroups.single(), seed, **fields).generate(prompts, settings(len(prompts)))
    return [(record.generated_tokens, record.generated_log_probs) for record in records]


def places_of(engine: DynamicInferenceEngine) -> list[list[list[int]]]:
    """Of each mixture here and each of its experts the slots that hold it."""
    mixtures = [layer.mlp for layer in engine.model.layers.values() if isinstance(layer.mlp, MoELayer)]
    return [mixture.expert_slots.placement.slots() for mixture in mixtures if mixture.expert_slots is not None]


def check_moving(
    plan: ParallelPlan, fields: dict[str, Any], balancing: ExpertBalancing, recorded: bool, expected: list[Answers]
) -> dict[str, float]:
    """Counters of this rank."""
    replayed = serve_as_on_a_gpu() if recorded else []
    groups = ProcessGroups.build(plan)
    engine = skewed_engine(groups, balancing=balancing, **fields)
    # The second engine has less to do.
    num_prompts = 3 - groups.dp.rank
    check_equal(engine, PROMPTS[:num_prompts], expected=expected[0][:num_prompts])
    first, at_first = engine.stats(), places_of(engine)
    assert first["expert_rebalances"] >= 1 <= first["moved_experts"]
    # By nearly all tokens one rank was twice as busy as the mean.
    assert first["expert_imbalance_after"] <= first["expert_imbalance"] <= 2
    engine.suspend()
    engine.resume()
    dist.barrier()
    # New weights reach all copies, and make others busy.
    engine.load_weights(skewed_weights(1))
    dist.barrier()
    for _ in range(2):
        check_equal(engine, PROMPTS[:num_prompts], expected=expected[1][:num_prompts])
    stats = engine.stats()
    assert places_of(engine) != at_first and stats["moved_experts"] > first["moved_experts"]
    return stats | {"replays": len(replayed)}


MOVING: dict[str, tuple[int, ParallelPlan, dict[str, Any], ExpertBalancing, bool]] = {
    "alltoall": (2, EP2, {}, BALANCING, False),
    "allgather, without copies": (2, EP2, {"moe_token_dispatcher_type": "allgather"}, ExpertBalancing(interval_steps=6), False),
    "recorded": (2, EP2, {}, BALANCING, True),
    "fp8": (2, EP2, {"weight_dtype": "fp8_weight_only"}, BALANCING, False),
    # One engine, whose ranks hold the same tokens.
    "tp2": (2, ParallelPlan(tp=2, ep=2, sequence_parallel=False), {}, BALANCING, False),
    "pp2-ep2": (4, ParallelPlan(pp=2, dp=2, ep=2), {}, BALANCING, False),
    # One engine with a batch of requests in flight on each stage.
    "pp2-tp2-ep2": (4, ParallelPlan(pp=2, tp=2, ep=2, sequence_parallel=False), {}, BALANCING, False),
    "tp2-ep2-etp2": (4, ParallelPlan(tp=2, dp=2, ep=2, etp=2, sequence_parallel=False), {}, BALANCING, False),
}


@functools.cache
def expected_answers(weight_dtype: str | None) -> list[Answers]:
    """By the weights of either seed."""
    return [answers_of(PROMPTS[:3], seed, weight_dtype=weight_dtype) for seed in (0, 1)]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if MOVING[name][0] > 2 else pytest.mark.journey if name != "alltoall" else ())
        for name in MOVING
    ],
)
def test_experts_that_move_and_have_copies_give_the_tokens_of_one_process(name: str) -> None:
    num_ranks, plan, fields, balancing, recorded = MOVING[name]
    expected = expected_answers(fields.get("weight_dtype"))
    inputs = {"plan": plan, "fields": fields, "balancing": balancing, "recorded": recorded, "expected": expected}
    results = run(check_moving, num_ranks, **inputs)
    if plan.pp == 1:
        # All ranks have decided the same; stages have layers of their own.
        figures = ("expert_rebalances", "moved_experts", "expert_imbalance", "expert_imbalance_after")
        assert all(result[figure] == results[0][figure] for result in results for figure in figures)
    assert all((result["replays"] > 20) == recorded for result in results)


# -- weights that change under way --------------------------------------------------------------------------------------


def replayed_alone(prompt: list[int], versions: list[tuple[int, int]], params: SamplingParams) -> Any:
    """A request in one process, which gets new weights after as many tokens."""
    engine = skewed_engine(ProcessGroups.single())
    (version, count), *rest = versions
    if version == 1:
        # It waited for the load.
        engine.load_weights(skewed_weights(1))
    number, done = engine.add_request(prompt, params), []
    while not done:
        if rest and engine.get_request(number).num_generated == count:
            engine.load_weights(skewed_weights(1))
            rest = []
        done += engine.step()
    return done[0]


def check_runners() -> tuple[list[list[tuple[int, int]]], dict[str, float]]:
    engine, rank = skewed_engine(ProcessGroups.build(EP2), balancing=dataclasses.replace(BALANCING, interval_steps=4)), dist.get_rank()
    queued = threading.Event()

    def wait_for_weights(*_: Any) -> None:
        """All ranks are in one step when they ask for new weights."""
        if engine.stats()["expert_rebalances"] >= 2:
            assert queued.wait(50)

    engine.model.register_forward_pre_hook(wait_for_weights)
    new, params = skewed_weights(1), dataclasses.replace(LONG, return_log_probs=True)

    async def main() -> list[Any]:
        # Few steps a vote: experts move while requests run.
        with EngineRunner(engine, lockstep=dataclasses.replace(PATIENT, vote_interval_steps=2)) as runner:
            streams = [await runner.submit(prompt, params) for prompt in PROMPTS[rank : rank + 2]]
            while engine.stats()["expert_rebalances"] < 2:
                await asyncio.sleep(0.005)
            load = asyncio.ensure_future(runner.load_weights(new))
            await asyncio.sleep(0)
            queued.set()
            await load
            records = [await stream.record() for stream in streams]
            await asyncio.to_thread(dist.barrier)
            return records

    records = asyncio.run(main())
    for record in records:
        alone = replayed_alone(record.prompt_tokens, record.weight_versions, params)
        assert record.generated_tokens == alone.generated_tokens
        torch.testing.assert_close(record.generated_log_probs, alone.generated_log_probs, rtol=1e-10, atol=1e-10)
    return [record.weight_versions for record in records], engine.stats()


@pytest.mark.journey
@pytest.mark.world(2)
def test_runners_move_experts_and_load_weights_while_requests_run(world: World) -> None:
    (one, stats), (two, others) = world(check_runners)
    # One that waited for blocks may have begun behind the load.
    assert any(len(versions) == 2 for versions in one) and any(len(versions) == 2 for versions in two)
    assert stats["expert_rebalances"] == others["expert_rebalances"] > 2 and stats["moved_experts"] > 0


def check_followed() -> dict[str, float]:
    """An engine of two ranks, whose first makes the runner."""
    groups = ProcessGroups.build(ParallelPlan(tp=2, ep=2, sequence_parallel=False))
    engine = skewed_engine(groups, balancing=BALANCING)
    if groups.tp.rank:
        follow_runner(engine, PATIENT)
        return engine.stats()
    expected = [answers_of(PROMPTS[:2], seed) for seed in (0, 1)]

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            for answers in expected:
                streams = [await runner.submit(prompt, params) for prompt, params in zip(PROMPTS[:2], settings(2), strict=True)]
                assert [(await stream.record()).generated_tokens for stream in streams] == [tokens for tokens, _ in answers]
                if answers is expected[0]:
                    await runner.load_weights(skewed_weights(1))

    asyncio.run(main())
    return engine.stats()


@pytest.mark.journey
@pytest.mark.world(2)
def test_followers_move_experts_with_the_first_rank(world: World) -> None:
    leader, follower = world(check_followed)
    assert leader["expert_rebalances"] == follower["expert_rebalances"] >= 1 and leader["moved_experts"] == follower["moved_experts"] > 0


def check_repeated_load() -> None:
    engine, rank = skewed_engine(ProcessGroups.build(EP2), balancing=BALANCING), dist.get_rank()
    engine.generate(PROMPTS[:1], LONG)
    if rank == 0:
        # Experts of its own are where they were trained, the other's are not.
        engine.load_weights(skewed_weights(0), 0)
    with pytest.raises(RuntimeError, match="ep rank 1 has not loaded weight_version=0 again, as others have; load the same weights on all"):
        engine.generate(PROMPTS[:1], LONG)
    if rank == 1:
        engine.load_weights(skewed_weights(0), 0)
    check_equal(engine, PROMPTS[:2], expected=answers_of(PROMPTS[:2]))


@pytest.mark.world(2)
def test_no_rank_steps_where_one_alone_has_loaded_again(world: World) -> None:
    world(check_repeated_load)


def check_broken_load() -> None:
    engine = skewed_engine(ProcessGroups.build(EP2), balancing=BALANCING)
    engine.weights = ModelWeights(engine.model, bucket_bytes=1)
    with pytest.raises(WeightLoadError, match="parameters did not come"):
        engine.load_weights(skewed_weights(1)[:4])
    # Experts move for its steps, and bring nothing that the load did not.
    engine.warm_up()
    assert not engine.can_step
    with pytest.raises(RuntimeError, match="ep rank 0 has weights of a load that failed half-way; repeat it"):
        engine.generate(PROMPTS[:1])
    engine.load_weights(skewed_weights(0))
    check_equal(engine, PROMPTS[:2], expected=answers_of(PROMPTS[:2]))


@pytest.mark.world(2)
def test_a_load_that_broke_is_still_broken_behind_a_warm_up(world: World) -> None:
    world(check_broken_load)


def check_absent() -> None:
    engine, rank = skewed_engine(ProcessGroups.build(EP2), balancing=BALANCING), dist.get_rank()
    assert engine.peers is not None
    engine.peers.open(PATIENT)
    engine.generate(PROMPTS[:1], LONG)
    # Steps before, however long they took, are none of it.
    engine.peers._config = dataclasses.replace(PATIENT, step_timeout_s=1)
    dist.barrier()
    # A move is due: nobody begins it without the others.
    num_rebalances = engine.stats()["expert_rebalances"]
    if rank == 0:
        with pytest.raises(RankFailedError, match="ep rank 1 did not come to the next step within 1 s"):
            engine.generate(PROMPTS[:1])
    dist.barrier()
    assert engine.stats()["expert_rebalances"] == num_rebalances
    if rank == 1:
        with pytest.raises(RankFailedError, match="ep rank 1 did not come"):
            engine.generate([])


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_does_not_come_where_experts_would_move_is_named(world: World) -> None:
    world(check_absent)


def check_failed_move() -> None:
    engine, rank = skewed_engine(ProcessGroups.build(EP2), balancing=BALANCING), dist.get_rank()
    slots = engine.model.layers["2"].mlp.expert_slots

    def fail(loads: Any) -> Any:
        raise ArithmeticError("broken")

    if rank == 1:
        slots.rebalance = fail

    async def main() -> None:
        with EngineRunner(engine, lockstep=PATIENT) as runner:
            with pytest.raises(RankFailedError, match="ep rank 1 failed in a step: ArithmeticError: broken"):
                await (await runner.submit(PROMPTS[0], LONG)).record()
            assert not runner.health().alive

    asyncio.run(main())
    if rank == 1:
        with pytest.raises(RankFailedError, match="ep rank 1 failed"):
            engine.step()
        assert not engine.can_step


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_rank_that_fails_while_experts_move_is_named_by_both(world: World) -> None:
    world(check_failed_move)


# -- what is said ---------------------------------------------------------------------------------------------------------


def check_lines() -> list[list[dict[str, float]]]:
    """Of the log of steps, and of moves."""
    lines: dict[str, list[str]] = {"mcore_inference.steps": [], "mcore_inference.engine": []}
    for name, texts in lines.items():
        logger, handler = logging.getLogger(name), logging.Handler()
        handler.emit = lambda record, texts=texts: texts.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    engine = skewed_engine(ProcessGroups.build(EP2), balancing=BALANCING)
    assert engine.stats()["expert_imbalance"] == 1.0
    # Tokens of warm-up count nowhere.
    engine.warm_up()
    assert not any(int(slots.loads.sum()) for slots in engine._balance._slots)
    engine.generate(PROMPTS[:2], LONG)
    steps = [json.loads(line) for line in lines["mcore_inference.steps"]]
    assert sum(line["expert_rebalances"] for line in steps) == engine.stats()["expert_rebalances"]
    assert sum(line["moved_experts"] for line in steps) == engine.stats()["moved_experts"]
    moves = [text for text in lines["mcore_inference.engine"] if "busiest rank" in text]
    assert len(moves) == (engine.stats()["expert_rebalances"] if dist.get_rank() == 0 else 0)
    return steps


@pytest.mark.world(2)
def test_the_log_of_steps_has_balance_and_moves(world: World) -> None:
    for steps in world(check_lines):
        assert steps[0]["expert_imbalance"] == 1.0
        moved = next(line for line in steps if line["expert_rebalances"])
        assert moved["expert_imbalance"] > 1.5 and moved["expert_imbalance_after"] < moved["expert_imbalance"]


def test_settings_are_refused_by_name() -> None:
    for fields, message in [
        ({"num_redundant_experts": -1}, "num_redundant_experts=-1 must be an integer from 0"),
        ({"num_redundant_experts": 1.5}, "num_redundant_experts=1.5"),
        ({"interval_steps": 0}, "interval_steps=0 must be an integer from 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            ExpertBalancing(**fields)
    with pytest.raises(ValueError, match=r"expert_balancing is a int; give ExpertBalancing\(...\), or None"):
        ExecutionConfig(expert_balancing=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="with ep=1 each rank holds all; serve with ep of 2 and more"):
        skewed_engine(ProcessGroups.single(), balancing=BALANCING)
    moving = skewed_engine(ProcessGroups.single())
    rounds = dataclasses.replace(moving.context.config, weight_dtype="fp8_weight_only")
    with pytest.raises(ValueError, match="with ep=1 each rank holds all; serve with ep of 2 and more"):
        context = DynamicInferenceContext.for_model(moving.model, rounds)
        DynamicInferenceEngine(moving.model, context, execution=ExecutionConfig(expert_balancing=BALANCING))
    assert not fp8_parameters(moving.model), "a refused engine has rounded them"
    moving.model.layers["2"].mlp.expert_slots = object()
    with pytest.raises(ValueError, match="experts of the model move between ranks, by .* another engine; set expert_balancing, too"):
        DynamicInferenceEngine(moving.model, moving.context)
    dense = GPTModel(CONFIG, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64)
    with pytest.raises(ValueError, match="num_redundant_experts=4, and no layer of the model has experts; leave expert_balancing out"):
        add_redundant_experts(dense, 4)


def test_copies_that_do_not_fit_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = skewed_engine(ProcessGroups.single())

    def take(count: int) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB")

    for number, add in (("0", lambda count: None), ("2", take)):
        monkeypatch.setattr(engine.model.layers[number].mlp, "check_redundant_experts", lambda count: None)
        monkeypatch.setattr(engine.model.layers[number].mlp, "add_redundant_experts", add)
    with pytest.raises(
        ValueError, match="num_redundant_experts=32 does not fit beside the weights of the model: CUDA out of memory; lower"
    ):
        add_redundant_experts(engine.model, 32)


# -- on GPUs -------------------------------------------------------------------------------------------------------------


def check_graphs() -> tuple[int, dict[str, float], int]:
    """Tokens compared with an engine whose experts stay, counters, and replays after the last recording."""
    groups, single = ProcessGroups.build(EP2), ProcessGroups.single()
    experts = moe_feed_forward(MoEConfig(num_moe_experts=8, moe_router_topk=2, moe_router_bias=True))
    place = {"device": "cuda", "dtype": torch.bfloat16}

    def skew(model: GPTModel) -> GPTModel:
        with torch.no_grad():
            for shard in named_shards(model):
                if shard.name.endswith("router.bias"):
                    shard.parameter[:2] = 1.0
        return model.eval()

    halves = skew(GPTModel(ON_GPUS, single, feed_forward=experts, dtype=torch.bfloat16))
    reference = GPTModel(ON_GPUS, single, feed_forward=experts, dtype=torch.float64).eval()
    reference.load_state_dict(halves.state_dict())
    sizes = InferenceConfig(max_sequence_length=96, max_requests=8, block_size_tokens=16, num_blocks=64)
    params = SamplingParams(temperature=0, num_tokens_to_generate=40, ignore_eos=True, return_log_probs=True)
    prompts = [prompt[:9] for prompt in PROMPTS]
    shards, records, stats, replays = list(named_shards(halves)), [], {}, 0
    for balancing in (ExpertBalancing(num_redundant_experts=4, interval_steps=8), None):
        model = skew(GPTModel(ON_GPUS, groups, feed_forward=experts, attention_core=PagedAttention(), **place))
        engine = DynamicInferenceEngine(
            model, DynamicInferenceContext.for_model(model, sizes), execution=ExecutionConfig(expert_balancing=balancing)
        )
        engine.create_cuda_graphs()
        recorded = sum(engine.cuda_graph_request_count_map.values())
        # Recordings of before the first move are replayed behind it, and behind new weights.
        first = engine.generate(prompts, params)
        engine.load_weights([(shard.name, shard.parameter.detach()) for shard in shards])
        dist.barrier()
        records.append(first + engine.generate(prompts, params))
        if balancing is not None:
            stats, replays = engine.stats(), sum(engine.cuda_graph_request_count_map.values()) - recorded
        dist.barrier()
        engine.close()
    return compare_records(reference, 2 * prompts, *records), stats, replays


@pytest.mark.gpu
def test_graphs_hold_when_experts_move() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    for compared, stats, replays in run(check_graphs, 2, backend="nccl", timeout_s=120.0):
        assert compared >= 16 and replays > 30
        assert stats["moved_experts"] > 0 and stats["expert_rebalances"] >= 2
