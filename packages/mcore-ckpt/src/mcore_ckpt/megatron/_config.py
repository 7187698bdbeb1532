# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The sizes of their model in our field names."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mcore_ckpt.megatron._names import LAYERS

__all__ = ["args_of", "family_of", "sizes_of"]

_SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels", "norm_epsilon"),
    *("normalization", "qk_layernorm", "add_bias_linear", "add_qkv_bias", "rotary_base", "rotary_percent", "init_method_std"),
)
_RENAMED = MappingProxyType({"layernorm_epsilon": "norm_epsilon", "padded_vocab_size": "vocab_size"})
_POSITIONS = MappingProxyType({"learned_absolute": "learned_absolute", "rope": "rope"})


def sizes_of(given: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], *, gated: bool) -> dict[str, Any]:
    """Our config: what the run said, then what the shapes say, which nobody can contradict."""
    found = {name: given[name] for name in _SAME if given.get(name) is not None}
    found |= {ours: given[theirs] for theirs, ours in _RENAMED.items() if given.get(theirs) is not None and ours not in found}
    if given.get("position_embedding_type") in _POSITIONS:
        found["position_embedding_type"] = given["position_embedding_type"]
        if given["position_embedding_type"] == "learned_absolute" and "embedding.position_embeddings.weight" in shapes:
            found["max_position_embeddings"] = shapes["embedding.position_embeddings.weight"][0]
    layers = [int(key.split(".")[2]) for key in shapes if key.startswith(LAYERS)]
    found["num_layers"] = 1 + max(layers, default=-1)
    if (word := shapes.get("embedding.word_embeddings.weight")) is not None:
        found["vocab_size"], found["hidden_size"] = word
    found["share_embeddings_and_output_weights"] = "output_layer.weight" not in shapes
    if given.get("group_query_attention") is False and "num_attention_heads" in found:
        found["num_query_groups"] = found["num_attention_heads"]
    experts = next((shape for key, shape in shapes.items() if key.endswith("experts.experts.linear_fc2.weight")), None)
    if experts is not None:
        found["num_moe_experts"], found["ffn_hidden_size"] = experts[0], experts[2]
        if given.get("moe_router_topk") is not None:
            found["moe_router_topk"] = given["moe_router_topk"]
    if gated and given.get("swiglu"):
        found["activation"] = "swiglu"
    return {name: value for name, value in found.items() if isinstance(value, str | int | float | bool)}


def family_of(given: Mapping[str, Any], sizes: Mapping[str, Any], *, gated: bool) -> str | None:
    """The Hugging Face family that has this model, where the run said enough to tell."""
    wanted = {"normalization": "RMSNorm", "position_embedding_type": "rope", "swiglu": True, "add_bias_linear": False}
    if not gated or any(given.get(name) != value for name, value in wanted.items()):
        return None
    experts, qk_norm, bias = "num_moe_experts" in sizes, bool(sizes.get("qk_layernorm")), bool(sizes.get("add_qkv_bias"))
    if experts:
        return None if bias else "qwen3_moe" if qk_norm else "mixtral"
    if qk_norm:
        return None if bias else "qwen3"
    return "qwen2" if bias else "llama"


def args_of(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Their settings of a config of ours."""
    found = {name: sizes[name] for name in (*_SAME, "moe_router_topk") if name in sizes}
    found |= {theirs: sizes[ours] for theirs, ours in _RENAMED.items() if ours in sizes}
    if "num_moe_experts" in sizes:
        found["num_experts"] = sizes["num_moe_experts"]
    if "num_query_groups" in sizes:
        found["group_query_attention"] = sizes["num_query_groups"] != sizes.get("num_attention_heads")
    if "share_embeddings_and_output_weights" in sizes:
        found["untie_embeddings_and_output_weights"] = not sizes["share_embeddings_and_output_weights"]
    # The fields that a config leaves out are at the defaults of ours.
    found |= {"normalization": sizes.get("normalization", "RMSNorm"), "swiglu": sizes.get("activation", "swiglu") == "swiglu"}
    found |= {name: sizes.get(name, default) for name, default in (("position_embedding_type", "rope"), ("add_bias_linear", False))}
    if found.get("max_position_embeddings") is None and sizes.get("max_position_embeddings") is not None:
        found["max_position_embeddings"] = sizes["max_position_embeddings"]
    return found
