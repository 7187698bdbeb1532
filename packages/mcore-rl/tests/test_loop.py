# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An iteration over any layout: same rollouts, same weights everywhere, a policy that learns."""

import asyncio
import dataclasses
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import Group, ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch
from mcore_rl import (
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    IterationReport,
    Learner,
    MegatronLocal,
    Problem,
    RewardOnlyAgent,
    gather_weights,
    grpo_iteration,
    refit,
    with_ref_logprobs,
)
from mcore_rl.envs import CharacterShare

TOKENIZER = ByteTokenizer()
SIZES = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=-(-TOKENIZER.vocab_size // 8) * 8
)
CONFIG = GRPOConfig(
    num_groups=2, group_size=16, seq_len=16, micro_batch_size=8, generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8)
)
OBJECTIVE = GRPOObjective()


def iterate(
    plan: ParallelPlan,
    iterations: int,
    device: str = "cpu",
    config: GRPOConfig = CONFIG,
    objective: GRPOObjective = OBJECTIVE,
    agent: RewardOnlyAgent | None = None,
) -> list[IterationReport]:
    groups = ProcessGroups.build(plan)
    # Rows of padding are never drawn, so the policy has none.
    model, frozen = (GPTModel(SIZES, groups, unpadded_vocab_size=TOKENIZER.vocab_size, device=device) for _ in range(2))
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups)
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8), device=device)
    copy = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=5, device=device).eval()
    engine = DynamicInferenceEngine(copy, context, TOKENIZER, seed=groups.world.rank, vocab_size=TOKENIZER.vocab_size)
    refit(model, groups, engine)
    agent = agent or CharacterShare(["a", "b"][groups.world.rank % 2 :], "abcdefghijklmnopqrstuvwxyz")
    interface = MegatronLocal(engine)
    reference = frozen if objective.kl_beta else None
    learner = Learner(model=model, groups=groups, objective=objective, sync=sync, optimizer=optimizer, reference=reference)
    reports = []
    for _ in range(iterations):
        reports.append(
            grpo_iteration(
                config, agent=agent, interface=interface, engine=engine, learner=learner, lr=2e-2,
            )
        )  # fmt: skip
    for name, full in gather_weights(model, groups):
        assert torch.equal(full, dict(copy.named_parameters())[name]), name
    return reports


def check_refit(plan: ParallelPlan) -> None:
    """What is gathered from a layout is what one rank holds from the same seed, each parameter once."""
    groups = ProcessGroups.build(plan)
    for sizes in (SIZES, dataclasses.replace(SIZES, share_embeddings_and_output_weights=True)):
        whole = {shard.name: shard.parameter for shard in named_shards(GPTModel(sizes, ProcessGroups.single()))}
        gathered = list(gather_weights(GPTModel(sizes, groups), groups))
        assert [name for name, _ in gathered] == list(whole)
        assert all(torch.equal(full, whole[name]) for name, full in gathered)


@pytest.mark.world(4)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, pp=2), ParallelPlan(tp=2, dp=2), ParallelPlan(pp=2, dp=2)])
def test_gathered_weights_are_the_global_ones(world, plan: ParallelPlan) -> None:
    world(check_refit, plan=plan)


def test_the_policy_learns_and_engine_and_trainer_agree() -> None:
    reports = iterate(ParallelPlan(), 8)
    assert sum(report.mean_reward for report in reports[-2:]) > 1.2 * sum(report.mean_reward for report in reports[:2])
    assert all(report.train.metrics["logprob_mismatch"] < 1e-5 for report in reports)
    assert reports[0].train.metrics["ratio"] == pytest.approx(1.0)


@pytest.mark.world(2)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(dp=2)])
def test_ranks_see_the_same_rollouts_and_keep_one_policy(world, plan: ParallelPlan) -> None:
    first, second = world(iterate, plan=plan, iterations=2)
    for ours, theirs in zip(first, second, strict=True):
        assert (ours.mean_reward, ours.num_rollouts, ours.train.loss) == (theirs.mean_reward, theirs.num_rollouts, theirs.train.loss)
        assert ours.train.metrics["logprob_mismatch"] < 1e-5


