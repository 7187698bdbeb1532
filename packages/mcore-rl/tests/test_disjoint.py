# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trainer and engines on ranks of their own: equal weights, the same learning, and a lost half that is named."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    BestAndWorst,
    DisjointLoop,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    Learner,
    MegatronLocal,
    MemorySwitch,
    NumberedProblems,
    Placement,
    Problem,
    RankTimeoutError,
    RefitTimeoutError,
    RolloutServer,
    WeightTransfer,
    grpo_iteration,
    refit,
)
from mcore_rl._loop._handover import Handover
from mcore_rl._ranks import _placement as placement_module
from mcore_rl.envs import CharacterShare
from mcore_rl.inference import OpenAIInference
from tests.support.world import leave_together, run

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=-(-TOKENIZER.vocab_size // 8) * 8
)
CONFIG = GRPOConfig(
    num_groups=2, group_size=16, seq_len=16, micro_batch_size=8, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8)
)


class Whole:
    """Takes whole weights."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.weights = {name: tensor.clone() for name, tensor in weights}


def policy(groups: ProcessGroups, seed: int = 0, vocab_size: int = TOKENIZER.vocab_size, device: str = "cpu") -> GPTModel:
    return GPTModel(SIZES, groups, unpadded_vocab_size=vocab_size, seed=seed, device=device)


def learner(groups: ProcessGroups, vocab_size: int = TOKENIZER.vocab_size, device: str = "cpu") -> Learner:
    model = policy(groups, vocab_size=vocab_size, device=device)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups)
    return Learner(model=model, groups=groups, objective=GRPOObjective(), sync=sync, optimizer=optimizer)


def server(rank: int, agent: CharacterShare | None = None, device: str = "cpu") -> RolloutServer:
    model = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=5, device=device).eval()
    context = DynamicInferenceContext.for_model(model, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8))
    engine = DynamicInferenceEngine(model, context, TOKENIZER, seed=rank, vocab_size=TOKENIZER.vocab_size)
    agent = agent or CharacterShare(["a", "b"][rank % 2 :], "abcdefghijklmnopqrstuvwxyz")
    return RolloutServer(agent=agent, interface=MegatronLocal(engine), engine=engine)


def loop_of(plan: ParallelPlan, agent: CharacterShare | None = None, config: GRPOConfig = CONFIG, **options: Any) -> DisjointLoop:
    placement = Placement.split(plan)
    if "timeout_s" in options:
        config = dataclasses.replace(config, rollout_timeout_s=0.9 * options["timeout_s"])
    if placement.groups is not None:
        return DisjointLoop(config, placement, learner=learner(placement.groups), **options)
    return DisjointLoop(config, placement, server=server(placement.engine_rank, agent), **options)


def draw_from_fewer_ids() -> str:
    placement, config = Placement.split(ParallelPlan()), dataclasses.replace(CONFIG, rollout_timeout_s=9.0)
    if placement.groups is None:
        loop = DisjointLoop(config, placement, server=server(placement.engine_rank), timeout_s=10.0)
    else:
        loop = DisjointLoop(config, placement, learner=learner(placement.groups, SIZES.vocab_size), timeout_s=10.0)
    with loop:
        try:
            loop.iterate(1e-2)
        except ValueError as error:
            return str(error)
    return "nothing"


@pytest.mark.world(2)
def test_engines_that_draw_from_fewer_ids_than_the_policy_has_are_refused_on_both_halves(world) -> None:
    one, other = world(draw_from_fewer_ids)
    assert one == other and one.startswith(f"the engine draws from vocab_size={TOKENIZER.vocab_size} ids")


# -- weights -----------------------------------------------------------------------------------------------------------


def carry(plan: ParallelPlan) -> tuple[bool, dict[str, Tensor]]:
    """What the engine of this rank took over, second time with other weights; on ranks that train, what one beside it takes."""
    placement, sink, transfer = Placement.split(plan), Whole(), WeightTransfer(bucket_bytes=3000)
    model = None if placement.groups is None else policy(placement.groups, seed=3)
    plans = []
    for _ in range(2):
        refit(model, placement.groups, None if placement.trains else sink, transfer, placement=placement)
        plans.append(transfer.plan)
        if model is not None:
            assert not sink.weights
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
    assert plans[0] is plans[1]
    if model is not None and placement.groups is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        refit(model, placement.groups, sink)
    return placement.trains, sink.weights


@pytest.mark.parametrize(
    ("num_ranks", "plan"),
    [
        pytest.param(2, ParallelPlan(), marks=pytest.mark.world(2)),
        pytest.param(4, ParallelPlan(tp=2), marks=pytest.mark.world(4)),
        pytest.param(4, ParallelPlan(pp=2), marks=[pytest.mark.world(4), pytest.mark.journey]),
        pytest.param(4, ParallelPlan(dp=3), marks=pytest.mark.world(4)),
    ],
    ids=["one", "tp2", "pp2", "dp3"],
)
def test_engines_elsewhere_have_the_weights_of_engines_beside_the_trainer(world, num_ranks: int, plan: ParallelPlan) -> None:
    results = world(carry, plan=plan)
    assert [trains for trains, _ in results] == [rank < plan.world_size for rank in range(num_ranks)]
    beside = results[0][1]
    assert beside
    for _, weights in results[1:]:
        assert weights.keys() == beside.keys() and all(torch.equal(weights[name], beside[name]) for name in beside)


def begin(max_lag: int) -> tuple[int, dict[str, Tensor]]:
    with loop_of(ParallelPlan(), max_lag=max_lag, timeout_s=30.0) as loop:
        for _ in range(2):
            loop.begin()
        model: Any = loop._server.engine if loop._learner is None else loop._learner  # type: ignore[union-attr]
        return loop.version, {name: value.detach().clone() for name, value in model.model.named_parameters()}


@pytest.mark.world(2)
@pytest.mark.parametrize("max_lag", [0, 1])
def test_engines_have_the_weights_before_the_first_iteration_for_whoever_asks_them(world, max_lag: int) -> None:
    (first, trained), (second, served) = world(begin, max_lag=max_lag)
    assert first == second == 0 and trained.keys() == served.keys()
    assert all(torch.equal(served[name], value) for name, value in trained.items())


def carry_in_buckets_of_two_sizes(trainer_bytes: int, server_bytes: int) -> dict[str, Tensor]:
    placement, sink = Placement.split(ParallelPlan()), Whole()
    transfer = WeightTransfer(bucket_bytes=trainer_bytes if placement.trains else server_bytes, timeout_s=5.0)
    model = None if placement.groups is None else policy(placement.groups, seed=3)
    refit(model, placement.groups, None if placement.trains else sink, transfer, placement=placement)
    return sink.weights if model is None else {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.world(2)
@pytest.mark.parametrize(("trainer_bytes", "server_bytes"), [(3000, 1 << 28), (1 << 28, 3000)])
def test_halves_with_buckets_of_two_sizes_carry_the_same_weights(world, trainer_bytes: int, server_bytes: int) -> None:
    trained, served = world(carry_in_buckets_of_two_sizes, trainer_bytes=trainer_bytes, server_bytes=server_bytes)
    assert served and trained.keys() <= served.keys()
    assert all(torch.equal(served[name], value) for name, value in trained.items())


def lose_a_half(lost: int, of: str) -> str:
    placement, transfer = Placement.split(ParallelPlan()), WeightTransfer(timeout_s=2.0)
    message = ""
    model = None if placement.groups is None else policy(placement.groups)
    # Of the others none is late.
    dist.barrier()
    try:
        if placement.world.rank == lost:
            pass
        elif of == "refit":
            refit(model, placement.groups, None if placement.trains else Whole(), transfer, placement=placement)
        else:
            placement.gather(None, 2.0, "rollouts")
    except (RefitTimeoutError, RankTimeoutError) as error:
        message = f"{type(error).__name__}: {error}"
    leave_together()
    return message


@pytest.mark.journey
@pytest.mark.world(4)
@pytest.mark.parametrize(("lost", "half"), [(0, "trains"), (2, "serves")])
@pytest.mark.parametrize(("of", "purpose", "kind"), [("refit", "weights", "RefitTimeoutError"), ("gather", "rollouts", "RankTimeoutError")])
def test_a_lost_rank_is_named_on_all_others(world, lost: int, half: str, of: str, purpose: str, kind: str) -> None:
    results = world(lose_a_half, lost=lost, of=of)
    expected = f"{kind}: rank {lost} ({half}) did not come within timeout_s=2 ({purpose}); look at the log of that rank"
    assert results == ["" if rank == lost else expected for rank in range(4)]


def die_after_arrival(lost: int, rows: int) -> str:
    placement = Placement.split(ParallelPlan())
    if placement.world.rank == lost:
        # As a rank that is killed between the length of its value and the value.
        original = placement_module._swap

        def swap(group: Group, own: list[Tensor], lengths: list[int], timeout_s: float) -> Any:
            if own[0].dtype == torch.uint8:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(group, own, lengths, timeout_s)

        placement_module._swap = swap  # type: ignore[assignment]
    try:
        placement.gather(["x" * rows], 5.0, "rollouts")
    except RankTimeoutError as error:
        return str(error)
    return ""


@pytest.mark.world(3)
@pytest.mark.parametrize(("lost", "half"), [(0, "trains"), (1, "serves")])
def test_a_rank_that_is_lost_after_it_came_is_named(world, lost: int, half: str) -> None:
    results = world(die_after_arrival, doomed=(lost,), lost=lost, rows=1 << 20)
    for rank, message in enumerate(results):
        if rank != lost:
            assert message == f"rank {lost} ({half}) died, no process is left (rollouts); look at the log of that rank"


def test_a_rank_that_is_lost_while_rollouts_are_handed_over_is_named() -> None:
    def lost(*_: Any) -> list[Any]:
        raise RankTimeoutError("rank 1 (serves) came, and did not exchange its rollouts")

    placement: Any = SimpleNamespace(gather=lambda *_: [None], gather_ahead=lost)
    with pytest.raises(RankTimeoutError, match=r"^rank 1 \(serves\) came"):
        Handover(CONFIG, placement, None, ProcessGroups.single(), 30.0).result()


def fail_alone() -> str:
    loop = loop_of(ParallelPlan(), Failing(["a"], "a"), max_lag=0, timeout_s=0.5)
    dist.barrier()
    if loop.placement.trains:
        return ""
    try:
        loop._work(0.0, None, draws=True)
    except (ConnectionError, RankTimeoutError) as error:
        return str(error)
    return "nothing"


@pytest.mark.world(2)
def test_a_rank_that_fails_says_why_though_the_others_stay_away(world) -> None:
    assert world(fail_alone)[1] == "no problems here"


def limits() -> float:
    return loop_of(ParallelPlan(), timeout_s=7.0)._transfer.timeout_s


@pytest.mark.world(2)
def test_halves_have_one_limit_of_a_refit(world) -> None:
    assert world(limits) == [7.0, 7.0]


# -- learning ----------------------------------------------------------------------------------------------------------


def iterate_apart(plan: ParallelPlan, iterations: int, max_lag: int) -> list[tuple[float, float | None, int]]:
    loop = loop_of(plan, max_lag=max_lag, timeout_s=30.0)
    reports = [loop.iterate(2e-2) for _ in range(iterations)]
    assert all(bool(report.updates) == loop.placement.trains for report in reports)
    assert max_lag or all(report.exchange_s == max(0.0, report.rollout_s - report.generate_s) for report in reports)
    return [(report.mean_reward, report.train.loss if report.updates else None, report.lag) for report in reports]


def iterate_beside(iterations: int) -> list[tuple[float, float]]:
    own, here = learner(ProcessGroups.single()), server(0)
    refit(own.model, own.groups, here.engine)
    parts: dict[str, Any] = {"agent": here.agent, "interface": here.interface, "engine": here.engine, "learner": own}
    reports = [grpo_iteration(CONFIG, **parts, lr=2e-2) for _ in range(iterations)]
    return [(report.mean_reward, report.train.loss) for report in reports]


@pytest.mark.journey
@pytest.mark.world(2)
def test_halves_that_take_turns_learn_what_one_rank_learns(world) -> None:
    trainer, engine = world(iterate_apart, plan=ParallelPlan(), iterations=3, max_lag=0)
    rewards, losses = zip(*iterate_beside(3), strict=True)
    assert tuple(reward for reward, *_ in trainer) == rewards
    # Which requests share a step of the engine is a matter of time, and so is the last bit of their log-probabilities. The first loss is 0
    # but for it.
    assert [loss for _, loss, _ in trainer] == pytest.approx(losses, rel=1e-4, abs=1e-6)
    assert [(reward, lag) for reward, _, lag in trainer] == [(reward, lag) for reward, _, lag in engine]
    assert all(lag == 0 for _, _, lag in trainer)


def iterate_on_one_device(device: str, max_lag: int) -> tuple[list[float], list[int]]:
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))
    placement, options = Placement.split(ParallelPlan()), {"max_lag": max_lag, "timeout_s": 60.0}
    config = dataclasses.replace(CONFIG, rollout_timeout_s=50.0)
    if placement.groups is not None:
        loop = DisjointLoop(config, placement, learner=learner(placement.groups, device=device), **options)  # type: ignore[arg-type]
    else:
        loop = DisjointLoop(config, placement, server=server(0, device=device), **options)  # type: ignore[arg-type]
    with loop:
        rewards = [loop.iterate(2e-2).mean_reward for _ in range(10)]
    return rewards, sorted(loop._transfer.ipc_peers)


@pytest.mark.journey
@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "cpu:gloo,cuda:gloo"), pytest.param("cuda:0", "cpu:gloo,cuda:nccl", marks=pytest.mark.gpu)]
)
def test_halves_that_are_processes_of_one_device_learn(device: str, backend: str, max_lag: int) -> None:
    (rewards, peers), (_, others) = run(iterate_on_one_device, 2, timeout_s=180.0, backend=backend, device=device, max_lag=max_lag)
    assert (peers, others) == ([1], [0])
    assert sum(rewards[-2:]) > 1.2 * sum(rewards[:2])


@pytest.mark.journey
@pytest.mark.world(4)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(dp=2)], ids=str)
def test_the_policy_learns_one_step_off(world, plan: ParallelPlan) -> None:
    trainer, *others = world(iterate_apart, plan=plan, iterations=10, max_lag=1)
    assert [lag for _, _, lag in trainer] == [0] + [1] * 9
    assert sum(reward for reward, *_ in trainer[-2:]) > 1.2 * sum(reward for reward, *_ in trainer[:2])
    assert all([reward for reward, *_ in other] == [reward for reward, *_ in trainer] for other in others)


@pytest.mark.world(2)
def test_rollouts_are_never_older_than_the_bound(world) -> None:
    trainer, engine = world(iterate_apart, plan=ParallelPlan(), iterations=5, max_lag=2)
    assert [lag for *_, lag in trainer] == [lag for *_, lag in engine] == [0, 1, 2, 2, 2]


class Counted(NumberedProblems):
    """Problem n is its number; any answer will do."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__("counted")
        self.start_at(0, rank=rank, num_ranks=num_ranks)

    def problem(self, number: int) -> Problem:
        return Problem(problem_id=str(number), prompt="ab"[number % 2], golden="")

    async def get_reward(self, response: str, problem: Problem) -> float:
        return float(len(response) % 3)


