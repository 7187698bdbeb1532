# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The sizes of their model in our field names."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mcore_ckpt.megatron._names import LAYERS

__all__ = ["args_of", "family_of", "sizes_of"]

_SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels", "norm_epsilon"),
    *("normalization", "qk_layernorm", "add_bias_linear", "add_qkv_bias", "rotary_base", "rotary_percent", "init_method_std"),
    *("softmax_type", "window_size", "window_attn_skip_freq"),
)
_ROUTER = (
    *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_enable_expert_bias"),
)
_SHARED = ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_latent_size")
_RENAMED = MappingProxyType({"layernorm_epsilon": "norm_epsilon", "padded_vocab_size": "vocab_size"})
_POSITIONS = MappingProxyType({"learned_absolute": "learned_absolute", "rope": "rope"})
_LATENT = MappingProxyType(
    {
        "q_lora_rank": "q_lora_rank",
        "kv_lora_rank": "kv_lora_rank",
        "qk_head_dim": "qk_nope_head_dim",
        "qk_pos_emb_head_dim": "qk_rope_head_dim",
        "v_head_dim": "v_head_dim",
    }
)
_YARN = MappingProxyType(
    {
        "rotary_scaling_factor": "factor",
        **{name: name for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
    }
)


def sizes_of(settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], *, gated: bool) -> dict[str, Any]:
    """Our config: what the run said, then what the shapes say, which nobody can contradict."""
    sizes = {name: settings[name] for name in _SAME if settings.get(name) is not None}
    sizes |= {ours: settings[theirs] for theirs, ours in _RENAMED.items() if settings.get(theirs) is not None and ours not in sizes}
    if settings.get("position_embedding_type") in _POSITIONS:
        sizes["position_embedding_type"] = settings["position_embedding_type"]
        if settings["position_embedding_type"] == "learned_absolute" and "embedding.position_embeddings.weight" in shapes:
            sizes["max_position_embeddings"] = shapes["embedding.position_embeddings.weight"][0]
    layers = [int(key.split(".")[2]) for key in shapes if key.startswith(LAYERS)]
    sizes["num_layers"] = 1 + max(layers, default=-1)
    if (word := shapes.get("embedding.word_embeddings.weight")) is not None:
        sizes["vocab_size"], sizes["hidden_size"] = word
    sizes["share_embeddings_and_output_weights"] = "output_layer.weight" not in shapes
    if settings.get("group_query_attention") is False and "num_attention_heads" in sizes:
        sizes["num_query_groups"] = sizes["num_attention_heads"]
    experts = next((shape for key, shape in shapes.items() if key.endswith("experts.experts.linear_fc2.weight")), None)
    if experts is not None:
        sizes["num_moe_experts"], sizes["ffn_hidden_size"] = experts[0], experts[2]
        dense = next((shape[-1] for key, shape in shapes.items() if key.endswith(".mlp.linear_fc2.weight")), None)
        if dense is not None:
            sizes |= {"ffn_hidden_size": dense, "moe_ffn_hidden_size": experts[2], "moe_layer_freq": _mixtures(shapes, sizes["num_layers"])}
        sizes |= {name: settings[name] for name in _ROUTER if settings.get(name) is not None}
        sizes |= _shared_of(shapes)
    if gated and settings.get("swiglu"):
        sizes["activation"] = "swiglu"
    if latent := _latent_of(settings, shapes):
        # Each head has keys and values of its own.
        sizes = {name: value for name, value in sizes.items() if name not in ("num_query_groups", "kv_channels")} | latent
    return {name: value for name, value in sizes.items() if isinstance(value, str | int | float | bool | tuple | list | dict)}


