# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decoders with multi-head latent attention: DeepSeek, as far as their layers are dense."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.hf._fields import Codec, Family, inner, refuse, renamed
from mcore_ckpt.hf._parts import DENSE_FFN, ENDS, FFN_NORM, INPUT_NORM, SIZES, same
from mcore_ckpt.hf._positions import rotary
from mcore_ckpt.hf._rules import Dim, Form, Layout, Part, Rule

__all__ = ["LATENT"]

_LATENT_EPSILON = 1e-6
_LAYER = "model.layers.{layer}.self_attn."
_OURS = "layers.{layer}.attention."


def _turned(ours: str, theirs: str, shape: tuple[Dim, ...], their_rows: Dim, groups: Dim, when: str = "") -> tuple[Rule, Rule]:
    """A projection whose last rows, in each of its groups, go through the rotary embedding; theirs pairs neighbours."""
    part = Part(_LAYER + theirs, (their_rows, shape[-1]))
    clause = f"{when} and " if when else ""
    return (
        Rule(_OURS + ours, shape, (Form((part,)),), clause + "rotary_interleaved"),
        Rule(_OURS + ours, shape, (Form((part,), Layout.TURNED, groups, "qrope"),), clause + "not rotary_interleaved"),
    )


_RANKED = "latent_attention.q_lora_rank"
_ATTENTION = (
    INPUT_NORM,
    *_turned("q.weight", "q_proj.weight", ("A", "qh", "D"), "Aqh", "A", f"not {_RANKED}"),
    same(_OURS + "q_down.weight", _LAYER + "q_a_proj.weight", "qr", "D", when=_RANKED),
    same(_OURS + "q_norm.weight", _LAYER + "q_a_layernorm.weight", "qr", when=_RANKED),
    *_turned("q_up.weight", "q_b_proj.weight", ("A", "qh", "qr"), "Aqh", "A", _RANKED),
    *_turned("kv_down.weight", "kv_a_proj_with_mqa.weight", ("krr", "D"), "krr", 1),
    same(_OURS + "kv_norm.weight", _LAYER + "kv_a_layernorm.weight", "kr"),
    Rule(_OURS + "kv_up.weight", ("A", "kvh", "kr"), (Form((Part(_LAYER + "kv_b_proj.weight", ("Akvh", "kr")),)),)),
    same(_OURS + "out.weight", _LAYER + "o_proj.weight", "D", "Avh"),
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


_CODECS = (
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
    _all_dense(),
)
_RULES = (*ENDS, *_ATTENTION, FFN_NORM, *DENSE_FFN)
_FREE = {"num_query_groups": None, "kv_channels": None, "rotary_interleaved": True}
# Of the experts and predicting heads that dense layers do not have, and of sizes that follow from others.
_INERT = frozenset(
    (
        *("ep_size", "head_dim", "moe_intermediate_size", "moe_layer_freq", "n_group", "n_shared_experts", "norm_topk_prob"),
        *("num_experts_per_tok", "num_mtp_layers", "num_nextn_predict_layers", "qk_head_dim", "routed_scaling_factor", "scoring_func"),
        *("topk_group", "topk_method"),
    )
)
_DEEPSEEK2 = Family(
    name="deepseek2",
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    codecs=_CODECS,
    free=_FREE,
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    inert=_INERT,
    rules=_RULES,
    ignored=(".rotary_emb.inv_freq",),
)
_DEEPSEEK3 = Family(
    name="deepseek3",
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    codecs=_CODECS,
    free=_FREE,
    fixed={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
    inert=_INERT,
    rules=_RULES,
    ignored=(".rotary_emb.inv_freq",),
)
LATENT = (_DEEPSEEK2, _DEEPSEEK3)
