# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""PPO: advantages of tokens, the critic's loss against its definition in float64, and a policy that learns with both."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceContext, DynamicInferenceEngine, InferenceConfig, PagedAttention
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, add_value_head
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import Batch
from mcore_rl import (
    AdvantageConfig,
    Aggregation,
    BatchStyle,
    Critic,
    FrozenWeights,
    GAEConfig,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    IterationReport,
    Learner,
    MegatronLocal,
    PackingConfig,
    PackingContext,
    TokenRollout,
    ValueObjective,
    grpo_iteration,
    refit,
)
from mcore_rl._critic import estimate, token_rewards, with_estimates
from mcore_rl._loop._update import MiniBatch, _estimated, _kl_sums
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._packing._trajectories import TrajectoryBatches, place_rows, write_batches
from mcore_rl.envs import CharacterShare

SMALL = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16, vocab_size=16, init_method_std=0.6)
MASKS = ([0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 1])
REWARDS = (1.0, -0.5, 0.25, 2.0)
GAE = GAEConfig(discount=0.9, lam=0.8, whiten=False)


def test_a_worked_example() -> None:
    # Differences 0.5 * 0.4 - 0.2 = 0, 0.5 * 0.8 - 0.4 = 0 and 1 - 0.8 = 0.2; each later one counts a quarter.
    config = GAEConfig(discount=0.5, lam=0.5)
    [(advantages, returns)] = config.estimate([torch.tensor([0.0, 0.0, 1.0])], [torch.tensor([0.2, 0.4, 0.8])])
    assert advantages.dtype == torch.float64
    assert advantages.tolist() == pytest.approx([0.0125, 0.05, 0.2], abs=1e-7)
    assert returns.tolist() == pytest.approx([0.2125, 0.45, 1.0], abs=1e-7)


