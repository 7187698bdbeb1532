# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The config of a model as the checkpoints' conversion sees it, which does not know its class."""

import dataclasses
import json
from typing import Any

import pytest

from mcore_ckpt.hf._config import complete, to_hf_config
from mcore_ckpt.hf._families import FAMILIES
from mcore_ckpt.hf._fields import DEFAULTS, NESTED
from mcore_ckpt.hf._windows import layer_flags
from mcore_parallel.models import TransformerConfig
from mcore_parallel.nn import (
    GatedDeltaNetConfig,
    LatentAttentionConfig,
    Llama3Scaling,
    MambaConfig,
    YarnScaling,
    is_layer_window_attention,
)

GROUPS_OF_FIELDS = {
    "latent_attention": LatentAttentionConfig,
    "rope_scaling": Llama3Scaling,
    "yarn": YarnScaling,
    "mamba": MambaConfig,
    "delta_net": GatedDeltaNetConfig,
}


def _defaults(kind: type) -> dict[str, Any]:
    assert dataclasses.is_dataclass(kind)
    return {one.name: ... if one.default is dataclasses.MISSING else one.default for one in dataclasses.fields(kind)}


def test_the_conversion_knows_every_field_of_the_models_config_and_its_default() -> None:
    ours = _defaults(TransformerConfig)
    assert {name: None if value is ... else value for name, value in ours.items()}.items() <= DEFAULTS.items()
    assert {name: _defaults(kind) for name, kind in GROUPS_OF_FIELDS.items()} == NESTED


def test_a_config_survives_being_a_dict_and_json() -> None:
    config = TransformerConfig(
        num_layers=4, hidden_size=16, num_attention_heads=4, vocab_size=32, hybrid_layer_pattern="M-+-", window_size=(3, 0),
        mamba=MambaConfig(num_groups=2),
        latent_attention=LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4),
    )  # fmt: skip
    assert TransformerConfig.from_dict(dataclasses.asdict(config)) == config
    assert TransformerConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_a_whole_config_of_a_plain_decoder_can_be_exported(family: str) -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=32)
    experts = {"num_moe_experts": 4, "moe_router_topk": 2} if family == "mixtral" else {}
    assert complete(dataclasses.asdict(config) | experts, FAMILIES[family])["ffn_hidden_size"] == 64


WINDOWS = [None, 1, 3, 8, "4", (1, 1, 0, 1, 1, 0), "([1]*2+[0]*1)*2", "[1,0]*3", "[0]*6", "1+2", "2*([1]+[0, 1])"]


@pytest.mark.parametrize("frequency", WINDOWS)
def test_the_layers_with_a_window_are_those_of_the_model(frequency: Any) -> None:
    sizes = {"num_layers": 6, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32, "window_size": (3, 0)}
    config = {**sizes, "window_attn_skip_freq": frequency}
    wanted = [is_layer_window_attention((3, 0), frequency, layer, num_layers=6) for layer in range(1, 7)]
    assert [bool(flag) for flag in layer_flags(config)] == wanted
    family = FAMILIES["qwen3"]
    types = to_hf_config(complete(config | {"qk_layernorm": True}, family), family, "float32")["layer_types"]
    assert types == ["sliding_attention" if one else "full_attention" for one in wanted]


BAD_WINDOWS = [
    "[1]*5",
    "([1]*3",
    "[2]*6",
    "[1]*3]",
    "1+[1]",
    "[1]*[1]",
    "0*3",
    "",
    "[1]**6",
    "__import__('os')",
    (1, 0),
    0,
    "[1]*99999*99999",
]


@pytest.mark.parametrize("frequency", BAD_WINDOWS)
def test_a_pattern_that_is_none_is_refused_by_name_on_both_sides(frequency: Any) -> None:
    sizes: dict[str, Any] = {"num_layers": 6, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32, "window_size": (3, 0)}
    with pytest.raises(ValueError, match="window_attn_skip_freq"):
        complete({**sizes, "window_attn_skip_freq": frequency, "qk_layernorm": True}, FAMILIES["qwen3"])
    with pytest.raises(ValueError, match="window_attn_skip_freq|layer pattern"):
        TransformerConfig(**sizes, window_attn_skip_freq=frequency)


def test_a_part_that_a_family_has_not_is_refused_with_those_that_have_it() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=32, qk_layernorm=True)
    with pytest.raises(ValueError, match=r"qk_layernorm=True cannot be expressed by family llama.* gemma3, olmoe, qwen3"):
        complete(dataclasses.asdict(config), FAMILIES["llama"])
    sinks = dataclasses.replace(config, softmax_type="learnable")
    with pytest.raises(ValueError, match=r"softmax_type='learnable' cannot be expressed by family qwen3"):
        complete(dataclasses.asdict(sinks), FAMILIES["qwen3"])


def test_the_scaling_of_a_long_context_is_written_as_what_it_computes() -> None:
    def written(**yarn: Any) -> dict[str, Any]:
        values = {"position_embedding_type": "yarn", "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, **yarn}}
        sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32}
        return to_hf_config(complete(sizes | values, FAMILIES["llama"]), FAMILIES["llama"], "float32")["rope_parameters"]

    assert "attention_factor" not in written()
    assert written(mscale=0.5)["attention_factor"] == pytest.approx(YarnScaling(factor=4.0, mscale=0.5).concentration)
    assert written(mscale=0.7, mscale_all_dim=0.9)["mscale_all_dim"] == 0.9
    with pytest.raises(ValueError, match="mscale_all_dim=0.9 beside mscale=0.0"):
        written(mscale=0.0, mscale_all_dim=0.9)
