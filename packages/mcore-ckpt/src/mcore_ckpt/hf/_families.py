# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The families. Only data: a new family is a new entry here."""

from types import MappingProxyType

from mcore_ckpt.hf._rules import ConfigField, Family, Form, Layout, Part, Rule

__all__ = ["FAMILIES"]

_THEIRS = "model.layers.{layer}."


def _same(ours: str, theirs: str, *shape: int | str, when_tied: bool = True) -> Rule:
    return Rule(ours, shape, (Form((Part(theirs, shape),)),), when_tied)


_ENDS = (
    _same("embedding.weight", "model.embed_tokens.weight", "V", "D"),
    _same("final_norm.weight", "model.norm.weight", "D"),
    _same("output.weight", "lm_head.weight", "V", "D", when_tied=False),
)
_ATTENTION = (
    _same("layers.{layer}.input_norm.weight", _THEIRS + "input_layernorm.weight", "D"),
    Rule(
        "layers.{layer}.attention.qkv.weight",
        ("K", "R", "D"),
        (
            Form(
                (
                    Part(_THEIRS + "self_attn.q_proj.weight", ("Q", "D")),
                    Part(_THEIRS + "self_attn.k_proj.weight", ("C", "D")),
                    Part(_THEIRS + "self_attn.v_proj.weight", ("C", "D")),
                ),
                Layout.GROUPED_QKV,
            ),
        ),
    ),
    _same("layers.{layer}.attention.out.weight", _THEIRS + "self_attn.o_proj.weight", "D", "Q"),
    _same("layers.{layer}.ffn_norm.weight", _THEIRS + "post_attention_layernorm.weight", "D"),
)
_DENSE = (
    Rule(
        "layers.{layer}.mlp.up.weight",
        (2, "F", "D"),
        (Form((Part(_THEIRS + "mlp.gate_proj.weight", ("F", "D")), Part(_THEIRS + "mlp.up_proj.weight", ("F", "D")))),),
    ),
    _same("layers.{layer}.mlp.down.weight", _THEIRS + "mlp.down_proj.weight", "D", "F"),
)
_EXPERT = _THEIRS + "block_sparse_moe.experts.{expert}."
_MIXTURE = (
    Rule(
        "layers.{layer}.mlp.router.weight",
        ("E", "D"),
        (Form((Part(_THEIRS + "block_sparse_moe.gate.weight", ("E", "D")),)), Form((Part(_THEIRS + "mlp.gate.weight", ("E", "D")),))),
    ),
    # Files hold one tensor an expert; the second form is what the modules of newer transformers hold in memory.
    Rule(
        "layers.{layer}.mlp.experts.up",
        ("E", 2, "F", "D"),
        (
            Form((Part(_EXPERT + "w1.weight", ("F", "D")), Part(_EXPERT + "w3.weight", ("F", "D")))),
            Form((Part(_THEIRS + "mlp.experts.gate_up_proj", ("E", "2F", "D")),)),
        ),
    ),
    Rule(
        "layers.{layer}.mlp.experts.down",
        ("E", "D", "F"),
        (Form((Part(_EXPERT + "w2.weight", ("D", "F")),)), Form((Part(_THEIRS + "mlp.experts.down_proj", ("E", "D", "F")),))),
    ),
)
_FIELDS = (
    ConfigField("num_layers", "num_hidden_layers"),
    ConfigField("hidden_size", "hidden_size"),
    ConfigField("num_attention_heads", "num_attention_heads"),
    ConfigField("num_query_groups", "num_key_value_heads", None),
    ConfigField("ffn_hidden_size", "intermediate_size"),
    ConfigField("kv_channels", "head_dim", None),
    ConfigField("vocab_size", "vocab_size"),
    ConfigField("init_method_std", "initializer_range", 0.02),
    ConfigField("share_embeddings_and_output_weights", "tie_word_embeddings", False),
)

_LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=(*_FIELDS, ConfigField("norm_epsilon", "rms_norm_eps", 1e-6)),
    rope_theta=10_000.0,
    fixed=MappingProxyType({"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}),
    rules=(*_ENDS, *_ATTENTION, *_DENSE),
    ignored=(".rotary_emb.inv_freq",),
)
_MIXTRAL = Family(
    name="mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=(
        *_FIELDS,
        ConfigField("norm_epsilon", "rms_norm_eps", 1e-5),
        ConfigField("num_moe_experts", "num_local_experts"),
        ConfigField("moe_router_topk", "num_experts_per_tok"),
    ),
    rope_theta=1_000_000.0,
    fixed=MappingProxyType({"hidden_act": "silu", "sliding_window": None}),
    rules=(*_ENDS, *_ATTENTION, *_MIXTURE),
    ignored=(".rotary_emb.inv_freq",),
)

FAMILIES = MappingProxyType({family.name: family for family in (_LLAMA, _MIXTRAL)})
"""Families by name."""
