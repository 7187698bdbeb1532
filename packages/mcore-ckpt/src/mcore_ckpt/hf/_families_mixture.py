# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decoders with a mixture of experts (Mixtral, Qwen, gpt-oss), and with multi-head latent attention (DeepSeek)."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.hf._experts import (
    DEEPSEEK_ROUTER,
    PACKED_EXPERTS,
    expert_bias,
    expert_count,
    experts,
    experts_by_list,
    experts_from,
    has_routed_layers,
    shared_rules,
    shared_width,
    sigmoid_router,
    softmax_router,
)
from mcore_ckpt.hf._fields import ATTENTION, DENSE_FFN, ENDS, FFN_NORM, INPUT_NORM, SIZES, Codec, Family, inner, refuse, renamed, same
from mcore_ckpt.hf._positions import rotary
from mcore_ckpt.hf._rules import Dim, Form, HFPart, PartLayout, WeightRule
from mcore_ckpt.hf._windows import window_by_layer

__all__ = ["LATENT", "MIXTURE"]

_LATENT_EPSILON = 1e-6
_THEIR_ATTENTION = "model.layers.{layer}.self_attn."
_OUR_ATTENTION = "layers.{layer}.attention."


def _turned(ours: str, theirs: str, shape: tuple[Dim, ...], their_rows: Dim, groups: Dim, when: str = "") -> tuple[WeightRule, WeightRule]:
    """A projection whose last rows, in each of its groups, go through the rotary embedding; theirs pairs neighbours."""
    part = HFPart(_THEIR_ATTENTION + theirs, (their_rows, shape[-1]))
    clause = f"{when} and " if when else ""
    return (
        WeightRule(_OUR_ATTENTION + ours, shape, (Form((part,)),), clause + "rotary_interleaved"),
        WeightRule(_OUR_ATTENTION + ours, shape, (Form((part,), PartLayout.TURNED, groups, "qrope"),), clause + "not rotary_interleaved"),
    )


_RANKED = "latent_attention.q_lora_rank"
_ATTENTION = (
    INPUT_NORM,
    *_turned("q.weight", "q_proj.weight", ("A", "qh", "D"), "Aqh", "A", f"not {_RANKED}"),
    same(_OUR_ATTENTION + "q_down.weight", _THEIR_ATTENTION + "q_a_proj.weight", "qr", "D", when=_RANKED),
    same(_OUR_ATTENTION + "q_norm.weight", _THEIR_ATTENTION + "q_a_layernorm.weight", "qr", when=_RANKED),
    *_turned("q_up.weight", "q_b_proj.weight", ("A", "qh", "qr"), "Aqh", "A", _RANKED),
    *_turned("kv_down.weight", "kv_a_proj_with_mqa.weight", ("krr", "D"), "krr", 1),
    same(_OUR_ATTENTION + "kv_norm.weight", _THEIR_ATTENTION + "kv_a_layernorm.weight", "kr"),
    WeightRule(
        _OUR_ATTENTION + "kv_up.weight", ("A", "kvh", "kr"), (Form((HFPart(_THEIR_ATTENTION + "kv_b_proj.weight", ("Akvh", "kr")),)),)
    ),
    same(_OUR_ATTENTION + "out.weight", _THEIR_ATTENTION + "o_proj.weight", "D", "Avh"),
)


