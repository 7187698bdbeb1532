# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Dense models: the decoders Llama, Mistral, Qwen and Gemma, and the encoder BERT."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt.hf._fields import (
    ATTENTION,
    DENSE_FFN,
    ENDS,
    FFN_NORM,
    SIZES,
    Codec,
    Family,
    attention_projections,
    named,
    refuse,
    renamed,
    same,
)
from mcore_ckpt.hf._positions import rotary
from mcore_ckpt.hf._rules import Dim, Form, HFPart, WeightRule
from mcore_ckpt.hf._windows import one_window, window_by_layer

__all__ = ["BERT", "DENSE"]

_INV_FREQ = (".rotary_emb.inv_freq",)
_LAYER = "model.layers.{layer}."


def _llama_biases() -> Codec:
    """attention_bias puts one on all four projections of attention, mlp_bias on those of the feed-forward; ours come together."""

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        if full["add_qkv_bias"] != full["add_bias_linear"]:
            refuse("add_qkv_bias", full["add_qkv_bias"], f"must equal add_bias_linear={full['add_bias_linear']} in this family")
        return {"attention_bias": full["add_qkv_bias"], "mlp_bias": full["add_bias_linear"]}

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        attention, mlp = (bool(config.get(name)) for name in ("attention_bias", "mlp_bias"))
        if attention != mlp:
            refuse("attention_bias", attention, f"beside mlp_bias={mlp} is not supported; both or neither are")
        return {"add_qkv_bias": attention, "add_bias_linear": mlp}

    return Codec(ours=("add_qkv_bias", "add_bias_linear"), theirs=("attention_bias", "mlp_bias"), write=write, read=read)


def _qwen_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    layers, first = config["num_hidden_layers"], config.get("max_window_layers", 28)
    return ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]


def _gemma_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(config["num_hidden_layers"])]


def _gemma2_kinds(config: Mapping[str, Any]) -> Sequence[str]:
    return ["full_attention" if layer % 2 else "sliding_attention" for layer in range(config["num_hidden_layers"])]


def _query_scale() -> Codec:
    """The score's factor as the width that it is the inverse root of."""

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        scale = full["softmax_scale"]
        width = full["kv_channels"] if scale is None else scale**-2
        return {"query_pre_attn_scalar": round(width) if math.isclose(width, round(width), rel_tol=1e-9) else width}

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        width = config.get("query_pre_attn_scalar", 256)
        return {"softmax_scale": None if width == config.get("head_dim", 256) else width**-0.5}

    return Codec(ours=("softmax_scale",), theirs=("query_pre_attn_scalar", "head_dim"), write=write, read=read)


def _soft_cap(name: str, default: float) -> Codec:
    """A cap that is there when nothing is said; null is none."""
    return Codec(ours=(name,), theirs=(name,), write=lambda full: {name: full[name]}, read=lambda config: {name: config.get(name, default)})


def _tanh_gelu() -> Codec:
    """Gemma's one activation. The first releases call it "gelu", and a null ``hidden_activation`` beside it means it too."""
    entries, words = ("hidden_act", "hidden_activation"), (None, "gelu", "gelu_pytorch_tanh")

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        for name in entries:
            if config.get(name) not in words:
                refuse(name, config[name], "is not supported; only 'gelu' and 'gelu_pytorch_tanh', which mean the same here, are")
        return {}

    return Codec(ours=(), theirs=entries, write=lambda full: {"hidden_act": "gelu_pytorch_tanh"}, read=read)


