# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every rule of a transformer's config has a config that breaks it, and says what to do."""

import dataclasses
from typing import Any

import pytest

from mcore_parallel.models import CONFIG_RULES, TransformerConfig
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, Llama3Scaling, MambaConfig, YarnScaling

GOOD: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
LATENT = LatentAttentionConfig(kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4)

BROKEN: dict[str, dict[str, Any]] = {
    **{f"positive-{name}": {name: 0} for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")},
    **{f"positive-{name}": {name: 0} for name in ("num_query_groups", "ffn_hidden_size", "kv_channels", "max_position_embeddings")},
    **{f"above-zero-{name}": {name: 0.0} for name in ("norm_epsilon", "softmax_scale", "rotary_base", "seq_len_interpolation_factor")},
    **{f"above-zero-{name}": {name: -1.0} for name in ("embedding_multiplier", "output_multiplier")},
    **{f"above-zero-{name}": {name: 0.0} for name in ("attn_logit_softcapping", "final_logit_softcapping")},
    "above-zero-activation_func_clamp_value": {"activation_func_clamp_value": 0.0, "activation": "quick_geglu"},
    "above-zero-rotary_base_window": {"rotary_base_window": float("inf"), "window_size": (4, 0)},
    "known-normalization": {"normalization": "BatchNorm"},
    "known-activation": {"activation": "tanh"},
    "known-softmax_type": {"softmax_type": "off_by_one"},
    "known-position_embedding_type": {"position_embedding_type": "alibi"},
    "heads-divide-hidden": {"num_attention_heads": 3},
    "groups-divide-heads": {"num_query_groups": 3},
    "quick-geglu-options": {"glu_linear_offset": 1.0},
    "one-norm-order": {"post_norm": True, "sandwich_norm": True},
    "norms-across-heads": {"qk_layernorm_across_heads": True},
    "window-range": {"window_size": (-2, 0)},
    "window-for-skip-freq": {"window_attn_skip_freq": 2},
    "window-for-base": {"rotary_base_window": 1e6},
    "per-layer-window_attn_skip_freq": {"window_attn_skip_freq": (1, 0, 1), "window_size": (4, 0)},
    "per-layer-no_rope_freq": {"no_rope_freq": (1, 2)},
    "rotary-share": {"rotary_percent": 0.0},
    "rotary-width": {"kv_channels": 3},
    "rows-for-learned-positions": {"position_embedding_type": "learned_absolute"},
    "yarn": {"yarn": YarnScaling()},
    "rope-scaling": {"rope_scaling": Llama3Scaling(), "position_embedding_type": "none"},
    "mrope": {"position_embedding_type": "mrope"},
    "mrope-sum": {"position_embedding_type": "mrope", "mrope_section": (1, 1, 1)},
    "pattern-length": {"hybrid_layer_pattern": "*-*"},
    "pattern-depths": {"hybrid_layer_pattern": "*-/*-"},
    "mamba-for-M": {"hybrid_layer_pattern": "M-"},
    "M-for-mamba": {"hybrid_layer_pattern": "*-", "mamba": MambaConfig()},
    "delta_net-for-G": {"hybrid_layer_pattern": "G-"},
    "G-for-delta_net": {"delta_net": GatedDeltaNetConfig(num_key_heads=1, num_value_heads=1)},
    "latent-attention-for-+": {"hybrid_layer_pattern": "+-"},
    "+-for-latent-attention": {"hybrid_layer_pattern": "*-", "latent_attention": LATENT},
    "latent-attention-heads": {"latent_attention": LATENT, "num_query_groups": 1},
    "mtp-number": {"mtp_num_layers": -1},
    "mtp-detach": {"mtp_detach": True},
    "init-std": {"init_method_std": -0.1},
}


def test_every_rule_has_a_failing_example() -> None:
    assert sorted(rule.id for rule in CONFIG_RULES) == sorted(BROKEN)
    assert len({rule.id for rule in CONFIG_RULES}) == len(CONFIG_RULES)


@pytest.mark.parametrize("rule", CONFIG_RULES, ids=lambda rule: rule.id)
def test_a_broken_rule_names_fields_values_and_remedy(rule: Any) -> None:
    changes = BROKEN[rule.id]
    with pytest.raises(ValueError) as caught:
        TransformerConfig(**{**GOOD, **changes})
    message = str(caught.value)
    for name in rule.fields:
        default = TransformerConfig.__dataclass_fields__[name].default
        assert f"{name}={({**GOOD, **changes}).get(name, default)!r}" in message
    assert message.endswith(f"{rule.must}; {rule.remedy}")


GOOD_CONFIGS: list[dict[str, Any]] = [
    {},
    {"kv_channels": 6, "num_attention_heads": 3, "num_query_groups": 3},
    {"window_size": (4, 0), "window_attn_skip_freq": (1, 0), "rotary_base_window": 1e4},
    {"position_embedding_type": "yarn", "yarn": YarnScaling(factor=4.0)},
    {"qk_layernorm": True, "qk_layernorm_across_heads": True},
    {"position_embedding_type": "mrope", "mrope_section": (1, 1, 0)},
    {"position_embedding_type": "learned_absolute", "max_position_embeddings": 8, "kv_channels": 3},
    {"latent_attention": LATENT, "mtp_num_layers": 1, "mtp_detach": True},
    {"hybrid_layer_pattern": "M|+/+", "mamba": MambaConfig(), "latent_attention": LATENT, "mtp_num_layers": 1},
    {"activation": "quick_geglu", "glu_linear_offset": 1.0, "activation_func_clamp_value": 7.0},
]


@pytest.mark.parametrize("changes", GOOD_CONFIGS)
def test_what_no_rule_forbids_can_be_made_and_changed(changes: dict[str, Any]) -> None:
    config = TransformerConfig(**{**GOOD, **changes})
    assert dataclasses.replace(config, vocab_size=32).vocab_size == 32 and config.vocab_size == 16


def test_a_name_that_is_no_field_is_told_with_the_nearest_one() -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 16}
    with pytest.raises(ValueError, match=r"'windowsize' is no field of TransformerConfig; write 'window_size', or leave it out"):
        TransformerConfig.from_dict({**sizes, "windowsize": (3, 0)})
    with pytest.raises(ValueError, match="'zzz' is no field of TransformerConfig; leave it out"):
        TransformerConfig.from_dict({**sizes, "zzz": 1})