LONG = dataclasses.replace(
    CONFIG,
    group_size=4,
    seq_len=32,
    micro_batch_size=4,
    generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=24),
    rollout_timeout_s=54.0,
)


def draw_across_refits(max_lag: int, iterations: int, own_lag: int | None) -> list[Any]:
    """What each iteration had; the engines are slower than the trainer, so that weights come while answers are drawn."""
    placement = Placement.split(ParallelPlan())
    options: dict[str, Any] = {"max_lag": max_lag, "timeout_s": 60.0}
    if placement.groups is not None:
        loop = DisjointLoop(LONG, placement, learner=learner(placement.groups), **options)
    else:
        here = server(placement.engine_rank)
        interface = MegatronLocal(here.engine, max_lag=own_lag)  # type: ignore[arg-type]
        step = interface.engine.step
        interface.engine.step = lambda: (time.sleep(0.02), step())[1]  # type: ignore[method-assign]
        agent = Counted(placement.engine_rank, placement.num_engines)
        loop = DisjointLoop(LONG, placement, server=dataclasses.replace(here, agent=agent, interface=interface), **options)
    taken: list[Any] = []
    original = loop._take

    def take() -> Any:
        batch = original()
        rollouts = [rollout for _, rollout in sorted(batch.collected.rollouts.items())]
        taken.append([(r.problem_id, list(r.weight_versions or ()), sum(r.generation_mask)) for r in rollouts])
        return batch

    loop._take = take  # type: ignore[method-assign]
    with loop:
        reports = [loop.iterate(2e-2) for _ in range(iterations)]
    redrawn = 0 if loop._server is None else loop._server.interface.num_redrawn  # type: ignore[attr-defined]
    return [
        taken,
        [(report.lag, report.token_lag, report.tokens_by_lag, report.num_dropped) for report in reports],
        loop.num_posed,
        redrawn,
    ]


