# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Names and shapes of a GPT model's weights there and here, and how its ranks cut them.

Both sides hold the rows of queries, keys and values per key-value group and a gate's rows before the values', so a whole tensor is the same
memory on both sides: only names and shapes differ.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

__all__ = ["LAYERS", "Cut", "cut", "is_gated", "join_cut", "our_name", "our_shape", "rule_of", "their_name", "their_shape"]

LAYERS = "decoder.layers."
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OURS = re.compile(r"layers\.(\d+)\.(.+)")


class Cut(Enum):
    """How tensor-parallel ranks share a weight."""

    WHOLE = "whole"
    ROWS = "rows"
    """Equal pieces of the first dim."""
    COLUMNS = "columns"
    """Equal pieces of the last dim."""
    LATENT = "latent"
    """Rows of the layers of the host; whole with those of Transformer Engine."""
    GATED = "gated"
    """Rows of the gate and rows of the values, each in equal pieces; a rank holds its gate's above its values'."""


@dataclass(frozen=True)
class NameRule:
    """One weight: our name behind the layer's, and how it is cut."""

    ours: str
    cut: Cut = Cut.WHOLE


_ENDS: Mapping[str, NameRule] = MappingProxyType(
    {
        "embedding.word_embeddings.weight": NameRule("embedding.weight", Cut.ROWS),
        "embedding.position_embeddings.weight": NameRule("position_embedding.weight"),
        "decoder.final_layernorm.weight": NameRule("final_norm.weight"),
        "decoder.final_layernorm.bias": NameRule("final_norm.bias"),
        "output_layer.weight": NameRule("output.weight", Cut.ROWS),
    }
)
_IN_LAYER: Mapping[str, NameRule] = MappingProxyType(
    {
        # The first name of a weight is the one that is written.
        "self_attention.linear_qkv.layer_norm_weight": NameRule("input_norm.weight"),
        "self_attention.linear_qkv.layer_norm_bias": NameRule("input_norm.bias"),
        "input_layernorm.weight": NameRule("input_norm.weight"),
        "input_layernorm.bias": NameRule("input_norm.bias"),
        "self_attention.linear_qkv.weight": NameRule("attention.qkv.weight", Cut.ROWS),
        "self_attention.linear_qkv.bias": NameRule("attention.qkv.bias", Cut.ROWS),
        "self_attention.linear_proj.weight": NameRule("attention.out.weight", Cut.COLUMNS),
        "self_attention.linear_proj.bias": NameRule("attention.out.bias"),
        "self_attention.q_layernorm.weight": NameRule("attention.q_norm.weight"),
        "self_attention.k_layernorm.weight": NameRule("attention.k_norm.weight"),
        "self_attention.core_attention.softmax_offset": NameRule("attention.softmax_offset", Cut.ROWS),
        "self_attention.linear_q_proj.weight": NameRule("attention.q.weight", Cut.ROWS),
        "self_attention.linear_q_down_proj.weight": NameRule("attention.q_down.weight", Cut.LATENT),
        "self_attention.linear_q_up_proj.layer_norm_weight": NameRule("attention.q_norm.weight"),
        "self_attention.linear_q_up_proj.weight": NameRule("attention.q_up.weight", Cut.ROWS),
        "self_attention.linear_kv_down_proj.weight": NameRule("attention.kv_down.weight", Cut.LATENT),
        "self_attention.linear_kv_up_proj.layer_norm_weight": NameRule("attention.kv_norm.weight"),
        "self_attention.kv_layernorm.weight": NameRule("attention.kv_norm.weight"),
        "self_attention.linear_kv_up_proj.weight": NameRule("attention.kv_up.weight", Cut.ROWS),
        "mlp.linear_fc1.layer_norm_weight": NameRule("ffn_norm.weight"),
        "mlp.linear_fc1.layer_norm_bias": NameRule("ffn_norm.bias"),
        "pre_mlp_layernorm.weight": NameRule("ffn_norm.weight"),
        "pre_mlp_layernorm.bias": NameRule("ffn_norm.bias"),
        "mlp.linear_fc1.weight": NameRule("mlp.up.weight", Cut.GATED),
        "mlp.linear_fc1.bias": NameRule("mlp.up.bias", Cut.GATED),
        "mlp.linear_fc2.weight": NameRule("mlp.down.weight", Cut.COLUMNS),
        "mlp.linear_fc2.bias": NameRule("mlp.down.bias"),
        "mlp.router.weight": NameRule("mlp.router.weight"),
        "mlp.router.bias": NameRule("mlp.router.bias"),
        "mlp.router.expert_bias": NameRule("mlp.router.expert_bias"),
        "mlp.shared_experts.linear_fc1.weight": NameRule("mlp.shared_experts.up.weight", Cut.GATED),
        "mlp.shared_experts.linear_fc2.weight": NameRule("mlp.shared_experts.down.weight", Cut.COLUMNS),
        "mlp.shared_experts.gate_weight": NameRule("mlp.shared_expert_gate.weight"),
        "mlp.fc1_latent_proj.weight": NameRule("mlp.latent_down.weight"),
        "mlp.fc2_latent_proj.weight": NameRule("mlp.latent_up.weight"),
        "mlp.experts.experts.linear_fc1.weight": NameRule("mlp.experts.up", Cut.GATED),
        "mlp.experts.experts.linear_fc1.bias": NameRule("mlp.experts.up_bias", Cut.GATED),
        "mlp.experts.experts.linear_fc2.weight": NameRule("mlp.experts.down", Cut.COLUMNS),
        "mlp.experts.experts.linear_fc2.bias": NameRule("mlp.experts.down_bias"),
    }
)
_EXPERT_PAIR = ("pre_mlp_layernorm", "mlp.linear_fc1.layer_norm")
# Latent attention, whose input's norm is a module of its own, and whose latents' norms are fused with what follows.
_LATENT: Mapping[str, str] = MappingProxyType(
    {"input_norm.weight": "input_layernorm.weight", "attention.q_norm.weight": "self_attention.linear_q_up_proj.layer_norm_weight"}
)
_HEADS = ("attention.q.weight", "attention.q_up.weight", "attention.kv_up.weight")
"""Ours are [heads, rows, D]."""