_TIED = "share_embeddings_and_output_weights"
_DECODER = (*SIZES, renamed("norm_epsilon", "rms_norm_eps", 1e-6), renamed(_TIED, "tie_word_embeddings", False), rotary(base=1e4))
_LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    codecs=(*_DECODER, _llama_biases()),
    fixed={"hidden_act": "silu"},
    rules=(*ENDS, *ATTENTION, FFN_NORM, *DENSE_FFN),
    ignored=_INV_FREQ,
)
_MISTRAL = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    codecs=(*_DECODER, one_window()),
    fixed={"hidden_act": "silu"},
    rules=(*ENDS, *ATTENTION, FFN_NORM, *DENSE_FFN),
    ignored=_INV_FREQ,
)
_QWEN = (*_DECODER, window_by_layer(_qwen_kinds, switch=True))
_QWEN2 = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    codecs=_QWEN,
    implies={"add_qkv_bias": True},
    fixed={"hidden_act": "silu"},
    inert=frozenset({"use_mrope"}),
    rules=(*ENDS, *ATTENTION, FFN_NORM, *DENSE_FFN),
    ignored=_INV_FREQ,
)
_QWEN3 = Family(
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    codecs=_QWEN,
    implies={"qk_layernorm": True},
    fixed={"hidden_act": "silu", "attention_bias": False},
    rules=(*ENDS, *ATTENTION, FFN_NORM, *DENSE_FFN),
    ignored=_INV_FREQ,
)
_GEMMA_IMPLIES = {"layernorm_zero_centered_gamma": True, "embedding_multiplier": lambda full: math.sqrt(full["hidden_size"])}
_GEMMA = Family(
    name="gemma",
    model_type="gemma",
    architecture="GemmaForCausalLM",
    codecs=(
        *SIZES,
        renamed("norm_epsilon", "rms_norm_eps", 1e-6),
        renamed(_TIED, "tie_word_embeddings", True),
        rotary(base=1e4),
        _tanh_gelu(),
    ),
    implies={**_GEMMA_IMPLIES, "activation": "geglu_tanh"},
    fixed={"attention_bias": False, "use_bidirectional_attention": False},
    rules=(*ENDS, *ATTENTION, FFN_NORM, *DENSE_FFN),
    ignored=_INV_FREQ,
)
_SANDWICH_NORMS = tuple(
    same(f"layers.{{layer}}.{ours}.weight", f"{_LAYER}{theirs}.weight", "D")
    for ours, theirs in (
        ("attention_post_norm", "post_attention_layernorm"),
        ("ffn_norm", "pre_feedforward_layernorm"),
        ("mlp_post_norm", "post_feedforward_layernorm"),
    )
)
_GEMMA_ACTIVATION = named("activation", "hidden_activation", {"gelu_pytorch_tanh": "geglu_tanh", "silu": "swiglu"}, "gelu_pytorch_tanh")
_GEMMA2 = Family(
    name="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    codecs=(
        *SIZES,
        renamed("norm_epsilon", "rms_norm_eps", 1e-6),
        renamed(_TIED, "tie_word_embeddings", True),
        rotary(base=1e4),
        window_by_layer(_gemma2_kinds),
        _GEMMA_ACTIVATION,
        _query_scale(),
        _soft_cap("attn_logit_softcapping", 50.0),
        _soft_cap("final_logit_softcapping", 30.0),
    ),
    implies={**_GEMMA_IMPLIES, "sandwich_norm": True},
    fixed={"attention_bias": False, "use_bidirectional_attention": False},
    inert=frozenset({"hidden_act"}),
    rules=(*ENDS, *ATTENTION, *_SANDWICH_NORMS, *DENSE_FFN),
    ignored=_INV_FREQ,
)
_GEMMA3 = Family(
    name="gemma3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    codecs=(
        *SIZES,
        renamed("norm_epsilon", "rms_norm_eps", 1e-6),
        renamed(_TIED, "tie_word_embeddings", True),
        rotary(base=1e6, window_base=1e4),
        window_by_layer(_gemma_kinds),
        _GEMMA_ACTIVATION,
        _query_scale(),
    ),
    implies={**_GEMMA_IMPLIES, "qk_layernorm": True, "sandwich_norm": True},
    fixed={
        "attention_bias": False, "attn_logit_softcapping": None, "final_logit_softcapping": None, "use_bidirectional_attention": False,
    },
    inert=frozenset({"hidden_act"}),
    rules=(*ENDS, *ATTENTION, *_SANDWICH_NORMS, *DENSE_FFN),
    ignored=_INV_FREQ,
)  # fmt: skip
DENSE = (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _GEMMA, _GEMMA2, _GEMMA3)


_BERT_LAYER = "bert.encoder.layer.{layer}."
_BERT_GELU = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "relu": "relu", "silu": "silu"}


def _norm(ours: str, theirs: str) -> tuple[WeightRule, ...]:
    """Weight and bias, which files of the first releases call gamma and beta."""
    return tuple(
        WeightRule(
            f"{ours}.{name}",
            ("D",),
            (Form((HFPart(f"{theirs}.{name}", ("D",)),)), Form((HFPart(f"{theirs}.{older}", ("D",)),))),
        )
        for name, older in (("weight", "gamma"), ("bias", "beta"))
    )