@pytest.mark.journey
@pytest.mark.world(3)
@pytest.mark.parametrize("max_lag", [1, 2])
def test_answers_in_flight_survive_a_refit_and_none_is_lost_or_doubled(world, max_lag: int) -> None:
    iterations = 4
    taken, reports, num_posed, _ = world(draw_across_refits, max_lag=max_lag, iterations=iterations, own_lag=None)[0]
    numbers = [[int(problem) for problem, *_ in batch] for batch in taken]
    # Two problems an iteration, one of each engine, in their order, each with all its answers.
    assert numbers == [sorted([2 * k, 2 * k + 1] * LONG.group_size, key=lambda n: n % 2) for k in range(iterations)]
    assert num_posed == (iterations, iterations)
    assert [lag for lag, *_ in reports] == [min(k, max_lag) for k in range(iterations)]
    assert all(dropped == 0 for *_, dropped in reports)
    for version, batch in enumerate(taken):
        for _, versions, num_tokens in batch:
            assert len(versions) == num_tokens and versions == sorted(versions)
            assert not versions or version - max_lag <= versions[0] <= versions[-1] <= version
    # Generation did not wait: weights came into the middle of answers, and the later tokens are of the newer ones.
    assert any(len(set(versions)) > 1 for batch in taken for _, versions, _ in batch)
    assert all(0 <= age <= max_lag for _, age, *_ in reports)
    for version, (batch, (_, age, by_lag, _)) in enumerate(zip(taken, reports, strict=True)):
        ages = [version - drawn for _, versions, _ in batch for drawn in versions]
        assert by_lag == {lag: ages.count(lag) for lag in set(ages)} and list(by_lag) == sorted(by_lag)
        assert age == pytest.approx(sum(ages) / len(ages))


