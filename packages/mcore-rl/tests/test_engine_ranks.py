# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines over several ranks of a run: the answers of engines that are whole on a rank, in any layout of the trainer."""

import asyncio
import dataclasses
import os
import signal
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineRunner,
    ExecutionConfig,
    InferenceConfig,
    LockstepConfig,
    PagedAttention,
    RankFailedError,
)
from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, dense_feed_forward
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_rl import (
    BestAndWorst,
    DPOObjective,
    FrozenWeights,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    InferenceRequest,
    InferenceResponse,
    IterationReport,
    Learner,
    MegatronLocal,
    MemorySwitch,
    RankTimeoutError,
    RolloutServer,
    TokenRollout,
    dpo_iteration,
    gather_weights,
    grpo_iteration,
    refit,
)
from mcore_rl.envs import CharacterShare
from mcore_rl.inference import BalancedInference
from tests.support.journeys import journeys_among
from tests.support.world import run

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=48,
    vocab_size=-(-TOKENIZER.vocab_size // 8) * 8,
)
EXPERTS = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, moe_token_dispatcher_type="alltoall"))
CONFIG = GRPOConfig(
    num_groups=2, group_size=4, seq_len=16, micro_batch_size=4, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=6)
)
PATIENT = LockstepConfig(join_timeout_s=50, silence_timeout_s=20)
SPLIT = ParallelPlan(tp=2, sequence_parallel=False)


class Recorded(MegatronLocal):
    """Keeps what it answered."""

    answers: list[InferenceResponse]

    async def agenerate(self, request: InferenceRequest) -> list[list[InferenceResponse]]:
        responses = await super().agenerate(request)
        self.answers += [response for row in responses for response in row]
        return responses


class Failing(CharacterShare):
    """Which fails with its first group, while others are drawn."""

    has_failed = False

    async def get_grouped_rollouts(self, *inputs: Any, **options: Any) -> AsyncGenerator[list[TokenRollout], None]:
        async for group in super().get_grouped_rollouts(*inputs, **options):
            if not self.has_failed:
                self.has_failed = True
                raise RuntimeError("the environment is wrong")
            yield group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parts:
    """What a rank trains and draws with."""

    groups: ProcessGroups
    learner: Learner
    engine: DynamicInferenceEngine
    interface: Recorded
    agent: CharacterShare
    number: int
    """Of this rank's engine."""


def parts_of(
    plan: ParallelPlan,
    served: ParallelPlan | None,
    *,
    experts: bool = False,
    pairs: bool = False,
    agent: type[CharacterShare] = CharacterShare,
) -> Parts:
    """Weights of one seed in the layout of the trainer, and an engine with others; None for one that is whole on each rank."""
    options: dict[str, Any] = {"feed_forward": EXPERTS if experts else dense_feed_forward, "dtype": torch.float64}
    groups = ProcessGroups.build(plan)
    model = GPTModel(SIZES, groups, unpadded_vocab_size=TOKENIZER.vocab_size, **options)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups)
    own = ProcessGroups.single() if served is None else ProcessGroups.build(served)
    copy = GPTModel(SIZES, own, attention_core=PagedAttention(), seed=5, **options).eval()
    context = DynamicInferenceContext.for_model(
        copy, InferenceConfig(max_sequence_length=32, max_requests=8, num_blocks=60, block_size_tokens=4)
    )
    execution = ExecutionConfig(record_routing=experts)
    engine = DynamicInferenceEngine(copy, context, TOKENIZER, vocab_size=TOKENIZER.vocab_size, execution=execution)
    engines = groups.world if served is None else own.dp
    interface = Recorded(engine, seed=11 + engines.rank, lockstep=PATIENT)
    interface.answers = []
    environment = agent(["a", "b", "c", "d"], "abcdefghijklmnopqrstuvwxyz")
    environment.start_at(0, rank=engines.rank, num_ranks=engines.size)
    learner = Learner(
        model=model,
        groups=groups,
        objective=DPOObjective(beta=0.1) if pairs else GRPOObjective(),
        sync=sync,
        optimizer=optimizer,
        reference=FrozenWeights(model) if pairs else None,
    )
    refit(model, groups, engine)
    return Parts(groups=groups, learner=learner, engine=engine, interface=interface, agent=environment, number=engines.rank)