def discounted(rewards: list[float], values: list[float], config: GAEConfig) -> list[float]:
    """The sum of the definition, term by term."""
    following = [*values, 0.0][1:]
    delta = [r + config.discount * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [sum((config.discount * config.lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


@pytest.mark.parametrize("config", [GAEConfig(), GAE, GAEConfig(lam=0.0), GAEConfig(lam=1.0), GAEConfig(discount=0.0)], ids=str)
def test_estimates_are_the_sum_of_the_definition(config: GAEConfig) -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = ([torch.randn(n, generator=generator, dtype=torch.float64) for n in (5, 1, 0, 9)] for _ in range(2))
    for reward, value, (advantages, returns) in zip(rewards, values, config.estimate(rewards, values), strict=True):
        expected = discounted(reward.tolist(), value.tolist(), config)
        assert advantages.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert torch.equal(returns, advantages + value)


def rollouts() -> list[TokenRollout]:
    generator = torch.Generator().manual_seed(0)
    return [
        TokenRollout(
            trajectory=torch.randint(16, (len(mask),), generator=generator).tolist(),
            reward=reward,
            generation_mask=[bool(x) for x in mask],
            logprobs=[-1.0] * sum(mask),
            env_id="env",
            problem_id=str(number),
        )
        for number, (mask, reward) in enumerate(zip(MASKS, REWARDS, strict=True))
    ]


def labelled(number: int, seed: int) -> torch.Tensor:
    """Numbers of the labels of a rollout."""
    return torch.randn(len(MASKS[number]) - 1, generator=torch.Generator().manual_seed(10 * seed + number), dtype=torch.float64)


def arranged(arrangement: str, aggregation: Aggregation) -> list[Batch]:
    written, numbers = with_scores(arrangement, aggregation)
    return with_estimates(written, estimate(written, [REWARDS[number] for number in numbers], GAE, 0.3)).batches


def with_scores(arrangement: str, aggregation: Aggregation) -> tuple[Any, list[int]]:
    style = BatchStyle(aggregation=aggregation, dtype=torch.float64)
    if arrangement == "packed":
        written: Any = PackingContext.pack(rollouts(), PackingConfig(bin_size=10), style)
    else:
        places, shape = place_rows(rollouts(), 8, int(arrangement))
        written = TrajectoryBatches(batches=write_batches(rollouts(), places, shape, style), places=places)
    numbers = list(getattr(written, "rollouts", range(len(MASKS))))
    for seed, name in enumerate(("old_values", "old_logprobs", "ref_logprobs")):
        # What stands at tokens that do not count is never looked at.
        values = [torch.full_like(batch.loss_mask, float("nan")) for batch in written.batches]
        for number, place in zip(numbers, written.places, strict=True):
            values[place.batch].view(-1)[place.start : place.start + place.num_labels] = labelled(number, seed)
        written = written.with_extra(name, values)
    return written, numbers


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_the_divergence_in_rewards_is_of_the_estimator_asked_for(estimator: str) -> None:
    written, numbers = with_scores("packed", Aggregation())
    expected = []
    for number in numbers:
        delta = (labelled(number, 2) - labelled(number, 1))[torch.tensor(MASKS[number][1:]).bool()]
        expected.append({"k1": -delta, "k2": delta**2 / 2, "k3": delta.exp() - delta - 1, "abs": delta.abs()}[estimator])
    sums = _kl_sums(len(MASKS), [MiniBatch(numbers, written)], ProcessGroups.single(), estimator)
    assert [sums[number] for number in numbers] == pytest.approx([gaps.sum().item() for gaps in expected])
    for rewards, gaps in zip(token_rewards(written, [0.0] * len(numbers), 0.5, estimator), expected, strict=True):
        torch.testing.assert_close(rewards, -0.5 * gaps)
    # What a configuration asks for comes to both places, through the update.
    config = dataclasses.replace(CONFIG, kl_in_reward=0.5, kl_in_reward_estimator=estimator, gae=GAEConfig(lam=1.0, whiten=False))
    headers = [RolloutHeader.of(one) for one in rollouts()]
    [part] = _estimated(config, headers, [MiniBatch(numbers, written)], ProcessGroups.single())
    values = part.written.of_rollouts([batch.extras["returns"] for batch in part.written.batches])
    for number, returns, gaps in zip(numbers, values, expected, strict=True):
        counted = returns[torch.tensor(MASKS[number][1:]).bool()]
        torch.testing.assert_close(counted[:1].double(), (REWARDS[number] - 0.5 * gaps.sum()).reshape(1)[: len(counted)])


def critic_model() -> GPTModel:
    model = GPTModel(SMALL, ProcessGroups.single(), dtype=torch.float64)
    head = add_value_head(model)
    assert head is not None
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.4, 0.6, 8, dtype=torch.float64)[None])
        head.bias.fill_(0.1)
    return model


def gradients(model: GPTModel, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [parameter for parameter in model.parameters() if parameter.requires_grad]))


def expected(clip: float, mode: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Each sequence alone, each formula written out."""
    model, losses = critic_model(), []
    for number, (rollout, mask) in enumerate(zip(rollouts(), MASKS, strict=True)):
        kept = [t for t in range(len(mask) - 1) if mask[t + 1]]
        old, old_logprobs, ref = (labelled(number, seed)[kept].tolist() for seed in range(3))
        rewards = [-0.3 * (a - b) for a, b in zip(old_logprobs, ref, strict=True)]
        rewards[-1] += REWARDS[number]
        targets = [a + v for a, v in zip(discounted(rewards, old, GAE), old, strict=True)]
        row = torch.tensor([rollout.trajectory])
        batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, row.shape[1] - 1))
        value = model.value_head(model(batch.tokens.flatten(), batch.step())[0].hidden)[kept]
        target, before = torch.tensor(targets, dtype=torch.float64), torch.tensor(old, dtype=torch.float64)
        clipped = before + (value - before).clip(-clip, clip)
        losses.append(0.5 * torch.max((value - target) ** 2, (clipped - target) ** 2))
    loss = torch.cat(losses).mean() if mode == "token_mean" else torch.stack([part.mean() for part in losses]).mean()
    return loss, gradients(model, loss)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("arrangement", ["1", "2", "4", "packed"])
@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_the_loss_of_values_is_its_definition_however_rollouts_lie(clip: float, arrangement: str, mode: str) -> None:
    model = critic_model()
    objective = ValueObjective(head=model.value_head, clip=clip)  # pyright: ignore[reportArgumentType]
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in arranged(arrangement, Aggregation(mode=mode)):
        report = objective(model(batch.tokens.flatten(), batch.step())[0], batch)
        total, count = total + report.sum, count + report.count
    loss, grads = expected(clip, mode)
    torch.testing.assert_close(total / count, loss, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(gradients(model, total / count), grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


TOKENIZER = ByteTokenizer()
SIZES = dataclasses.replace(
    SMALL, num_layers=2, hidden_size=32, ffn_hidden_size=48, vocab_size=-(-TOKENIZER.vocab_size // 8) * 8, init_method_std=0.02
)
CONFIG = GRPOConfig(
    num_groups=32,
    group_size=1,
    seq_len=16,
    micro_batch_size=8,
    generation_args=GenericGenerationArgs(temperature=1.0, max_tokens=8),
    gae=GAEConfig(),
    num_mini_batches=2,
)


def iterate(plan: ParallelPlan, iterations: int, config: GRPOConfig = CONFIG, warmup: int = 0) -> list[IterationReport]:
    groups = ProcessGroups.build(plan)
    policy, values = (GPTModel(SIZES, groups, unpadded_vocab_size=TOKENIZER.vocab_size) for _ in range(2))
    head = add_value_head(values)
    syncs = [DistributedDataParallel(DistributedDataParallelConfig(), model, groups) for model in (policy, values)]
    optimizers = [MegatronOptimizer(OptimizerConfig(lr=2e-2, weight_decay=0.0), sync, groups) for sync in syncs]
    context = DynamicInferenceContext(SIZES, InferenceConfig(max_sequence_length=32, max_requests=32, block_size_tokens=8))
    copy = GPTModel(SIZES, ProcessGroups.single(), attention_core=PagedAttention(), seed=5).eval()
    engine = DynamicInferenceEngine(copy, context, TOKENIZER, seed=groups.world.rank, vocab_size=TOKENIZER.vocab_size)
    refit(policy, groups, engine)
    learner = Learner(
        model=policy,
        groups=groups,
        objective=GRPOObjective(),
        sync=syncs[0],
        optimizer=optimizers[0],
        reference=FrozenWeights(policy) if config.kl_in_reward else None,
        critic=Critic(model=values, objective=ValueObjective(head=head), sync=syncs[1], optimizer=optimizers[1], lr=1e-2),
    )
    agent = CharacterShare(["a", "b"][groups.world.rank % 2 :], "abcdefghijklmnopqrstuvwxyz")
    interface, reports = MegatronLocal(engine), []
    for number in range(iterations):
        before = [parameter.detach().clone() for parameter in policy.parameters()]
        report = grpo_iteration(
            config, agent=agent, interface=interface, engine=engine, learner=learner, lr=2e-2, train_policy=number >= warmup
        )
        same = all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
        assert same == (number < warmup) == (not report.updates)
        reports.append(report)
    return reports


def test_the_policy_learns_from_single_answers() -> None:
    reports = iterate(ParallelPlan(), 10)
    assert sum(report.mean_reward for report in reports[-2:]) > 1.2 * sum(report.mean_reward for report in reports[:2])
    assert all(report.updates[0].metrics["logprob_mismatch"] < 1e-5 for report in reports)


def test_the_critic_learns_before_the_policy_does() -> None:
    reports = iterate(ParallelPlan(), 5, warmup=4)
    losses = [report.critic_updates[0].loss for report in reports]
    assert reports[0].critic_updates[0].metrics["value"] == 0.0 and reports[-1].critic_updates[0].metrics["value"] > 0.01
    assert losses[3] < losses[0] and len(reports[-1].updates) == len(reports[-1].critic_updates) == 2


def losses(plan: ParallelPlan, packed: bool) -> list[float]:
    config = dataclasses.replace(CONFIG, num_groups=16, micro_batch_size=4, kl_in_reward=0.05, num_epochs=2)
    if packed:
        config = dataclasses.replace(config, packing=PackingConfig(bin_size=24, alignment=2 * plan.cp if plan.cp > 1 else 1))
    return [update.loss for report in iterate(plan, 2, config) for update in (*report.updates, *report.critic_updates)]


@pytest.mark.journey
@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(
    ("plan", "packed"),
    [(ParallelPlan(dp=2), True), (ParallelPlan(pp=2), False), (ParallelPlan(tp=2), True), (ParallelPlan(cp=2), True)],
    ids=str,
)
def test_all_ranks_see_one_loss_of_each_update(world, plan: ParallelPlan, packed: bool) -> None:
    one, other = world(losses, plan=plan, packed=packed)
    assert one == other and len(one) == 16 and all(map(math.isfinite, one))


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="lam=1.5 must lie from 0 to 1"):
        GAEConfig(lam=1.5)
    with pytest.raises(ValueError, match="clip=0 must be positive"):
        ValueObjective(head=None, clip=0)
    with pytest.raises(ValueError, match="has no effect beside gae"):
        dataclasses.replace(CONFIG, advantage=AdvantageConfig(scale="none"))
    with pytest.raises(ValueError, match="come with values of lengths"):
        GAE.estimate([torch.zeros(2)], [torch.zeros(3)])
    nobody: Any = None
    learner = Learner(model=torch.nn.Identity(), groups=ProcessGroups.single(), objective=GRPOObjective(), sync=nobody, optimizer=nobody)
    with pytest.raises(ValueError, match="PPO needs both"):
        grpo_iteration(CONFIG, agent=nobody, interface=nobody, engine=nobody, learner=learner, lr=1.0)
