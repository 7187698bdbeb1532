# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Models by name, and models from files and fields."""

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mcore_parallel.models import TransformerConfig
from mcore_parallel.planner._errors import PlannerError
from mcore_parallel.planner._model import ExpertSizes, ModelSizes

_LLAMA3 = {"num_query_groups": 8, "vocab_size": 128_256, "rotary_base": 500_000.0}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "llama3-8b": {**_LLAMA3, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "ffn_hidden_size": 14_336},
        "llama3-70b": {**_LLAMA3, "num_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "ffn_hidden_size": 28_672},
        "llama3-405b": {**_LLAMA3, "num_layers": 126, "hidden_size": 16_384, "num_attention_heads": 128, "ffn_hidden_size": 53_248},
        "mixtral-8x7b": {
            "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "ffn_hidden_size": 14_336,
            "vocab_size": 32_000, "rotary_base": 1e6, "num_moe_experts": 8, "moe_router_topk": 2,
        },
        "mixtral-8x22b": {
            "num_layers": 56, "hidden_size": 6144, "num_attention_heads": 48, "num_query_groups": 8, "ffn_hidden_size": 16_384,
            "vocab_size": 32_768, "rotary_base": 1e6, "num_moe_experts": 8, "moe_router_topk": 2,
        },
        "qwen3-235b-a22b": {
            "num_layers": 94, "hidden_size": 4096, "num_attention_heads": 64, "num_query_groups": 4, "kv_channels": 128,
            "ffn_hidden_size": 12_288, "vocab_size": 151_936, "rotary_base": 1e6,
            "num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 1536,
        },
        "deepseek-v3-like": {
            "num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "kv_channels": 128, "ffn_hidden_size": 18_432,
            "vocab_size": 129_280, "num_moe_experts": 256, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
            "moe_shared_expert_intermediate_size": 2048,
        },
        "kimi-k2-like": {
            "num_layers": 61, "hidden_size": 7168, "num_attention_heads": 64, "kv_channels": 128, "ffn_hidden_size": 18_432,
            "vocab_size": 163_840, "num_moe_experts": 384, "moe_router_topk": 8, "moe_ffn_hidden_size": 2048,
            "moe_shared_expert_intermediate_size": 2048,
        },
    }
)  # fmt: skip
"""Fields by name. The "-like" ones have full attention and experts in every layer, where the originals compress keys and values and
begin with dense layers."""

_EXPERT_FIELDS = ("num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size")
_TYPES = {field.name: field.type for field in dataclasses.fields(TransformerConfig)}
_FIELDS = (*_TYPES, *_EXPERT_FIELDS)

# Names in the config.json of a Hugging Face model -> ours; the first that is there counts.
_THEIRS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_layers": ("num_hidden_layers",),
        "num_query_groups": ("num_key_value_heads",),
        "ffn_hidden_size": ("intermediate_size",),
        "kv_channels": ("head_dim", "v_head_dim"),
        "norm_epsilon": ("rms_norm_eps",),
        "rotary_base": ("rope_theta",),
        "init_method_std": ("initializer_range",),
        "share_embeddings_and_output_weights": ("tie_word_embeddings",),
        "num_moe_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
        "moe_router_topk": ("num_experts_per_tok",),
        "moe_ffn_hidden_size": ("moe_intermediate_size",),
        "moe_shared_expert_intermediate_size": ("shared_expert_intermediate_size",),
    }
)


def find_model(name: str | None = None, overrides: Mapping[str, Any] | None = None) -> ModelSizes:
    """A named model, or the one of a config.json, with some fields replaced.

    Args:
        name: of a preset, or the path of a JSON file with the fields of ``TransformerConfig`` (and of the experts) or with those of
            a Hugging Face model, or of the folder of its config.json; None when the overrides say everything.
        overrides: field -> value.

    Raises:
        PlannerError: no such model, file or field, a value that does not fit, a field that is missing.

    Example:
        >>> find_model("mixtral-8x7b", {"num_layers": 2}).experts.topk
        2
    """
    fields = {} if name is None else dict(PRESETS[name]) if name in PRESETS else _read(name)
    for field, value in (overrides or {}).items():
        if field not in _FIELDS:
            raise PlannerError(f"{field}={value} names no field of a model{_nearest(field, _FIELDS)}")
        fields[field] = value
    return _build(fields)


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """``field=value`` texts as fields; numbers, true, false and null as in JSON.

    Raises:
        PlannerError: a text without "=", or a value that is none of these.
    """
    overrides = {}
    for text in texts:
        field, sign, value = text.partition("=")
        try:
            overrides[field] = json.loads(value)
        except ValueError:
            raise PlannerError(f"{text!r} must be field=value with a number, true, false or null{'' if sign else '; add =value'}") from None
    return overrides


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise PlannerError(f"model={name!r} has no config.json, and is no preset{_nearest(name, PRESETS)}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise PlannerError(f"model={name!r} cannot be read as JSON ({error}); give the config.json of a model") from None
    if not isinstance(raw, dict):
        raise PlannerError(f"model={name!r} holds no JSON object; give the config.json of a model")
    values = {field: raw[field] for field in _FIELDS if raw.get(field) is not None}
    for ours, theirs in _THEIRS.items():
        value = next((raw[their] for their in theirs if raw.get(their) is not None), None)
        if ours not in values and value is not None:
            values[ours] = value
    shared = raw.get("n_shared_experts")
    if shared and "moe_shared_expert_intermediate_size" not in values:
        values["moe_shared_expert_intermediate_size"] = shared * values.get("moe_ffn_hidden_size", values.get("ffn_hidden_size", 0))
    return values


def _build(fields: dict[str, Any]) -> ModelSizes:
    for field, value in fields.items():
        kind = str(_TYPES.get(field, "int | None"))
        allowed = (bool,) if "bool" in kind else (int, float) if "float" in kind else (int,)
        if not (value is None and "None" in kind) and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
            raise PlannerError(f"{field}={value!r} must be of type {' or '.join(kind.__name__ for kind in allowed)}")
    needed = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
    if missing := [field for field in needed if field not in fields]:
        raise PlannerError(f"the model lacks {', '.join(missing)}; add {missing[0]}=VALUE, or begin with one of {', '.join(PRESETS)}")
    try:
        config = TransformerConfig(**{field: value for field, value in fields.items() if field in _TYPES})
    except PlannerError:
        raise
    except ValueError as error:
        raise PlannerError(str(error)) from None
    num_experts = fields.get("num_moe_experts")
    if num_experts is None:
        if expert_fields := [field for field in _EXPERT_FIELDS if fields.get(field) is not None]:
            raise PlannerError(f"{expert_fields[0]}={fields[expert_fields[0]]} needs num_moe_experts; set that too, or drop it")
        return ModelSizes(config=config)
    width = fields.get("moe_ffn_hidden_size") or config.ffn_size
    shared, topk = fields.get("moe_shared_expert_intermediate_size") or 0, fields.get("moe_router_topk") or 2
    return ModelSizes(
        config=config,
        experts=ExpertSizes(num_experts=num_experts, topk=topk, ffn_hidden_size=width, shared_ffn_hidden_size=shared),
    )


def _nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(known)}"