@pytest.mark.parametrize(
    "args",
    [
        GenericGenerationArgs(temperature=0.5, max_tokens=8),
        GenericGenerationArgs(temperature=1.7, max_tokens=8),
        GenericGenerationArgs(max_tokens=8),
    ],
    ids=lambda args: f"temperature-{args.temperature}",
)
def test_engine_and_trainer_agree_at_the_temperature_of_the_policy(args: GenericGenerationArgs) -> None:
    config = dataclasses.replace(CONFIG, generation_args=args)
    reports = iterate(ParallelPlan(), 2, config=config, objective=GRPOObjective(temperature=config.temperature))
    assert all(report.train.metrics["logprob_mismatch"] < 1e-5 for report in reports)
    assert reports[0].train.metrics["ratio"] == pytest.approx(1.0)


def test_the_reference_is_the_policy_at_first_and_stays_where_it_was() -> None:
    config = dataclasses.replace(CONFIG, generation_args=GenericGenerationArgs(temperature=0.8, max_tokens=8))
    first, second, third = iterate(ParallelPlan(), 3, config=config, objective=GRPOObjective(kl_beta=0.1, temperature=0.8))
    assert abs(first.train.metrics["kl"]) < 1e-9
    assert third.train.metrics["kl"] > second.train.metrics["kl"] > 1e-6


def check_reference(plan: ParallelPlan) -> None:
    """Every layout makes the log-probabilities that one rank makes, in evaluation mode and without a gradient."""
    groups, generator = ProcessGroups.build(plan), torch.Generator().manual_seed(0)
    tokens = torch.randint(SIZES.vocab_size, (3, 2, 9), generator=generator)
    batches = [Batch(tokens=rows[:, :-1], labels=rows[:, 1:], loss_mask=torch.ones(2, 8)) for rows in tokens]
    model = GPTModel(SIZES, groups, dtype=torch.float64).train()
    scored = with_ref_logprobs(model, batches, groups, temperature=0.7)
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    whole = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    for batch, share in zip(batches, scored, strict=True):
        if not groups.pp.is_last:
            assert "ref_logprobs" not in share.extras
            continue
        output, _ = whole(batch.tokens.flatten(), batch.step())
        logits = output.logits().detach() / 0.7
        expected = logits.log_softmax(-1).gather(1, batch.labels.flatten()[:, None]).view(batch.labels.shape)
        mine = dataclasses.replace(batch, extras={"expected": expected}).context_share(groups.cp)
        torch.testing.assert_close(share.extras["ref_logprobs"], mine.extras["expected"], rtol=1e-10, atol=1e-12)
        assert torch.equal(share.labels, mine.labels) and not share.extras["ref_logprobs"].requires_grad


@pytest.mark.world(2)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(cp=2)], ids=str)
def test_reference_log_probs_are_those_of_one_rank(world, plan: ParallelPlan) -> None:
    world(check_reference, plan=plan)


