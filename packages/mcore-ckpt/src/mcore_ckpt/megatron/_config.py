# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The sizes of their model in our field names."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mcore_ckpt.megatron._args import EXPORTED, LATENT, LLAMA3, OTHER_NAMES, ROUTER, SAME_NAMES, SHARED, YARN
from mcore_ckpt.megatron._names import LAYERS

__all__ = ["check_unread", "family_of", "sizes_of"]

_POSITIONS = ("learned_absolute", "rope", "mrope", "yarn", "none")
_GATED = MappingProxyType({"swiglu": True, "quick_geglu": True, "squared_relu": False})
# Settings without a field of ours: the value that changes nothing, and what another one is.
_NOT_HERE: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "qk_l2_norm": (False, "norms of queries and keys without weights"),
        "attention_output_gate": (False, "a gate whose rows lie between those of the queries"),
        "experimental_attention_variant": (None, "another attention"),
        "is_hybrid_model": (False, "a hybrid model"),
        "hybrid_override_pattern": (None, "a hybrid model"),
        "hybrid_layer_pattern": (None, "a hybrid model"),
        "use_mup": (False, "factors of embeddings, scores and logits"),
    }
)


def check_unread(args: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse numbers of rotary positions in args of a run of theirs: its program builds a model that has its own, whatever they say.

    ``config``, the settings of the caller, may say either number. Args that an export of ours wrote are those of the model.

    Raises:
        ValueError: such a number that only the args say, by its name and value.
    """
    settings = {**args, **config}
    kind = settings.get("position_embedding_type")
    if args.get(EXPORTED) or settings.get("multi_latent_attention") or kind in ("learned_absolute", "none"):
        return
    unread: dict[str, tuple[Any, ...]] = {"rotary_seq_len_interpolation_factor": (None, 1)}
    if settings.get("use_rope_scaling") and kind in (None, "rope"):
        unread["rope_scaling_factor"] = (8.0, None)
    for name, same in unread.items():
        if name not in config and (value := args.get(name)) not in same:
            raise ValueError(
                f"{name}={value!r} is in the args, and pretrain_gpt.py builds its model with {same[0]!r} whatever they say; "
                f"give {value!r} or {same[0]!r} in the config, as the model had it"
            )


def sizes_of(settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], *, gated: bool) -> dict[str, Any]:
    """Our config: what the run said, then what the shapes say, which nobody can contradict.

    Raises:
        ValueError: a setting that no model of ours has, by its name and value; a size that is needed and not known.
    """
    for name, (only, what) in _NOT_HERE.items():
        if (value := settings.get(name)) not in (None, only):
            raise ValueError(f"{name}={value!r} is {what}, which a GPT model here does not have; only {only!r} can be imported")
    sizes = {name: settings[name] for name in SAME_NAMES if settings.get(name) is not None}
    for ours, names in OTHER_NAMES.items():
        if values := [settings[theirs] for theirs in names if settings.get(theirs) is not None]:
            sizes[ours] = values[0]
    if settings.get("num_query_groups") is not None:
        sizes["num_query_groups"] = settings["num_query_groups"]
    sizes.pop("max_position_embeddings", None)
    latent = _latent_of(settings, shapes)
    sizes |= {} if latent else _positions_of(settings, shapes)
    layers = [int(key.split(".")[2]) for key in shapes if key.startswith(LAYERS)]
    sizes["num_layers"] = 1 + max(layers, default=-1)
    if (word := shapes.get("embedding.word_embeddings.weight")) is not None:
        sizes["vocab_size"], sizes["hidden_size"] = word
    sizes["share_embeddings_and_output_weights"] = "output_layer.weight" not in shapes
    for field, part in (("add_bias_linear", "linear_proj"), ("add_qkv_bias", "linear_qkv")):
        if any(key.endswith(f"self_attention.{part}.weight") for key in shapes):
            sizes[field] = any(key.endswith(f"self_attention.{part}.bias") for key in shapes)
    if settings.get("group_query_attention") is False and "num_attention_heads" in sizes:
        sizes["num_query_groups"] = sizes["num_attention_heads"]
    experts = next((shape for key, shape in shapes.items() if key.endswith("experts.experts.linear_fc2.weight")), None)
    dense = next((shape[-1] for key, shape in shapes.items() if key.endswith(".mlp.linear_fc2.weight")), None)
    if dense is not None:
        sizes["ffn_hidden_size"] = dense
    if experts is not None:
        sizes["num_moe_experts"], sizes["ffn_hidden_size"] = experts[0], experts[2]
        if dense is not None:
            sizes |= {"ffn_hidden_size": dense, "moe_ffn_hidden_size": experts[2], "moe_layer_freq": _mixtures(shapes, sizes["num_layers"])}
        sizes |= {name: settings[name] for name in ROUTER if settings.get(name) is not None}
        sizes |= _shared_of(shapes)
        all_biased = sizes.get("add_bias_linear", False)
        router, biased = (any(key.endswith(end) for key in shapes) for end in (".router.bias", ".experts.linear_fc2.bias"))
        if router != all_biased:
            sizes["moe_router_bias"] = router
        if biased != all_biased:
            have, others = ("have", "no") if biased else ("lack", "some")
            raise ValueError(
                f"the experts {have} biases (experts.experts.linear_fc2.bias), and linear_proj has {others}; both do here, or none"
            )
        _check_router(settings)
    sizes |= _activation_of(settings, shapes, gated=gated)
    if latent:
        # Each head has keys and values of its own; positions are not interpolated there.
        dropped = ("num_query_groups", "kv_channels", "seq_len_interpolation_factor")
        sizes = {name: value for name, value in sizes.items() if name not in dropped} | latent
    return {name: value for name, value in sizes.items() if isinstance(value, str | int | float | bool | tuple | list | dict)}


def _positions_of(settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """Of grouped queries, and the scale of their scores.

    Raises:
        ValueError: positions of another kind, or ones that say too little.
    """
    kind = settings.get("position_embedding_type")
    if kind not in (None, *_POSITIONS):
        raise ValueError(f"position_embedding_type={kind!r} is not there here; only {', '.join(_POSITIONS)} can be imported")
    if settings.get("enable_gpt_oss") and kind != "yarn":
        raise ValueError(
            "enable_gpt_oss=True scales positions by numbers that it does not say; give position_embedding_type='yarn' and yarn_* in the "
            "config"
        )
    sizes: dict[str, Any] = {} if kind is None else {"position_embedding_type": kind}
    if kind == "learned_absolute" and "embedding.position_embeddings.weight" in shapes:
        sizes["max_position_embeddings"] = shapes["embedding.position_embeddings.weight"][0]
    sizes |= {name: settings[name] for name in ("softmax_scale", "no_rope_freq") if settings.get(name) is not None}
    if kind == "mrope":
        sizes["mrope_section"] = settings.get("mrope_section")
    if kind == "yarn":
        names = {**{f"yarn_{theirs}": ours for theirs, ours in YARN.items()}, "yarn_correction_range_round_to_int": None}
        yarn = {ours or theirs[5:]: settings[theirs] for theirs, ours in names.items() if settings.get(theirs) is not None}
        if missing := [name for name in ("factor", "original_max_position_embeddings") if name not in yarn]:
            name = next(theirs for theirs, ours in names.items() if ours == missing[0])
            raise ValueError(f"position_embedding_type='yarn', and the checkpoint does not say {name}; give it in the config")
        sizes["yarn"] = yarn
    if settings.get("use_rope_scaling") and kind in (None, "rope"):
        factor = settings.get("rope_scaling_factor")
        sizes["rope_scaling"] = {"factor": 8.0 if factor is None else factor, **LLAMA3}
    return sizes


def _activation_of(settings: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], *, gated: bool) -> dict[str, Any]:
    """Empty where nothing says it.

    Raises:
        ValueError: settings that no activation of ours has, or that the weights contradict.
    """
    flags = {name: bool(settings[name]) for name in _GATED if settings.get(name) is not None}
    chosen = [name for name, on in flags.items() if on]
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(f'{name}=True' for name in chosen)} exclude one another; set one of them in the config")
    if not flags or not any(key.endswith("linear_fc1.weight") for key in shapes):
        return {}
    if gated != (bool(chosen) and _GATED[chosen[0]]):
        has, sets = ("a gate", ", ".join(chosen) or "none") if gated else ("no gate", chosen[0])
        raise ValueError(
            f"the feed-forward has {has}, and of {', '.join(_GATED)} the settings have {sets}; give the right one as True in the config"
        )
    tanh = bool(settings.get("bias_gelu_fusion")) and any(key.endswith("linear_fc1.bias") for key in shapes)
    sizes: dict[str, Any] = {"activation": chosen[0] if chosen else "gelu_tanh" if tanh else "gelu"}
    for name, only in (("glu_linear_offset", 0.0), ("activation_func_clamp_value", None)):
        value = settings.get(name)
        if value in (None, only):
            continue
        if sizes["activation"] != "quick_geglu":
            raise ValueError(
                f"{name}={value!r} is of quick_geglu alone here, and the activation is {sizes['activation']}; only {only!r} can"
            )
        sizes[name] = value
    return sizes


def _check_router(settings: Mapping[str, Any]) -> None:
    kinds = settings.get("moe_router_load_balancing_type")
    if "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds or ()):
        raise ValueError(
            "moe_router_load_balancing_type='sinkhorn' weighs experts in a way of its own; give another one in the config to import without"
        )


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
    # An arg that nobody set leaves the default of their config.
    kind = settings.get("rope_type") or ("yarn" if settings.get("multi_latent_attention") else None)
    needed = [name for name in LATENT if name != "q_lora_rank" and settings.get(name) is None]
    needed += ["rope_type"] if kind is None else []
    if needed:
        raise ValueError(f"the checkpoint has latent attention and does not say {', '.join(needed)}; give it in the config")
    if settings.get("rotary_percent") not in (None, 1.0):
        raise ValueError(
            f"rotary_percent={settings['rotary_percent']!r}: all rotary channels of latent attention turn here; only 1.0 can be imported"
        )
    latent = {ours: settings.get(theirs) for theirs, ours in LATENT.items()}
    sizes: dict[str, Any] = {
        "latent_attention": latent,
        "rotary_interleaved": True,
        "qk_layernorm": False,
        "position_embedding_type": "rope",
    }
    yarn = {ours: settings[theirs] for theirs, ours in YARN.items() if settings.get(theirs) is not None}
    if kind == "yarn":
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
    ordinary = {"moe_router_score_function": "softmax", "rotary_percent": 1.0}
    others = ("rotary_interleaved", "rotary_percent", "layernorm_zero_centered_gamma", "seq_len_interpolation_factor", "softmax_scale")
    others = (*others, "no_rope_freq", "moe_router_bias", "moe_layer_freq", *SHARED, *ROUTER[1:])
    if any((value := sizes.get(name)) and value != ordinary.get(name) for name in others):
        return None
    experts, qk_norm, bias = "num_moe_experts" in sizes, bool(sizes.get("qk_layernorm")), bool(sizes.get("add_qkv_bias"))
    if experts:
        return None if bias else "qwen3_moe" if qk_norm else "mixtral"
    if qk_norm:
        return None if bias else "qwen3"
    return "qwen2" if bias else "llama"
