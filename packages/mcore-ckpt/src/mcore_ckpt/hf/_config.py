# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A model's config in our field names and as config.json, both ways, by the codecs of the family."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt.hf._families import FAMILIES, NOT_COVERED, all_families
from mcore_ckpt.hf._fields import DEFAULTS, NESTED, Config, Family, refuse

__all__ = ["brief", "check_entries", "complete", "families_of", "from_hf_config", "measure", "to_hf_config"]

_INERT = frozenset(
    (
        # Who wrote the file, for which class, and how it is stored or run.
        *("architectures", "auto_map", "dtype", "model_type", "name_or_path", "torch_dtype", "torchscript", "transformers_version"),
        *("attn_implementation", "cache_implementation", "chunk_size_feed_forward", "gradient_checkpointing", "output_attentions"),
        *("output_hidden_states", "problem_type", "quantization_config", "return_dict", "tokenizer_class", "unsloth_version", "use_cache"),
        *("id2label", "label2id", "num_labels", "finetuning_task", "task_specific_params", "pretraining_tp", "num_logits_to_keep"),
        # Token ids and lengths, which an import keeps beside the model.
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id"),
        *("max_position_embeddings", "is_decoder", "is_encoder_decoder"),
        # Terms of a loss, which are a run's choice here.
        *("aux_loss_alpha", "output_router_logits", "router_aux_loss_coef", "seq_aux", "z_loss_coefficient"),
    )
)
"""Entries of any family that say nothing about its numbers."""
_WITHOUT = "no model has dropout here: set it to 0.0, or import with ignore=NAME to train without"


def check_entries(config: Config, family: Family, ignore: Collection[str]) -> None:
    """Every entry is read, has the one value that the family describes, or changes nothing.

    Args:
        config: of config.json.
        ignore: entries to pass over: dropout, and those that no codec reads.

    Raises:
        CheckpointingException: names an entry and its value.
        ValueError: ``ignore`` names an entry that the weights depend on.
    """
    read = {name for codec in family.codecs for name in codec.theirs}
    for name in ignore:
        if name in read or (name in family.fixed and not _is_dropout(name)):
            raise ValueError(f"ignore={name!r}: family {family.name} reads it; change it in config.json")
    for name, only in family.fixed.items():
        value = config.get(name, family.silent.get(name, only))
        if name not in ignore and not _same(value, only):
            where = "" if name in config else ", which it means to leave it out,"
            _refuse(f"{name}={value!r}{where} is not supported for {family.name}; {_WITHOUT if _is_dropout(name) else f'only {only!r} is'}")
    known = read | family.fixed.keys() | family.inert | _INERT | set(ignore)
    for name, value in config.items():
        if name in known or name.startswith("_") or value is None:
            continue
        if not _is_dropout(name):
            _refuse(f"{name}={value!r} is not known for {family.name}; import with ignore={name} if it changes nothing")
        if not _same(value, 0.0):
            _refuse(f"{name}={value!r} is not supported for {family.name}; {_WITHOUT}")


def _refuse(what: str) -> NoReturn:
    raise CheckpointingException(f"config.json: {what}")


def _same(value: Any, only: Any) -> bool:
    """Null stands for whatever is off."""
    return value == only or (value is None and not only)


def _is_dropout(name: str) -> bool:
    return "dropout" in name or name.endswith("pdrop")