class Unreachable(CharacterShare):
    async def get_prompt(self, *, validation: bool = False) -> Problem:
        raise AssertionError("something was generated")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": GRPOObjective(kl_beta=0.1)}, "kl_beta=0.1 needs a frozen reference model; pass reference, or set kl_beta=0"),
        ({"objective": GRPOObjective(temperature=0.5)}, "objective.temperature=0.5 must be that of generation_args, 1.0"),
        ({"groups": dataclasses.replace(ProcessGroups.single(), dp=Group((0, 1, 2), 0))}, "num_groups .* = 32 must be divisible by dp=3"),
    ],
    ids=["reference", "temperature", "dp"],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_is_generated(options: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = dict.fromkeys(("model", "sync", "optimizer"))
    parts |= {"groups": ProcessGroups.single(), "objective": GRPOObjective()}
    nobody: Any = None
    with pytest.raises(ValueError, match=message):
        grpo_iteration(CONFIG, agent=Unreachable(["x"], "a"), interface=nobody, engine=nobody, learner=Learner(**(parts | options)), lr=1.0)


class Unreliable(CharacterShare):
    """Every third judgement fails; one prompt never comes when asked for it."""

    def __init__(self, silent_after: int = 10**9) -> None:
        super().__init__(["a", "b"], "abcdefghijklmnopqrstuvwxyz")
        self.num_prompts = self.num_judged = 0
        self.silent_after = silent_after

    async def get_prompt(self, *, validation: bool = False) -> Problem:
        self.num_prompts += 1
        if self.num_prompts > self.silent_after:
            await asyncio.sleep(60)
        return await super().get_prompt()

    async def get_reward(self, response: str, problem: Problem) -> float:
        self.num_judged += 1
        if self.num_judged % 3 == 0:
            raise RuntimeError("judge fell over")
        return await super().get_reward(response, problem)


@pytest.mark.parametrize(("silent_after", "timeout_s", "dropped"), [(10**9, 60.0, 10), (1, 6.0, 5 + 16)], ids=["judge", "deadline"])
def test_the_survivors_are_trained_on_and_the_others_counted(silent_after: int, timeout_s: float, dropped: int) -> None:
    config = dataclasses.replace(CONFIG, rollout_timeout_s=timeout_s)
    [report] = iterate(ParallelPlan(), 1, config=config, agent=Unreliable(silent_after))
    assert (report.num_rollouts, report.num_dropped) == (32 - dropped, dropped)
    assert not report.train.skipped


def drop_on_ranks() -> tuple[int, int, float]:
    [report] = iterate(ParallelPlan(dp=2), 1, agent=Unreliable())
    return report.num_rollouts, report.num_dropped, report.train.loss


@pytest.mark.world(2)
def test_data_ranks_train_on_survivors_that_do_not_divide(world) -> None:
    one, other = world(drop_on_ranks)
    assert one == other and one[:2] == (22, 10)


def fail_on_one_rank() -> str:
    class Failing(CharacterShare):
        async def get_prompt(self, *, validation: bool = False) -> Problem:
            raise ConnectionError("no problems here")

    groups = ProcessGroups.build(ParallelPlan(dp=2))
    agent = Failing(["a"], "a") if groups.dp.rank else None
    try:
        iterate(ParallelPlan(dp=2), 1, agent=agent)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.world(2)
def test_a_rank_whose_rollouts_fail_is_named_on_the_others(world) -> None:
    one, other = world(fail_on_one_rank)
    assert one.startswith("RuntimeError: rollouts failed on other ranks: {1:") and "no problems here" in one
    assert other == "ConnectionError: no problems here"


@pytest.mark.gpu
def test_the_policy_learns_on_a_gpu() -> None:
    reports = iterate(ParallelPlan(), 8, device="cuda")
    assert sum(report.mean_reward for report in reports[-2:]) > 1.2 * sum(report.mean_reward for report in reports[:2])


def test_sizes_that_cannot_learn_are_refused() -> None:
    with pytest.raises(ValueError, match="group_size=1 must be at least 2"):
        GRPOConfig(num_groups=1, group_size=1, seq_len=8)
    with pytest.raises(ValueError, match="temperature=0 in generation_args draws the same answer"):
        GRPOConfig(num_groups=1, group_size=2, seq_len=8, generation_args=GenericGenerationArgs(temperature=0.0))
    with pytest.raises(ValueError, match="rollout_timeout_s=0 must be positive"):
        GRPOConfig(num_groups=1, group_size=2, seq_len=8, rollout_timeout_s=0)


class Hopeless(CharacterShare):
    async def get_reward(self, response: str, problem: Problem) -> float:
        raise RuntimeError("judge fell over")


def test_an_iteration_without_any_survivor_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no rollout of 2 groups of 16 is left"):
        iterate(ParallelPlan(), 1, agent=Hopeless(["a"], "a"))
