# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Stacks with Mamba-2 layers: Mamba-2 alone, Nemotron-H, Bamba."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mcore_ckpt.hf._experts import NEMOTRON_ROUTER, experts_by_pattern, pattern_has_experts, sigmoid_router, ungated_experts
from mcore_ckpt.hf._fields import ENDS, SIZES, Codec, Family, attention_projections, named, refuse, renamed, same
from mcore_ckpt.hf._positions import rotary
from mcore_ckpt.hf._rules import Form, HFPart, PartLayout, WeightRule

__all__ = ["HYBRID"]

_SYMBOLS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_WORDS = {word: symbol for symbol, word in _SYMBOLS.items()} | {"mamba": "M", "attention": "*"}


def _pattern_of(full: Mapping[str, Any], symbols: str) -> str:
    pattern = full["hybrid_layer_pattern"]
    if pattern is None:
        refuse("hybrid_layer_pattern", pattern, f"is needed; write a symbol of {symbols!r} for each layer")
    layers = pattern.replace("|", "")
    for symbol in layers:
        if symbol not in symbols:
            refuse("hybrid_layer_pattern", pattern, f"has {symbol!r}, which this family has not; only {' '.join(symbols)}")
    if len(layers) != full["num_layers"]:
        refuse("hybrid_layer_pattern", pattern, f"has {len(layers)} layers, num_layers={full['num_layers']}")
    if "M" in layers and full["mamba"] is None:
        refuse("mamba", None, "is needed for the layers M of the pattern")
    return layers


_STACK = ("num_layers", "hybrid_layer_pattern")


def _only_mamba() -> Codec:
    return Codec(
        ours=_STACK,
        theirs=("num_hidden_layers",),
        write=lambda full: {"num_hidden_layers": len(_pattern_of(full, "M"))},
        read=lambda config: {"num_layers": config["num_hidden_layers"], "hybrid_layer_pattern": "M" * config["num_hidden_layers"]},
    )


def _named_layers() -> Codec:
    """A word for each layer, or one string of symbols, as releases before had it."""

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        pattern = _pattern_of(full, "M*-E")
        return {
            "num_hidden_layers": len(pattern),
            "hybrid_override_pattern": pattern,
            "layers_block_type": [_SYMBOLS[symbol] for symbol in pattern],
        }

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        words: Sequence[str] = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
        if not words:
            raise ValueError("lacks layers_block_type")
        for word in words:
            if word not in _WORDS and word not in _SYMBOLS:
                refuse("layers_block_type", word, f"is not supported; only {', '.join(_WORDS)} are")
        return {"num_layers": len(words), "hybrid_layer_pattern": "".join(_WORDS.get(word, word) for word in words)}

    theirs = ("num_hidden_layers", "hybrid_override_pattern", "layers_block_type")
    return Codec(ours=_STACK, theirs=theirs, write=write, read=read)


def _pairs() -> Codec:
    """Layers of a mixer and a feed-forward each: two of ours."""

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        pattern = _pattern_of(full, "M*-")
        mixers, feed_forwards = pattern[::2], pattern[1::2]
        if len(pattern) % 2 or "-" in mixers or set(feed_forwards) - {"-"}:
            refuse("hybrid_layer_pattern", pattern, "must be mixers, M or *, each with a feed-forward behind it, as in 'M-*-'")
        attention = [layer for layer, symbol in enumerate(mixers) if symbol == "*"]
        return {"num_hidden_layers": len(mixers), "attn_layer_indices": attention}

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        attention, count = config.get("attn_layer_indices") or (), config["num_hidden_layers"]
        return {
            "num_layers": 2 * count,
            "hybrid_layer_pattern": "".join("*-" if layer in attention else "M-" for layer in range(count)),
        }

    return Codec(ours=_STACK, theirs=("num_hidden_layers", "attn_layer_indices"), write=write, read=read)


def _step_limits() -> Codec:
    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        limits = (0.0, math.inf) if full["mamba"] is None else full["mamba"]["dt_limits"]
        # JSON has no infinity; what nobody limits is left out.
        return {} if limits == (0.0, math.inf) else {"time_step_limit": [{"__float__": "Infinity"} if x == math.inf else x for x in limits]}

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        limits = config.get("time_step_limit") or (0.0, math.inf)
        return {"mamba.dt_limits": tuple(float(x["__float__"]) if isinstance(x, dict) else float(x) for x in limits)}

    return Codec(ours=("mamba",), theirs=("time_step_limit",), write=write, read=read)


