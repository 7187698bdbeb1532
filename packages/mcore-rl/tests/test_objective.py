# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The clipped loss against its closed form."""

import dataclasses
import math

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.training import Batch
from mcore_rl import GRPOObjective, ImportanceCorrection, PolicyLossConfig, calculate_grpo_loss, group_relative_advantages

EPS = 0.2
SIZES = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16, vocab_size=16, init_method_std=0.6)
EXTRAS = ("advantages", "inference_logprobs", "old_logprobs", "ref_logprobs")


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 2.0])
def test_loss_is_the_pessimistic_branch(advantage: float, ratio: float) -> None:
    current = torch.tensor([math.log(0.3 * ratio)], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([math.log(0.3)], dtype=torch.float64)
    loss, kl, r, _, above, below = calculate_grpo_loss(current, old, None, torch.tensor([advantage]), EPS, EPS, 0.0, 0.0)
    clipped = min(max(ratio, 1 - EPS), 1 + EPS)
    assert loss.item() == pytest.approx(-min(ratio * advantage, clipped * advantage))
    assert r.item() == pytest.approx(ratio)
    assert kl.item() == 0
    assert (above.item(), below.item()) == (ratio > 1 + EPS, ratio < 1 - EPS)
    loss.backward()
    inactive = (advantage > 0 and ratio > 1 + EPS) or (advantage < 0 and ratio < 1 - EPS)
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(0.0 if inactive else -ratio * advantage)


def test_on_policy_loss_is_minus_the_weighted_advantage() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5])
    inference = logprobs - 0.1
    advantages = torch.tensor([1.0, -2.0, 0.5])
    loss, *_ = calculate_grpo_loss(logprobs, logprobs, logprobs, advantages, EPS, EPS, 0.1, 0.0, inference, 2.0)
    torch.testing.assert_close(loss, -math.exp(0.1) * advantages)


def test_truncation_caps_the_weight_from_above_only() -> None:
    logprobs = torch.full((2,), -1.0)
    inference = torch.tensor([-3.0, 0.0])
    loss, *_ = calculate_grpo_loss(logprobs, logprobs, None, torch.ones(2), EPS, EPS, 0.0, 0.0, inference, 1.5)
    torch.testing.assert_close(loss, torch.tensor([-1.5, -math.exp(-1.0)]))


def test_mean_of_the_kl_estimator_is_the_divergence() -> None:
    p, q = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64)
    _, kl, *_ = calculate_grpo_loss(p.log(), p.log(), q.log(), torch.zeros(3), EPS, EPS, 1.0, 0.0)
    torch.testing.assert_close((p * kl).sum(), (p * (p / q).log()).sum())


def test_impossible_tokens_stay_finite() -> None:
    current = torch.tensor([-math.inf, -1.0], requires_grad=True)
    loss, *_ = calculate_grpo_loss(current, torch.tensor([-1.0, -1.0]), None, torch.ones(2), EPS, EPS, 0.0, 0.1)
    assert loss.isfinite().all()


def test_gradients_agree_with_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    current, old, ref, inference = (-torch.rand(4, 6, generator=generator, dtype=torch.float64) - 0.5 for _ in range(4))
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x: calculate_grpo_loss(x, old[0], ref[0], advantages, EPS, EPS, 0.1, 0.01, inference[0], 2.0)[0], current[0].requires_grad_()
    )


def test_advantages_are_centred_and_scaled_within_their_group() -> None:
    first, second, flat = group_relative_advantages([[0.0, 1.0], [1.0, 2.0, 3.0], [5.0, 5.0]])
    assert first == pytest.approx([-0.5 / 0.5001, 0.5 / 0.5001])
    assert second == pytest.approx([-1 / (math.sqrt(2 / 3) + 1e-4), 0, 1 / (math.sqrt(2 / 3) + 1e-4)])
    assert flat == [0.0, 0.0]
    assert group_relative_advantages([[0.0, 1.0]], std_norm=False) == [[-0.5, 0.5]]


