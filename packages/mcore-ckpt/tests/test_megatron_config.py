# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every field of a model's config goes to Megatron-LM's settings and comes back, or is refused by name before anything is written."""

import argparse
import dataclasses
import json

import pytest
import torch

from mcore_ckpt import CheckpointingException, read_tensor, save
from mcore_ckpt.hf import export_checkpoint_hf
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.megatron import export_checkpoint_megatron, import_checkpoint_megatron
from mcore_ckpt.megatron._args import EXPORTED, args_of

parallel = pytest.importorskip("mcore_parallel", reason="compares with the configs and models of mcore-parallel")
models = pytest.importorskip("mcore_parallel.models")
step = pytest.importorskip("mcore_parallel.nn").Step

BASE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32, "ffn_hidden_size": 24}
LATENT = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
YARN = {"factor": 4.0, "original_max_position_embeddings": 8, "mscale_all_dim": 1.0}
GROUPED_YARN = {"position_embedding_type": "yarn", "yarn": YARN, "kv_channels": 16}
BIASED = {"add_bias_linear": True, "add_qkv_bias": True}
WINDOW = {"window_size": (3, 0)}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2}
# field -> changes to BASE that take it off its default; a model of them comes back as it went.
MAPPED = {
    "num_layers": {"num_layers": 3},
    "hidden_size": {"hidden_size": 24},
    "num_attention_heads": {"num_attention_heads": 2},
    "vocab_size": {"vocab_size": 64},
    "num_query_groups": {"num_query_groups": 2},
    "ffn_hidden_size": {"ffn_hidden_size": None},
    "kv_channels": {"kv_channels": 6},
    "normalization": {"normalization": "LayerNorm"},
    "norm_epsilon": {"norm_epsilon": 1e-3},
    "layernorm_zero_centered_gamma": {"layernorm_zero_centered_gamma": True},
    "qk_layernorm": {"qk_layernorm": True},
    "add_bias_linear": BIASED,
    "add_qkv_bias": {"add_qkv_bias": True},
    "activation": {"activation": "squared_relu"},
    "glu_linear_offset": {"glu_linear_offset": 1.0, "activation": "quick_geglu"},
    "activation_func_clamp_value": {"activation_func_clamp_value": 0.25, "activation": "quick_geglu"},
    "softmax_type": {"softmax_type": "learnable"},
    "window_size": WINDOW,
    "window_attn_skip_freq": {"window_attn_skip_freq": (1, 0), **WINDOW},
    "latent_attention": {"latent_attention": LATENT, "rotary_interleaved": True},
    "position_embedding_type": {"position_embedding_type": "none"},
    "max_position_embeddings": {"max_position_embeddings": 24, "position_embedding_type": "learned_absolute"},
    "rotary_base": {"rotary_base": 100.0},
    "rotary_percent": {"rotary_percent": 0.5},
    "rotary_interleaved": {"rotary_interleaved": True},
    "seq_len_interpolation_factor": {"seq_len_interpolation_factor": 4.0},
    "rope_scaling": {"rope_scaling": {"factor": 32.0}, "kv_channels": 16, "rotary_base": 500_000.0},
    "yarn": {"yarn": YARN, "position_embedding_type": "yarn", "latent_attention": LATENT, "rotary_interleaved": True},
    "mrope_section": {"mrope_section": (2, 1, 1), "position_embedding_type": "mrope", "kv_channels": 8},
    "no_rope_freq": {"no_rope_freq": 2, "num_layers": 3},
    "init_method_std": {"init_method_std": 0.5},
    "share_embeddings_and_output_weights": {"share_embeddings_and_output_weights": True},
    "num_moe_experts": EXPERTS,
    "moe_router_topk": {**EXPERTS, "moe_router_topk": 3},
    "moe_ffn_hidden_size": {**EXPERTS, "moe_ffn_hidden_size": 12, "moe_layer_freq": (0, 1)},
    "moe_layer_freq": {**EXPERTS, "moe_layer_freq": (1, 0)},
    "moe_shared_expert_intermediate_size": {**EXPERTS, "moe_shared_expert_intermediate_size": 12},
    "moe_shared_expert_gate": {**EXPERTS, "moe_shared_expert_intermediate_size": 12, "moe_shared_expert_gate": True},
    "moe_latent_size": {**EXPERTS, "moe_latent_size": 8},
    "moe_router_score_function": {**EXPERTS, "moe_router_score_function": "sigmoid"},
    "moe_router_pre_softmax": {**EXPERTS, "moe_router_pre_softmax": True},
    "moe_router_topk_scaling_factor": {**EXPERTS, "moe_router_topk_scaling_factor": 2.5},
    "moe_router_num_groups": {**EXPERTS, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "moe_router_group_topk": {**EXPERTS, "moe_router_num_groups": 2, "moe_router_group_topk": 1},
    "moe_router_enable_expert_bias": {**EXPERTS, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "moe_apply_probs_on_input": {**EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True},
}
# Off their defaults these are in no setting there.
REFUSED = {
    "qk_layernorm_across_heads": {"qk_layernorm_across_heads": True, "qk_layernorm": True},
    "sandwich_norm": {"sandwich_norm": True},
    "post_norm": {"post_norm": True},
    "softmax_scale": {"softmax_scale": 1.0},
    "attn_logit_softcapping": {"attn_logit_softcapping": 50.0},
    "attention_output_gate": {"attention_output_gate": True},
    "rotary_base_window": {"rotary_base_window": 100.0, **WINDOW},
    "hybrid_layer_pattern": {"hybrid_layer_pattern": "*-"},
    "mamba": {"mamba": {"state_dim": 16}},
    "delta_net": {"delta_net": {"num_key_heads": 2, "num_value_heads": 2}},
    "embedding_multiplier": {"embedding_multiplier": 4.0},
    "output_multiplier": {"output_multiplier": 0.5},
    "final_logit_softcapping": {"final_logit_softcapping": 30.0},
    "moe_router_bias": {**EXPERTS, "moe_router_bias": True},
    "moe_expert_capacity_factor": {**EXPERTS, "moe_expert_capacity_factor": 1.5},
    "moe_dispatch_fwd_dtype": {**EXPERTS, "moe_dispatch_fwd_dtype": "fp8"},
    "moe_router_force_load_balancing": {**EXPERTS, "moe_router_force_load_balancing": True},
    "num_token_types": {"num_token_types": 2},
    "add_binary_head": {"add_binary_head": True},
}
# They change no weight's meaning: which kernel computes it, and depths of multi-token prediction, whose weights are left out by name.
FREE = {"attention_backend", "mtp_num_layers", "mtp_detach"}
# Nor do these of a mixture: how it is trained, at which precision its router multiplies, who moves its tokens. A value off the default.
FREE_OF_EXPERTS = {
    "moe_shared_expert_overlap": True,
    "moe_router_dtype": "fp64",
    "moe_router_bias_update_rate": 0.01,
    "moe_router_bias_decay_steps": 100,
    "moe_router_bias_decay_style": "linear",
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.001],
    "moe_aux_loss_num_devices": 2,
    "moe_z_loss_coeff": 1e-3,
    "moe_router_report_entropy": True,
    "moe_input_jitter_eps": 0.01,
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "hybridep",
    "moe_flex_dispatcher_fallback": "alltoall",
    "moe_flex_timeout_s": 10.0,
    "moe_deepep_num_sms": 24,
    "moe_hybridep_num_sms": 24,
    "moe_symmetric_max_tokens": 4096,
    "moe_symmetric_exact_rows": True,
    "moe_enable_deepep": True,
    "moe_token_drop_policy": "position",
    "moe_pad_expert_input_to_capacity": True,
    "moe_router_padding_for_quantization": True,
    "moe_router_padding_for_fp8": True,
}
# Of fields above, other values and combinations.
MORE_MAPPED = {
    "quick_geglu": {"activation": "quick_geglu"},
    "gelu": {"activation": "gelu", **BIASED},
    "gelu_tanh": {"activation": "gelu_tanh", **BIASED},
    "gelu without biases": {"activation": "gelu"},
    "window of every third": {"window_attn_skip_freq": 3, "num_layers": 4, **WINDOW},
    "biases of experts": {**EXPERTS, **BIASED, "activation": "quick_geglu", "glu_linear_offset": 1.0},
    "biases of experts without a gate": {**EXPERTS, **BIASED, "activation": "squared_relu", "moe_router_bias": True},
    "off-by-one": {"softmax_type": "off-by-one"},
    "the scale that follows": {"softmax_scale": 0.5},
    "YaRN of grouped queries": GROUPED_YARN,
    "every number of YaRN": {
        **GROUPED_YARN,
        "yarn": {**YARN, "beta_fast": 8.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 0.3, "correction_range_round_to_int": False},
    },
    "gpt-oss": {
        **EXPERTS,
        **BIASED,
        **WINDOW,
        "window_attn_skip_freq": 2,
        "softmax_type": "learnable",
        "activation": "quick_geglu",
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": 7.0,
        "kv_channels": 8,
        "num_query_groups": 2,
        "rotary_base": 150_000.0,
        "position_embedding_type": "yarn",
        "yarn": {"factor": 32.0, "original_max_position_embeddings": 8, "correction_range_round_to_int": False},
    },
}
MORE_REFUSED = {
    "activation='geglu'": {"activation": "geglu"},
    "activation='relu'": {"activation": "relu"},
    "activation='gelu_tanh'": {"activation": "gelu_tanh"},
    "activation='gelu_tanh' cannot be exported with experts": {"activation": "gelu_tanh", **BIASED, **EXPERTS},
    "add_qkv_bias=False": {"add_bias_linear": True},
    "position_embedding_type='relative'": {"position_embedding_type": "relative"},
    "yarn={'factor': 4.0}": {"yarn": {"factor": 4.0}},
    "rotary_percent=0.5 cannot be exported with YaRN": {**GROUPED_YARN, "rotary_percent": 0.5},
    "rotary_interleaved=True cannot be exported with YaRN": {**GROUPED_YARN, "rotary_interleaved": True},
    "seq_len_interpolation_factor=4.0 cannot be exported with YaRN": {**GROUPED_YARN, "seq_len_interpolation_factor": 4.0},
    "rope_scaling.low_freq_factor=2.0": {"rope_scaling": {"low_freq_factor": 2.0}},
    "window_attn_skip_freq='": {"window_attn_skip_freq": "([1]*1+[0]*1)*1", **WINDOW},
    "rotary_percent=0.5": {"latent_attention": LATENT, "rotary_interleaved": True, "rotary_percent": 0.5},
    "no_rope_freq=2": {"latent_attention": LATENT, "rotary_interleaved": True, "no_rope_freq": 2},
    "yarn.correction_range_round_to_int=False": {**MAPPED["yarn"], "yarn": {"factor": 4.0, "correction_range_round_to_int": False}},
    "yarn.mscale=None": {**MAPPED["yarn"], "yarn": {"factor": 4.0, "mscale": None, "mscale_all_dim": 1.0}},
    "moe_shared_expert_intermediate_size=12": {**MAPPED["moe_shared_expert_intermediate_size"], **BIASED},
    "moe_latent_size=8": {**MAPPED["moe_latent_size"], **BIASED},
    "moe_router_load_balancing_type='sinkhorn'": {**EXPERTS, "moe_router_load_balancing_type": "sinkhorn"},
    "moe_expert_capacity_factor=0.0": {**EXPERTS, "moe_expert_capacity_factor": 0.0},
    "new_field=3": {"new_field": 3},
}


def split(config):
    """The fields of the model, and those of the mixture or None."""
    experts = {name: value for name, value in config.items() if "moe_" in name}
    return {name: value for name, value in config.items() if name not in experts}, experts or None


def model_of(config):
    trunk, experts = split(config)
    options = {}
    if experts is not None:
        moe = pytest.importorskip("mcore_moe")
        options["feed_forward"] = moe.moe_feed_forward(moe.MoEConfig.from_dict(experts))
    return models.GPTModel(models.TransformerConfig.from_dict(trunk), parallel.ProcessGroups.single(), **options).double()


def logits(model):
    tokens = torch.arange(20) % 32
    with torch.no_grad():
        return model.eval()(tokens, step.causal(1, 20))[0].logits()


def meant(config):
    """Fields of the model, spelled in one way, without those that say how it is trained or computed."""
    full = models.TransformerConfig.from_dict(split(config)[0])
    fields = {name: value for name, value in dataclasses.asdict(full).items() if name not in FREE}
    fields |= {"num_query_groups": full.kv_heads, "kv_channels": full.head_dim, "ffn_hidden_size": full.ffn_size}
    if full.no_rope_freq is not None:
        fields["no_rope_freq"] = [models_bare(full, layer) for layer in range(full.num_layers)]
    if full.softmax_scale == full.head_dim**-0.5:
        fields["softmax_scale"] = None
    return fields


def models_bare(config, layer):
    freq = config.no_rope_freq
    return int((layer + 1) % freq == 0) if isinstance(freq, int) else freq[layer]


def test_every_field_of_a_config_has_a_case():
    names = {field.name for field in dataclasses.fields(models.TransformerConfig)}
    mixture = {name for name in (*MAPPED, *REFUSED) if "moe_" in name}
    assert {*MAPPED, *REFUSED, *FREE} == names | mixture | {"num_token_types", "add_binary_head"}
    assert not set(MAPPED) & set(REFUSED)
    defaults = models.TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=32)
    for name in names - FREE - {"ffn_hidden_size"}:
        assert {**MAPPED, **REFUSED}[name][name] != getattr(defaults, name), name
    # A config at the defaults of all its fields says what one that is silent says.
    whole = json.loads(json.dumps(dataclasses.asdict(defaults)))
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 32}
    assert args_of(sizes).items() <= args_of(whole).items()
    with pytest.raises(ValueError, match="new_field=3 cannot be exported: no setting of Megatron-LM is known for it"):
        args_of({**sizes, "new_field": 3})