def _least_step() -> Codec:
    """Nemotron-H cuts its steps at the smallest one it was initialised with."""

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        least, most = (0.0, math.inf) if full["mamba"] is None else full["mamba"]["dt_limits"]
        if most != math.inf:
            refuse("mamba.dt_limits", (least, most), "has no name there; only (x, inf) has")
        return {"time_step_min": least}

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        least = config.get("time_step_min")
        return {"mamba.dt_limits": (0.001 if least is None else float(least), math.inf)}

    return Codec(ours=("mamba",), theirs=("time_step_min",), write=write, read=read)


def _mamba_codecs(theirs: Mapping[str, str], chunk: int) -> tuple[Codec, ...]:
    defaults = {"state_dim": 128, "num_groups": 8, "expand": 2, "conv_kernel": 4, "chunk_size": chunk, "use_conv_bias": True}
    return tuple(renamed(f"mamba.{ours}", name, defaults.get(ours, ...)) for ours, name in theirs.items())


def _mamba_rules(theirs: str) -> tuple[WeightRule, ...]:
    """Their rows are gates, inputs, B, C and steps of all heads; ours the same, but group by group."""
    ours = "layers.{layer}.mamba."

    def grouped(
        name: str, their_name: str, rows: tuple[str, ...], total: str, per_group: str, *inner: int | str, when: str = ""
    ) -> WeightRule:
        part = HFPart(theirs + their_name, (total, *inner), rows)
        wide = tuple(size for size in inner if size != 1)
        return WeightRule(ours + name, ("mg", per_group, *wide), (Form((part,), PartLayout.GROUPED, "mg"),), when, "M")

    channels = ("mi", "ms", "ms")
    return (
        grouped("in_proj.weight", "in_proj.weight", ("mi", *channels, "mh"), "mp", "mp/g", "D"),
        grouped("conv.weight", "conv1d.weight", channels, "mc", "mc/g", 1, "mk"),
        grouped("conv.bias", "conv1d.bias", channels, "mc", "mc/g", when="mamba.use_conv_bias"),
        *(same(ours + name, theirs + name, "mh", kinds="M") for name in ("A_log", "D", "dt_bias")),
        same(ours + "norm.weight", theirs + "norm.weight", "mi", kinds="M"),
        same(ours + "out_proj.weight", theirs + "out_proj.weight", "D", "mi", kinds="M"),
    )