def _affine(ours: str, theirs: str, out: Dim, inner: Dim, *, when: str = "") -> tuple[WeightRule, ...]:
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


def _bert_codecs(kind: str) -> tuple[Codec, ...]:
    return (
        *(codec for codec in SIZES if codec.ours[0] not in ("num_query_groups", "kv_channels")),
        renamed("norm_epsilon", "layer_norm_eps", 1e-12),
        renamed("max_position_embeddings", "max_position_embeddings", 512),
        renamed("num_token_types", "type_vocab_size", 2),
        named("activation", "hidden_act", _BERT_GELU, "gelu"),
        _pair_head(kind),
    )


_BERT_IMPLIES = {
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "position_embedding_type": "learned_absolute",
    "share_embeddings_and_output_weights": True,
    "num_query_groups": lambda full: full["num_attention_heads"],
    "kv_channels": lambda full: full["hidden_size"] // full["num_attention_heads"],
}
_BERT_FREE = {"rotary_base": 1e4, "rotary_percent": 1.0}
_BERT_FIXED = {
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "is_decoder": False,
    "add_cross_attention": False,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_BERT_SILENT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_BERT_RULES = (
    same("embedding.weight", "bert.embeddings.word_embeddings.weight", "V", "D"),
    same("position_embedding.weight", "bert.embeddings.position_embeddings.weight", "P", "D"),
    same("token_type_embedding.weight", "bert.embeddings.token_type_embeddings.weight", "types", "D"),
    *attention_projections(
        "layers.{layer}.attention.",
        *(f"{_BERT_LAYER}attention.{name}" for name in ("self.query", "self.key", "self.value", "output.dense")),
    ),
    *_affine("layers.{layer}.mlp.up", _BERT_LAYER + "intermediate.dense", "F", "D"),
    *_affine("layers.{layer}.mlp.down", _BERT_LAYER + "output.dense", "D", "F"),
    *_affine("lm_head.dense", "cls.predictions.transform.dense", "D", "D"),
    *_norm("lm_head.norm", "cls.predictions.transform.LayerNorm"),
    same("lm_head.bias", "cls.predictions.bias", "V"),
    # Never true here: the name under which a file may hold the embedding once more.
    same("output.weight", "cls.predictions.decoder.weight", "V", "D", when="not share_embeddings_and_output_weights"),
    *_affine("pooler.dense", "bert.pooler.dense", "D", "D", when="add_binary_head"),
    *_affine("binary_head", "cls.seq_relationship", 2, "D", when="add_binary_head"),
)
# The bias of the decoder is the one of the predictions under a second name.
_BERT_IGNORED = ("embeddings.position_ids", "predictions.decoder.bias")
_BERT_SHOWN_BY = {"add_binary_head": "cls.seq_relationship.weight"}
_BERT = Family(
    name="bert",
    model_type="bert",
    architecture="BertForPreTraining",
    codecs=_bert_codecs("Bert"),
    implies={**_BERT_IMPLIES, "post_norm": True},
    free=_BERT_FREE,
    fixed=_BERT_FIXED,
    silent=_BERT_SILENT,
    inert=frozenset({"classifier_dropout"}),
    rules=(
        *_BERT_RULES,
        *_norm("embedding_norm", "bert.embeddings.LayerNorm"),
        *_norm("layers.{layer}.attention_post_norm", _BERT_LAYER + "attention.output.LayerNorm"),
        *_norm("layers.{layer}.mlp_post_norm", _BERT_LAYER + "output.LayerNorm"),
    ),
    shown_by=_BERT_SHOWN_BY,
    ignored=_BERT_IGNORED,
)
_MEGATRON_BERT = Family(
    name="megatron_bert",
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    codecs=_bert_codecs("MegatronBert"),
    implies=_BERT_IMPLIES,
    free=_BERT_FREE,
    fixed=_BERT_FIXED,
    silent=_BERT_SILENT,
    inert=frozenset({"classifier_dropout"}),
    rules=(
        *_BERT_RULES,
        *_norm("layers.{layer}.input_norm", _BERT_LAYER + "attention.ln"),
        *_norm("layers.{layer}.ffn_norm", _BERT_LAYER + "ln"),
        *_norm("final_norm", "bert.encoder.ln"),
    ),
    shown_by=_BERT_SHOWN_BY,
    ignored=_BERT_IGNORED,
)
BERT = (_BERT, _MEGATRON_BERT)