def test_every_field_of_a_mixture_has_a_case():
    moe = pytest.importorskip("mcore_moe")
    fields = {field.name: field for field in dataclasses.fields(moe.MoEConfig)}
    assert set(fields) == {name for name in (*MAPPED, *REFUSED, *FREE_OF_EXPERTS) if "moe_" in name}
    assert not set(FREE_OF_EXPERTS) & {*MAPPED, *REFUSED}
    plain = args_of({**BASE, **EXPERTS})
    for name, value in FREE_OF_EXPERTS.items():
        assert value != fields[name].default and args_of({**BASE, **EXPERTS, name: value}) == plain, name
    # What a run records: the whole mixture at its defaults; a negative capacity is none.
    whole = json.loads(json.dumps(dataclasses.asdict(moe.MoEConfig(**EXPERTS))))
    assert plain.items() <= args_of({**BASE, **whole}).items()
    assert args_of({**BASE, **EXPERTS, "moe_expert_capacity_factor": -1.0}) == plain


def test_a_mixture_comes_back_without_what_trained_it(tmp_path):
    config = {**BASE, **EXPERTS, "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 1e-3, "moe_router_dtype": "fp32"}
    state = {f"model.{shard.name}": shard.parameter.detach() for shard in parallel.named_shards(model_of(config))}
    save(state, tmp_path / "ours", extra={"config": config})
    assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs") == []
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    back = read_manifest(tmp_path / "again").extra["config"]
    assert back["num_moe_experts"] == 4 and not {"moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_dtype"} & set(back)


@pytest.mark.parametrize("name", [*MAPPED, *MORE_MAPPED])
def test_a_model_comes_back_as_it_went(name, tmp_path):
    config = {**BASE, **{**MAPPED, **MORE_MAPPED}[name]}
    torch.manual_seed(0)
    model = model_of({**config, "init_method_std": 0.5})
    with torch.no_grad():
        for parameter in model.parameters():
            # Biases, sinks and norms are not at their first values either.
            parameter.add_(0.1 * torch.randn_like(parameter))
    state = {f"model.{shard.name}": shard.parameter.detach() for shard in parallel.named_shards(model)}
    save(state, tmp_path / "ours", extra={"config": json.loads(json.dumps(config))})
    assert export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs") == []
    assert import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again") == []
    manifest = read_manifest(tmp_path / "again")
    back = manifest.extra["config"]
    expected = meant(config)
    if "num_moe_experts" in config:
        # Where all layers have experts the width is theirs.
        expected["ffn_hidden_size"] = config["ffn_hidden_size"]
    assert meant(back) == expected and set(manifest.tensors) == set(state)
    other = model_of(back)
    with torch.no_grad():
        for shard in parallel.named_shards(other):
            shard.parameter.copy_(read_tensor(tmp_path / "again", f"model.{shard.name}"))
    assert torch.equal(logits(model), logits(other))


@pytest.mark.parametrize("name", [*REFUSED, *MORE_REFUSED])
def test_what_no_setting_says_is_refused_before_anything_is_written(name, tmp_path):
    changes = {**REFUSED, **MORE_REFUSED}[name]
    config = {**BASE, **changes}
    save({"model.layers.0.mlp.down.weight": torch.ones(16, 24)}, tmp_path / "ours", extra={"config": json.loads(json.dumps(config))})
    with pytest.raises(ValueError, match=r"cannot be exported.*(only .* can|leave it out|give one 0 or 1)") as caught:
        export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    assert str(caught.value).startswith(name if "=" in name else f"{name}={changes[name]!r}") and not (tmp_path / "theirs").exists()


def test_depths_of_multi_token_prediction_are_left_out_by_name(tmp_path):
    config = {**BASE, "mtp_num_layers": 1, "attention_backend": "torch", "mtp_detach": True}
    model = model_of({**config, "attention_backend": "auto"})
    state = {f"model.{shard.name}": shard.parameter.detach() for shard in parallel.named_shards(model)}
    save(state, tmp_path / "ours", extra={"config": config})
    further = sorted(name for name in state if name.startswith("model.mtp"))
    assert further and export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs") == further
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    assert meant(read_manifest(tmp_path / "again").extra["config"]) == meant(BASE)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"qk_l2_norm": True}, r"qk_l2_norm=True is norms of queries and keys without weights.*only False can be imported"),
        ({"attention_output_gate": True}, "attention_output_gate=True is a gate"),
        ({"experimental_attention_variant": "dsa"}, "experimental_attention_variant='dsa' is another attention"),
        ({"is_hybrid_model": True}, "is_hybrid_model=True is a hybrid model"),
        ({"hybrid_override_pattern": "M*"}, r"hybrid_override_pattern='M\*' is a hybrid model"),
        ({"hybrid_layer_pattern": "M*"}, r"hybrid_layer_pattern='M\*' is a hybrid model"),
        ({"use_mup": True}, "use_mup=True is factors"),
        ({"position_embedding_type": "relative"}, "position_embedding_type='relative' is not there here"),
        ({"position_embedding_type": "yarn"}, "does not say yarn_rotary_scaling_factor; give it in the config"),
        ({"enable_gpt_oss": True}, "enable_gpt_oss=True scales positions"),
        ({"swiglu": False}, "the feed-forward has a gate, and of swiglu, quick_geglu, squared_relu the settings have none"),
        ({"swiglu": False, "squared_relu": True}, "the feed-forward has a gate, .* the settings have squared_relu"),
        ({"quick_geglu": True}, "swiglu=True and quick_geglu=True exclude one another"),
        ({"activation_func_clamp_value": 7.0}, "activation_func_clamp_value=7.0 is of quick_geglu alone here, and .* is swiglu"),
        ({"glu_linear_offset": 1.0}, "glu_linear_offset=1.0 is of quick_geglu alone here"),
        ({"moe_router_load_balancing_type": ["sinkhorn"]}, "moe_router_load_balancing_type='sinkhorn' weighs experts"),
    ],
)  # fmt: skip
def test_settings_that_no_model_has_are_refused_before_anything_is_written(settings, words, tmp_path):
    config = {**BASE, **EXPERTS}
    state = {f"model.{shard.name}": shard.parameter.detach() for shard in parallel.named_shards(model_of(config))}
    save(state, tmp_path / "ours", extra={"config": config})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    with pytest.raises(CheckpointingException, match=words):
        import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again", config=settings)
    assert not (tmp_path / "again").exists()


