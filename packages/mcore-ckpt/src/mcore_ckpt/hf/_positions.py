# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rotary embeddings in config.json: base, share of the channels, and the scalings for long contexts."""

import math
from collections.abc import Mapping
from typing import Any

from mcore_ckpt.hf._fields import Codec, Config, refuse

__all__ = ["rotary"]

_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def rotary(*, base: float, share: float | None = None, window_base: float | None = None) -> Codec:
    """Rotary embedding, plain or scaled as "linear", "llama3" or "yarn".

    Args:
        base: what it means to be silent about it.
        share: of a head's channels that turn when the parameters say nothing, whatever stands beside them; None for a family whose
            attention turns all of them and reads no ``partial_rotary_factor``.
        window_base: base of layers with a window when nothing is said; None where all layers have the same.
    """

    def write(full: Config) -> dict[str, Any]:
        kind = full["position_embedding_type"]
        if kind not in ("rope", "yarn"):
            refuse("position_embedding_type", kind, 'has no place here; use "rope" or "yarn"')
        theta = float(full["rotary_base"])
        parameters = _scaling(full) | {"rope_theta": theta}
        older: dict[str, Any] = {"rope_theta": theta}
        if share is not None:
            parameters["partial_rotary_factor"] = older["partial_rotary_factor"] = float(full["rotary_percent"])
        elif full["rotary_percent"] != 1.0:
            refuse("rotary_percent", full["rotary_percent"], "has no name there: the family's attention turns all channels; set it to 1.0")
        # transformers before 5 reads rope_scaling, and takes its presence as a scaling; later ones take it for all of rope_parameters.
        if parameters["rope_type"] != "default":
            older["rope_scaling"] = {key: value for key, value in parameters.items() if key != "rope_theta"}
        if window_base is None:
            return older | {"rope_parameters": parameters}
        local = float(theta if full["rotary_base_window"] is None else full["rotary_base_window"])
        windowed = {"rope_type": "default", "rope_theta": local}
        # Newer releases take rope_scaling for the whole of rope_parameters.
        older.pop("rope_scaling", None)
        return older | {
            "rope_local_base_freq": local,
            "rope_parameters": {"full_attention": parameters, "sliding_attention": windowed},
        }

    def read(config: Config) -> dict[str, Any]:
        parameters, local = dict(config.get("rope_parameters") or {}), None
        if window_base is None:
            parameters = dict(config.get("rope_scaling") or parameters)
        else:
            windowed = parameters.get("sliding_attention") or {}
            if windowed.get("rope_type", "default") != "default":
                refuse("rope_type", windowed["rope_type"], "of sliding_attention is not supported; only 'default' is")
            local = float(windowed.get("rope_theta") or config.get("rope_local_base_freq") or window_base)
            parameters = dict(parameters.get("full_attention") or {}) | (config.get("rope_scaling") or {})
        ours: dict[str, Any] = {"rotary_base": float(parameters.get("rope_theta") or config.get("rope_theta") or base)}
        ours["rotary_percent"] = float(parameters.get("partial_rotary_factor") or share) if share else _read_whole(parameters, config)
        if local is not None:
            ours["rotary_base_window"] = local
        return ours | _read_scaling(parameters, config)

    fields = ("position_embedding_type", "rotary_base", "rotary_percent", "seq_len_interpolation_factor", "rope_scaling", "yarn")
    theirs = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "max_position_embeddings")
    if window_base is not None:
        fields, theirs = (*fields, "rotary_base_window"), (*theirs, "rope_local_base_freq")
    return Codec(ours=fields, theirs=theirs, write=write, read=read)


def _read_whole(parameters: Mapping[str, Any], config: Config) -> float:
    """The share of a family that turns all channels."""
    factor = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if factor not in (None, 1.0) and kind != "default":
        # Scaled angles follow it there, and attention does not.
        refuse("partial_rotary_factor", factor, f"beside rope_type={kind!r} is not supported: the family turns all channels; leave it out")
    # Plain angles do not follow it: it is there in vain.
    return 1.0