_BACKBONE = "backbone.layers.{layer}."
_BACKBONE_ENDS = (
    same("embedding.weight", "backbone.embeddings.weight", "V", "D"),
    same("final_norm.weight", "backbone.norm_f.weight", "D"),
    same("output.weight", "lm_head.weight", "V", "D", when="not share_embeddings_and_output_weights"),
    same("layers.{layer}.input_norm.weight", _BACKBONE + "norm.weight", "D", kinds="M*"),
    *_mamba_rules(_BACKBONE + "mixer."),
)
_TIED = renamed("share_embeddings_and_output_weights", "tie_word_embeddings", False)
# How the first step sizes are drawn, and how 16-bit sums are kept.
_FIRST_STEPS = frozenset(
    (
        *("time_step_floor", "time_step_init_scheme", "time_step_max", "time_step_rank", "time_step_scale"),
        *("rescale_prenorm_residual", "residual_in_fp32"),
    )
)
_MAMBA2 = Family(
    name="mamba2",
    model_type="mamba2",
    architecture="Mamba2ForCausalLM",
    codecs=(
        _only_mamba(),
        renamed("hidden_size", "hidden_size"),
        renamed("vocab_size", "vocab_size"),
        renamed("norm_epsilon", "layer_norm_epsilon", 1e-5),
        renamed("init_method_std", "initializer_range", 0.1),
        _TIED,
        *_mamba_codecs(
            {
                "state_dim": "state_size", "head_dim": "head_dim", "num_groups": "n_groups", "num_heads": "num_heads", "expand": "expand",
                "conv_kernel": "conv_kernel", "chunk_size": "chunk_size", "use_conv_bias": "use_conv_bias",
            },
            256,
        ),
        _step_limits(),
    ),
    free={
        "num_attention_heads": 1, "num_query_groups": None, "kv_channels": None, "ffn_hidden_size": None, "activation": "swiglu",
        "position_embedding_type": "none", "rotary_base": 1e4, "add_qkv_bias": False, "qk_layernorm": False, "rotary_percent": 1.0,
    },
    fixed={"hidden_act": "silu", "use_bias": False},
    inert=_FIRST_STEPS | {"intermediate_size", "norm_before_gate", "rms_norm", "time_step_min"},
    rules=_BACKBONE_ENDS,
)  # fmt: skip
_NEMOTRON_H = Family(
    name="nemotron_h",
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    codecs=(
        *(codec for codec in SIZES if codec.ours[0] != "num_layers"),
        _named_layers(),
        renamed("norm_epsilon", "layer_norm_epsilon", 1e-5),
        _TIED,
        named("activation", "mlp_hidden_act", {"relu2": "squared_relu", "relu": "relu", "silu": "silu", "gelu": "gelu"}, "relu2"),
        *_mamba_codecs(
            {
                "state_dim": "ssm_state_size", "head_dim": "mamba_head_dim", "num_groups": "n_groups", "num_heads": "mamba_num_heads",
                "expand": "expand", "conv_kernel": "conv_kernel", "chunk_size": "chunk_size", "use_conv_bias": "use_conv_bias",
            },
            128,
        ),
        _least_step(),
        experts_by_pattern(),
        sigmoid_router(NEMOTRON_ROUTER, routes=pattern_has_experts, said={}),
    ),
    implies={"position_embedding_type": "none"},
    free={"rotary_base": 1e4, "rotary_percent": 1.0},
    fixed={
        "mamba_hidden_act": "silu", "use_bias": False, "mamba_proj_bias": False, "attention_bias": False, "mlp_bias": False,
        "sliding_window": None, "num_nextn_predict_layers": 0,
    },
    # No head is turned, and the epsilon of norms has one name.
    inert=_FIRST_STEPS
    | {
        "attention_head_dim", "hidden_act", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "mtp_layers_block_type", "norm_eps",
        "partial_rotary_factor", "rms_norm_eps", "rope_theta", "time_step_limit", "use_mamba_kernels",
    },
    rules=(
        *_BACKBONE_ENDS,
        *attention_projections("layers.{layer}.attention.", *(f"{_BACKBONE}mixer.{name}_proj" for name in "qkvo"), kinds="*"),
        same("layers.{layer}.ffn_norm.weight", _BACKBONE + "norm.weight", "D", kinds="-E"),
        same("layers.{layer}.mlp.up.weight", _BACKBONE + "mixer.up_proj.weight", "F", "D", kinds="-"),
        same("layers.{layer}.mlp.down.weight", _BACKBONE + "mixer.down_proj.weight", "D", "F", kinds="-"),
        *ungated_experts(_BACKBONE + "mixer."),
    ),
)  # fmt: skip
_BAMBA_LAYER = "model.layers.{pair}."
_BAMBA = Family(
    name="bamba",
    model_type="bamba",
    architecture="BambaForCausalLM",
    codecs=(
        *(codec for codec in SIZES if codec.ours[0] != "num_layers"),
        _pairs(),
        renamed("norm_epsilon", "rms_norm_eps", 1e-5),
        _TIED,
        rotary(base=1e4, share=0.5),
        *_mamba_codecs(
            {
                "state_dim": "mamba_d_state", "head_dim": "mamba_d_head", "num_groups": "mamba_n_groups", "num_heads": "mamba_n_heads",
                "expand": "mamba_expand", "conv_kernel": "mamba_d_conv", "chunk_size": "mamba_chunk_size",
                "use_conv_bias": "mamba_conv_bias",
            },
            256,
        ),
        _step_limits(),
    ),
    fixed={"hidden_act": "silu", "mamba_proj_bias": False, "attention_bias": False, "mlp_bias": False},
    rules=(
        ENDS[0],
        same("final_norm.weight", "model.final_layernorm.weight", "D"),
        ENDS[2],
        same("layers.{layer}.input_norm.weight", _BAMBA_LAYER + "input_layernorm.weight", "D", kinds="M*"),
        *_mamba_rules(_BAMBA_LAYER + "mamba."),
        *attention_projections("layers.{layer}.attention.", *(f"{_BAMBA_LAYER}self_attn.{name}_proj" for name in "qkvo"), kinds="*"),
        same("layers.{layer}.ffn_norm.weight", _BAMBA_LAYER + "pre_ff_layernorm.weight", "D", kinds="-"),
        WeightRule(
            "layers.{layer}.mlp.up.weight",
            (2, "F", "D"),
            (Form(tuple(HFPart(f"{_BAMBA_LAYER}feed_forward.{name}_proj.weight", ("F", "D")) for name in ("gate", "up"))),),
            kinds="-",
        ),
        same("layers.{layer}.mlp.down.weight", _BAMBA_LAYER + "feed_forward.down_proj.weight", "D", "F", kinds="-"),
    ),
    ignored=(".rotary_emb.inv_freq",),
)  # fmt: skip
HYBRID = (_MAMBA2, _NEMOTRON_H, _BAMBA)
