# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the functions of routing are asked for is computed or refused by name, as the fields of `MoEConfig` are."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_moe import (
    MoEConfig,
    apply_router_token_dropping,
    choose_experts,
    compute_routing_scores_for_aux_loss,
    get_capacity,
    get_updated_expert_bias,
    sinkhorn,
    switch_load_balancing_loss_func,
    topk_routing_with_score_function,
    z_loss_func,
)

LOGITS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
CHOICES: list[tuple[dict[str, Any], str]] = [
    ({"topk": 5}, "topk=5 must lie in 1..num_experts=4"),
    ({"topk": 0}, "topk=0 must lie in 1..num_experts=4"),
    ({"topk": -1}, "topk=-1 must lie in 1..num_experts=4"),
    # A group would be scored by none of its experts.
    ({"topk": 1, "num_groups": 4, "group_topk": 2}, "group_topk=2 must divide topk=1: so many of a group score it"),
    ({"topk": 3, "num_groups": 2, "group_topk": 2}, "group_topk=2 must divide topk=3"),
    ({"topk": 2, "num_groups": 3, "group_topk": 1}, "num_groups=3 must divide num_experts=4"),
    ({"topk": 2, "num_groups": 0, "group_topk": 1}, "num_groups=0 must divide num_experts=4"),
    ({"topk": 2, "num_groups": 2, "group_topk": 3}, "group_topk=3 must lie in 1..num_groups=2"),
    ({"topk": 2, "num_groups": 2, "group_topk": 0}, "group_topk=0 must lie in 1..num_groups=2"),
    ({"topk": 3, "num_groups": 2, "group_topk": 1}, "topk=3 asks group_topk=1 groups for 3 experts each, but 2 groups have 2; lower topk"),
    ({"topk": 2, "num_groups": 2}, "num_groups=2 and group_topk=None go together; set both or none"),
    ({"topk": 2, "group_topk": 2}, "num_groups=None and group_topk=2 go together; set both or none"),
    ({"topk": 2, "score_function": "foo"}, "score_function='foo' must be softmax or sigmoid or sqrtsoftplus"),
]


def refused(message: str, call: Callable[..., Any], *arguments: Any, **choices: Any) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(*arguments, **choices)


@pytest.mark.parametrize(("choices", "message"), CHOICES)
def test_functions_refuse_what_the_config_refuses(choices: dict[str, Any], message: str) -> None:
    refused(message, choose_experts, LOGITS, **choices)
    refused(message, topk_routing_with_score_function, LOGITS, **choices)
    fields = {f"moe_router_{name}": value for name, value in choices.items()}
    names = re.sub(r"\b(topk|num_groups|group_topk|score_function)\b", r"moe_router_\1", message).replace("num_experts", "num_moe_experts")
    refused(names, MoEConfig, num_moe_experts=4, **fields)
    if set(choices) <= {"topk", "score_function"}:
        refused(message, compute_routing_scores_for_aux_loss, LOGITS, **{"score_function": "softmax", **choices})


def test_a_choice_of_other_shapes_is_refused() -> None:
    refused("num_experts=0 must be at least 1", choose_experts, LOGITS[:, :0], 1)
    refused("num_experts=0 must be at least 1", compute_routing_scores_for_aux_loss, LOGITS[:, :0], 1, "softmax")
    refused("logits have shape [1, 5, 4], must be [tokens, experts]", choose_experts, LOGITS[None], 1)
    refused("expert_bias has shape [1], must be [4]", choose_experts, LOGITS, 1, expert_bias=torch.ones(1))
    refused("experts_TK has shape [5, 2], must be [5, 1]", choose_experts, LOGITS, 1, experts_TK=torch.ones(5, 2))
    refused("scaling_factor=-1.0 must be above 0", choose_experts, LOGITS, 1, scaling_factor=-1.0)
    refused("pre_softmax=True needs score_function='softmax'", choose_experts, LOGITS, 1, pre_softmax=True, score_function="sigmoid")


def test_a_capacity_that_is_none_is_refused() -> None:
    routed = torch.ones(5, 4, dtype=torch.bool)
    for factor in (-1.0, 0.0, float("nan"), float("inf")):
        refused(f"capacity_factor={factor} must be above 0 and finite", apply_router_token_dropping, LOGITS, routed, 4, factor)
        refused(f"capacity_factor={factor} must be above 0 and finite", get_capacity, 16, 4, factor)
    refused("router_topk=5 must lie in 1..num_experts=4", apply_router_token_dropping, LOGITS, routed, 5, 1.0)
    refused("num_experts=0 must be at least 1", apply_router_token_dropping, LOGITS[:, :0], routed[:, :0], 1, 1.0)
    refused("routing_map has shape [5, 4] of torch.float32", apply_router_token_dropping, LOGITS, LOGITS, 2, 1.0)
    refused("routing_probs has shape [4, 4], must be [5, 4]", apply_router_token_dropping, LOGITS[:4], routed, 2, 1.0)
    refused("num_experts=0 must be at least 1", get_capacity, 16, 0, 1.0)
    refused("num_tokens=-1 must not be negative", get_capacity, -1, 4, 1.0)
    refused("min_capacity=-1 must not be negative", get_capacity, 16, 4, 1.0, -1)


def test_losses_and_bias_of_other_sizes_are_refused() -> None:
    counts = torch.ones(4)
    refused("num_experts=0 and topk=1 must be at least 1", switch_load_balancing_loss_func, LOGITS[:, :0], counts[:0], 5, 1, 0, 0.1)
    refused("num_experts=4 and topk=0 must be at least 1", switch_load_balancing_loss_func, LOGITS, counts, 5, 0, 4, 0.1)
    refused("probs has shape [5, 4], must be [5, 8]", switch_load_balancing_loss_func, LOGITS, counts, 5, 2, 8, 0.1)
    refused("tokens_per_expert has shape [1], must be [4]", switch_load_balancing_loss_func, LOGITS, counts[:1], 5, 2, 4, 0.1)
    refused("total_num_tokens=-5 must not be negative", switch_load_balancing_loss_func, LOGITS, counts, -5, 2, 4, 0.1)
    refused("moe_aux_loss_coeff=-0.1 must not be negative", switch_load_balancing_loss_func, LOGITS, counts, 5, 2, 4, -0.1)
    refused("z_loss_coeff=nan must not be negative, and finite", z_loss_func, LOGITS, float("nan"))
    refused("expert_bias_update_rate=-1.0 must not be negative", get_updated_expert_bias, counts, torch.zeros(4), -1.0)
    refused("tokens_per_expert has shape [1], must be [4]", get_updated_expert_bias, counts[:1], torch.zeros(4), 1.0)


def test_an_assignment_of_no_expert_or_without_an_iteration_is_refused() -> None:
    refused("cost has shape [5, 0], must be [tokens, experts] with an expert at least", sinkhorn, LOGITS[:, :0])
    refused("max_iterations=0 must be at least 1", sinkhorn, LOGITS, max_iterations=0)
    refused("tol=-1.0 must not be negative", sinkhorn, LOGITS, -1.0)
    refused("valid has shape [4], must be [5]: one bool a token", sinkhorn, LOGITS, valid=torch.ones(4, dtype=torch.bool))
