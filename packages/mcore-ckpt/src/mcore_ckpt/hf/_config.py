# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Model sizes in our field names and in config.json's, both ways, by the table of the family."""

from collections.abc import Mapping
from typing import Any

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt.hf._families import FAMILIES
from mcore_ckpt.hf._rules import Family

__all__ = ["complete", "family_named", "from_hf_config", "measure", "to_hf_config"]

_NOT_SIZES = ("norm_epsilon", "rotary_base", "init_method_std", "share_embeddings_and_output_weights")


def family_named(name: str) -> Family:
    """The family called ``name``.

    Raises:
        ValueError: there is none.
    """
    if name not in FAMILIES:
        raise ValueError(f"family={name!r} is unknown; the families are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def complete(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Our config with every field of the family, absent and None ones replaced by their meaning.

    Raises:
        ValueError: a size is missing or does not fit, or a field is one the family cannot express.
    """
    known = {field.ours for field in family.fields} | {"rotary_base"}
    unknown = config.keys() - known
    if unknown:
        raise ValueError(
            f"config has fields that family {family.name} does not express: {list_names(unknown, known)}; leave out what does not matter"
        )
    full = {"norm_epsilon": 1e-5, "rotary_base": 10_000.0, "init_method_std": 0.02, "share_embeddings_and_output_weights": False}
    full |= {name: value for name, value in config.items() if value is not None}
    for name in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
        if name not in full:
            raise ValueError(f"config lacks {name}")
    full.setdefault("num_query_groups", full["num_attention_heads"])
    full.setdefault("ffn_hidden_size", 4 * full["hidden_size"])
    full.setdefault("kv_channels", full["hidden_size"] // full["num_attention_heads"])
    missing = known - full.keys()
    if missing:
        raise ValueError(f"config lacks {', '.join(sorted(missing))}, which family {family.name} needs")
    for name, value in full.items():
        if name not in _NOT_SIZES and (type(value) is not int or value < 1):
            raise ValueError(f"config {name}={value!r} must be an int of at least 1")
    if full["num_attention_heads"] % full["num_query_groups"]:
        raise ValueError(f"num_query_groups={full['num_query_groups']} must divide num_attention_heads={full['num_attention_heads']}")
    return full


def measure(full: Mapping[str, Any]) -> dict[str, int]:
    """Sizes by the letters of the rules."""
    heads, groups, width, ffn = (full[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"))
    return {
        "L": full["num_layers"],
        "D": full["hidden_size"],
        "V": full["vocab_size"],
        "F": ffn,
        "2F": 2 * ffn,
        "A": heads,
        "K": groups,
        "H": width,
        "Q": heads * width,
        "C": groups * width,
        "R": (heads // groups + 2) * width,
        "E": full.get("num_moe_experts", 0),
    }


def to_hf_config(full: Mapping[str, Any], family: Family, dtype: str) -> dict[str, Any]:
    """config.json of a model with these sizes, readable by releases of transformers before and after the renaming of two fields."""
    config = {"architectures": [family.architecture], "model_type": family.model_type, **family.fixed}
    config |= {field.theirs: full[field.ours] for field in family.fields}
    base = float(full["rotary_base"])
    config |= {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    return {**config, "torch_dtype": dtype, "dtype": dtype, "use_cache": True}


def from_hf_config(config: Mapping[str, Any]) -> tuple[Family, dict[str, Any]]:
    """The family of a config.json and its sizes in our field names.

    Raises:
        CheckpointingException: an unknown family, a missing size, or a setting that means another model than the family describes.
    """
    family = next((one for one in FAMILIES.values() if one.model_type == config.get("model_type")), None)
    if family is None:
        raise CheckpointingException(f"config.json: model_type={config.get('model_type')!r} is none of {', '.join(sorted(FAMILIES))}")
    for name, value in family.fixed.items():
        if config.get(name, value) != value:
            raise CheckpointingException(f"config.json: {name}={config[name]!r} is not supported for {family.name}; only {value!r} is")
    if config.get("quantization_config"):
        raise CheckpointingException(
            "config.json: quantization_config is set; quantised weights are not supported, use the unquantised model"
        )
    ours = {"rotary_base": _rotary_base(config, family)}
    for field in family.fields:
        value = config.get(field.theirs, field.default)
        if value is ...:
            raise CheckpointingException(f"config.json lacks {field.theirs}")
        ours[field.ours] = value
    try:
        return family, complete(ours, family)
    except ValueError as error:
        raise CheckpointingException(f"config.json: {error}") from error


def _rotary_base(config: Mapping[str, Any], family: Family) -> float:
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise CheckpointingException(f"config.json: rope_type={kind!r} is not supported; only 'default' is")
    return float(rope.get("rope_theta") or config.get("rope_theta") or family.rope_theta)