def rule_of(key: str, *, gated: bool) -> NameRule | None:
    """Of their whole, per-layer key; None for a weight that a GPT model does not have."""
    match = _LAYER.fullmatch(key)
    rule = _IN_LAYER.get(match[2]) if match else _ENDS.get(key)
    if rule is not None and rule.cut is Cut.GATED and not gated:
        return NameRule(rule.ours, Cut.ROWS)
    return rule


def is_gated(shapes: Mapping[str, Sequence[int]]) -> bool:
    """Whether the feed-forward has a gate, from whole shapes by per-layer key: its first product is then twice as wide as its second."""
    for key, shape in shapes.items():
        if key.endswith("linear_fc1.weight"):
            second = shapes.get(key.replace("linear_fc1", "linear_fc2"))
            return second is not None and shape[-2] == 2 * second[-1]
    return False


def our_name(key: str) -> str | None:
    """Our name of their per-layer key; None where we have none."""
    rule, match = rule_of(key, gated=True), _LAYER.fullmatch(key)
    if rule is None:
        return None
    return f"layers.{match[1]}.{rule.ours}" if match else rule.ours


def their_name(name: str, *, experts: bool, latent: bool = False) -> str | None:
    """Their per-layer key of our name; None where they have none.

    Args:
        experts: the layer's feed-forward is a mixture, whose norm is a module of its own.
        latent: the layer's attention is multi-head latent attention.
    """
    match = _OURS.fullmatch(name)
    table, wanted = (_IN_LAYER, match[2]) if match else (_ENDS, name)
    key = _LATENT.get(wanted) if match and latent else None
    key = key or next((key for key, rule in table.items() if rule.ours == wanted), None)
    if key is None:
        return None
    if experts and key.startswith(_EXPERT_PAIR[1]):
        key = f"{_EXPERT_PAIR[0]}.{key.rpartition('_')[2]}"
    return f"{LAYERS}{match[1]}.{key}" if match else key


def our_shape(
    key: str, shape: Sequence[int], *, gated: bool, num_query_groups: int | None, num_heads: int | None = None
) -> tuple[int, ...]:
    """Our shape of their whole tensor of one layer: queries, keys and values by group, or of latents by head, a gate and its values apart.

    Raises:
        ValueError: the number of key-value groups is needed and not known, or does not fit.
    """
    shape = tuple(shape)
    rule = rule_of(key, gated=gated)
    assert rule is not None
    if rule.ours.startswith("attention.qkv."):
        return _divided(key, shape, "num_query_groups", num_query_groups)
    if rule.ours in _HEADS:
        return _divided(key, shape, "num_attention_heads", num_heads)
    if rule.cut is Cut.GATED:
        place = 1 if ".mlp.experts." in key else 0
        return (*shape[:place], 2, shape[place] // 2, *shape[place + 1 :])
    return shape


def _divided(key: str, shape: tuple[int, ...], field: str, count: int | None) -> tuple[int, ...]:
    if count is None:
        raise ValueError(f"{key}: the checkpoint does not say {field}; give it in the config")
    if shape[0] % count:
        raise ValueError(f"{key}: {field}={count} does not divide its {shape[0]} rows")
    return (count, shape[0] // count, *shape[1:])


def their_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Their shape of our tensor ``...NAME``: groups, and a gate and its values, one above the other.

    Example:
        >>> their_shape("model.layers.0.mlp.up.weight", (2, 24, 16)), their_shape("layers.0.mlp.experts.up", (4, 2, 24, 16))
        ((48, 16), (4, 48, 16))
    """
    shape = tuple(shape)
    part = name.rpartition("layers.")[2].partition(".")[2]
    place = {"attention.qkv.weight": 0, "attention.qkv.bias": 0, "mlp.up.weight": 0, "mlp.up.bias": 0, "mlp.experts.up": 1}.get(part)
    if part == "mlp.shared_experts.up.weight":
        place = 0
    if part == "mlp.experts.up_bias":
        place = 1
    if part in _HEADS:
        place = 0
    if place is None or len(shape) == place + (1 if part.endswith("bias") else 2):
        return shape
    return (*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])


def cut(whole: Tensor, how: Cut, rank: int, size: int) -> Tensor:
    """What tensor-parallel rank ``rank`` of ``size`` holds of a weight [rows, ...]; a view where that is possible."""
    if how in (Cut.WHOLE, Cut.LATENT) or size == 1:
        return whole
    if how is Cut.COLUMNS:
        return whole.chunk(size, -1)[rank]
    if how is Cut.ROWS:
        return whole.chunk(size)[rank]
    return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])


def join_cut(parts: Sequence[Tensor], how: Cut) -> Tensor:
    """Inverse of `cut` over all ranks; of copies, the first."""
    if how in (Cut.WHOLE, Cut.LATENT) or len(parts) == 1:
        return parts[0]
    if how is Cut.COLUMNS:
        return torch.cat(list(parts), -1)
    if how is Cut.ROWS:
        return torch.cat(list(parts))
    halves = [part.chunk(2) for part in parts]
    return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