def weighted_batch(mask: list[float]) -> Batch:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(16, (2, len(mask) // 2 + 1), generator=generator)
    shape = tokens[:, 1:].shape
    extras = {name: torch.randn(shape, dtype=torch.float64, generator=generator) - 3 * (name != "advantages") for name in EXTRAS}
    return Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.tensor(mask).double().view(shape), extras=extras)


def oracle(objective: GRPOObjective, logits: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, float]]:
    """Token by token from the definition: the weighted sum of the losses, and the sums of the metrics."""
    total, sums = torch.zeros((), dtype=torch.float64), dict.fromkeys(("entropy", "kl", "ratio", "mismatch"), 0.0)
    rows = zip(logits, batch.labels.flatten().tolist(), batch.loss_mask.flatten().tolist(), strict=True)
    for number, (scores, label, weight) in enumerate(rows):
        if not weight:
            continue
        probs = torch.exp(scores / objective.temperature) / torch.exp(scores / objective.temperature).sum()
        entropy = -sum(p * p.log() for p in probs)
        advantage, inference, old, ref = (batch.extras[name].flatten()[number] for name in EXTRAS)
        current = probs[label].log()
        ratio = torch.exp(current - old)
        clipped = torch.clamp(ratio, 1 - objective.policy.clip_low, 1 + objective.policy.clip_high)
        limit = objective.correction
        correction = 1.0 if limit is None else min(math.exp(old - inference), limit.high if limit.mode == "truncate" else math.inf)
        kl = torch.exp(ref - current) - (ref - current) - 1
        policy = torch.minimum(ratio * advantage, clipped * advantage) * correction
        total = total + weight * (objective.kl_beta * kl - policy - objective.entropy_weight * entropy)
        terms = {"entropy": entropy, "kl": kl, "ratio": ratio, "mismatch": (current - inference).abs()}
        sums = {name: value + weight * terms[name].item() for name, value in sums.items()}
    return total, sums


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("mask", [[1.0] * 8, [0.5] * 8, [1, 0, 0.25, 2, 0, 0.5, 1, 0]], ids=["ones", "halves", "mixed"])
def test_sum_metrics_and_gradients_equal_the_definition(mask: list[float], temperature: float) -> None:
    objective = GRPOObjective(kl_beta=0.3, entropy_weight=0.2, temperature=temperature)
    batch, model = weighted_batch(mask), GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    parameters = list(model.parameters())
    output, _ = model(batch.tokens.flatten(), batch.step())
    report = objective(output, batch)
    gradients = torch.autograd.grad(report.sum, parameters)
    output, _ = model(batch.tokens.flatten(), batch.step())
    expected, sums = oracle(objective, output.logits(), batch)
    torch.testing.assert_close(report.sum.double(), expected, rtol=1e-10, atol=1e-12)
    assert report.count.item() == pytest.approx(sum(mask))
    for name, value in {"entropy": "entropy", "kl": "kl", "ratio": "ratio", "logprob_mismatch": "mismatch"}.items():
        assert report.metrics[name].item() == pytest.approx(sums[value], rel=1e-10)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, parameters), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "objective",
    [
        GRPOObjective(policy=PolicyLossConfig(clip_low=0.05, clip_high=0.4)),
        GRPOObjective(correction=ImportanceCorrection(mode="none")),
        GRPOObjective(correction=ImportanceCorrection(high=1.1)),
        GRPOObjective(correction=None),
    ],
    ids=["clip", "whole weights", "truncated weights", "no weights"],
)
def test_clipping_and_importance_weights_are_those_of_the_fields(objective: GRPOObjective) -> None:
    batch, model = weighted_batch([1.0] * 8), GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    # Weights on both sides of 2, where the default truncates.
    batch.extras["inference_logprobs"].sub_(2)
    output, _ = model(batch.tokens.flatten(), batch.step())
    expected, _ = oracle(objective, output.logits(), batch)
    torch.testing.assert_close(objective(output, batch).sum.double(), expected, rtol=1e-10, atol=1e-12)
    assert objective(output, batch).sum.item() != pytest.approx(GRPOObjective()(output, batch).sum.item())


def test_a_mean_does_not_depend_on_the_scale_of_the_mask() -> None:
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)

    def mean(mask: list[float]) -> float:
        batch = weighted_batch(mask)
        output, _ = model(batch.tokens.flatten(), batch.step())
        return GRPOObjective()(output, batch).mean.item()

    assert mean([0.5] * 8) == pytest.approx(mean([1.0] * 8))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_a_masked_position_may_hold_anything(bad: float) -> None:
    objective, mask = GRPOObjective(kl_beta=0.3, entropy_weight=0.2), [1, 0, 1, 1, 0, 1, 1, 0]
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)

    def gradients(batch: Batch) -> list[torch.Tensor]:
        output, _ = model(batch.tokens.flatten(), batch.step())
        report = objective(output, batch)
        assert report.sum.isfinite() and all(value.isfinite() for value in report.metrics.values())
        return list(torch.autograd.grad(report.sum, list(model.parameters())))

    clean = weighted_batch(mask)
    spoilt = {name: torch.where(clean.loss_mask > 0, value, bad) for name, value in clean.extras.items()}
    for one, other in zip(gradients(clean), gradients(dataclasses.replace(clean, extras=spoilt)), strict=True):
        assert torch.equal(one, other)


def test_the_entropy_of_an_even_policy_is_the_logarithm_of_its_size() -> None:
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    torch.nn.init.zeros_(model.get_parameter("output.weight"))
    batch = weighted_batch([1.0] * 8)
    output, _ = model(batch.tokens.flatten(), batch.step())
    assert GRPOObjective()(output, batch).metrics["entropy"].item() == pytest.approx(8 * math.log(16))


def test_a_temperature_without_log_probs_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature=0.0 must be positive"):
        GRPOObjective(temperature=0.0)
