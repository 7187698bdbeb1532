# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rules and config fields that most families share."""

from mcore_ckpt.hf._fields import Codec, renamed
from mcore_ckpt.hf._rules import Dim, Form, Layout, Part, Rule

__all__ = ["ATTENTION", "DENSE_FFN", "ENDS", "FFN_NORM", "INPUT_NORM", "SIZES", "attention_projections", "same"]

_LAYER = "model.layers.{layer}."


def same(ours: str, theirs: str, *shape: Dim, when: str = "", kinds: str = "") -> Rule:
    """A tensor that only has another name there."""
    return Rule(ours, shape, (Form((Part(theirs, shape),)),), when, kinds)


def attention_projections(ours: str, q: str, k: str, v: str, o: str, *, kinds: str = "") -> tuple[Rule, ...]:
    """Projections of grouped-query attention with their biases, from the prefixes ``ours`` and those of the other side's four."""

    def fused(suffix: str, inner: tuple[Dim, ...], when: str) -> Rule:
        parts = (Part(q + suffix, ("Q", *inner)), Part(k + suffix, ("C", *inner)), Part(v + suffix, ("C", *inner)))
        return Rule(f"{ours}qkv{suffix}", ("K", "R", *inner), (Form(parts, Layout.GROUPED, "K"),), when, kinds)

    return (
        fused(".weight", ("D",), ""),
        fused(".bias", (), "add_qkv_bias"),
        same(f"{ours}out.weight", o + ".weight", "D", "Q", kinds=kinds),
        same(f"{ours}out.bias", o + ".bias", "D", when="add_bias_linear", kinds=kinds),
    )


ENDS = (
    same("embedding.weight", "model.embed_tokens.weight", "V", "D"),
    same("final_norm.weight", "model.norm.weight", "D"),
    same("output.weight", "lm_head.weight", "V", "D", when="not share_embeddings_and_output_weights"),
)
INPUT_NORM = same("layers.{layer}.input_norm.weight", _LAYER + "input_layernorm.weight", "D")
ATTENTION = (
    INPUT_NORM,
    *attention_projections("layers.{layer}.attention.", *(f"{_LAYER}self_attn.{name}_proj" for name in "qkvo")),
    same("layers.{layer}.attention.q_norm.weight", _LAYER + "self_attn.q_norm.weight", "H", when="qk_layernorm"),
    same("layers.{layer}.attention.k_norm.weight", _LAYER + "self_attn.k_norm.weight", "H", when="qk_layernorm"),
)
FFN_NORM = same("layers.{layer}.ffn_norm.weight", _LAYER + "post_attention_layernorm.weight", "D")
DENSE_FFN = (
    Rule(
        "layers.{layer}.mlp.up.weight",
        (2, "F", "D"),
        (Form((Part(_LAYER + "mlp.gate_proj.weight", ("F", "D")), Part(_LAYER + "mlp.up_proj.weight", ("F", "D")))),),
    ),
    Rule(
        "layers.{layer}.mlp.up.bias",
        (2, "F"),
        (Form((Part(_LAYER + "mlp.gate_proj.bias", ("F",)), Part(_LAYER + "mlp.up_proj.bias", ("F",)))),),
        "add_bias_linear",
    ),
    same("layers.{layer}.mlp.down.weight", _LAYER + "mlp.down_proj.weight", "D", "F"),
    same("layers.{layer}.mlp.down.bias", _LAYER + "mlp.down_proj.bias", "D", when="add_bias_linear"),
)
SIZES: tuple[Codec, ...] = (
    renamed("num_layers", "num_hidden_layers"),
    renamed("hidden_size", "hidden_size"),
    renamed("num_attention_heads", "num_attention_heads"),
    renamed("num_query_groups", "num_key_value_heads", None),
    renamed("ffn_hidden_size", "intermediate_size"),
    renamed("kv_channels", "head_dim", None),
    renamed("vocab_size", "vocab_size"),
    renamed("init_method_std", "initializer_range", 0.02),
)