@pytest.mark.journey
@pytest.mark.world(2)
def test_what_an_engine_gives_up_for_its_age_is_drawn_again(world) -> None:
    (taken, reports, num_posed, _), (*_, redrawn) = world(draw_across_refits, max_lag=2, iterations=4, own_lag=0)
    assert redrawn > 0 and num_posed == (8,) and all(dropped == 0 for *_, dropped in reports)
    assert [[int(problem) for problem, *_ in batch] for batch in taken] == [sorted([2 * k, 2 * k + 1] * LONG.group_size) for k in range(4)]
    # Whatever was open at a load began again with its weights.
    assert all(len(set(versions)) <= 1 for batch in taken for _, versions, _ in batch)


class Slow(CharacterShare):
    """Each judgement takes a while; the other half works meanwhile."""

    async def get_reward(self, response: str, problem: Problem) -> float:
        await asyncio.sleep(1.0)
        return await super().get_reward(response, problem)


def spans_of_work(max_lag: int) -> list[tuple[float, float]]:
    """When this rank judged, or stepped, by the clock of the machine."""
    spans: list[tuple[float, float]] = []

    class Timed(Slow):
        async def get_reward(self, response: str, problem: Problem) -> float:
            begin = time.monotonic()
            reward = await super().get_reward(response, problem)
            spans.append((begin, time.monotonic()))
            return reward

    loop = loop_of(ParallelPlan(), Timed(["a", "b"], "abc"), max_lag=max_lag)
    if (own := loop._learner) is not None:
        step = own.optimizer.step

        def slow_step(*args: Any, **keywords: Any) -> Any:
            begin = time.monotonic()
            time.sleep(1.0)
            spans.append((begin, time.monotonic()))
            return step(*args, **keywords)

        own.optimizer.step = slow_step  # type: ignore[method-assign]
    for _ in range(3):
        loop.iterate(2e-2)
    return spans


