# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Selection, weights and the balance loss as formulas."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_moe import MoEConfig, choose_experts, switch_load_balancing_loss_func, topk_routing_with_score_function


def by_hand(row: list[float], topk: int, pre_softmax: bool, sigmoid: bool) -> dict[int, float]:
    x = torch.tensor(row, dtype=torch.float64)
    scores = x.sigmoid() if sigmoid else x.softmax(0) if pre_softmax else x
    order = sorted(range(len(row)), key=lambda expert: (-scores[expert].item(), expert))[:topk]
    picked = scores[order]
    if sigmoid:
        picked = picked / picked.sum() if topk > 1 else picked
    elif not pre_softmax:
        picked = picked.softmax(0)
    return {expert: weight.item() for expert, weight in zip(order, picked, strict=True)}


@pytest.mark.parametrize("topk", [2, 3, 5])
@pytest.mark.parametrize(("pre_softmax", "score_function"), [(False, "softmax"), (True, "softmax"), (False, "sigmoid")])
def test_choice_equals_a_loop_over_tokens(topk: int, pre_softmax: bool, score_function: str) -> None:
    logits = torch.randn(40, 5, generator=torch.Generator().manual_seed(topk), dtype=torch.float64).round(decimals=0)
    probs, chosen = topk_routing_with_score_function(logits, topk, use_pre_softmax=pre_softmax, score_function=score_function)
    for row, prob, mark in zip(logits.tolist(), probs, chosen, strict=True):
        expected = by_hand(row, topk, pre_softmax, score_function == "sigmoid")
        assert set(mark.nonzero().flatten().tolist()) == set(expected)
        for expert, weight in expected.items():
            assert prob[expert].item() == pytest.approx(weight, rel=1e-12)


def test_equal_scores_go_to_the_lowest_number() -> None:
    assert choose_experts(torch.zeros(3, 6), 2).experts_TK.tolist() == [[0, 1]] * 3


class Operators(TorchDispatchMode):
    """Counts what torch is asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("score_function", ["sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize(("topk", "groups", "sums"), [(1, None, 0), (4, None, 1), (4, 2, 2), (8, 2, 2)])
def test_only_batch_invariant_routing_adds_up_one_after_the_other(score_function: str, topk: int, groups: int | None, sums: int) -> None:
    logits = torch.randn(30, 16, generator=torch.Generator().manual_seed(topk))
    options = {"score_function": score_function, "num_groups": groups and 2 * groups, "group_topk": groups}
    with Operators() as ran:
        routing = choose_experts(logits, topk, **options)
    added = 1 if topk > 1 else 0
    assert (ran.counts["sum"], ran.counts["add"], ran.counts["split"]) == (sums, added, 0)
    scores = logits.sigmoid() if score_function == "sigmoid" else torch.nn.functional.softplus(logits).sqrt()
    keys = scores
    if groups:
        members = scores.unflatten(-1, (2 * groups, -1))
        best = (
            members.sort(dim=-1, descending=True).values[..., : topk // groups].sum(-1).sort(dim=-1, descending=True, stable=True).indices
        )
        keys = members.masked_fill(
            torch.ones_like(best, dtype=torch.bool).scatter(-1, best[:, :groups], False).unsqueeze(-1), -1.0
        ).flatten(-2)
    chosen = keys.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    picked = scores.gather(-1, chosen)
    assert torch.equal(routing.experts_TK, chosen)
    assert torch.equal(routing.probs_TK, picked / (picked.sum(-1, keepdim=True) + 1e-20) if topk > 1 else picked)
    with Operators() as ran:
        choose_experts(logits[:1], topk, batch_invariant=True, **options)
    assert ran.counts["sum"] == 0


def test_scaling_factor_multiplies_once() -> None:
    logits = torch.randn(7, 4, dtype=torch.float64)
    plain, scaled = choose_experts(logits, 2), choose_experts(logits, 2, scaling_factor=2.5)
    assert torch.equal(plain.probs_TK * 2.5, scaled.probs_TK)


def test_even_router_costs_its_coefficient_and_a_collapsed_one_more() -> None:
    even = switch_load_balancing_loss_func(torch.full((8, 4), 0.25), torch.full((4,), 4), 8, 2, 4, 0.1)
    assert even.item() == pytest.approx(0.1)
    collapsed = torch.zeros(8, 4)
    collapsed[:, :2] = 0.5
    loss = switch_load_balancing_loss_func(collapsed, torch.tensor([8, 8, 0, 0]), 8, 2, 4, 0.1)
    assert loss.item() == pytest.approx(0.1 * 4 / 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_moe_experts": 0}, "num_moe_experts=0"),
        ({"num_moe_experts": 2, "moe_router_topk": 3}, "moe_router_topk=3 must lie in 1..num_moe_experts=2"),
        ({"num_moe_experts": 2, "moe_router_topk": 1}, "moe_router_pre_softmax=True"),
        ({"num_moe_experts": 2, "moe_router_score_function": "relu"}, "softmax or sigmoid or sqrtsoftplus"),
        ({"num_moe_experts": 2, "moe_router_dtype": "int8"}, "fp32, fp64"),
        ({"num_moe_experts": 2, "moe_aux_loss_coeff": -1.0}, "must not be negative"),
    ],
)
def test_bad_fields_are_named(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        MoEConfig(**fields)