def iterate(parts: Parts, config: GRPOConfig = CONFIG) -> IterationReport:
    shared: dict[str, Any] = {"interface": parts.interface, "engine": parts.engine, "learner": parts.learner, "lr": 2e-2}
    if isinstance(parts.learner.objective, DPOObjective):
        return dpo_iteration(config, pairs=BestAndWorst(parts.agent, group_size=4), **shared)
    return grpo_iteration(config, agent=parts.agent, **shared)


def learn(
    plan: ParallelPlan, served: ParallelPlan | None, config: GRPOConfig = CONFIG, *, experts: bool = False, pairs: bool = False
) -> tuple[Any, list[tuple[list[int], list[float]]]]:
    """Three iterations, and what the rank's engine was asked for between them: their numbers, and all answers in order."""
    parts = parts_of(plan, served, experts=experts, pairs=pairs)
    reports, asked = [], []
    for _ in range(3):
        reports.append(iterate(parts, config))
        # As of an evaluation, by another interface of the same engine.
        with config.memory.generating(optimizer=parts.learner.optimizer, sync=parts.learner.sync, engine=parts.engine):
            other = parts.interface.with_seed(-1 - parts.number)
            with other.drawing() as asks:
                if asks:
                    asyncio.run(other.agenerate(InferenceRequest(prompts=[[65, 66], [67]], n=2, generation_args=config.drawing_args)))
                asked.append(asks)
        trained = dict(gather_weights(parts.learner.model, parts.groups))
        for name, full in gather_weights(parts.engine.model, parts.engine.model.groups):
            assert torch.equal(full, trained[name]), name
    assert not parts.engine.has_unfinished_requests() and parts.engine.weight_version == 4
    assert asked == [parts.engine.model.groups.tp_pp.rank == 0] * 3 and asked[0] == bool(parts.interface.answers)
    numbers = [
        (report.mean_reward, report.num_rollouts, report.train.loss, report.train.grad_norm, report.mean_length, report.lengths)
        for report in reports
    ]
    assert pairs or all(report.train.metrics["logprob_mismatch"] < 1e-6 for report in reports)
    return numbers, sorted((list(answer.token_ids), list(answer.logprobs or ())) for answer in parts.interface.answers)