def _all_dense() -> Codec:
    """Every layer comes before the first mixture of experts."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        layers, dense = config.get("num_hidden_layers", 0), config.get("first_k_dense_replace", 0)
        if config.get("n_routed_experts") is not None and dense < layers:
            refuse(
                "first_k_dense_replace", dense, f"leaves mixtures of experts in the {layers} layers, which this family does not describe"
            )
        return {}

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        return {"first_k_dense_replace": full["num_layers"]}

    return Codec(ours=(), theirs=("first_k_dense_replace", "n_routed_experts"), write=write, read=read)


def _latent_norms() -> Codec:
    """The norms of the latents are there at 1e-6, whatever ``rms_norm_eps`` says."""

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        own = inner(full, "latent_attention.norm_epsilon")
        if (full["norm_epsilon"] if own is None else own) != _LATENT_EPSILON:
            name, value = ("norm_epsilon", full["norm_epsilon"]) if own is None else ("latent_attention.norm_epsilon", own)
            refuse(name, value, f"of the latents has no name there; set latent_attention.norm_epsilon={_LATENT_EPSILON}")
        return {}

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        return {} if (config.get("rms_norm_eps") or 1e-6) == _LATENT_EPSILON else {"latent_attention.norm_epsilon": _LATENT_EPSILON}

    return Codec(ours=("latent_attention",), theirs=("rms_norm_eps",), write=write, read=read)


_LATENT_CODECS = (
    *(codec for codec in SIZES if codec.ours[0] not in ("num_query_groups", "kv_channels")),
    # As many key-value heads as heads, which expand from the latent.
    Codec(
        ours=(),
        theirs=("num_key_value_heads",),
        write=lambda full: {"num_key_value_heads": full["num_attention_heads"]},
        read=lambda config: {},
    ),
    renamed("norm_epsilon", "rms_norm_eps", 1e-6),
    _latent_norms(),
    renamed("share_embeddings_and_output_weights", "tie_word_embeddings", False),
    rotary(base=1e4),
    renamed("latent_attention.q_lora_rank", "q_lora_rank", None),
    *(renamed(f"latent_attention.{name}", name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")),
)
_LATENT_RULES = (*ENDS, *_ATTENTION, FFN_NORM, *DENSE_FFN)
_LAYER = "model.layers.{layer}."
_PROJECTED_EXPERTS = experts(
    _LAYER + "mlp.gate.weight", *(f"{_LAYER}mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))
)
_DEEPSEEK_EXPERTS = (
    *_PROJECTED_EXPERTS,
    expert_bias(_LAYER + "mlp.gate.e_score_correction_bias"),
    *shared_rules("mlp.shared_experts"),
)
_LATENT_FREE = {"num_query_groups": None, "kv_channels": None, "rotary_interleaved": True}
# Of predicting heads, and sizes that follow from others.
_LATENT_INERT = frozenset({"ep_size", "head_dim", "num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim"})
# Of the experts that dense layers do not have.
_ROUTING = frozenset(
    (
        *("moe_intermediate_size", "moe_layer_freq", "n_group", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok"),
        *("routed_scaling_factor", "scoring_func", "topk_group", "topk_method"),
    )
)
_DEEPSEEK_ROUTING = sigmoid_router(DEEPSEEK_ROUTER, routes=has_routed_layers, said={"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
_DEEPSEEK2 = Family(
    name="deepseek2",
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    codecs=(*_LATENT_CODECS, _all_dense()),
    free=_LATENT_FREE,
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    inert=_LATENT_INERT | _ROUTING,
    rules=_LATENT_RULES,
    ignored=(".rotary_emb.inv_freq",),
)
_DEEPSEEK3 = Family(
    name="deepseek3",
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    codecs=(*(codec for codec in _LATENT_CODECS if codec.ours[:1] != ("ffn_hidden_size",)), experts_from(), _DEEPSEEK_ROUTING),
    free=_LATENT_FREE,
    fixed={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
    inert=_LATENT_INERT,
    rules=(*_LATENT_RULES, *_DEEPSEEK_EXPERTS),
    ignored=(".rotary_emb.inv_freq",),
)
LATENT = (_DEEPSEEK2, _DEEPSEEK3)


_MIXTRAL = Family(
    name="mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    codecs=(
        *SIZES,
        renamed("norm_epsilon", "rms_norm_eps", 1e-5),
        renamed("share_embeddings_and_output_weights", "tie_word_embeddings", False),
        renamed("num_moe_experts", "num_local_experts"),
        renamed("moe_router_topk", "num_experts_per_tok"),
        rotary(base=1e6),
    ),
    fixed={"hidden_act": "silu", "sliding_window": None, "router_jitter_noise": 0.0},
    rules=(
        *ENDS,
        *ATTENTION,
        FFN_NORM,
        *experts(_LAYER + "block_sparse_moe.gate.weight", *(f"{_LAYER}block_sparse_moe.experts.{{expert}}.w{n}.weight" for n in (1, 3, 2))),
    ),
    ignored=(".rotary_emb.inv_freq",),
)
_SOFTMAX_CODECS = (
    renamed("share_embeddings_and_output_weights", "tie_word_embeddings", False),
    expert_count(),
    renamed("moe_router_topk", "num_experts_per_tok"),
    rotary(base=1e4),
    softmax_router(),
)
_QWEN_CODECS = (
    *(codec for codec in SIZES if codec.ours[0] != "ffn_hidden_size"),
    experts_by_list(),
    renamed("norm_epsilon", "rms_norm_eps", 1e-6),
    *_SOFTMAX_CODECS,
)
_QWEN_RULES = (*ENDS, *ATTENTION, FFN_NORM, *DENSE_FFN, *_PROJECTED_EXPERTS)
_QWEN_FIXED = {"hidden_act": "silu", "use_sliding_window": False}
_QWEN_INERT = frozenset({"layer_types", "max_window_layers", "sliding_window"})
_QWEN2_MOE = Family(
    name="qwen2_moe",
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    codecs=(*_QWEN_CODECS, shared_width()),
    implies={"add_qkv_bias": True, "moe_shared_expert_gate": True},
    fixed={**_QWEN_FIXED, "qkv_bias": True},
    inert=_QWEN_INERT,
    rules=(*_QWEN_RULES, *shared_rules("mlp.shared_expert")),
    ignored=(".rotary_emb.inv_freq",),
)
_QWEN3_MOE = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    codecs=_QWEN_CODECS,
    implies={"qk_layernorm": True},
    fixed={**_QWEN_FIXED, "attention_bias": False},
    inert=_QWEN_INERT,
    rules=_QWEN_RULES,
    ignored=(".rotary_emb.inv_freq",),
)
_OLMOE = Family(
    name="olmoe",
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    codecs=(
        *(codec for codec in SIZES if codec.ours[0] != "kv_channels"),
        renamed("norm_epsilon", "rms_norm_eps", 1e-5),
        *_SOFTMAX_CODECS,
    ),
    implies={
        "qk_layernorm": True,
        "qk_layernorm_across_heads": True,
        "kv_channels": lambda full: full["hidden_size"] // full["num_attention_heads"],
    },
    fixed={"hidden_act": "silu", "attention_bias": False, "clip_qkv": None},
    rules=(*ENDS, *ATTENTION, FFN_NORM, *_PROJECTED_EXPERTS),
    ignored=(".rotary_emb.inv_freq",),
)


def _alternate(config: Mapping[str, Any]) -> list[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config["num_hidden_layers"])]


def _windows_in_turn() -> Codec:
    by_layer = window_by_layer(_alternate)

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            raise ValueError("lacks rope_parameters and rope_scaling, which it means to scale by 32 to leave out; write them")
        return by_layer.read({"sliding_window": 128, **config})

    return Codec(ours=by_layer.ours, theirs=by_layer.theirs, write=by_layer.write, read=read)


def _swiglu_limit() -> Codec:
    """There is always one."""
    ours, theirs = "activation_func_clamp_value", "swiglu_limit"

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        if full[ours] is None:
            refuse(ours, None, "has no name there: every expert is clamped; set a number")
        return {theirs: full[ours]}

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        limit = config.get(theirs, 7.0)
        if limit is None:
            refuse(theirs, None, "is no limit, and experts are clamped; write a number, or leave it out for 7.0")
        return {ours: limit}

    return Codec(ours=(ours,), theirs=(theirs,), write=write, read=read)


_GPT_OSS = Family(
    name="gpt_oss",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    codecs=(
        *SIZES,
        renamed("norm_epsilon", "rms_norm_eps", 1e-5),
        renamed("share_embeddings_and_output_weights", "tie_word_embeddings", False),
        renamed("num_moe_experts", "num_local_experts"),
        renamed("moe_router_topk", "num_experts_per_tok"),
        rotary(base=1.5e5),
        _windows_in_turn(),
        _swiglu_limit(),
    ),
    implies={
        "add_bias_linear": True, "add_qkv_bias": True, "softmax_type": "learnable", "activation": "quick_geglu", "glu_linear_offset": 1.0,
    },
    fixed={"hidden_act": "silu", "attention_bias": True, "swiglu_alpha": 1.702},
    inert=frozenset({"experts_per_token", "initial_context_length"}),
    rules=(
        *ENDS,
        *ATTENTION,
        same("layers.{layer}.attention.softmax_offset", _LAYER + "self_attn.sinks", "A"),
        FFN_NORM,
        *PACKED_EXPERTS,
    ),
    ignored=(".rotary_emb.inv_freq",),
)  # fmt: skip
MIXTURE = (_MIXTRAL, _QWEN2_MOE, _QWEN3_MOE, _OLMOE, _GPT_OSS)
