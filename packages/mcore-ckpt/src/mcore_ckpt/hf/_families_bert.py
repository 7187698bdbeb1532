# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bidirectional encoders: BERT, and Megatron's BERT with the norms in front."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.hf._fields import Codec, Family, named, refuse, renamed
from mcore_ckpt.hf._parts import SIZES, attention_projections, same
from mcore_ckpt.hf._rules import Dim, Form, Part, Rule

__all__ = ["BERT"]

_LAYER = "bert.encoder.layer.{layer}."
_GELU = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}


def _norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Weight and bias, which files of the first releases call gamma and beta."""
    return tuple(
        Rule(f"{ours}.{name}", ("D",), (Form((Part(f"{theirs}.{name}", ("D",)),)), Form((Part(f"{theirs}.{older}", ("D",)),))))
        for name, older in (("weight", "gamma"), ("bias", "beta"))
    )


def _affine(ours: str, theirs: str, out: Dim, inner: Dim, *, when: str = "") -> tuple[Rule, ...]:
    return (
        same(f"{ours}.weight", f"{theirs}.weight", out, inner, when=when),
        same(f"{ours}.bias", f"{theirs}.bias", out, when=when),
    )


def _pair_head(kind: str) -> Codec:
    """Whether the model tells if two sentences follow one another: the name of its class says it, or that it has the weights."""
    with_head, without = f"{kind}ForPreTraining", f"{kind}ForMaskedLM"

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        names = config.get("architectures") or [with_head]
        if names[0] not in (with_head, without):
            refuse("architectures", names[0], f"is not supported; only {with_head} and {without} are")
        return {"add_binary_head": names[0] == with_head}

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        return {"architectures": [without if full["add_binary_head"] is False else with_head]}

    return Codec(ours=("add_binary_head",), theirs=("architectures",), write=write, read=read)


def _codecs(kind: str) -> tuple[Codec, ...]:
    return (
        *(codec for codec in SIZES if codec.ours[0] not in ("num_query_groups", "kv_channels")),
        renamed("norm_epsilon", "layer_norm_eps", 1e-12),
        renamed("max_position_embeddings", "max_position_embeddings", 512),
        renamed("num_token_types", "type_vocab_size", 2),
        named("activation", "hidden_act", _GELU, "gelu"),
        _pair_head(kind),
    )


_IMPLIES = {
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "position_embedding_type": "learned_absolute",
    "share_embeddings_and_output_weights": True,
    "num_query_groups": lambda full: full["num_attention_heads"],
    "kv_channels": lambda full: full["hidden_size"] // full["num_attention_heads"],
}
_FREE = {"rotary_base": 1e4, "rotary_percent": 1.0}
_FIXED = {
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "is_decoder": False,
    "add_cross_attention": False,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_SILENT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_RULES = (
    same("embedding.weight", "bert.embeddings.word_embeddings.weight", "V", "D"),
    same("position_embedding.weight", "bert.embeddings.position_embeddings.weight", "P", "D"),
    same("token_type_embedding.weight", "bert.embeddings.token_type_embeddings.weight", "types", "D"),
    *attention_projections(
        "layers.{layer}.attention.", *(f"{_LAYER}attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense"))
    ),
    *_affine("layers.{layer}.mlp.up", _LAYER + "intermediate.dense", "F", "D"),
    *_affine("layers.{layer}.mlp.down", _LAYER + "output.dense", "D", "F"),
    *_affine("lm_head.dense", "cls.predictions.transform.dense", "D", "D"),
    *_norm("lm_head.norm", "cls.predictions.transform.LayerNorm"),
    same("lm_head.bias", "cls.predictions.bias", "V"),
    # Never true here: the name under which a file may hold the embedding once more.
    same("output.weight", "cls.predictions.decoder.weight", "V", "D", when="not share_embeddings_and_output_weights"),
    *_affine("pooler.dense", "bert.pooler.dense", "D", "D", when="add_binary_head"),
    *_affine("binary_head", "cls.seq_relationship", 2, "D", when="add_binary_head"),
)
# The bias of the decoder is the one of the predictions under a second name.
_IGNORED = ("embeddings.position_ids", "predictions.decoder.bias")
_SHOWN_BY = {"add_binary_head": "cls.seq_relationship.weight"}
_BERT = Family(
    name="bert",
    model_type="bert",
    architecture="BertForPreTraining",
    codecs=_codecs("Bert"),
    implies={**_IMPLIES, "post_norm": True},
    free=_FREE,
    fixed=_FIXED,
    silent=_SILENT,
    inert=frozenset({"classifier_dropout"}),
    rules=(
        *_RULES,
        *_norm("embedding_norm", "bert.embeddings.LayerNorm"),
        *_norm("layers.{layer}.attention_post_norm", _LAYER + "attention.output.LayerNorm"),
        *_norm("layers.{layer}.mlp_post_norm", _LAYER + "output.LayerNorm"),
    ),
    shown_by=_SHOWN_BY,
    ignored=_IGNORED,
)
_MEGATRON_BERT = Family(
    name="megatron_bert",
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    codecs=_codecs("MegatronBert"),
    implies=_IMPLIES,
    free=_FREE,
    fixed=_FIXED,
    silent=_SILENT,
    inert=frozenset({"classifier_dropout"}),
    rules=(
        *_RULES,
        *_norm("layers.{layer}.input_norm", _LAYER + "attention.ln"),
        *_norm("layers.{layer}.ffn_norm", _LAYER + "ln"),
        *_norm("final_norm", "bert.encoder.ln"),
    ),
    shown_by=_SHOWN_BY,
    ignored=_IGNORED,
)
BERT = (_BERT, _MEGATRON_BERT)
