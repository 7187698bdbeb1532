# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Mixtures that cannot be are refused before the first tensor."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from mcore_moe import MoEConfig, TopKRouter, moe_feed_forward, sinkhorn
from mcore_moe._config import ELSEWHERE, RESERVED
from mcore_moe._routing import top
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import check_grouped_width
from mcore_parallel.models import TransformerConfig, check_layout
from mcore_parallel.nn import Step

MODEL = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=16)
GROUPS: dict[str, Any] = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
BIASED: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
QUANTILES: dict[str, Any] = {"moe_router_load_balancing_type": "quantile_balancing", "moe_router_enable_expert_bias": True}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_ffn_hidden_size": -8}, "moe_ffn_hidden_size=-8 must be at least 1; leave it out"),
        ({"moe_ffn_hidden_size": 0}, "moe_ffn_hidden_size=0 must be at least 1"),
        ({"moe_ffn_hidden_size": 8.0}, "moe_ffn_hidden_size=8.0 must be an integer or None"),
        ({"num_moe_experts": "4"}, "num_moe_experts='4' must be an integer, not str; write 4"),
    ],
)
def test_types_and_sizes_are_checked(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{"num_moe_experts": 4, **values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moe_router_num_groups": 2}, "moe_router_num_groups=2 and moe_router_group_topk=None go together"),
        ({"moe_router_group_topk": 2}, "moe_router_num_groups=None and moe_router_group_topk=2 go together"),
        ({"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "moe_router_num_groups=3 must divide num_moe_experts=8"),
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 4}, "moe_router_group_topk=4 must lie in 1..moe_router_num_groups=2"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 4}, "moe_router_group_topk=4 must divide moe_router_topk=2"),
        (
            {"moe_router_num_groups": 8, "moe_router_group_topk": 1},
            "moe_router_topk=2 asks moe_router_group_topk=1 groups for 2 experts each, but 8 groups have 1",
        ),
        ({"moe_router_enable_expert_bias": True}, "needs moe_router_score_function='sigmoid' or 'sqrtsoftplus', found 'softmax'"),
        ({"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True}, "needs moe_router_score_function='softmax'"),
        ({"moe_router_bias_update_rate": -1.0}, "moe_router_bias_update_rate=-1.0 must not be negative, and finite; 0 freezes"),
        ({"moe_input_jitter_eps": 1.5}, "moe_input_jitter_eps=1.5 must lie in 0..1"),
        ({"moe_z_loss_coeff": -1.0}, "moe_z_loss_coeff=-1.0 must not be negative"),
        ({"moe_router_load_balancing_type": "loud"}, "moe_router_load_balancing_type='loud' must be aux_loss, seq_aux_loss, "),
        ({"moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss")}, "must be equally long; give one a type"),
        ({"moe_router_load_balancing_type": ("aux_loss",) * 2, "moe_aux_loss_coeff": (0.1, 0.1)}, "none twice"),
        ({"moe_router_load_balancing_type": (), "moe_aux_loss_coeff": ()}, "must name one type at least"),
        (
            {"moe_router_load_balancing_type": ("aux_loss", "sinkhorn"), "moe_aux_loss_coeff": (0.1, 0.0)},
            "combines sinkhorn, quantile_balancing, none with",
        ),
        ({**QUANTILES, "moe_router_enable_expert_bias": False}, "sets the bias of the experts; set moe_router_enable_expert_bias=True"),
        ({**QUANTILES, "moe_router_bias_update_rate": 0.1}, "has no use for moe_router_bias_update_rate=0.1; leave it out, or set 0"),
        ({**QUANTILES, "moe_router_num_groups": 2, "moe_router_group_topk": 1}, "found moe_router_num_groups=2; leave one out"),
        ({**QUANTILES, "moe_router_topk": 8}, "has nothing to balance: moe_router_topk=8 takes all experts; choose 'none'"),
        ({**QUANTILES, "moe_aux_loss_coeff": 0.1}, "has no loss to weigh"),
        ({"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.1}, "has no loss to weigh"),
        ({"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.1}, "has no loss to weigh"),
        ({"moe_router_load_balancing_type": "sinkhorn", "moe_router_num_groups": 2, "moe_router_group_topk": 1}, "selects by itself"),
        ({"moe_router_load_balancing_type": "sinkhorn", "moe_router_score_function": "sigmoid"}, "leave that at 'softmax'"),
        (
            {"moe_router_load_balancing_type": "sinkhorn", "moe_router_pre_softmax": True},
            "moe_router_pre_softmax=True changes nothing with",
        ),
        ({"moe_dispatch_fwd_dtype": "int8"}, "moe_dispatch_fwd_dtype='int8' must be fp8 or None"),
        (
            {"moe_dispatch_fwd_dtype": "fp8", "moe_token_dispatcher_type": "flex"},
            "moe_dispatch_fwd_dtype='fp8' needs moe_token_dispatcher_type='alltoall', found 'flex'",
        ),
        (
            {"moe_dispatch_fwd_dtype": "fp8", "moe_shared_expert_overlap": True, "moe_shared_expert_intermediate_size": 8},
            "moe_dispatch_fwd_dtype='fp8' does not go with moe_shared_expert_overlap=True",
        ),
        ({"moe_aux_loss_num_devices": 4}, "moe_aux_loss_num_devices=4 is for .*'device_aux_loss' and 'comm_aux_loss', found 'aux_loss'"),
        ({"moe_router_load_balancing_type": "comm_aux_loss"}, "type='comm_aux_loss' balances devices; set moe_aux_loss_num_devices"),
        (
            {"moe_router_load_balancing_type": "device_aux_loss", "moe_aux_loss_num_devices": 3},
            "moe_aux_loss_num_devices=3 must be at least 2 and divide num_moe_experts=8 for .*'device_aux_loss'",
        ),
        (
            {"moe_router_load_balancing_type": "device_aux_loss", "moe_router_num_groups": 1, "moe_router_group_topk": 1},
            "moe_router_num_groups=1 must be at least 2",
        ),
        (
            {"moe_router_load_balancing_type": "device_aux_loss", **GROUPS, "moe_aux_loss_num_devices": 0},
            "moe_aux_loss_num_devices=0 must be at least 2",
        ),
        ({"moe_router_bias_decay_steps": 9}, "moe_router_bias_decay_steps=9 freezes a bias that never moves; set moe_router_enable_expert"),
        ({**BIASED, "moe_router_bias_decay_steps": 0}, "moe_router_bias_decay_steps=0 must be at least 1"),
        ({**BIASED, "moe_router_bias_decay_style": "fast"}, "moe_router_bias_decay_style='fast' must be constant, linear or cosine"),
        ({**BIASED, "moe_router_bias_decay_style": "cosine"}, "moe_router_bias_decay_style='cosine' needs moe_router_bias_decay_steps"),
        (
            {**BIASED, "moe_router_bias_decay_steps": 9, "moe_router_bias_update_rate": 0.0},
            "moe_router_bias_decay_steps=9 freezes a bias that never moves",
        ),
        (
            {**QUANTILES, "moe_router_bias_decay_steps": 9, "moe_router_bias_decay_style": "linear"},
            "moe_router_bias_decay_style='linear' has no rate to bring down",
        ),
        ({"moe_router_bias_update_rate": 0.01}, "moe_router_bias_update_rate=0.01 moves no bias; set moe_router_enable_expert_bias=True"),
        ({"moe_token_drop_policy": "position"}, "moe_token_drop_policy='position' has nothing to drop; set moe_expert_capacity_factor"),
        ({"moe_router_topk_scaling_factor": 0.0}, "moe_router_topk_scaling_factor=0.0 must be above 0 and finite"),
        ({"moe_router_topk_scaling_factor": -1.0}, "moe_router_topk_scaling_factor=-1.0 must be above 0 and finite"),
        ({"moe_shared_expert_gate": True}, "has nothing to gate; set moe_shared_expert_intermediate_size"),
        ({"moe_shared_expert_intermediate_size": 0}, "moe_shared_expert_intermediate_size=0 must be at least 1"),
        ({"moe_apply_probs_on_input": True}, "moe_apply_probs_on_input=True needs moe_router_topk=1, found 2"),
        ({"moe_latent_size": 0}, "moe_latent_size=0 must be at least 1"),
        ({"moe_layer_freq": 0}, "moe_layer_freq=0 must be at least 1"),
        ({"moe_layer_freq": (0, 0)}, r"moe_layer_freq=\(0, 0\) must be at least 1, or one 0 or 1 a layer"),
        ({"moe_layer_freq": (1, 2)}, "one 0 or 1 a layer"),
    ],
)
def test_rules_name_both_fields(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{"num_moe_experts": 8, **values})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    ["moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_topk_scaling_factor", "moe_router_bias_update_rate", "moe_input_jitter_eps"],
)
def test_numbers_are_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}={value} must "):
        MoEConfig(num_moe_experts=8, **{name: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(
            ({name: value}, f"{name}={value!r} is for moe_token_dispatcher_type='flex', found 'alltoall'; leave one out")
            for name, value in {
                "moe_flex_dispatcher_backend": "hybridep",
                "moe_flex_dispatcher_fallback": "alltoall",
                "moe_flex_timeout_s": 7.0,
                "moe_deepep_num_sms": 8,
                "moe_hybridep_num_sms": 8,
                "moe_symmetric_exact_rows": True,
                "moe_symmetric_max_tokens": 8,
            }.items()
        ),
        (
            {"moe_token_dispatcher_type": "flex", "moe_symmetric_exact_rows": True},
            "moe_symmetric_exact_rows=True is for moe_flex_dispatcher_backend='symmetric', found 'deepep'; leave one out",
        ),
        (
            {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "symmetric", "moe_deepep_num_sms": 8},
            "moe_deepep_num_sms=8 is for moe_flex_dispatcher_backend='deepep', found 'symmetric'",
        ),
        (
            {"moe_enable_deepep": True, "moe_flex_dispatcher_backend": "hybridep"},
            "moe_enable_deepep=True is moe_flex_dispatcher_backend='deepep', found 'hybridep'; leave moe_enable_deepep out",
        ),
        (
            {"moe_enable_deepep": True, "moe_token_dispatcher_type": "allgather"},
            "moe_enable_deepep=True is moe_token_dispatcher_type='flex', found 'allgather'",
        ),
    ],
)
def test_what_nobody_would_read_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoEConfig(num_moe_experts=8, **values)


@pytest.mark.parametrize("name", ["moe_combine_bwd_dtype", "moe_paged_stash", "moe_router_force_biased", "inference_grouped_gemm_backend"])
def test_reserved_fields_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=4 is reserved and not implemented; leave it out"):
        MoEConfig(num_moe_experts=8, **{name: 4})


@pytest.mark.parametrize("name", ELSEWHERE)
def test_fields_of_megatron_that_lie_elsewhere_say_where(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=True is no field of MoEConfig: .+"):
        MoEConfig(num_moe_experts=8, **{name: True})
    assert name not in {field.name for field in dataclasses.fields(MoEConfig)} | RESERVED


def test_one_type_and_a_tuple_of_it_are_the_same() -> None:
    one = MoEConfig(num_moe_experts=8, moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1)
    other = MoEConfig(num_moe_experts=8, moe_router_load_balancing_type=("seq_aux_loss",), moe_aux_loss_coeff=(0.1,))
    assert one == other and dict(one.loss_coefficients) == {"seq_aux_loss": 0.1}
    assert MoEConfig(num_moe_experts=8).loss_names == ()


def test_sinkhorn_in_a_list_is_sinkhorn() -> None:
    """Whoever reads the field compares it with a name."""
    listed = {"num_moe_experts": 8, "moe_router_load_balancing_type": ["sinkhorn"], "moe_aux_loss_coeff": [0.0]}
    config = MoEConfig.from_dict(listed)
    assert config == MoEConfig(num_moe_experts=8, moe_router_load_balancing_type="sinkhorn")
    router = TopKRouter(config, 4, ProcessGroups.single(), dtype=torch.float64)
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    x = torch.randn(64, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 1
    routing, _ = router(x, Step.causal(1, 64))
    logits = x @ router.weight.detach().t()
    assert torch.equal(routing.experts_TK, top(sinkhorn(logits), 2)) and not torch.equal(routing.experts_TK, top(logits, 2))
    with pytest.raises(ValueError, match="moe_expert_capacity_factor=1.0 does not go with moe_router_load_balancing_type='sinkhorn'"):
        MoEConfig.from_dict({**listed, "moe_expert_capacity_factor": 1.0})


def test_a_config_survives_being_json() -> None:
    config = MoEConfig(num_moe_experts=8, moe_layer_freq=(0, 1), moe_router_load_balancing_type=("aux_loss",), moe_aux_loss_coeff=(0.1,))
    assert MoEConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("text", "freq"),
    [("2", 2), ("[0]*2 + [1]", (0, 0, 1)), ("([1]*3+[0]*1)*3", (1, 1, 1, 0) * 3), ("3*[0, 1]", (0, 1) * 3), (" (0, 1) ", (0, 1))],
)
def test_the_layers_are_read_as_the_command_line_of_megatron_writes_them(text: str, freq: Any) -> None:
    assert MoEConfig.from_dict({"num_moe_experts": 4, "moe_layer_freq": text}).moe_layer_freq == freq


@pytest.mark.parametrize(
    "text",
    ["[1", "__import__('os')", "[1]*99999999999", "[1]*-1", "[x]", "[1.5]", "[True]", "1+1", "[[1]]", "'1'", "[1]-[1]", "(" * 400, ""],
)
def test_a_text_that_is_no_list_of_layers_is_refused_and_never_run(text: str) -> None:
    with pytest.raises(ValueError, match="moe_layer_freq=.* must be a number, or lists of 0 and 1 with"):
        MoEConfig.from_dict({"num_moe_experts": 4, "moe_layer_freq": text})


def test_defaults() -> None:
    """What users rely on without naming it."""
    assert {name: value for name, value in dataclasses.asdict(MoEConfig(num_moe_experts=8)).items() if value not in (None, False)} == {
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_bias_decay_style": "constant",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_token_dispatcher_type": "alltoall",
        "moe_flex_dispatcher_backend": "deepep",
        "moe_flex_timeout_s": 100.0,
        "moe_deepep_num_sms": 20,
        "moe_hybridep_num_sms": 16,
        "moe_token_drop_policy": "probs",
    }


def test_layers_with_experts() -> None:
    every = MoEConfig(num_moe_experts=4)
    assert all(every.is_moe_layer(layer, 3) for layer in range(4))
    second = dataclasses.replace(every, moe_layer_freq=2)
    assert [second.is_moe_layer(layer, 5) for layer in range(7)] == [True, False, True, False, True, True, True]
    listed = dataclasses.replace(every, moe_layer_freq=(0, 1))
    assert [listed.is_moe_layer(layer, 2) for layer in range(3)] == [False, True, True]
    wide = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=4, vocab_size=16)
    with pytest.raises(ValueError, match="moe_layer_freq has 2 entries, the model num_layers=3; give one a layer"):
        check_layout(wide, ParallelPlan(), feed_forward=moe_feed_forward(listed))
    odd = dataclasses.replace(MODEL, num_layers=2, ffn_hidden_size=10)
    mixture = dataclasses.replace(listed, moe_ffn_hidden_size=16)
    with pytest.raises(ValueError, match="tp=4 must divide ffn_hidden_size=10"):
        check_layout(odd, ParallelPlan(tp=4), feed_forward=moe_feed_forward(mixture))
    with pytest.raises(ValueError, match="tp=4 must divide moe_shared_expert_intermediate_size=6"):
        check_layout(
            MODEL, ParallelPlan(tp=4), feed_forward=moe_feed_forward(MoEConfig(num_moe_experts=4, moe_shared_expert_intermediate_size=6))
        )


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"ep": 8, "dp": 8}, "ep=8 must divide num_moe_experts=4; lower ep"),
        ({"etp": 3, "dp": 3}, "etp=3 must divide the expert width 20; lower etp"),
    ],
)
def test_layouts_are_checked(degrees: dict[str, Any], message: str) -> None:
    feed_forward = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_ffn_hidden_size=20))
    with pytest.raises(ValueError, match=message):
        check_layout(MODEL, ParallelPlan(**degrees), feed_forward=feed_forward)
    check_layout(MODEL, ParallelPlan(tp=2, ep=2, dp=2), feed_forward=feed_forward)


def test_widths_of_grouped_products() -> None:
    feed_forward = moe_feed_forward(MoEConfig(num_moe_experts=4, moe_ffn_hidden_size=24))
    place: dict[str, Any] = {"feed_forward": feed_forward, "dtype": torch.bfloat16, "device": "cuda"}
    check_layout(MODEL, ParallelPlan(), **place)
    with pytest.raises(ValueError, match="moe_ffn_hidden_size=12 on a rank must be a multiple of 8: .* rows of 16 bytes; use 16 on a rank"):
        check_layout(MODEL, ParallelPlan(dp=2, etp=2), **place)
    # Other dtypes take one matmul per expert, of any width.
    check_layout(MODEL, ParallelPlan(dp=2, etp=2), **{**place, "dtype": torch.float32})
    check_grouped_width("hidden_size", 12, torch.bfloat16, "cpu")