def assert_alike(whole: list[Any], split: list[Any], num_answers: int) -> None:
    """The same answers by the same seeds, and the same learnt from them, on every rank."""
    one, other = (sorted(answer for _, answers in ranks for answer in answers) for ranks in (whole, split))
    assert len(one) >= num_answers and [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
    assert [value for _, values in other for value in values] == pytest.approx([value for _, values in one for value in values], abs=1e-6)
    for numbers, _ in (*whole, *split):
        for ours, theirs in zip(numbers, whole[0][0], strict=True):
            assert ours[:-1] == pytest.approx(theirs[:-1], rel=1e-6, abs=1e-9) and ours[-1] == theirs[-1]


@pytest.fixture(scope="module")
def whole() -> list[Any]:
    return [learn(ParallelPlan(), None)]


CASES = {
    "dp": (ParallelPlan(dp=2), SPLIT, CONFIG),
    "tp": (ParallelPlan(tp=2), SPLIT, CONFIG),
    "pp": (ParallelPlan(pp=2), SPLIT, CONFIG),
    "pp-into-pp": (ParallelPlan(pp=2), ParallelPlan(pp=2, sequence_parallel=False), CONFIG),
    "suspended": (ParallelPlan(dp=2), SPLIT, dataclasses.replace(CONFIG, memory=MemorySwitch(suspend_engine=True, release_gradients=True))),
}


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("case", journeys_among(CASES, "tp", "pp", "pp-into-pp", "suspended"))
def test_an_engine_of_two_ranks_draws_what_one_of_a_rank_draws_and_the_policy_learns_alike(world, whole: list[Any], case: str) -> None:
    plan, served, config = CASES[case]
    assert_alike(whole, world(learn, plan=plan, served=served, config=config), 36)


@pytest.mark.journey
@pytest.mark.world(2, shared=True)
def test_pairs_are_drawn_by_an_engine_of_two_ranks(world) -> None:
    assert_alike([learn(ParallelPlan(), None, pairs=True)], world(learn, plan=ParallelPlan(dp=2), served=SPLIT, pairs=True), 36)


@pytest.mark.journey
@pytest.mark.world(2, shared=True)
def test_an_engine_spreads_experts_over_its_ranks_and_records_where_tokens_go(world) -> None:
    served = dataclasses.replace(SPLIT, ep=2)
    split = world(learn, plan=ParallelPlan(dp=2, ep=2), served=served, experts=True)
    assert_alike([learn(ParallelPlan(), None, experts=True)], split, 36)


@pytest.mark.journey
@pytest.mark.world(4)
def test_two_engines_of_two_ranks_share_the_problems_as_two_of_one_do(world) -> None:
    split = world(learn, plan=ParallelPlan(tp=2, dp=2), served=dataclasses.replace(SPLIT, dp=2))
    assert_alike(run(learn, 2, plan=ParallelPlan(dp=2), served=None), split, 48)


# -- failures ------------------------------------------------------------------------------------------------------------


def fail_on_the_first_rank() -> tuple[str, int]:
    parts, message = parts_of(ParallelPlan(dp=2), SPLIT, agent=Failing), ""
    try:
        iterate(parts)
    except RuntimeError as error:
        message = str(error)
    # The engine is as it was.
    return message, iterate(parts).num_rollouts


@pytest.mark.world(2, shared=True)
def test_a_failure_of_the_rank_that_asks_ends_the_iteration_on_all_and_the_next_one_draws(world) -> None:
    first, second = world(fail_on_the_first_rank)
    assert first == ("the environment is wrong", 8)
    assert second[0].startswith("ranks failed: {0: ") and "the environment is wrong" in second[0] and second[1] == 8


def lose_a_rank(lost: int) -> tuple[str, str, float]:
    """A process that dies in the middle of a draw: what the other is told, and how soon."""
    parts = parts_of(ParallelPlan(dp=2), SPLIT)
    iterate(parts)
    step, count = parts.engine.step, parts.engine.step_count

    def dying() -> Any:
        if parts.engine.step_count == count + 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    if parts.groups.world.rank == lost:
        parts.engine.step = dying  # type: ignore[method-assign]
    begin = time.monotonic()
    with pytest.raises(RankFailedError) as caught:
        iterate(parts)
    return str(caught.value), str(caught.value.__cause__), time.monotonic() - begin


@pytest.mark.journey
@pytest.mark.world(2)
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_dies_in_a_draw_is_named_on_the_others(world, lost: int) -> None:
    message, cause, seconds = world(lose_a_rank, doomed=(lost,), lost=lost)[1 - lost]
    assert f"tp rank {lost} is gone" in message and f"rank {lost} died, no process is left (rollouts)" in cause
    assert seconds < 30


def lose_a_rank_of_an_engine() -> str:
    """Of four ranks the last one dies in a draw."""
    parts = parts_of(ParallelPlan(dp=4), dataclasses.replace(SPLIT, dp=2))
    step = parts.engine.step

    def dying() -> Any:
        if parts.engine.step_count == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    if parts.groups.world.rank == 3:
        with pytest.raises(ValueError, match=r"this is tp rank 1 of engine 1 \(rank 3 of the world\) of 2, and rank 0 runs the engine"):
            EngineRunner(parts.engine)
        parts.engine.step = dying  # type: ignore[method-assign]
    with pytest.raises((RankFailedError, RankTimeoutError)) as caught:
        iterate(parts, dataclasses.replace(CONFIG, micro_batch_size=2))
    return str(caught.value)


@pytest.mark.journey
@pytest.mark.world(4)
def test_all_ranks_say_which_rank_of_the_run_was_lost(world) -> None:
    first, second, third, _ = world(lose_a_rank_of_an_engine, doomed=(3,))
    assert third == "tp rank 1 of engine 1 (rank 3 of the world) is gone: its connection broke"
    assert all(message.startswith("rank 3 died, no process is left (rollouts)") for message in (first, second))


def refuse() -> list[str]:
    parts, messages = parts_of(ParallelPlan(dp=2), SPLIT), []
    shared: dict[str, Any] = {"agent": parts.agent, "engine": parts.engine, "learner": parts.learner, "lr": 1e-3}
    for call in (
        lambda: grpo_iteration(CONFIG, interface=BalancedInference([parts.interface]), **shared),
        lambda: RolloutServer(agent=parts.agent, interface=parts.interface, engine=parts.engine),
        lambda: parts.interface.generate(InferenceRequest(prompts=[[65]], n=1, generation_args=CONFIG.drawing_args)),
    ):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


@pytest.mark.world(2, shared=True)
def test_what_keeps_no_ranks_together_is_refused_by_name(world) -> None:
    for balanced, server, outside in world(refuse):
        assert balanced.startswith("interface is a BalancedInference, which does not keep the ranks of its engine together")
        assert server.startswith("engine spans several ranks, and each rank that serves has one of its own")
        assert outside.startswith("the engine has 2 ranks, which step together inside of drawing()")
