# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A config of ours in their settings, by the names of Megatron-LM's arguments."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

__all__ = ["EXPORTED", "LATENT", "LLAMA3", "OTHER_NAMES", "ROUTER", "SAME_NAMES", "SHARED", "YARN", "args_of"]

EXPORTED = "exported_by_mcore"
"""Marks args that an export wrote: every one of them is the model's."""
SAME_NAMES = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "normalization", "qk_layernorm"),
    *("add_bias_linear", "add_qkv_bias", "softmax_type", "rotary_base", "rotary_percent", "rotary_interleaved", "init_method_std"),
    *("max_position_embeddings", "window_size", "window_attn_skip_freq"),
)
"""Fields with one name and one meaning on both sides."""
OTHER_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "vocab_size": ("padded_vocab_size",),
        # Releases differ in the name under which an argument is kept.
        "norm_epsilon": ("norm_epsilon", "layernorm_epsilon"),
        "layernorm_zero_centered_gamma": ("layernorm_zero_centered_gamma", "apply_layernorm_1p"),
        "seq_len_interpolation_factor": ("rotary_seq_len_interpolation_factor",),
    }
)
"""Fields with one meaning on both sides -> their names."""
ROUTER = (
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias", "moe_apply_probs_on_input"),
)
SHARED = ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_latent_size")
LATENT = MappingProxyType(
    {
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    }
)
YARN = MappingProxyType(
    {
        "rotary_scaling_factor": "factor",
        **{name: name for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
    }
)
LLAMA3: Mapping[str, Any] = MappingProxyType({"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})
"""What their scaled positions have beside a factor."""
_YARN_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        "factor": 1.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "correction_range_round_to_int": True,
    }
)
_ACTIVATIONS: Mapping[str, Mapping[str, bool]] = MappingProxyType(
    {
        "swiglu": {"swiglu": True},
        "quick_geglu": {"quick_geglu": True},
        "squared_relu": {"squared_relu": True},
        # Fused with its bias, theirs is the tanh approximation.
        "gelu": {"bias_gelu_fusion": False},
        "gelu_tanh": {"bias_gelu_fusion": True},
    }
)
_POSITIONS = ("rope", "mrope", "yarn", "learned_absolute", "none")
# Fields without an argument there: the only value that can be written, and why.
_NOT_THERE: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "qk_layernorm_across_heads": (False, "norms of queries and keys are of single heads there"),
        "sandwich_norm": (False, "nothing is normalised behind mixer and feed-forward there"),
        "post_norm": (False, "each branch normalises its input there"),
        "attn_logit_softcapping": (None, "scores have no cap there"),
        "attention_output_gate": (False, "the rows of the gate lie between those of the queries there"),
        "rotary_base_window": (None, "all layers have one rotary base there"),
        "hybrid_layer_pattern": (None, "only GPT models have names there"),
        "mamba": (None, "only GPT models have names there"),
        "delta_net": (None, "only GPT models have names there"),
        "embedding_multiplier": (1.0, "embeddings have no factor there"),
        "output_multiplier": (1.0, "logits have no factor there"),
        "final_logit_softcapping": (None, "logits have no cap there"),
        "num_token_types": (None, "only GPT models have names there"),
        "add_binary_head": (None, "only GPT models have names there"),
        "moe_router_force_load_balancing": (False, "it routes at random"),
        "moe_dispatch_fwd_dtype": (None, "experts read tokens as they are there"),
    }
)
_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "num_query_groups", "ffn_hidden_size")),
        **dict.fromkeys(("kv_channels", "activation_func_clamp_value", "softmax_scale", "window_size", "window_attn_skip_freq")),
        **dict.fromkeys(("latent_attention", "max_position_embeddings", "seq_len_interpolation_factor", "rope_scaling", "yarn")),
        **dict.fromkeys(("mrope_section", "no_rope_freq", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_bias")),
        **dict.fromkeys(("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk")),
        **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size")),
        **dict.fromkeys(("layernorm_zero_centered_gamma", "qk_layernorm", "add_bias_linear", "add_qkv_bias"), False),
        **dict.fromkeys(("rotary_interleaved", "share_embeddings_and_output_weights", "moe_router_pre_softmax"), False),
        **dict.fromkeys(("moe_router_enable_expert_bias", "moe_apply_probs_on_input", "moe_shared_expert_gate"), False),
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "activation": "swiglu",
        "glu_linear_offset": 0.0,
        "softmax_type": "vanilla",
        "position_embedding_type": "rope",
        "rotary_base": 10_000.0,
        "rotary_percent": 1.0,
        "init_method_std": 0.02,
        "moe_router_topk": 2,
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss",
        "moe_expert_capacity_factor": None,
        # Which kernel computes it; what trains further depths, whose weights an export leaves out by name.
        "attention_backend": "auto",
        "mtp_num_layers": 0,
        "mtp_detach": False,
        **{name: only for name, (only, _) in _NOT_THERE.items()},
    }
)
"""Fields of a config of ours, mixtures included, and what each means where it is left out."""
_PASSED_OVER = frozenset(
    {
        *("moe_shared_expert_overlap", "moe_router_bias_update_rate", "moe_router_bias_decay_steps", "moe_router_bias_decay_style"),
        *("moe_aux_loss_coeff", "moe_aux_loss_num_devices", "moe_z_loss_coeff", "moe_router_report_entropy", "moe_input_jitter_eps"),
        *("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_flex_dispatcher_fallback", "moe_flex_timeout_s"),
        *("moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_symmetric_max_tokens", "moe_symmetric_exact_rows", "moe_enable_deepep"),
        *("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization", "moe_router_padding_for_fp8", "moe_router_dtype"),
        # Without a capacity nothing is dropped.
        "moe_token_drop_policy",
    }
)
"""Fields of mixtures that leave the model's function in evaluation alone: its training, who moves its tokens, the router's precision."""
_ALWAYS = ("normalization", "add_bias_linear")
"""Fields whose defaults differ on the two sides."""