@pytest.mark.journey
@pytest.mark.world(2)
def test_one_step_off_the_halves_work_at_the_same_time(world) -> None:
    for max_lag in (0, 1):
        steps, judged = world(spans_of_work, max_lag=max_lag)
        assert len(steps) == 3 <= len(judged)
        assert any(one[0] < other[1] and other[0] < one[1] for one in steps for other in judged) == (max_lag == 1)


def hand_over_beside_training(iterations: int) -> tuple[list[bool], bool]:
    """Whether the next rollouts were here, in micro-batches, before each update was over; and whether the threads ended with the loop."""
    loop, arrived = loop_of(ParallelPlan(), max_lag=1, timeout_s=30.0), []
    if (own := loop._learner) is not None:
        step = own.optimizer.step

        def slow_step(*args: Any, **keywords: Any) -> Any:
            handover: Any = loop._handover
            batch = handover._batch.result(20)
            arrived.append(batch.written.done() and len(batch.written.result()) == 1 and len(batch.collected.groups) == CONFIG.num_groups)
            return step(*args, **keywords)

        own.optimizer.step = slow_step  # type: ignore[method-assign]
    with loop:
        reports = [loop.iterate(2e-2) for _ in range(iterations)]
    assert [report.lag for report in reports] == [0] + [1] * (iterations - 1)
    handover = loop._handover
    assert handover is not None
    return arrived, not handover._thread.is_alive()


