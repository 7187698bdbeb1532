# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Each objective that a configuration makes, against its definition, sequence by sequence in float64."""

import dataclasses
import functools
import itertools
import math
import statistics
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.training import Batch
from mcore_rl import (
    AdvantageConfig,
    Aggregation,
    BatchStyle,
    GenericGenerationArgs,
    GRPOConfig,
    GRPOObjective,
    ImportanceCorrection,
    MismatchReport,
    OverlongPenalty,
    PackingConfig,
    PackingContext,
    PolicyLossConfig,
    TokenRollout,
    kl_estimate,
    rollout_batches,
)
from mcore_rl._objective._correction import MismatchTotals, mismatch
from mcore_rl._packing._trajectories import TrajectoryBatches, place_rows, write_batches

SIZES = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16, vocab_size=16, init_method_std=0.6)
LENGTHS = ((2, 5), (1, 3), (3, 1), (1, 7), (4, 2))
ADVANTAGES = (1.3, -0.7, 0.4, -2.0, 0.9)
AGGREGATIONS = (
    Aggregation(),
    Aggregation(mode="sequence_mean"),
    Aggregation(mode="sequence_sum"),
    Aggregation(mode="constant", length=9),
)


def rollouts() -> list[TokenRollout]:
    generator = torch.Generator().manual_seed(0)
    return [
        TokenRollout(
            trajectory=torch.randint(16, (prompt + written,), generator=generator).tolist(),
            reward=0.0,
            generation_mask=[False] * prompt + [True] * written,
            logprobs=(-3 * torch.rand(written, generator=generator, dtype=torch.float64) - 0.5).tolist(),
            env_id="env",
            problem_id=str(prompt),
        )
        for prompt, written in LENGTHS
    ]


def per_token(number: int, seed: int) -> torch.Tensor:
    """Log-probabilities of a rollout's labels, of an old policy or a reference."""
    generator = torch.Generator().manual_seed(100 * seed + number)
    return -2 * torch.rand(sum(LENGTHS[number]) - 1, generator=generator, dtype=torch.float64) - 1.2


def with_scores(written: Any) -> list[Batch]:
    for seed, name in ((1, "old_logprobs"), (2, "ref_logprobs")):
        values = [torch.zeros_like(batch.loss_mask) for batch in written.batches]
        for number, place in zip(getattr(written, "rollouts", range(len(LENGTHS))), written.places, strict=True):
            values[place.batch].flatten()[place.start : place.start + place.num_labels] = per_token(number, seed)
        written = written.with_extra(name, values)
    return written.batches


def batches(arrangement: str, aggregation: Aggregation) -> list[Batch]:
    style = BatchStyle(aggregation=aggregation, dtype=torch.float64)
    if arrangement == "packed":
        context = PackingContext.pack(rollouts(), PackingConfig(bin_size=14), style)
        return with_scores(context.with_advantages([ADVANTAGES[number] for number in context.rollouts]))

    places, shape = place_rows(rollouts(), 9, int(arrangement))
    written = TrajectoryBatches(batches=write_batches(rollouts(), places, shape, style), places=places)
    return with_scores(written.with_advantages(ADVANTAGES))