def _shared_of(shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Width and gate of the shared experts, width of the latents, and biases of the router, which the weights tell."""
    sizes: dict[str, Any] = {}
    for key, shape in shapes.items():
        if key.endswith(".shared_experts.linear_fc2.weight"):
            sizes["moe_shared_expert_intermediate_size"] = shape[-1]
        elif key.endswith(".shared_experts.gate_weight"):
            sizes["moe_shared_expert_gate"] = True
        elif key.endswith(".fc1_latent_proj.weight"):
            sizes["moe_latent_size"] = shape[0]
        elif key.endswith(".router.expert_bias"):
            sizes["moe_router_enable_expert_bias"] = True
    return sizes


def _mixtures(shapes: Mapping[str, Sequence[int]], num_layers: int) -> list[int]:
    """1 for each layer with experts, 0 for each without."""
    return [int(f"{LAYERS}{layer}.mlp.router.weight" in shapes) for layer in range(num_layers)]


def _latent_of(settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Our fields of multi-head latent attention, whose rotary channels are pairs of neighbours there.

    Raises:
        ValueError: a size that is needed and not known; latents without norms, which are always there here.
    """
    layers = {key.rpartition(".self_attention.")[0] for key in shapes if key.endswith("self_attention.linear_kv_down_proj.weight")}
    if not layers:
        return {}
    for layer in sorted(layers):
        norms = ["kv"] if f"{layer}.self_attention.linear_q_proj.weight" in shapes else ["q", "kv"]
        for norm in norms:
            names = (f"{layer}.self_attention.{norm}_layernorm.weight", f"{layer}.self_attention.linear_{norm}_up_proj.layer_norm_weight")
            if not any(name in shapes for name in names):
                raise ValueError(f"{names[0]} is missing: latents without norms (qk_layernorm=False) are a model that is not there here")
    needed = [name for name in (*_LATENT, "rope_type") if name != "q_lora_rank" and settings.get(name) is None]
    if needed:
        raise ValueError(f"the checkpoint has latent attention and does not say {', '.join(needed)}; give it in the config")
    latent = {ours: settings.get(theirs) for theirs, ours in _LATENT.items()}
    sizes: dict[str, Any] = {
        "latent_attention": latent,
        "rotary_interleaved": True,
        "qk_layernorm": False,
        "position_embedding_type": "rope",
    }
    yarn = {ours: settings[theirs] for theirs, ours in _YARN.items() if settings.get(theirs) is not None}
    if settings["rope_type"] == "yarn":
        sizes |= {"position_embedding_type": "yarn", "yarn": yarn}
    elif (all_dims := yarn.get("mscale_all_dim")) and (factor := yarn.get("factor", 1.0)) > 1.0:
        # The factor of the scores is theirs whether positions are scaled or not.
        width = settings["qk_head_dim"] + settings["qk_pos_emb_head_dim"]
        sizes["softmax_scale"] = (0.1 * all_dims * math.log(factor) + 1.0) ** 2 / math.sqrt(width)
    return sizes


def family_of(settings: Mapping[str, Any], sizes: Mapping[str, Any], *, gated: bool) -> str | None:
    """The Hugging Face family that has this model, where the run said enough to tell."""
    wanted = {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False}
    if not gated or any(settings.get(name) != value for name, value in wanted.items()):
        return None
    if sizes.get("softmax_type", "vanilla") != "vanilla" or sizes.get("window_size") is not None or "moe_latent_size" in sizes:
        return None
    balanced = sizes.get("moe_router_score_function") == "sigmoid" and "moe_shared_expert_intermediate_size" in sizes
    if "latent_attention" in sizes:
        # All norms are of one epsilon there, and those of the latents of 1e-6 in the family.
        known = balanced if "num_moe_experts" in sizes else "moe_layer_freq" not in sizes
        return "deepseek3" if sizes.get("norm_epsilon") == 1e-6 and known else None
    ordinary = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}
    if any(sizes.get(name) not in (None, ordinary.get(name)) for name in ("moe_layer_freq", *_SHARED, *_ROUTER[1:])):
        return None
    experts, qk_norm, bias = "num_moe_experts" in sizes, bool(sizes.get("qk_layernorm")), bool(sizes.get("add_qkv_bias"))
    if experts:
        return None if bias else "qwen3_moe" if qk_norm else "mixtral"
    if qk_norm:
        return None if bias else "qwen3"
    return "qwen2" if bias else "llama"


def args_of(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Their settings of a config of ours.

    Raises:
        ValueError: latent attention, or norms of queries and keys, that are not theirs.
    """
    if sizes.get("qk_layernorm_across_heads"):
        raise ValueError("qk_layernorm_across_heads=True cannot be exported: norms of queries and keys are of single heads there")
    args = {name: sizes[name] for name in (*_SAME, *_ROUTER, *_SHARED) if name in sizes}
    args |= {theirs: sizes[ours] for theirs, ours in _RENAMED.items() if ours in sizes}
    if "num_moe_experts" in sizes:
        args["num_experts"] = sizes["num_moe_experts"]
    if "num_query_groups" in sizes:
        args["group_query_attention"] = sizes["num_query_groups"] != sizes.get("num_attention_heads")
    if "share_embeddings_and_output_weights" in sizes:
        args["untie_embeddings_and_output_weights"] = not sizes["share_embeddings_and_output_weights"]
    # The fields that a config leaves out are at the defaults of ours.
    args |= {"normalization": sizes.get("normalization", "RMSNorm"), "swiglu": sizes.get("activation", "swiglu") == "swiglu"}
    args |= {name: sizes.get(name, default) for name, default in (("position_embedding_type", "rope"), ("add_bias_linear", False))}
    args |= {name: sizes[name] for name in ("moe_layer_freq", "moe_ffn_hidden_size") if name in sizes}
    args |= _latent_args(sizes)
    if args.get("max_position_embeddings") is None and sizes.get("max_position_embeddings") is not None:
        args["max_position_embeddings"] = sizes["max_position_embeddings"]
    return args


def _latent_args(sizes: Mapping[str, Any]) -> dict[str, Any]:
    latent = sizes.get("latent_attention")
    if not isinstance(latent, Mapping):
        return {}
    kind, yarn = sizes.get("position_embedding_type", "rope"), sizes.get("yarn")
    epsilon = sizes.get("norm_epsilon", 1e-5)
    refused = {
        "rotary_interleaved": (sizes.get("rotary_interleaved", False), True, "the rotary channels are pairs of neighbours there"),
        "latent_attention.norm_epsilon": (latent.get("norm_epsilon") or epsilon, epsilon, "all norms have one epsilon there"),
        "softmax_scale": (sizes.get("softmax_scale"), None, "the scale follows from the widths there"),
    }
    for name, (value, only, why) in refused.items():
        if value != only:
            raise ValueError(f"{name}={value!r} cannot be exported with latent attention: {why}; only {only!r} can")
    if kind not in ("rope", "yarn"):
        raise ValueError(f"position_embedding_type={kind!r} cannot be exported with latent attention; only 'rope' and 'yarn' can")
    args = {theirs: latent.get(ours) for theirs, ours in _LATENT.items()}
    args |= {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": kind, "position_embedding_type": "rope"}
    # Without a scaling the factor of the scores is 1.
    scaling = yarn if kind == "yarn" and isinstance(yarn, Mapping) else {"factor": 1.0, "mscale_all_dim": 0.0}
    return args | {theirs: scaling[ours] for theirs, ours in _YARN.items() if scaling.get(ours) is not None}