@pytest.mark.world(2)
def test_rollouts_arrive_and_are_packed_beside_the_training_of_those_before(world) -> None:
    assert world(hand_over_beside_training, iterations=3) == [([True] * 3, True), ([], True)]


class Endless(CharacterShare):
    """From the second iteration on, judgements take longer than any test."""

    async def get_reward(self, response: str, problem: Problem) -> float:
        if int(problem.problem_id) >= CONFIG.num_groups:
            await asyncio.sleep(3600)
        return await super().get_reward(response, problem)


def close_while_drawing() -> tuple[float, bool]:
    agent = Endless(["a", "b", "a", "b"], "a")
    agent.judge_timeout_s = 7200.0
    loop = loop_of(ParallelPlan(), agent, max_lag=1, timeout_s=30.0)
    with loop:
        loop.iterate(2e-2)
        begin = time.monotonic()
    handover = loop._handover
    assert handover is not None
    return time.monotonic() - begin, handover._thread.is_alive()


@pytest.mark.world(2)
def test_a_closed_loop_gives_up_what_is_on_its_way(world) -> None:
    assert all(seconds < 5 and not alive for seconds, alive in world(close_while_drawing))


class Failing(CharacterShare):
    async def group_rollout(self, *parts: Any, **options: Any) -> list[Any]:
        raise ConnectionError("no problems here")