def mean_and_gradients(objective: GRPOObjective, parts: list[Batch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for batch in parts:
        output, _ = model(batch.tokens.flatten(), batch.step())
        report = objective(output, batch)
        total, count = total + report.sum, count + report.count
    return total / count, list(torch.autograd.grad(total / count, list(model.parameters())))


@functools.cache
def expected(name: str, aggregation: Aggregation) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Each sequence alone through the model, each formula written out; once for all arrangements."""
    objective = OBJECTIVES[name]
    model, policy, limit = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64), objective.policy, objective.correction
    losses = []
    for number, (rollout, advantage) in enumerate(zip(rollouts(), ADVANTAGES, strict=True)):
        row, prompt = torch.tensor([rollout.trajectory]), LENGTHS[number][0]
        batch = Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, row.shape[1] - 1))
        output, _ = model(batch.tokens.flatten(), batch.step())
        logits = output.logits() / objective.temperature
        every = logits.log_softmax(-1)
        current = every.gather(1, batch.labels.flatten()[:, None]).squeeze(1)[prompt - 1 :]
        entropy = -(every.exp() * every).sum(-1)[prompt - 1 :]
        old, ref = (per_token(number, seed)[prompt - 1 :] for seed in (1, 2))
        inference = torch.tensor(rollout.logprobs, dtype=torch.float64)
        log_ratio = current - old
        ratio = torch.exp(log_ratio.mean()).expand_as(log_ratio) if policy.ratio_level == "sequence" else log_ratio.exp()
        clipped = torch.clip(ratio, 1 - policy.clip_low, 1 + policy.clip_high)
        if policy.kind == "cispo":
            gain = clipped.detach() * advantage * current
        else:
            gain = torch.min(ratio * advantage, clipped * advantage)
            if policy.dual_clip and advantage < 0:
                gain = torch.max(gain, torch.full_like(gain, policy.dual_clip * advantage))
        if limit is not None:
            logs = old - inference
            weight = {"token": logs, "sequence": logs.sum().expand_as(logs), "geometric": logs.mean().expand_as(logs)}[limit.level].exp()
            if limit.mode == "truncate":
                weight = weight.clip(max=limit.high)
            if limit.mode == "mask":
                weight = weight * ((weight >= limit.low) & (weight <= limit.high))
            gain = gain * weight * float(not bool((logs.exp() < limit.veto).any()))
        gap = ref - current
        kl = {"k1": -gap, "k2": gap**2 / 2, "k3": gap.exp() - gap - 1, "abs": gap.abs()}[objective.kl_estimator]
        losses.append(objective.kl_beta * kl - gain - objective.entropy_weight * entropy)
    loss = {
        "token_mean": lambda: torch.cat(losses).mean(),
        "sequence_mean": lambda: torch.stack([loss.mean() for loss in losses]).mean(),
        "sequence_sum": lambda: torch.stack([loss.sum() for loss in losses]).mean(),
        "constant": lambda: torch.stack([loss.sum() / 9 for loss in losses]).mean(),
    }[aggregation.mode]()
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


OBJECTIVES = {
    "grpo": GRPOObjective(correction=None),
    "dapo": GRPOObjective(policy=PolicyLossConfig(clip_high=0.28), entropy_weight=0.05, temperature=0.7),
    "dual-clip": GRPOObjective(policy=PolicyLossConfig(dual_clip=1.1)),
    "gspo": GRPOObjective(policy=PolicyLossConfig(ratio_level="sequence", clip_low=0.05, clip_high=0.3), correction=None),
    "cispo": GRPOObjective(policy=PolicyLossConfig(kind="cispo", clip_low=math.inf, clip_high=0.1)),
    "k1": GRPOObjective(kl_beta=0.3, kl_estimator="k1"),
    "k2": GRPOObjective(kl_beta=0.3, kl_estimator="k2"),
    "k3": GRPOObjective(kl_beta=0.3),
    "abs": GRPOObjective(kl_beta=0.3, kl_estimator="abs"),
    "token-mask": GRPOObjective(correction=ImportanceCorrection(mode="mask", low=0.5, high=1.8)),
    "sequence-truncated": GRPOObjective(correction=ImportanceCorrection(level="sequence", high=0.8)),
    "sequence-mask": GRPOObjective(correction=ImportanceCorrection(level="sequence", mode="mask", low=0.2, high=0.86)),
    "geometric-mask": GRPOObjective(correction=ImportanceCorrection(level="geometric", mode="mask", low=0.5, high=0.96)),
    "veto": GRPOObjective(correction=ImportanceCorrection(veto=0.4)),
    "whole-weights": GRPOObjective(correction=ImportanceCorrection(mode="none")),
}


def assert_equal(ours: tuple[torch.Tensor, list[torch.Tensor]], theirs: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-12)
    for mine, other in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("arrangement", ["1", "3", "packed"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=lambda aggregation: aggregation.mode)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_gradients_equal_the_definition(name: str, aggregation: Aggregation, arrangement: str) -> None:
    ours = mean_and_gradients(OBJECTIVES[name], batches(arrangement, aggregation))
    assert_equal(ours, expected(name, aggregation))


def test_the_cases_reach_every_branch() -> None:
    """Clips on both sides, limits and vetoes all occur, and none covers everything."""
    [batch] = batches("5", Aggregation())
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    output, _ = model(batch.tokens.flatten(), batch.step())
    for name, metrics in {
        "grpo": ("clipped_above", "clipped_below"),
        "gspo": ("clipped_above", "clipped_below"),
        "token-mask": ("is_limited",),
        "sequence-truncated": ("is_limited",),
        "sequence-mask": ("is_limited",),
        "geometric-mask": ("is_limited",),
        "veto": ("is_vetoed",),
    }.items():
        report = OBJECTIVES[name](output, batch)
        for metric in metrics:
            assert 0 < report.metrics[metric] < report.count, (name, metric)
    assert OBJECTIVES["dual-clip"](output, batch).sum != OBJECTIVES["dapo"](output, batch).sum


def check_context_parallel() -> None:
    groups = ProcessGroups.build(ParallelPlan(cp=2))
    for name in ("gspo", "sequence-mask", "veto", "k3"):
        parts = []
        for aggregation in AGGREGATIONS:
            style = BatchStyle(aggregation=aggregation, dtype=torch.float64)
            context = PackingContext.pack(rollouts(), PackingConfig(bin_size=16, alignment=4), style)
            parts = with_scores(context.with_advantages([ADVANTAGES[number] for number in context.rollouts]))
            model = GPTModel(SIZES, groups, dtype=torch.float64)
            totals = torch.zeros(2, dtype=torch.float64)
            for batch in parts:
                share = batch.context_share(groups.cp)
                output, _ = model(share.tokens.flatten(), share.step())
                report = OBJECTIVES[name](output, share)
                totals += torch.stack([report.sum.detach(), report.count])
            torch.distributed.all_reduce(totals)
            torch.testing.assert_close(totals[0] / totals[1], expected(name, aggregation)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
def test_sequences_that_context_parallel_ranks_share_count_as_whole(world) -> None:
    world(check_context_parallel)


def test_truncated_answers_may_be_masked() -> None:
    one, other = rollouts()[:2]
    cut = dataclasses.replace(other, finish_reason="length")
    [batch] = rollout_batches([one, cut], [1.0, 1.0], seq_len=9, micro_batch_size=2, style=BatchStyle(mask_truncated=True))
    assert batch.loss_mask.sum(1).tolist() == [5, 0] and batch.extras["advantages"][1].abs().sum() == 0


REWARDS = [[1.0, 0.0, 0.5], [2.0, 2.0], [0.0, 1.0, 1.0, 4.0]]


@pytest.mark.parametrize("scale", ["group_std", "batch_std", "batch_reward_std", "none"])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out", "batch_mean"])
def test_equal_rewards_have_no_advantage_to_the_last_bit(baseline: str, scale: str) -> None:
    config = AdvantageConfig(baseline=baseline, scale=scale)
    for reward in (0.1, 0.7, -1 / 3):
        groups = config.advantages([[reward] * 3, [reward] * 7])
        assert all(advantage == 0 for group in groups for advantage in group)
    if baseline != "batch_mean":
        equal, _ = config.advantages([[0.7] * 7, [0.0, 1.0]])
        assert not any(equal)


def test_unequal_rewards_are_centred_by_their_plain_mean() -> None:
    config = AdvantageConfig(scale="none")
    groups = [list(rewards) for size in (3, 6, 7) for rewards in itertools.product((0.0, 1.0), repeat=size)]
    for group, ours in zip(groups, config.advantages(groups), strict=True):
        values = torch.tensor(group, dtype=torch.float64)
        assert ours == ((values - values.mean()).tolist() if len(set(group)) > 1 else [0.0] * len(group))
    # Whoever comes first earns what he would earn in another place.
    (first, second), (third, fourth) = (config.advantages([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])[place][:2] for place in (0, 1))
    assert (first, second) == (fourth, third)


def test_advantages_equal_their_definitions() -> None:
    flat = [reward for group in REWARDS for reward in group]
    for baseline in ("group_mean", "leave_one_out", "batch_mean", "none"):
        centred = []
        for group in REWARDS:
            for i, reward in enumerate(group):
                others = group[:i] + group[i + 1 :]
                base = {"group_mean": statistics.mean(group), "leave_one_out": statistics.mean(others), "batch_mean": statistics.mean(flat)}
                centred.append(reward - base.get(baseline, 0.0))
        spreads = [statistics.pstdev(group) for group in REWARDS for _ in group]
        batch, raw = ([statistics.pstdev(values)] * len(flat) for values in (centred, flat))
        for scale, divisors in {"none": None, "group_std": spreads, "batch_std": batch, "batch_reward_std": raw}.items():
            ours = AdvantageConfig(baseline=baseline, scale=scale).advantages(REWARDS)
            theirs = centred if divisors is None else [c / (d + 1e-4) for c, d in zip(centred, divisors, strict=True)]
            assert [a for group in ours for a in group] == pytest.approx(theirs, rel=1e-12, abs=1e-12), (baseline, scale)
    assert AdvantageConfig(baseline="leave_one_out", scale="none").advantages([[3.0], []]) == [[0.0], []]
    assert AdvantageConfig(scale="batch_std").advantages([]) == []


def test_rewards_of_the_batch_may_be_those_of_one_environment() -> None:
    small, large = [[0.0, 1.0, 1.0], [0.5, 0.5]], [[-30.0, 70.0], [20.0, 10.0, 10.0]]
    rewards, env_ids = [small[0], large[0], small[1], large[1]], ["small", "large", "small", "large"]
    for fields in ({"scale": "batch_std"}, {"baseline": "batch_mean", "scale": "none"}, {"scale": "batch_reward_std", "std_correction": 1}):
        config = AdvantageConfig(**fields, per_environment=True)
        (one, two), (three, four) = config.advantages(small), config.advantages(large)
        assert config.advantages(rewards, env_ids) == [one, three, two, four]
        plain = AdvantageConfig(**fields)
        assert plain.advantages(rewards, env_ids) == plain.advantages(rewards) != [one, three, two, four]
    with pytest.raises(ValueError, match="per_environment=True has no effect with baseline='group_mean' and scale='group_std'"):
        AdvantageConfig(per_environment=True)


@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_equal_groups_equal_those_of_trl(seed: int) -> None:
    rewards = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    others = rewards - (rewards.sum(dim=1, keepdim=True) - rewards) / 3
    # torch's std is of a sample where nothing else is said, and that is what TRL divides by.
    cases = {
        ("group_mean", "group_std"): centred / (rewards.std(dim=1, keepdim=True) + 1e-4),
        ("group_mean", "batch_reward_std"): centred / (rewards.std() + 1e-4),
        ("group_mean", "none"): centred,
        ("leave_one_out", "none"): others,
        ("leave_one_out", "batch_std"): (others - others.mean()) / (others.std() + 1e-4),
        ("batch_mean", "batch_std"): (rewards - rewards.mean()) / (rewards.std() + 1e-4),
    }
    for (baseline, scale), wanted in cases.items():
        ours = AdvantageConfig(baseline=baseline, scale=scale, std_correction=1).advantages(rewards.tolist())
        torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), wanted, rtol=1e-12, atol=1e-12)


def test_a_reward_that_is_alone_has_no_advantage_with_either_correction() -> None:
    for correction in (0, 1):
        for scale in ("group_std", "batch_std", "batch_reward_std"):
            assert AdvantageConfig(scale=scale, std_correction=correction).advantages([[3.0], []]) == [[0.0], []]


def test_the_mismatch_of_micro_batches_is_that_of_their_tokens_that_count() -> None:
    parts: list[tuple[torch.Tensor, torch.Tensor]] = []
    totals = MismatchTotals(torch.device("cpu"))
    assert totals.report() is None
    for batch in batches("2", Aggregation()):
        known, keep = batch.extras["inference_logprobs"].clone(), batch.loss_mask != 0
        # What the engine said nothing of, and what does not count, may be anything.
        known[~keep] = math.nan
        output, _ = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)(batch.tokens.flatten(), batch.step())
        GRPOObjective(observe=totals.add)(output, dataclasses.replace(batch, extras={**batch.extras, "inference_logprobs": known}))
        parts.append((batch.extras["old_logprobs"][keep], known[keep]))
    whole = MismatchReport.of(torch.cat([old for old, _ in parts]), torch.cat([known for _, known in parts]))
    assert dataclasses.asdict(totals.report() or whole) == pytest.approx(dataclasses.asdict(whole)) and totals.report() is not None


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_an_estimate_is_the_divergence(estimator: str) -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    torch.testing.assert_close((p * kl_estimate(p.log(), q.log(), estimator)).sum(), (p * (p / q).log()).sum())


def test_k2_as_a_loss_has_the_gradient_of_the_divergence() -> None:
    logits = torch.tensor([0.5, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.3], dtype=torch.float64).log_softmax(0)
    current = logits.log_softmax(0)
    divergence = (current.exp() * (current - reference)).sum()
    [wanted] = torch.autograd.grad(divergence, logits, retain_graph=True)
    [ours] = torch.autograd.grad((current.exp().detach() * kl_estimate(current, reference, "k2")).sum(), logits)
    torch.testing.assert_close(ours, wanted)


def test_the_overlong_penalty_is_linear_in_its_buffer() -> None:
    penalty = OverlongPenalty(max_length=10, buffer=4)
    assert [penalty(length) for length in (0, 6, 7, 8, 10, 99)] == [0, 0, -0.25, -0.5, -1, -1]


def test_the_mismatch_is_reported() -> None:
    old, inference = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    report = MismatchReport.of(old, inference)
    weights = [math.exp(0.5), math.exp(-1.0), 1.0]
    assert (report.weight_min, report.weight_max) == pytest.approx((weights[1], weights[0]))
    assert report.effective_sample_size == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / 3)
    assert (report.k1, report.k3) == pytest.approx((0.5 / 3, sum(w - 1 - math.log(w) for w in weights) / 3))
    assert report.probability_gap == pytest.approx((abs(math.exp(-1) - math.exp(-1.5)) + abs(math.exp(-2) - math.exp(-1))) / 3)
    assert MismatchReport.of(old, old).effective_sample_size == pytest.approx(1.0)
    means = {name: values.mean().item() for name, values in mismatch(old.double(), inference.double()).items()}
    assert means == pytest.approx({"probability_gap": report.probability_gap, "mismatch_k1": report.k1, "mismatch_k3": report.k3})
    assert (report.probability_gap_min, report.probability_gap_max) == pytest.approx((0.0, math.exp(-1) - math.exp(-2)))
    probabilities = [math.exp(value) for value in (-1.5, -1.0, -0.5)]
    drawn = (report.inference_probability_min, report.inference_probability, report.inference_probability_max)
    assert drawn == pytest.approx((probabilities[0], sum(probabilities) / 3, probabilities[2]))
    with pytest.raises(ValueError, match="must be of one shape and not empty"):
        MismatchReport.of(old[:0], inference[:0])


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (PolicyLossConfig, {"kind": "ppo"}, "kind='ppo' must be one of clip, cispo"),
        (PolicyLossConfig, {"ratio_level": "turn"}, "ratio_level='turn' must be one of"),
        (PolicyLossConfig, {"clip_low": -0.1}, "clip_low=-0.1 must not be negative"),
        (PolicyLossConfig, {"clip_high": math.nan}, "clip_high=nan must not be negative"),
        (PolicyLossConfig, {"dual_clip": 1.0}, "dual_clip=1.0 must be above 1"),
        (PolicyLossConfig, {"kind": "cispo", "dual_clip": 3.0}, "dual_clip=3.0 must be above 1, and kind='clip'"),
        (PolicyLossConfig, {"kind": "cispo", "ratio_level": "sequence"}, "ratio_level='sequence' has no meaning"),
        (ImportanceCorrection, {"level": "turn"}, "level='turn' must be one of"),
        (ImportanceCorrection, {"mode": "drop"}, "mode='drop' must be one of"),
        (ImportanceCorrection, {"high": 0.0}, "low=0.0 and high=0.0 must be in order"),
        (ImportanceCorrection, {"low": 0.5}, "low=0.5 has no effect with mode='truncate'"),
        (ImportanceCorrection, {"veto": 1.0}, "veto=1.0 must lie from 0 to below 1"),
        (GRPOObjective, {"kl_estimator": "k4"}, "kl_estimator='k4' must be one of k1, k2, k3"),
        (GRPOObjective, {"kl_beta": -1.0}, "kl_beta=-1.0 must be a finite number, at least 0"),
        (GRPOObjective, {"entropy_weight": math.nan}, "entropy_weight=nan must be a finite number, at least 0"),
        (GRPOObjective, {"entropy_weight": -5.0}, "entropy_weight=-5.0 must be a finite number, at least 0"),
        (Aggregation, {"mode": "mean"}, "mode='mean' must be one of"),
        (Aggregation, {"mode": "constant"}, "length=None must be at least 1 with mode='constant'"),
        (Aggregation, {"length": 5}, "length=5 must be .* None with others"),
        (AdvantageConfig, {"baseline": "median"}, "baseline='median' must be one of"),
        (AdvantageConfig, {"scale": "mad"}, "scale='mad' must be one of"),
        (AdvantageConfig, {"std_correction": 2}, "std_correction=2 must be 0"),
        (OverlongPenalty, {"max_length": 4, "buffer": 5}, "buffer=5 must lie from 1 to max_length=4"),
        (OverlongPenalty, {"max_length": math.inf, "buffer": 5}, "max_length=inf must be a whole number, at least 1"),
        (GRPOConfig, {"num_groups": 2, "group_size": 1, "seq_len": 8}, "group_size=1 must be at least 2"),
        (
            GRPOConfig,
            {"num_groups": 2, "group_size": 2, "seq_len": 8, "old_logprobs": "engine"},
            "old_logprobs='engine' must be trainer or",
        ),
        (
            GRPOConfig,
            {"num_groups": 3, "group_size": 3, "seq_len": 8, "num_mini_batches": 2},
            "= 9 must be divisible by num_mini_batches=2",
        ),
        (GRPOConfig, {"num_groups": 3, "group_size": 3, "seq_len": 8, "kl_in_reward": -1.0}, "kl_in_reward=-1.0 must be a finite number"),
        (
            GRPOConfig,
            {"num_groups": 3, "group_size": 3, "seq_len": 8, "kl_in_reward": math.inf},
            "kl_in_reward=inf must be a finite number",
        ),
        (
            GRPOConfig,
            {"num_groups": 3, "group_size": 3, "seq_len": 8, "kl_in_reward": 0.1, "kl_in_reward_estimator": "k4"},
            "kl_in_reward_estimator='k4' must be one of k1, k2, k3",
        ),
        (
            GRPOConfig,
            {"num_groups": 3, "group_size": 3, "seq_len": 8, "kl_in_reward_estimator": "k3"},
            "kl_in_reward_estimator='k3' has no effect without kl_in_reward",
        ),
        (
            GRPOConfig,
            {"num_groups": 3, "group_size": 3, "seq_len": 8, "reward_clip": (1.0, 1.0)},
            "must be two finite numbers in ascending",
        ),
        (GRPOConfig, {"num_groups": 3, "group_size": 3, "seq_len": 8, "reward_clip": (0.0, math.inf)}, "must be two finite numbers in asc"),
        (GRPOConfig, {"num_groups": 2.5, "group_size": 3, "seq_len": 8}, "num_groups=2.5 must be a whole number, at least 1"),
        (
            GRPOConfig,
            {"num_groups": 3, "group_size": 3, "seq_len": 8, "max_filter_ratio": math.nan},
            "max_filter_ratio=nan must be a finite",
        ),
        (GRPOConfig, {"num_groups": 3, "group_size": 3, "seq_len": 8, "max_filter_ratio": 0.5}, "max_filter_ratio=0.5 must be a finite"),
        (GenericGenerationArgs, {"temperature": -1.0}, "temperature=-1.0 must be a finite number, at least 0"),
        (GenericGenerationArgs, {"temperature": math.nan}, "temperature=nan must be a finite number, at least 0"),
        (GenericGenerationArgs, {"max_tokens": -3}, "max_tokens=-3 must be at least 1"),
        (GenericGenerationArgs, {"top_k": -5}, "top_k=-5 must be at least 0"),
        (GenericGenerationArgs, {"top_p": 7.0}, "top_p=7.0 must lie above 0 and up to 1"),
        (GenericGenerationArgs, {"top_p": math.nan}, "top_p=nan must lie above 0 and up to 1"),
    ],
)
def test_what_cannot_be_honoured_is_refused(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**fields)
