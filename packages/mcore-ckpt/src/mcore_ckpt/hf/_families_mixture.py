# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Decoders with a mixture of experts in every layer: Mixtral, Qwen3."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt.hf._fields import Codec, Family, refuse, renamed
from mcore_ckpt.hf._parts import ATTENTION, ENDS, FFN_NORM, SIZES
from mcore_ckpt.hf._positions import rotary
from mcore_ckpt.hf._rules import Form, Part, Rule

__all__ = ["MIXTURE"]

_LAYER = "model.layers.{layer}."


def _experts(router: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Files hold one tensor an expert; the second forms are what the modules of newer transformers hold in memory."""
    in_memory = _LAYER + "mlp.experts."
    return (
        Rule(
            "layers.{layer}.mlp.router.weight",
            ("E", "D"),
            (Form((Part(router, ("E", "D")),)), Form((Part(_LAYER + "mlp.gate.weight", ("E", "D")),))),
        ),
        Rule(
            "layers.{layer}.mlp.experts.up",
            ("E", 2, "F", "D"),
            (
                Form((Part(gate, ("F", "D")), Part(up, ("F", "D")))),
                Form((Part(in_memory + "gate_up_proj", ("E", "2F", "D")),)),
            ),
        ),
        Rule(
            "layers.{layer}.mlp.experts.down",
            ("E", "D", "F"),
            (Form((Part(down, ("D", "F")),)), Form((Part(in_memory + "down_proj", ("E", "D", "F")),))),
        ),
    )


def _expert_count() -> Codec:
    """Newer releases call it as Mixtral does."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        count = config.get("num_local_experts") or config.get("num_experts")
        if count is None:
            raise ValueError("lacks num_experts")
        return {"num_moe_experts": count}

    def write(full: Mapping[str, Any]) -> dict[str, Any]:
        return dict.fromkeys(("num_experts", "num_local_experts"), full["num_moe_experts"])

    return Codec(ours=("num_moe_experts",), theirs=("num_experts", "num_local_experts"), write=write, read=read)


def _weights_add_up() -> Codec:
    """A token's experts weigh 1 together, which silence does not mean."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("norm_topk_prob") is not True:
            refuse("norm_topk_prob", config.get("norm_topk_prob"), "is not supported; only True is")
        return {}

    return Codec(ours=(), theirs=("norm_topk_prob",), write=lambda full: {"norm_topk_prob": True}, read=read)


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
        *_experts(
            _LAYER + "block_sparse_moe.gate.weight", *(f"{_LAYER}block_sparse_moe.experts.{{expert}}.w{n}.weight" for n in (1, 3, 2))
        ),
    ),
    ignored=(".rotary_emb.inv_freq",),
)
_QWEN3_MOE = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    codecs=(
        *(codec for codec in SIZES if codec.ours[0] != "ffn_hidden_size"),
        renamed("ffn_hidden_size", "moe_intermediate_size"),
        renamed("norm_epsilon", "rms_norm_eps", 1e-6),
        renamed("share_embeddings_and_output_weights", "tie_word_embeddings", False),
        _expert_count(),
        renamed("moe_router_topk", "num_experts_per_tok"),
        rotary(base=1e4),
        _weights_add_up(),
    ),
    implies={"qk_layernorm": True},
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    inert=frozenset({"intermediate_size", "max_window_layers", "sliding_window"}),
    rules=(
        *ENDS,
        *ATTENTION,
        FFN_NORM,
        *_experts(_LAYER + "mlp.gate.weight", *(f"{_LAYER}mlp.experts.{{expert}}.{name}_proj.weight" for name in ("gate", "up", "down"))),
    ),
    ignored=(".rotary_emb.inv_freq",),
)
MIXTURE = (_MIXTRAL, _QWEN3_MOE)