_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
_SIZES = (*_NEEDED, "num_query_groups", "ffn_hidden_size", "kv_channels")
# What an import always says; other fields only when they are not at their default.
_SAID = (*_SIZES, "norm_epsilon", "rotary_base", "init_method_std", "share_embeddings_and_output_weights")
# Without a meaning for the weights of any family, or written as it is.
_FREE = {"attention_backend", "max_position_embeddings", "mtp_detach"}
_MAYBE_SIZES = (
    *("max_position_embeddings", "num_token_types", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size"),
    *("moe_shared_expert_intermediate_size", "moe_latent_size", "moe_router_num_groups", "moe_router_group_topk"),
)


def complete(config: Config, family: Family) -> dict[str, Any]:
    """Our config with every field: what is absent has the family's value, what is None its meaning.

    Raises:
        ValueError: a size is missing or does not fit, there is no such field, or the family cannot express its value.
    """
    unknown = config.keys() - DEFAULTS.keys()
    if unknown:
        raise ValueError(
            f"config has fields that family {family.name} does not express: {list_names(unknown, DEFAULTS)}; leave out what does not matter"
        )
    full = {name: _plain(value) for name, value in {**DEFAULTS, **family.free, **config}.items()}
    for name, value in family.free.items():
        full[name] = value if full[name] is None else full[name]
    for name in _NEEDED:
        if full[name] is None:
            raise ValueError(f"config lacks {name}")
    _check_kinds(full)
    for name, derived in (
        ("num_query_groups", full["num_attention_heads"]),
        ("ffn_hidden_size", 4 * full["hidden_size"]),
        ("kv_channels", full["hidden_size"] // full["num_attention_heads"]),
    ):
        full[name] = derived if full[name] is None else full[name]
    _complete_experts(full)
    for name, defaults in NESTED.items():
        if full[name] is not None:
            full[name] = _fill(name, full[name], defaults)
    if mamba := full["mamba"]:
        if mamba["num_heads"] is None:
            mamba["num_heads"] = mamba["expand"] * full["hidden_size"] // mamba["head_dim"]
        if mamba["num_heads"] % mamba["num_groups"]:
            refuse("mamba.num_groups", mamba["num_groups"], f"must divide its num_heads={mamba['num_heads']}")
    if full["num_attention_heads"] % full["num_query_groups"]:
        refuse("num_query_groups", full["num_query_groups"], f"must divide num_attention_heads={full['num_attention_heads']}")
    _check_implied(full, config, family)
    for codec in family.codecs:
        codec.write(full)
    return full


def _complete_experts(full: dict[str, Any]) -> None:
    """One spelling of layers, widths and biases of a mixture."""
    freq, layers = full["moe_layer_freq"], full["num_layers"]
    if isinstance(freq, tuple) and (len(freq) != layers or set(freq) - {0, 1} or 1 not in freq):
        refuse("moe_layer_freq", freq, f"must have a 0 or 1 for each of the {layers} layers, and a 1 among them")
    if full["hybrid_layer_pattern"] is not None:
        # Its symbols say which layers have experts; a dense one has a width of its own.
        if full["num_moe_experts"] is not None and full["moe_ffn_hidden_size"] is None:
            full["moe_ffn_hidden_size"] = full["ffn_hidden_size"]
    elif freq == 1 or (isinstance(freq, tuple) and all(freq)):
        full["moe_layer_freq"] = 1
        if full["num_moe_experts"] is not None and full["moe_ffn_hidden_size"] is not None:
            full["ffn_hidden_size"], full["moe_ffn_hidden_size"] = full["moe_ffn_hidden_size"], None
    if full["moe_router_bias"] == full["add_bias_linear"]:
        full["moe_router_bias"] = None


def families_of(config: Config) -> tuple[str, ...]:
    """The families that can express a config in our field names, those of other installed packages last.

    Example:
        >>> families_of({"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100})[0]
        'llama'
    """
    able = []
    for name, family in all_families().items():
        try:
            complete(config, family)
        except ValueError:
            continue
        able.append(name)
    return tuple(able)


def _plain(value: Any) -> Any:
    """Lists, which JSON makes of tuples, as tuples again; groups of fields as dicts of our own."""
    if isinstance(value, list | tuple):
        return tuple(_plain(one) for one in value)
    return {key: _plain(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _check_kinds(full: Config) -> None:
    for name, value in full.items():
        if name in _SIZES or name in _MAYBE_SIZES:
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"config {name}={value!r} must be an int of at least 1")
        elif name in NESTED:
            if value is not None and not isinstance(value, Mapping):
                raise ValueError(f"config {name}={value!r} must be None or a group of fields: {', '.join(NESTED[name])}")
        elif isinstance(DEFAULTS[name], bool):
            if type(value) is not bool:
                raise ValueError(f"config {name}={value!r} must be True or False")
        elif isinstance(DEFAULTS[name], float) and (type(value) not in (int, float) or not math.isfinite(value)):
            raise ValueError(f"config {name}={value!r} must be a number")


def _fill(name: str, values: Config, defaults: Config) -> dict[str, Any]:
    unknown = values.keys() - defaults.keys()
    if unknown:
        raise ValueError(f"config {name} has no {list_names(unknown, defaults)}")
    complete = {**defaults, **values}
    missing = [key for key, value in complete.items() if value is ...]
    if missing:
        raise ValueError(f"config {name} lacks {', '.join(missing)}")
    return complete


def _check_implied(full: dict[str, Any], config: Config, family: Family) -> None:
    """Fields that config.json does not carry have the family's value; those that were not given get it."""
    for name in DEFAULTS.keys() - family.carried - family.free.keys() - _FREE:
        value = family.implies.get(name, DEFAULTS[name])
        value = value(full) if callable(value) else value
        if full[name] is None or name not in config:
            full[name] = value
        same = math.isclose(full[name], value, rel_tol=1e-9) if isinstance(value, float) else full[name] == value
        if not same:
            others = sorted(other.name for other in FAMILIES.values() if name in other.carried or other.implies.get(name) == full[name])
            hint = f", or export as a family that has it: {', '.join(others)}" if others else ""
            refuse(name, full[name], f"cannot be expressed by family {family.name}, which means {value!r}; train with that{hint}")


def brief(full: Config) -> dict[str, Any]:
    """The sizes, and what is not at its default."""
    return {name: value for name, value in full.items() if name in _SAID or value != DEFAULTS[name]}


def measure(full: Config) -> dict[str, int]:
    """Sizes by the letters of the rules; those of mixers only where the config has them."""
    heads, groups, width, ffn = (full[name] for name in ("num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size"))
    sizes = {
        "L": full["num_layers"],
        "D": full["hidden_size"],
        "V": full["vocab_size"],
        "F": ffn,
        "X": full["moe_ffn_hidden_size"] or ffn,
        "2X": 2 * (full["moe_ffn_hidden_size"] or ffn),
        "XD": full["moe_latent_size"] or full["hidden_size"],
        "SX": full["moe_shared_expert_intermediate_size"] or 0,
        "A": heads,
        "K": groups,
        "H": width,
        "Q": heads * width,
        "C": groups * width,
        "QKV": (heads + 2 * groups) * width,
        "R": (heads // groups + 2) * width,
        "E": full["num_moe_experts"] or 0,
        "P": full["max_position_embeddings"] or 0,
        "types": full["num_token_types"] or 0,
    }
    if full["latent_attention"]:
        sizes |= _latent_sizes(full["latent_attention"], heads)
    if full["mamba"]:
        sizes |= _mamba_sizes(full["mamba"])
    return sizes


def _latent_sizes(latent: Config, heads: int) -> dict[str, int]:
    """qr and kr the ranks, qh a query head, vh a value head, krr kv rank and rotary key, kvh what a head reads from the
    rank, qrope its channels that turn; A before a letter for all heads."""
    nope, rope, value = (latent[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank = latent["kv_lora_rank"]
    return {
        "qr": latent["q_lora_rank"] or 0, "kr": rank, "krr": rank + rope, "qh": nope + rope, "vh": value, "kvh": nope + value,
        "qrope": rope, "Aqh": heads * (nope + rope), "Akvh": heads * (nope + value), "Avh": heads * value,
    }  # fmt: skip


def _mamba_sizes(mamba: Config) -> dict[str, int]:
    """mh heads, mi the inner width, mg groups, ms groups times states, mk the convolution's taps, mc its channels, mp rows of the
    projection in; /g for those of one group."""
    heads, groups = mamba["num_heads"], mamba["num_groups"]
    width, states = heads * mamba["head_dim"], groups * mamba["state_dim"]
    channels, rows = width + 2 * states, 2 * width + 2 * states + heads
    return {
        "mh": heads, "mi": width, "mg": groups, "ms": states, "mk": mamba["conv_kernel"], "mc": channels, "mp": rows,
        "mc/g": channels // groups, "mp/g": rows // groups,
    }  # fmt: skip


def to_hf_config(full: Config, family: Family, dtype: str) -> dict[str, Any]:
    """config.json of a model with this complete config."""
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type, **family.fixed}
    for codec in family.codecs:
        config |= codec.write(full)
    if full["max_position_embeddings"] is not None:
        config["max_position_embeddings"] = full["max_position_embeddings"]
    return {**config, "torch_dtype": dtype, "dtype": dtype, "use_cache": True}


def from_hf_config(config: Config, ignore: Collection[str] = (), family: Family | None = None) -> tuple[Family, dict[str, Any]]:
    """The family of a config.json and the complete config in our field names.

    Args:
        config: of config.json.
        ignore: entries to pass over, as of `check_entries`.
        family: the one to read it by; by default that of its model_type.

    Raises:
        CheckpointingException: an unknown family, a missing size, or a setting that means another model than the family describes.
        ValueError: ``ignore`` names an entry that the weights depend on.
    """
    families = all_families() if family is None else {family.name: family}
    kinds = {one.model_type: one for one in families.values()}
    kind = str(config.get("model_type"))
    family = kinds.get(kind)
    if family is None:
        why = f"; not covered: {NOT_COVERED[kind]}" if kind in NOT_COVERED else ""
        raise CheckpointingException(f"config.json: model_type={config.get('model_type')!r} is none of {', '.join(sorted(kinds))}{why}")
    check_entries(config, family, ignore)
    ours: dict[str, Any] = {}
    try:
        for codec in family.codecs:
            for path, value in codec.read(config).items():
                group, _, name = path.rpartition(".")
                (ours.setdefault(group, {}) if group else ours)[name] = value
        return family, complete(ours, family)
    except (ValueError, TypeError, KeyError) as error:
        reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise CheckpointingException(f"config.json: {reason}") from error