def test_numbers_of_yarn_that_are_none_go_out_as_those_that_they_mean():
    yarn = {"factor": 4.0, "mscale": None, "mscale_all_dim": 1.0}
    args = args_of({**BASE, **GROUPED_YARN, "yarn": yarn})
    assert args["position_embedding_type"] == "yarn" and args["yarn_rotary_scaling_factor"] == 4.0
    assert (args["yarn_mscale"], args["yarn_mscale_all_dim"]) == (1.0, 0.0) and args["yarn_original_max_position_embeddings"] == 4096
    scaling = parallel.nn.YarnScaling
    assert scaling(**yarn).concentration == scaling(factor=4.0, mscale=1.0, mscale_all_dim=0.0).concentration


@pytest.mark.parametrize(
    ("args", "theirs", "free"),
    [
        ({"rotary_seq_len_interpolation_factor": 4.0}, None, {"position_embedding_type": "none"}),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, 8.0, {"use_rope_scaling": False}),
    ],
    ids=["interpolation", "scaling"],
)
def test_numbers_of_positions_that_their_program_does_not_read_are_the_callers_choice(args, theirs, free, tmp_path):
    """The model of a run has ``theirs``, whatever its args say; with ``free`` it has no such number."""
    config = {**BASE, "kv_channels": 16}
    state = {f"model.{shard.name}": shard.parameter.detach() for shard in parallel.named_shards(model_of(config))}
    save(state, tmp_path / "ours", extra={"config": config})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    common = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)
    # A run of theirs writes no mark of an export.
    common["args"] = argparse.Namespace(**{name: value for name, value in vars(common["args"]).items() if name != EXPORTED} | args)
    torch.save(common, tmp_path / "theirs" / "common.pt")

    def imported(output, settings=None):
        import_checkpoint_megatron(tmp_path / "theirs", tmp_path / output, config=settings)
        back = read_manifest(tmp_path / output).extra["config"]
        return back.get("rope_scaling", {}).get("factor"), back.get("seq_len_interpolation_factor")

    name, value = list(args.items())[-1]
    with pytest.raises(CheckpointingException, match=rf"{name}={value} is in the args.* give {value} or {theirs} in the config"):
        imported("refused")
    assert not (tmp_path / "refused").exists()
    assert value in imported("said", {name: value})
    assert imported("read", {name: theirs}) == (theirs, None)
    assert imported("free", free)[0] is None