def fail(max_lag: int, trainer: bool) -> str:
    loop = loop_of(ParallelPlan(), None if trainer else Failing(["a"], "a"), max_lag=max_lag, timeout_s=20.0)
    if trainer and (own := loop._learner) is not None:
        own.optimizer.step = None  # type: ignore[method-assign, assignment]
    try:
        loop.iterate(2e-2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.world(2)
@pytest.mark.parametrize("max_lag", [0, 1])
@pytest.mark.parametrize("trainer", [False, True], ids=["engine", "trainer"])
def test_a_half_that_fails_ends_the_other_one(world, max_lag: int, trainer: bool) -> None:
    results = world(fail, max_lag=max_lag, trainer=trainer)
    failed, other = (0, 1) if trainer else (1, 0)
    assert results[failed].startswith("TypeError: " if trainer else "ConnectionError: no problems here")
    assert results[other].startswith(f"RuntimeError: ranks failed: {{{failed}:")


class Deadly(CharacterShare):
    """The machine of the second iteration's judge fails."""

    num_prompts = 0

    async def get_prompt(self, *, validation: bool = False) -> Problem:
        self.num_prompts += 1
        if self.num_prompts > CONFIG.num_groups:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().get_prompt()


def lose_an_engine() -> str:
    # Longer than a world may take.
    loop = loop_of(ParallelPlan(), Deadly(["a"], "a"), max_lag=0, timeout_s=300.0)
    loop.iterate(2e-2)
    try:
        loop.iterate(2e-2)
    except RankTimeoutError as error:
        return str(error)
    return ""


@pytest.mark.world(2)
def test_a_killed_engine_is_named_at_once(world) -> None:
    message = world(lose_an_engine, doomed=(1,))[0]
    assert message == "rank 1 (serves) died, no process is left (rollouts); look at the log of that rank"


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="takes 1 of 1 ranks and leaves none to serve; start more ranks"):
        Placement.split(ParallelPlan())
    two = Group((0, 1), 1)
    with pytest.raises(ValueError, match="2 of 2 ranks train, which leaves no rank to a half"):
        Placement(world=two, host=two, num_trainers=2, groups=None)
    serving = Placement(world=two, host=two, num_trainers=1, groups=None)
    nobody: Any = None
    own = RolloutServer(agent=nobody, interface=nobody, engine=nobody)
    with pytest.raises(ValueError, match="rank 1 serves: pass server, and nothing else"):
        DisjointLoop(CONFIG, serving)
    with pytest.raises(ValueError, match="max_lag=-1 must not be negative"):
        DisjointLoop(CONFIG, serving, server=own, max_lag=-1)
    with pytest.raises(
        ValueError, match="timeout_s=7200 must be above rollout_timeout_s=7200 of the config: .*; raise timeout_s, or lower"
    ):
        DisjointLoop(CONFIG, serving, server=own, timeout_s=7200.0)
    with pytest.raises(ValueError, match="memory=.* has no effect where trainer and engines have ranks of their own"):
        DisjointLoop(dataclasses.replace(CONFIG, memory=MemorySwitch(suspend_engine=True)), serving, server=own)
    with pytest.raises(ValueError, match="partial=True hands over groups one by one, and pairs are made of many; pass partial=False"):
        DisjointLoop(CONFIG, serving, server=dataclasses.replace(own, agent=BestAndWorst(nobody)))
    held = dataclasses.replace(
        own, agent=CharacterShare(["a"], "a"), interface=OpenAIInference("http://127.0.0.1:1", model="m", tokenizer=TOKENIZER)
    )
    with pytest.raises(ValueError, match="partial=True needs an interface that takes weights .* a OpenAIInference does not"):
        DisjointLoop(CONFIG, serving, server=held)
    assert not DisjointLoop(CONFIG, serving, server=held, partial=False).partial
    with pytest.raises(ValueError, match="pass placement=Placement.split"):
        list(WeightTransfer().weights(None, None, own))
    assert not dist.is_initialized()
