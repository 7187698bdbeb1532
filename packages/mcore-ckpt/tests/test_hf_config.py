# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""config.json means what transformers reads in it: every entry of its classes is read, fixed, or known to change nothing."""

import dataclasses
import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from mcore_ckpt import CheckpointingException  # noqa: E402
from mcore_ckpt.hf import export_hf, import_hf  # noqa: E402
from mcore_ckpt.hf._config import complete, from_hf_config, measure, to_hf_config  # noqa: E402
from mcore_ckpt.hf._families import FAMILIES  # noqa: E402
from mcore_ckpt.hf._rules import sites  # noqa: E402

WHOLE = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "mixtral", "qwen3_moe", "olmoe")
"""Families whose attention turns all channels."""
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 48, "num_query_groups": 2, "kv_channels": 8}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0}
STATES = {"state_dim": 6, "head_dim": 8, "num_groups": 4, "num_heads": 8}
HYBRID = {
    "bamba": {"hybrid_layer_pattern": "M-*-", "num_layers": 4, "mamba": STATES, "norm_epsilon": 1e-5},
    "nemotron_h": {"hybrid_layer_pattern": "M-*-", "num_layers": 4, "mamba": STATES, "activation": "squared_relu"},
    "mamba2": {"hybrid_layer_pattern": "MM", "mamba": STATES},
}


@pytest.fixture(scope="module", autouse=True)
def _quiet():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def sizes_of(name):
    if name.startswith("deepseek"):
        return {key: value for key, value in SIZES.items() if key not in ("num_query_groups", "kv_channels")} | {"latent_attention": LATENT}
    if name.endswith("bert"):
        return SIZES | {"num_query_groups": 4, "max_position_embeddings": 64, "num_token_types": 2, "activation": "gelu"}
    if name in ("mixtral", "qwen3_moe", "gpt_oss", "olmoe"):
        return SIZES | EXPERTS | ({"activation_func_clamp_value": 7.0} if name == "gpt_oss" else {})
    if name == "qwen2_moe":
        return SIZES | EXPERTS | {"moe_shared_expert_intermediate_size": 8}
    return SIZES | HYBRID.get(name, {})


def config_json(name, **changes):
    """What an export of a small model writes."""
    family = FAMILIES[name]
    return {"max_position_embeddings": 64} | to_hf_config(complete({**sizes_of(name), **changes}, family), family, "float32")


def rotary_channels(theirs):
    """Channels of a head that transformers gives angles to."""
    config = transformers.CONFIG_MAPPING[theirs["model_type"]].from_dict(dict(theirs))
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return {2 * value.numel() for key, value in model.named_buffers() if key.endswith("inv_freq") and "original" not in key}


@pytest.mark.parametrize("name", WHOLE)
def test_partial_rotary_is_refused_where_transformers_turns_all_channels(name):
    theirs = config_json(name)
    assert "partial_rotary_factor" not in str(theirs)
    assert rotary_channels(theirs) == rotary_channels({**theirs, "partial_rotary_factor": 0.5}) == {8}
    with pytest.raises(ValueError, match=r"rotary_percent=0\.5 has no name there.*set it to 1\.0"):
        config_json(name, rotary_percent=0.5)
    nested = theirs["rope_parameters"]
    if name == "gemma3":
        nested = {**nested, "full_attention": {**nested["full_attention"], "partial_rotary_factor": 0.5}}
    else:
        nested = {**nested, "partial_rotary_factor": 0.5}
    for changes in ({"partial_rotary_factor": 0.5}, {"rope_parameters": nested}):
        assert from_hf_config({**theirs, **changes})[1]["rotary_percent"] == 1.0


def test_partial_rotary_beside_scaled_angles_is_refused_where_transformers_cannot_compute_it():
    theirs = config_json("llama") | {"rope_parameters": {**SCALED, "partial_rotary_factor": 0.5}}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(dict(theirs)))
    with pytest.raises(RuntimeError):
        model(torch.arange(6)[None])
    with pytest.raises(CheckpointingException, match=r"partial_rotary_factor=0\.5 beside rope_type='yarn'"):
        from_hf_config(theirs)


@pytest.mark.parametrize("scaling", [{}, {"rope_scaling": {"factor": 8.0}}, {"seq_len_interpolation_factor": 2.0}])
def test_the_share_of_bamba_is_the_one_that_transformers_reads(scaling):
    theirs = config_json("bamba", rotary_percent=0.25, **scaling)
    assert rotary_channels(theirs) == {2}
    assert from_hf_config(theirs)[1]["rotary_percent"] == 0.25
    # Beside the parameters it is overwritten there.
    beside = {key: value for key, value in theirs.items() if key not in ("rope_parameters", "rope_scaling")}
    assert rotary_channels(beside) == {4} and from_hf_config(beside)[1]["rotary_percent"] == 0.5


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_every_entry_of_the_class_of_transformers_is_read_or_known_to_change_nothing(name):
    family = FAMILIES[name]
    kind = transformers.CONFIG_MAPPING[family.model_type]
    theirs, refused = config_json(name, **({"norm_epsilon": 1e-6} if name.startswith("deepseek") else {})), []
    for field in dataclasses.fields(kind):
        if field.name not in theirs:
            try:
                from_hf_config({**theirs, field.name: object()}, [])
            except CheckpointingException as error:
                if f"{field.name}=" in str(error) and "is not known" in str(error):
                    refused.append(field.name)
    assert refused == []