@pytest.mark.parametrize("format", ["torch_dist", "fsdp_dtensor"])
def test_the_same_numbers_come_back_from_an_export(format, tmp_path):
    for number, name in enumerate(("seq_len_interpolation_factor", "rope_scaling")):
        config = {**BASE, **MAPPED[name]}
        ours, theirs, again = (tmp_path / f"{folder}{number}" for folder in ("ours", "theirs", "again"))
        save({f"model.{s.name}": s.parameter.detach() for s in parallel.named_shards(model_of(config))}, ours, extra={"config": config})
        export_checkpoint_megatron(ours, theirs, format=format)
        import_checkpoint_megatron(theirs, again)
        assert meant(read_manifest(again).extra["config"])[name] == meant(config)[name]


def test_settings_that_no_layer_there_reads_change_nothing(tmp_path):
    state = {f"model.{shard.name}": shard.parameter.detach() for shard in parallel.named_shards(model_of(BASE))}
    save(state, tmp_path / "ours", extra={"config": BASE})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "plain")
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again", config={"apply_residual_connection_post_layernorm": True})
    assert read_manifest(tmp_path / "again").extra == read_manifest(tmp_path / "plain").extra


def test_the_scaled_positions_of_llama_go_on_to_hugging_face(tmp_path):
    scaled = {**BASE, "rope_scaling": {"factor": 8.0}, "kv_channels": 16, "rotary_base": 500_000.0}
    state = {f"model.{shard.name}": shard.parameter.detach() for shard in parallel.named_shards(model_of(scaled))}
    save(state, tmp_path / "ours", extra={"config": scaled})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again")
    again = read_manifest(tmp_path / "again").extra
    assert again["family"] == "llama"
    export_checkpoint_hf(tmp_path / "again", tmp_path / "hf", family=again["family"], config=again["config"], prefix="model.")
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written["model_type"] == "llama" and written["rope_parameters"]["rope_type"] == "llama3"
    assert written["rope_parameters"]["factor"] == 8.0


def test_settings_that_have_no_argument_are_taken_from_the_config(tmp_path):
    """What a program with a config of its own has, such as scaled positions of grouped queries."""
    state = {f"model.{shard.name}": shard.parameter.detach() for shard in parallel.named_shards(model_of(BASE))}
    save(state, tmp_path / "ours", extra={"config": BASE})
    export_checkpoint_megatron(tmp_path / "ours", tmp_path / "theirs")
    yarn = {"yarn_rotary_scaling_factor": 32.0, "yarn_original_max_position_embeddings": 4096, "yarn_correction_range_round_to_int": False}
    settings = {"position_embedding_type": "yarn", "enable_gpt_oss": True, "softmax_scale": 0.25, **yarn}
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "again", config=settings)
    again = read_manifest(tmp_path / "again").extra
    back = models.TransformerConfig.from_dict(again["config"])
    assert back.yarn is not None and back.yarn.factor == 32.0 and not back.yarn.correction_range_round_to_int and "family" not in again
    assert back.yarn.original_max_position_embeddings == 4096 and back.softmax_scale == 0.25
