# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The clipped loss against its closed form."""

import math

import pytest
import torch

from mcore_rl import calculate_grpo_loss, group_relative_advantages

EPS = 0.2


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