def _scaling(full: Config) -> dict[str, Any]:
    if full["position_embedding_type"] == "yarn":
        for name in ("rope_scaling", "seq_len_interpolation_factor"):
            if full[name] is not None:
                refuse(name, full[name], 'cannot stand beside position_embedding_type="yarn"; set it to None')
        return _write_yarn(full["yarn"])
    if full["yarn"] is not None:
        refuse("yarn", full["yarn"], 'needs position_embedding_type="yarn"')
    if full["rope_scaling"] is not None:
        if full["seq_len_interpolation_factor"] is not None:
            refuse(
                "seq_len_interpolation_factor", full["seq_len_interpolation_factor"], "cannot stand beside rope_scaling; set one to None"
            )
        return {"rope_type": "llama3", **{name: full["rope_scaling"][name] for name in _LLAMA3}}
    if full["seq_len_interpolation_factor"] is not None:
        return {"rope_type": "linear", "factor": float(full["seq_len_interpolation_factor"])}
    return {"rope_type": "default"}


def _read_scaling(parameters: Mapping[str, Any], config: Config) -> dict[str, Any]:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    original = parameters.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if kind == "default":
        return {}
    if kind == "linear":
        return {"seq_len_interpolation_factor": float(_needed(parameters, "factor"))}
    if kind == "llama3":
        scaling = {name: _needed(parameters, name) for name in _LLAMA3[:3]}
        return {"rope_scaling": scaling | {"original_max_position_embeddings": original or _needed(parameters, _LLAMA3[3])}}
    if kind == "yarn":
        return {"position_embedding_type": "yarn", "yarn": _read_yarn(parameters, original or _needed(parameters, _LLAMA3[3]))}
    refuse("rope_type", kind, "is not supported; only 'default', 'linear', 'llama3' and 'yarn' are")


def _needed(parameters: Mapping[str, Any], name: str) -> Any:
    if parameters.get(name) is None:
        raise ValueError(f"lacks {name} beside its rope_type")
    return parameters[name]


def _write_yarn(yarn: Config | None) -> dict[str, Any]:
    if yarn is None:
        refuse("yarn", yarn, 'is needed with position_embedding_type="yarn"')
    entries = {name: yarn[name] for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")}
    entries |= {"rope_type": "yarn", "truncate": yarn["correction_range_round_to_int"]}
    mscale, all_dims = yarn["mscale"], yarn["mscale_all_dim"]
    if mscale and all_dims:
        return entries | {"mscale": mscale, "mscale_all_dim": all_dims}
    if all_dims:
        refuse("yarn.mscale_all_dim", all_dims, f"beside mscale={mscale} has no name there; set both or neither")
    if mscale is not None and all_dims is not None and (mscale, all_dims) != (1.0, 0.0):
        # There, either of them being 0 stands for no choice; the factor itself can always be said.
        entries["attention_factor"] = _concentration(yarn["factor"], mscale) / _concentration(yarn["factor"], all_dims)
    return entries


def _read_yarn(parameters: Mapping[str, Any], original: int) -> dict[str, Any]:
    factor = float(_needed(parameters, "factor"))
    yarn: dict[str, Any] = {
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": float(parameters.get("beta_fast") or 32.0),
        "beta_slow": float(parameters.get("beta_slow") or 1.0),
        "correction_range_round_to_int": bool(parameters.get("truncate", True)),
    }
    mscale, all_dims, attention_factor = parameters.get("mscale"), parameters.get("mscale_all_dim"), parameters.get("attention_factor")
    if attention_factor is not None:
        if all_dims:
            refuse("attention_factor", attention_factor, f"beside mscale_all_dim={all_dims} is not supported; give one of them")
        if factor <= 1.0 and attention_factor != 1.0:
            refuse("attention_factor", attention_factor, f"with factor={factor} is not supported; leave it out")
        return yarn | {"mscale": (attention_factor - 1.0) / (0.1 * math.log(factor)) if factor > 1.0 else 1.0}
    if all_dims and not mscale:
        refuse("mscale_all_dim", all_dims, f"beside mscale={mscale} is not supported; give both or neither")
    return yarn | {"mscale": mscale, "mscale_all_dim": all_dims} if mscale and all_dims else yarn


def _concentration(factor: float, mscale: float) -> float:
    """Of attention at this stretch of the context (equation 22 of Peng et al., 2023, with a factor in the slope)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
