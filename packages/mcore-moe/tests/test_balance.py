# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Group limits, biases, losses and balanced assignments against loops and closed forms."""

import itertools

import pytest
import torch

from mcore_moe import (
    choose_experts,
    compute_routing_scores_for_aux_loss,
    get_updated_expert_bias,
    sinkhorn,
    topk_routing_with_score_function,
    z_loss_func,
)

F64 = torch.float64


def by_hand(scores: list[float], topk: int, num_groups: int, group_topk: int, bias: list[float]) -> list[int]:
    """The chosen experts, best first."""
    keys = [score + more for score, more in zip(scores, bias, strict=True)]
    size = len(keys) // num_groups
    groups = [keys[group * size : (group + 1) * size] for group in range(num_groups)]
    worth = [sum(sorted(group, reverse=True)[: topk // group_topk]) for group in groups]
    best = sorted(range(num_groups), key=lambda group: (-worth[group], group))[:group_topk]
    allowed = [expert for group in best for expert in range(group * size, (group + 1) * size)]
    return sorted(allowed, key=lambda expert: (-keys[expert], expert))[:topk]


@pytest.mark.parametrize(("num_groups", "group_topk", "topk"), [(4, 2, 4), (4, 2, 2), (2, 1, 3), (4, 4, 4), (1, 1, 5)])
@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus", "softmax", "pre_softmax"])
def test_groups_limit_the_choice_as_a_loop_does(num_groups: int, group_topk: int, topk: int, score_function: str) -> None:
    generator = torch.Generator().manual_seed(topk)
    logits = torch.randn(50, 12, generator=generator, dtype=F64)
    learned = score_function in ("sigmoid", "sqrtsoftplus")
    bias = torch.randn(12, generator=generator, dtype=F64) * 0.3 if learned else torch.zeros(12, dtype=F64)
    scores = {
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": (1 + logits.exp()).log().sqrt(),
        "softmax": logits,
        "pre_softmax": logits.softmax(-1),
    }[score_function]
    routing = choose_experts(
        logits,
        topk,
        pre_softmax=score_function == "pre_softmax",
        score_function=score_function.removeprefix("pre_"),
        num_groups=num_groups,
        group_topk=group_topk,
        scaling_factor=2.5,
        expert_bias=bias if learned else None,
    )
    for row, experts, probs in zip(scores, routing.experts_TK.tolist(), routing.probs_TK, strict=True):
        assert experts == by_hand(row.tolist(), topk, num_groups, group_topk, bias.tolist())
        assert len({expert * num_groups // 12 for expert in experts}) <= group_topk
        picked = row[experts]
        expected = picked / picked.sum() if learned else picked.softmax(0) if score_function == "softmax" else picked
        torch.testing.assert_close(probs, 2.5 * expected, rtol=1e-12, atol=1e-15)


def test_one_group_is_no_group_and_equal_biases_change_nothing() -> None:
    logits = torch.randn(30, 8, dtype=F64)
    plain = topk_routing_with_score_function(logits, 3, score_function="sigmoid")
    for choice in ({"num_groups": 1, "group_topk": 1}, {"expert_bias": torch.full((8,), 7.0)}, {"expert_bias": torch.zeros(8)}):
        other = topk_routing_with_score_function(logits, 3, score_function="sigmoid", **choice)
        assert all(torch.equal(one, two) for one, two in zip(plain, other, strict=True))


def test_pre_and_post_softmax_agree_when_all_experts_are_chosen() -> None:
    logits = torch.randn(9, 4, dtype=F64)
    torch.testing.assert_close(*(choose_experts(logits, 4, pre_softmax=pre).probs_TK for pre in (False, True)))


def test_gradients_reach_chosen_experts_only() -> None:
    logits = torch.randn(20, 6, dtype=F64, requires_grad=True)
    routing = choose_experts(logits, 2)
    (grad,) = torch.autograd.grad((routing.probs_TK * torch.randn(20, 2, dtype=F64)).sum(), logits)
    chosen = torch.zeros(20, 6, dtype=torch.bool).scatter(1, routing.experts_TK, True)
    assert not grad[~chosen].any() and grad[chosen].all()
    torch.testing.assert_close(grad.sum(-1), torch.zeros(20, dtype=F64), rtol=0, atol=1e-12)


def test_a_recorded_choice_gets_weights_of_the_present_logits() -> None:
    first, now = torch.randn(10, 6, dtype=F64), torch.randn(10, 6, dtype=F64)
    recorded = choose_experts(first, 2).experts_TK
    recorded[3] = -1
    routing = choose_experts(now, 2, experts_TK=recorded)
    fresh = choose_experts(now, 2).experts_TK
    assert torch.equal(routing.experts_TK[3], fresh[3])
    keep = torch.arange(10) != 3
    assert torch.equal(routing.experts_TK[keep], recorded[keep])
    torch.testing.assert_close(routing.probs_TK, now.gather(1, routing.experts_TK).softmax(-1))


def test_scores_of_losses_know_no_groups_and_sum_to_one() -> None:
    logits = torch.randn(20, 6, dtype=F64)
    for score_function in ("softmax", "sigmoid", "sqrtsoftplus"):
        chosen, scores = compute_routing_scores_for_aux_loss(logits, 2, score_function)
        assert torch.equal(chosen.sum(-1), torch.full((20,), 2))
        assert torch.equal(chosen, torch.zeros_like(chosen).scatter(1, logits.topk(2).indices, True))
        torch.testing.assert_close(scores.sum(-1), torch.ones(20, dtype=F64))


def test_z_loss_on_constants_and_its_gradient() -> None:
    logits = torch.full((5, 8), 2.0, dtype=F64, requires_grad=True)
    loss = z_loss_func(logits, 1e-3)
    log_sum = 2.0 + torch.tensor(8.0, dtype=F64).log()
    assert loss.item() == pytest.approx(1e-3 * log_sum.item() ** 2)
    (grad,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(grad, (1e-3 * 2 * log_sum / 5 / 8).detach().expand(5, 8))


def test_bias_falls_by_the_rate_where_an_expert_has_too_much() -> None:
    bias = torch.tensor([0.5, 0.0, -0.5, 0.0])
    updated = get_updated_expert_bias(torch.tensor([9, 1, 4, 2]), bias, 0.125)
    assert updated.tolist() == [0.375, 0.125, -0.5, 0.125]
    assert torch.equal(get_updated_expert_bias(torch.full((4,), 3), bias, 0.125), bias)


@pytest.mark.parametrize("scale", [1.0, 200.0])
def test_sinkhorn_balances_rows_and_columns_without_overflow(scale: float) -> None:
    cost = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)) * min(scale, 3.0) + scale
    result = sinkhorn(cost)
    assert result.isfinite().all()
    torch.testing.assert_close(result.sum(0), torch.full((8,), 1 / 8), rtol=1e-2, atol=0)
    torch.testing.assert_close(result.sum(1), torch.full((64,), 1 / 64), rtol=5e-2, atol=0)


def test_sinkhorn_equals_plain_iterations_and_leaves_padding_out() -> None:
    cost = torch.randn(16, 4, dtype=F64)
    kernel, rows, columns = cost.exp(), torch.ones(16, dtype=F64), torch.ones(4, dtype=F64)
    for _ in range(500):
        rows = 1 / (16 * kernel @ columns)
        columns = 1 / (4 * kernel.t() @ rows)
    torch.testing.assert_close(sinkhorn(cost, tol=1e-12, max_iterations=500), rows[:, None] * kernel * columns, rtol=1e-5, atol=1e-9)
    padded = torch.cat((cost, torch.full((3, 4), 50.0, dtype=F64)))
    valid = torch.arange(19) < 16
    result = sinkhorn(padded, tol=1e-12, max_iterations=500, valid=valid)
    torch.testing.assert_close(result[:16], sinkhorn(cost, tol=1e-12, max_iterations=500), rtol=1e-9, atol=1e-12)
    assert not result[16:].any()


def test_equal_scores_are_chosen_by_number_within_groups_too() -> None:
    routing = choose_experts(torch.zeros(2, 8), 4, score_function="sigmoid", num_groups=4, group_topk=2)
    assert routing.experts_TK.tolist() == [[0, 1, 2, 3]] * 2
    # Far fewer distinct bfloat16 values than experts: ties go to the lowest number whatever the rest.
    logits = torch.tensor(list(itertools.product([0.0, 1.0], repeat=6)), dtype=torch.bfloat16)
    for row, experts in zip(logits.tolist(), choose_experts(logits, 3).experts_TK.tolist(), strict=True):
        assert experts == sorted(range(6), key=lambda expert: (-row[expert], expert))[:3]