def args_of(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Their settings of a config of ours; fields that it leaves out, or that are None, are at the defaults of ours.

    Raises:
        ValueError: a field that no setting of theirs says, by its name and value.
    """
    if unknown := [name for name in sizes if name not in _DEFAULTS and name not in _PASSED_OVER]:
        raise ValueError(
            f"{unknown[0]}={sizes[unknown[0]]!r} cannot be exported: no setting of Megatron-LM is known for it; leave it out of the "
            "checkpoint's config if it changes nothing"
        )
    set_fields = {name: value for name, value in sizes.items() if value is not None}
    full = {**_DEFAULTS, **set_fields}
    for name, (only, why) in _NOT_THERE.items():
        _only(full, name, only, why)
    args = {name: full[name] for name in SAME_NAMES if name in set_fields or name in _ALWAYS}
    args |= {theirs: set_fields[ours] for ours, names in OTHER_NAMES.items() if ours in set_fields for theirs in names}
    if "num_query_groups" in set_fields:
        args["num_query_groups"] = set_fields["num_query_groups"]
        args["group_query_attention"] = set_fields["num_query_groups"] != full["num_attention_heads"]
    if "ffn_hidden_size" not in set_fields and "hidden_size" in set_fields:
        # Theirs depends on the activation.
        args["ffn_hidden_size"] = 4 * set_fields["hidden_size"]
    args["untie_embeddings_and_output_weights"] = not full["share_embeddings_and_output_weights"]
    if "window_size" in set_fields:
        args["window_size"] = tuple(set_fields["window_size"])
    args |= _activation(full) | _layer_choices(full) | _experts(full, set_fields)
    args |= _positions(full) if full["latent_attention"] is None else _latent(full)
    _check_biases(full)
    return {name: value for name, value in args.items() if value is not None} | {EXPORTED: True}


def _only(full: Mapping[str, Any], name: str, only: Any, why: str, beside: str = "") -> None:
    if full[name] != only:
        raise ValueError(f"{name}={full[name]!r} cannot be exported{beside}: {why}; only {only!r} can")


def _activation(full: Mapping[str, Any]) -> dict[str, Any]:
    name = full["activation"]
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation={name!r} cannot be exported: it has no argument there; only {', '.join(_ACTIVATIONS)} can")
    if name == "gelu_tanh" and not full["add_bias_linear"]:
        raise ValueError(
            "activation='gelu_tanh' cannot be exported with add_bias_linear=False: theirs is fused with a bias; only 'gelu' can without"
        )
    if name == "gelu_tanh" and full["num_moe_experts"] is not None:
        raise ValueError("activation='gelu_tanh' cannot be exported with experts, which have no fused one there; only 'gelu' can")
    args: dict[str, Any] = {"swiglu": False, **_ACTIVATIONS[name]}
    return args | {name: full[name] for name in ("glu_linear_offset", "activation_func_clamp_value") if full[name]}


def _layer_choices(full: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that say something of each layer: N, or a list, which is no tuple there."""
    args: dict[str, Any] = {}
    for name in ("window_attn_skip_freq", "no_rope_freq"):
        value = full[name]
        if isinstance(value, str):
            raise ValueError(f"{name}={value!r} cannot be exported: a pattern is spelled out there; give one 0 or 1 for each layer")
        args[name] = list(value) if isinstance(value, Sequence) else value
    if isinstance(skip := args["no_rope_freq"], int) and full["num_layers"] is not None:
        # Theirs must divide the layers.
        args["no_rope_freq"] = [int((layer + 1) % skip == 0) for layer in range(full["num_layers"])]
    return args


def _experts(full: Mapping[str, Any], set_fields: Mapping[str, Any]) -> dict[str, Any]:
    if full["num_moe_experts"] is None:
        return {}
    kinds, capacity = full["moe_router_load_balancing_type"], full["moe_expert_capacity_factor"]
    if "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds):
        raise ValueError(
            f"moe_router_load_balancing_type={kinds!r} cannot be exported: it weighs experts in a way of its own; only types without it can"
        )
    if capacity is not None and capacity >= 0:
        _only(full, "moe_expert_capacity_factor", None, "it drops tokens in evaluation too")
    biased, router = full["add_bias_linear"], full["moe_router_bias"]
    if router is not None and router != biased:
        raise ValueError(
            f"moe_router_bias={router!r} cannot be exported with add_bias_linear={biased!r}, which the router follows there; only "
            f"{biased!r} can"
        )
    for name in ("moe_shared_expert_intermediate_size", "moe_latent_size"):
        if biased and full[name] is not None:
            raise ValueError(f"{name}={full[name]!r} cannot be exported with add_bias_linear=True, which puts biases there; only None can")
    args = {name: set_fields[name] for name in (*ROUTER, *SHARED, "moe_ffn_hidden_size", "moe_layer_freq") if name in set_fields}
    if isinstance(freq := args.get("moe_layer_freq"), Sequence):
        args["moe_layer_freq"] = list(freq)
    return args | {"num_experts": full["num_moe_experts"]}


def _check_biases(full: Mapping[str, Any]) -> None:
    if full["add_bias_linear"] and not full["add_qkv_bias"] and full["latent_attention"] is None:
        raise ValueError(
            "add_qkv_bias=False cannot be exported with add_bias_linear=True, which biases queries, keys and values too there; only True "
            "can"
        )


def _positions(full: Mapping[str, Any]) -> dict[str, Any]:
    """Of grouped queries."""
    kind, scaling, scale = full["position_embedding_type"], full["rope_scaling"], full["softmax_scale"]
    if kind not in _POSITIONS:
        raise ValueError(f"position_embedding_type={kind!r} cannot be exported: it has no argument there; only {', '.join(_POSITIONS)} can")
    width = full["kv_channels"] or ((full["hidden_size"] or 0) // (full["num_attention_heads"] or 1))
    if scale is not None and not (width and math.isclose(scale, width**-0.5, rel_tol=1e-9)):
        _only(full, "softmax_scale", None, "it has no argument there, and follows from the width of a head")
    args: dict[str, Any] = {"position_embedding_type": kind}
    if kind == "yarn":
        args |= _yarn(full)
    else:
        _only(full, "yarn", None, "it is of position_embedding_type='yarn'")
    if full["mrope_section"] is not None:
        args["mrope_section"] = list(full["mrope_section"])
    if scaling is not None:
        for name, only in LLAMA3.items():
            _only({f"rope_scaling.{name}": scaling.get(name, only)}, f"rope_scaling.{name}", only, "only the factor has an argument there")
        args |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.get("factor", 8.0)}
    return args


def _yarn(full: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN of grouped queries, all of its numbers, by the names that their config has without latent attention."""
    beside = " with YaRN"
    _only(full, "rotary_percent", 1.0, "all channels turn there", beside)
    _only(full, "rotary_interleaved", False, "the halves of a head turn there", beside)
    for name in ("seq_len_interpolation_factor", "rope_scaling"):
        _only(full, name, None, "it has no effect there", beside)
    yarn = {**_YARN_DEFAULTS, **(full["yarn"] or {})}
    if yarn["mscale"] is None or yarn["mscale_all_dim"] is None:
        # Either one means the factor that these have.
        yarn |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    theirs_of = {ours: theirs for theirs, ours in YARN.items()}
    return {f"yarn_{theirs_of.get(name, name)}": yarn[name] for name in _YARN_DEFAULTS}


def _latent(full: Mapping[str, Any]) -> dict[str, Any]:
    """Of multi-head latent attention, positions included."""
    latent, kind, epsilon = full["latent_attention"], full["position_embedding_type"], full["norm_epsilon"]
    beside = " with latent attention"
    latents = {**full, "latent_attention.norm_epsilon": latent.get("norm_epsilon") or epsilon}
    _only(full, "rotary_interleaved", True, "the rotary channels are pairs of neighbours there", beside)
    _only(latents, "latent_attention.norm_epsilon", epsilon, "all norms have one epsilon there", beside)
    _only(full, "softmax_scale", None, "the scale follows from the widths there", beside)
    _only(full, "rotary_percent", 1.0, "all rotary channels turn there", beside)
    for name in ("seq_len_interpolation_factor", "rope_scaling", "no_rope_freq", "mrope_section"):
        _only(full, name, None, "it has no effect there", beside)
    if kind not in ("rope", "yarn"):
        raise ValueError(f"position_embedding_type={kind!r} cannot be exported with latent attention; only 'rope' and 'yarn' can")
    args = {theirs: latent.get(ours) for theirs, ours in LATENT.items()}
    args |= {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": kind, "position_embedding_type": "rope"}
    # Without a scaling the factor of the scores is 1.
    stated = full["yarn"] or {} if kind == "yarn" else {"mscale_all_dim": 0.0}
    yarn = {**_YARN_DEFAULTS, **stated}
    whole = {"yarn.correction_range_round_to_int": yarn["correction_range_round_to_int"]}
    _only(whole, "yarn.correction_range_round_to_int", True, "the ramp has whole channels there")
    if yarn["mscale"] is None and yarn["mscale_all_dim"]:
        raise ValueError(f"yarn.mscale=None cannot be exported beside mscale_all_dim={yarn['mscale_all_dim']!r}; only a number can")
    if yarn["mscale"] is None or yarn["mscale_all_dim"] is None:
        # Both mean the factor that these have.
        stated = {**stated, "mscale": 1.0, "mscale_all_dim": 0.0}
    return args | {theirs: {**yarn, **stated}[ours] for theirs, ours in YARN.items() if ours in stated or ours == "factor"}
