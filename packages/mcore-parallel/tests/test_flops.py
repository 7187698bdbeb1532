# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Counted parameters and operations."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mcore_parallel import ProcessGroups
from mcore_parallel.models import (
    BertModel,
    GPTModel,
    TransformerConfig,
    feed_forward_share,
    flops_per_token,
    hybrid_config,
    num_bert_parameters,
    num_parameters,
)
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig, Step, YarnScaling

SIZES: dict[str, Any] = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 40}
HYBRID: dict[str, Any] = {name: SIZES[name] for name in ("hidden_size", "num_attention_heads", "vocab_size")}
LATENT = LatentAttentionConfig(q_lora_rank=10, kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
FULL_QUERIES = LatentAttentionConfig(kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=8)
MAMBA = MambaConfig(state_dim=5, head_dim=8, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, chunk_size=4)
BERT: dict[str, Any] = {
    **SIZES, "normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True, "activation": "gelu",
    "position_embedding_type": "learned_absolute", "max_position_embeddings": 32, "share_embeddings_and_output_weights": True,
}  # fmt: skip
MATRICES_ONLY: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_query_groups": 2, "ffn_hidden_size": 20},
    "wide heads": {"kv_channels": 10},
    "tied": {"share_embeddings_and_output_weights": True},
    "gated attention, squared ReLU": {"attention_output_gate": True, "activation": "squared_relu"},
    "latent": {"latent_attention": LATENT},
    "latent, full queries": {"latent_attention": FULL_QUERIES, "add_bias_linear": True},
    "further tokens": {"mtp_num_layers": 2},
    "Qwen": {"add_qkv_bias": True, "qk_layernorm": True},
    "OLMoE": {"num_query_groups": 2, "qk_layernorm": True, "qk_layernorm_across_heads": True},
    "Gemma": {"sandwich_norm": True, "layernorm_zero_centered_gamma": True, "activation": "geglu_tanh", "embedding_multiplier": 5.0},
    "GPT-2": {
        "normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": True, "activation": "gelu_tanh", "qk_layernorm": True,
        "position_embedding_type": "learned_absolute", "max_position_embeddings": 32,
    },
}  # fmt: skip
OTHERS = {
    "sinks and windows": TransformerConfig(
        **SIZES, softmax_type="learnable", window_size=(4, 0), window_attn_skip_freq=3, activation="quick_geglu", glu_linear_offset=1.0
    ),
    "yarn": TransformerConfig(
        **SIZES, kv_channels=8, position_embedding_type="yarn", yarn=YarnScaling(factor=4.0, original_max_position_embeddings=64)
    ),
    "Mamba-2": hybrid_config("MM", **HYBRID, mamba=MAMBA),
    "Nemotron-H": hybrid_config("M-M*-", **HYBRID, mamba=MAMBA, activation="squared_relu"),
    "delta net": hybrid_config("G-G-*-", **HYBRID, delta_net=DELTA),
    "latent hybrid": hybrid_config("M+|-/+-", **HYBRID, mamba=MAMBA, latent_attention=LATENT, mtp_detach=True),
}


def counted(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MATRICES_ONLY)
def test_counts_equal_the_model_and_the_counter_of_torch(name: str) -> None:
    config = TransformerConfig(**SIZES, **MATRICES_ONLY[name])
    model = GPTModel(config, ProcessGroups.single(), device="meta")
    assert num_parameters(config) == counted(model)
    tokens, step = torch.zeros(32, dtype=torch.int64, device="meta"), Step.causal(2, 16, "meta")
    if config.mtp_num_layers:
        return
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output, _ = model(tokens, step)
        output.logits().sum().backward()
    assert counter.get_total_flops() == 32 * flops_per_token(config, 16, causal=False)


@pytest.mark.parametrize("name", OTHERS)
def test_parameters_of_every_family_are_counted(name: str) -> None:
    assert num_parameters(OTHERS[name]) == counted(GPTModel(OTHERS[name], ProcessGroups.single(), device="meta"))


@pytest.mark.parametrize("post_norm", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_token_types": 0, "add_binary_head": False}])
def test_parameters_of_bert_are_counted(post_norm: bool, options: dict[str, Any]) -> None:
    config = TransformerConfig(**BERT, post_norm=post_norm)
    assert num_bert_parameters(config, **options) == counted(BertModel(config, ProcessGroups.single(), device="meta", **options))


def test_a_causal_token_sees_half_of_the_others_on_average() -> None:
    config = TransformerConfig(**SIZES)
    saved = flops_per_token(config, 9, causal=False) - flops_per_token(config, 9)
    assert saved == 6 * 3 * 2 * 24 * (9 - 5)


@pytest.mark.parametrize("window", [(0, 0), (3, 0), (3, 2), (-1, 1), (50, 50)])
@pytest.mark.parametrize("causal", [True, False])
def test_a_window_counts_the_keys_inside(window: tuple[int, int], causal: bool) -> None:
    S = 9
    place, other = torch.arange(S)[:, None], torch.arange(S)
    left, right = (size if size >= 0 else S for size in window)
    seen = (other >= place - left) & (other <= place + (0 if causal else right))
    plain, windowed = TransformerConfig(**SIZES), TransformerConfig(**SIZES, window_size=window, window_attn_skip_freq=(1, 0, 1))
    saved = (S + 1) / 2 if causal else S
    expected = flops_per_token(plain, S, causal=causal) - 6 * 2 * 2 * 24 * (saved - seen.sum().item() / S)
    assert flops_per_token(windowed, S, causal=causal) == pytest.approx(expected)


def test_linear_mixers_cost_the_same_at_any_length() -> None:
    config = OTHERS["Mamba-2"]
    assert flops_per_token(config, 16) == flops_per_token(config, 4096)
    weights = 2 * (3 * 48 + 2 * 10 + 6) * 24 + 40 * 24
    assert flops_per_token(config, 16) == 6 * (weights + 2 * (4 * (48 + 2 * 10) + 2.5 * 48 * 5))


def test_further_tokens_cost_a_layer_a_mixture_of_states_and_the_logits_each() -> None:
    plain, more = TransformerConfig(**SIZES), TransformerConfig(**SIZES, mtp_num_layers=2)
    fourth = TransformerConfig(**{**SIZES, "num_layers": 5})
    assert flops_per_token(more, 8) == flops_per_token(fourth, 8) + 6 * 2 * (2 * 24 * 24 + 40 * 24)
    assert flops_per_token(plain, 8) < flops_per_token(more, 8)


def test_another_feed_forward_replaces_the_dense_one() -> None:
    config = TransformerConfig(**SIZES)
    dense = 3 * 24 * 96
    assert num_parameters(config, feed_forward=0) == num_parameters(config) - 3 * dense
    assert flops_per_token(config, 4, feed_forward=2 * dense) == flops_per_token(config, 4) + 6 * 3 * dense
    assert feed_forward_share(config) == dense / (dense + 4 * 24 * 24)


def test_another_feed_forward_stands_in_the_places_of_e() -> None:
    config = hybrid_config("*-*E", **HYBRID)
    assert num_parameters(config, feed_forward=1000) == num_parameters(config) - 3 * 24 * 96 + 1000