def test_an_entry_that_nothing_reads_is_refused_by_name(tmp_path):
    theirs = config_json("llama")
    with pytest.raises(CheckpointingException, match=r"residual_multiplier=0\.22 is not known for llama; import with ignore="):
        from_hf_config({**theirs, "residual_multiplier": 0.22})
    from_hf_config({**theirs, "residual_multiplier": 0.22}, ["residual_multiplier"])
    from_hf_config({**theirs, "residual_multiplier": None, "_attn_implementation_autoset": True, "attention_dropout": 0})
    with pytest.raises(ValueError, match="ignore='hidden_act': family llama reads it"):
        from_hf_config(theirs, ["hidden_act"])
    with pytest.raises(ValueError, match="ignore='rope_theta': family llama reads it"):
        from_hf_config(theirs, ["rope_theta"])


@pytest.mark.parametrize("entry", ["attention_dropout", "resid_pdrop", "hidden_dropout_prob"])
def test_dropout_is_refused_or_left_out_by_name(entry):
    theirs = config_json("llama") | {entry: 0.1}
    with pytest.raises(CheckpointingException, match=rf"{entry}=0\.1 is not supported for llama; no model has dropout here"):
        from_hf_config(theirs)
    assert from_hf_config(theirs, [entry])[1] == from_hf_config({**theirs, entry: 0.0})[1]


@pytest.mark.parametrize("name", ["bert", "megatron_bert"])
def test_the_dropout_that_bert_has_when_nothing_is_said_is_refused_too(name):
    theirs = config_json(name)
    both = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    assert theirs.items() >= both.items()
    silent = {key: value for key, value in theirs.items() if key not in both}
    kind = transformers.CONFIG_MAPPING[theirs["model_type"]]
    assert kind.from_dict(silent).hidden_dropout_prob == 0.1
    with pytest.raises(CheckpointingException, match=r"hidden_dropout_prob=0\.1, which it means to leave it out, is not supported"):
        from_hf_config(silent)
    assert from_hf_config(silent, both) == from_hf_config(theirs)


def test_the_first_gemma_says_gelu_and_means_its_approximation():
    theirs = config_json("gemma")
    assert theirs["hidden_act"] == "gelu_pytorch_tanh"
    for changes in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": None}, {"hidden_activation": "gelu_pytorch_tanh"}):
        assert transformers.GemmaConfig.from_dict({**theirs, **changes}).hidden_act == "gelu_pytorch_tanh"
        assert from_hf_config({**theirs, **changes})[1]["activation"] == "geglu_tanh"
    with pytest.raises(CheckpointingException, match="hidden_act='relu' is not supported"):
        from_hf_config({**theirs, "hidden_act": "relu"})
    with pytest.raises(CheckpointingException, match="use_bidirectional_attention=True is not supported"):
        from_hf_config({**theirs, "use_bidirectional_attention": True})


@pytest.mark.parametrize("name", ["deepseek2", "deepseek3"])
def test_norms_of_latents_have_the_epsilon_of_transformers(name, tmp_path):
    with pytest.raises(ValueError, match=r"norm_epsilon=1e-05 of the latents has no name there; set latent_attention\.norm_epsilon=1e-06"):
        config_json(name, norm_epsilon=1e-5)
    config = sizes_of(name) | {"norm_epsilon": 1e-3, "latent_attention": {**LATENT, "norm_epsilon": 1e-6}}
    full = complete(config, FAMILIES[name])
    export_hf(
        {site.name: torch.zeros(site.shape) for site in sites(FAMILIES[name].rules, measure(full), full)},
        tmp_path / "out", family=name, config=config, hf_config={"max_position_embeddings": 64},
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    attention = model.model.layers[0].self_attn
    assert attention.kv_a_layernorm.variance_epsilon == 1e-6
    assert model.model.norm.variance_epsilon == 1e-3
    read = import_hf(tmp_path / "out").config
    assert read["norm_epsilon"] == 1e-3 and read["latent_attention"]["norm_epsilon"] == 1e-6
    # Where both are the same nothing needs to be said.
    assert from_hf_config(config_json(name, norm_epsilon=1e-6))[1]["latent_attention"]["norm_epsilon"] is None


def test_a_window_that_is_not_said_is_the_one_of_transformers():
    theirs = {key: value for key, value in config_json("mistral").items() if key != "sliding_window"}
    assert transformers.MistralConfig.from_dict(dict(theirs)).sliding_window == 4096
    assert from_hf_config(theirs)[1]["window_size"] == (4095, 0)
    assert from_hf_config({**theirs, "sliding_window": None})[1]["window_size"] is None


@pytest.mark.parametrize(("name", "default"), [("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)])
def test_a_soft_cap_of_null_is_none_and_one_that_is_not_said_is_the_one_of_transformers(name, default):
    theirs = config_json("gemma2", **{name: None})
    assert theirs[name] is None and getattr(transformers.Gemma2Config.from_dict(dict(theirs)), name) is None
    assert from_hf_config(theirs)[1][name] is None
    silent = {entry: value for entry, value in theirs.items() if entry != name}
    assert getattr(transformers.Gemma2Config.from_dict(dict(silent)), name) == from_hf_config(silent)[1][name] == default


def test_experts_of_gpt_oss_that_are_not_clamped_are_refused_both_ways():
    theirs = config_json("gpt_oss")
    with pytest.raises(CheckpointingException, match="swiglu_limit=None is no limit"):
        from_hf_config({**theirs, "swiglu_limit": None})
    with pytest.raises(ValueError, match="activation_func_clamp_value=None has no name there"):
        config_json("gpt_oss", activation_func_clamp_value=None)
    assert from_hf_config({entry: value for entry, value in theirs.items() if entry != "swiglu_limit"}) == from_hf_config(theirs)
