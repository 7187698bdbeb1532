# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Mixtures that start as a dense model: the same logits, for every activation, width of the experts and kind of weights."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, moe_feed_forward, upcycle_state_dict
from mcore_parallel import ParallelPlan, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step

F64 = torch.float64
MODEL = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=12, init_method_std=0.5)
MIXTURE = MoEConfig(num_moe_experts=8, moe_router_topk=4, moe_ffn_hidden_size=6)
TOKENS, STEP = torch.arange(10) % 7, Step.causal(2, 5)


def dense_model(model: TransformerConfig) -> GPTModel:
    dense = GPTModel(model, ProcessGroups.single(), dtype=F64)
    with torch.no_grad():
        for name, parameter in dense.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    return dense


def upcycled(model: TransformerConfig, mixture: MoEConfig, zero_router: bool = False) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits of both models, and the state of the mixture."""
    dense = dense_model(model)
    experts = GPTModel(model, ProcessGroups.single(), feed_forward=moe_feed_forward(mixture), dtype=F64)
    if zero_router:
        with torch.no_grad():
            for name, parameter in experts.named_parameters():
                if "router" in name:
                    parameter.zero_()
    state = upcycle_state_dict(dense.state_dict(), experts.state_dict(), mixture)
    experts.load_state_dict(state)
    return dense(TOKENS, STEP)[0].logits(), experts(TOKENS, STEP)[0].logits(), state


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "quick_geglu", "gelu", "squared_relu"])
def test_the_logits_stay_for_every_activation_and_width(activation: str, biased: bool) -> None:
    model = dataclasses.replace(MODEL, activation=activation, add_bias_linear=biased)
    if activation == "quick_geglu":
        model = dataclasses.replace(model, glu_linear_offset=1.0, activation_func_clamp_value=2.0)
    for width in (12, 6, 3):
        expected, logits, _ = upcycled(model, dataclasses.replace(MIXTURE, moe_ffn_hidden_size=width))
        torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "choice",
    [
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_topk_scaling_factor": 2.5},
        {"moe_router_score_function": "sqrtsoftplus"},
        {"moe_router_num_groups": 2, "moe_router_group_topk": 2},
        {"moe_router_topk_scaling_factor": 0.5, "moe_layer_freq": (0, 1)},
        {"moe_expert_capacity_factor": 8.0, "moe_pad_expert_input_to_capacity": True},
    ],
    ids=["sigmoid", "sqrtsoftplus", "groups", "dense-layer", "capacity"],
)
def test_the_logits_stay_whatever_the_weights(choice: dict[str, Any]) -> None:
    expected, logits, _ = upcycled(dataclasses.replace(MODEL, add_bias_linear=True), dataclasses.replace(MIXTURE, **choice))
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "choice", [{"moe_router_pre_softmax": True}, {"moe_router_load_balancing_type": "sinkhorn"}], ids=["pre", "sinkhorn"]
)
def test_weights_over_all_experts_are_made_up_for_as_if_they_were_alike(choice: dict[str, Any]) -> None:
    model, mixture = dataclasses.replace(MODEL, add_bias_linear=True), dataclasses.replace(MIXTURE, **choice)
    expected, logits, _ = upcycled(model, mixture, zero_router=True)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(upcycled(model, mixture)[1], expected)


def test_patterns_of_layers_keep_their_logits() -> None:
    dense = dense_model(dataclasses.replace(MODEL, num_layers=4, hybrid_layer_pattern="*-*-"))
    pattern = dataclasses.replace(MODEL, num_layers=4, hybrid_layer_pattern="*-*E")
    experts = GPTModel(pattern, ProcessGroups.single(), feed_forward=moe_feed_forward(MIXTURE), dtype=F64)
    experts.load_state_dict(upcycle_state_dict(dense.state_dict(), experts.state_dict(), MIXTURE))
    expected, logits = (model(TOKENS, STEP)[0].logits() for model in (dense, experts))
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-12)


def test_slices_follow_one_another_and_share_a_row_of_the_router() -> None:
    _, _, state = upcycled(MODEL, MIXTURE)
    dense = dense_model(MODEL).state_dict()
    up, down, rows = (state[f"layers.1.mlp.{name}"] for name in ("experts.up", "experts.down", "router.weight"))
    for expert in range(8):
        cut = slice(expert % 2 * 6, expert % 2 * 6 + 6)
        assert torch.equal(up[expert], dense["layers.1.mlp.up.weight"][:, cut])
        assert torch.equal(down[expert], 2 * dense["layers.1.mlp.down.weight"][:, cut])
        assert torch.equal(rows[expert], rows[expert // 2 * 2])
    assert len(rows.unique(dim=0)) == 4
    up[0].zero_()
    assert up[2].any() and dense["layers.1.mlp.up.weight"].any(), "experts share no memory"


def test_all_but_the_routers_may_be_on_the_meta_device_and_dtypes_are_those_of_the_mixture() -> None:
    _, _, expected = upcycled(MODEL, MIXTURE)
    experts = GPTModel(MODEL, ProcessGroups.single(), feed_forward=moe_feed_forward(MIXTURE), dtype=F64).state_dict()
    shapes = {name: value if "router" in name else value.to("meta").to(torch.bfloat16) for name, value in experts.items()}
    state = upcycle_state_dict(dense_model(MODEL).state_dict(), shapes, MIXTURE)
    assert list(state) == list(expected)
    for name, value in state.items():
        assert value.dtype == (F64 if "router" in name else torch.bfloat16)
        assert "router" in name or torch.equal(value, expected[name].to(torch.bfloat16))


def check_ranks(plan: ParallelPlan) -> None:
    """Every rank takes its part of the whole state."""
    expected, _, state = upcycled(MODEL, MIXTURE)
    groups = ProcessGroups.build(plan)
    model = GPTModel(MODEL, groups, feed_forward=moe_feed_forward(MIXTURE), dtype=F64)
    with torch.no_grad():
        for shard in named_shards(model):
            shard.parameter.copy_(state[shard.name][shard.spec.slices(groups)])
    assert not list(named_buffer_shards(model))
    torch.testing.assert_close(model(TOKENS, STEP)[0].logits(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.world(2)
def test_two_ranks_with_half_of_the_experts_each_have_the_same_logits(world) -> None:
    world(check_ranks, plan=ParallelPlan(dp=2, ep=2))


@pytest.mark.filterwarnings("ignore:moe_router_force_load_balancing=True routes at random")
@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"moe_ffn_hidden_size": 5}, "moe_ffn_hidden_size=5 of layers.0.mlp.experts.down must divide the dense width 12"),
        ({"moe_ffn_hidden_size": 24}, "moe_ffn_hidden_size=24 .* must divide the dense width 12 of layers.0.mlp.down.weight"),
        ({"moe_ffn_hidden_size": 4}, "moe_router_topk=4 must be a multiple of 3, the experts that hold one dense feed-forward"),
        ({"moe_ffn_hidden_size": 4, "moe_router_topk": 3}, "num_moe_experts=8 must be a multiple of 3"),
        (
            {"moe_ffn_hidden_size": 3, "moe_router_num_groups": 4, "moe_router_group_topk": 2},
            "num_moe_experts / moe_router_num_groups=2 must be a multiple of 4",
        ),
        (
            {"moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
            "moe_apply_probs_on_input=True scales the input of the activation",
        ),
        ({"moe_router_force_load_balancing": True}, "moe_router_force_load_balancing=True sends a token to experts at random"),
        ({"moe_latent_size": 4}, "moe_latent_size=4 has no part in a dense model"),
        ({"moe_shared_expert_intermediate_size": 4}, "layers.0.mlp.shared_experts.up.weight has no part in a dense model"),
        (
            {"moe_ffn_hidden_size": 12, "moe_router_topk": 1, "moe_router_score_function": "sigmoid"},
            "moe_router_topk=1 with moe_router_score_function='sigmoid' weighs an expert by its own score",
        ),
    ],
)
def test_mixtures_that_cannot_start_so_are_named(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        upcycled(MODEL, dataclasses.replace(MIXTURE, **choice))


def test_models_that_are_not_alike_are_named() -> None:
    dense = dense_model(MODEL).state_dict()
    experts = GPTModel(MODEL, ProcessGroups.single(), feed_forward=moe_feed_forward(MIXTURE), dtype=F64).state_dict()
    with pytest.raises(ValueError, match="no parameter named ...experts.up"):
        upcycle_state_dict(dense, dense, MIXTURE)
    with pytest.raises(ValueError, match="final_norm.weight is in the mixture, not in the dense model"):
        upcycle_state_dict({name: value for name, value in dense.items() if name != "final_norm.weight"}, experts, MIXTURE)
    with pytest.raises(ValueError, match="extra is in the dense model, not in the mixture"):
        upcycle_state_dict({**dense, "extra": torch.ones(1)}, experts, MIXTURE)
    with pytest.raises(ValueError, match="one of layers.0.mlp.experts.up_bias and layers.0.mlp.up.bias is missing"):
        upcycle_state_dict({**dense, "layers.0.mlp.up.bias": torch.ones(2, 12)}, experts, MIXTURE)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts.up would be \(8, 6, 8\), the mixture has \(8, 2, 6, 8\)"):
        upcycle_state_dict({**dense, "layers.0.mlp.up.weight": torch.ones(12, 8)}, experts, MIXTURE)
    with pytest.raises(ValueError, match="has 4 experts; pass whole tensors, not shards"):
        halves = {name: value[:4] if ".experts." in name else value for name, value in experts.items()}
        upcycle_state_dict(dense, halves, MIXTURE)
