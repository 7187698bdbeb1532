# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What an import reads: whole tensors by per-layer key, plain values, and the parameter groups of the optimizer."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mcore_ckpt._core import DeferredTensor

__all__ = ["MegatronSource", "common_groups", "find_groups", "make_groups", "plain", "plain_groups"]

_JSON = (str, int, float, bool)


@dataclass(frozen=True)
class MegatronSource:
    """What was found, before names are translated."""

    tensors: Mapping[str, DeferredTensor]
    """Weights by per-layer key, ``decoder.layers.3.mlp.linear_fc2.weight``."""
    common: Mapping[str, Any]
    """Values that are no tensors: args, iteration and others."""
    states: Mapping[tuple[str, str], DeferredTensor] = field(default_factory=dict)
    """Optimizer state by kind ("param", "exp_avg", "exp_avg_sq") and per-layer key."""
    groups: tuple[Mapping[str, Any], ...] = ()
    """Parameter groups of the optimizer, of all ranks that stored some."""
    left: tuple[str, ...] = ()
    """Entries that are not carried over."""

    @property
    def step(self) -> int | None:
        """Updates that the optimizer made; None where it does not say."""
        return max((int(group["step"]) for group in self.groups if type(group.get("step")) in (int, float)), default=None)

    @property
    def args(self) -> Mapping[str, Any]:
        """The settings of the run that wrote it; empty where it does not say."""
        args = self.common.get("args")
        return args if isinstance(args, Mapping) else {}


def plain(value: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries that JSON holds as they are."""
    return {str(key): item for key, item in value.items() if re.fullmatch(r"\w+", str(key)) and (item is None or type(item) in _JSON)}


# What the optimizers that they know look for in a group, beside rates and decay.
_SWITCHES: Mapping[str, Any] = MappingProxyType(
    {
        "amsgrad": False,
        "bias_correction": True,
        "capturable": False,
        "differentiable": False,
        "foreach": None,
        "fused": None,
        "maximize": False,
    }
)
_SAME_FOR_ALL: Mapping[str, Any] = MappingProxyType({"default_config": True, "lr_mult": 1.0, "is_decoupled_lr": False})
_LAYOUT = "fully_reshardable"


def find_groups(value: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """All parameter groups in the plain values of an optimizer, or of several."""
    if depth > 8:
        return
    if isinstance(value, Mapping):
        groups = value.get("param_groups")
        for group in groups if isinstance(groups, list) else []:
            if isinstance(group, Mapping):
                yield group
        for item in value.values():
            yield from find_groups(item, depth + 1)
    elif isinstance(value, list | tuple) and len(value) < 64:
        for item in value:
            yield from find_groups(item, depth + 1)


def plain_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What JSON holds of them, each once: the ranks of a run all have the same."""
    distinct: list[dict[str, Any]] = []
    for group in groups:
        row = {str(key): _plain(value) for key, value in group.items() if key != "params" and _is_plain(value)}
        if row not in distinct:
            distinct.append(row)
    return distinct


def make_groups(config: Mapping[str, Any], *, experts: bool) -> list[dict[str, Any]]:
    """The groups that a run of theirs has with these settings: weights, biases and norms (no decay), and experts.

    Args:
        config: fields of `mcore_parallel.optim.OptimizerConfig`: "lr", and "min_lr", "weight_decay", "decoupled_weight_decay",
            "adam_beta1", "adam_beta2", "adam_eps" where they differ from its defaults (min_lr: None). "expert_model_parallel_size" of
            the run that will read them: with 1 experts are like other weights.
        experts: whether the model has some.

    Raises:
        ValueError: no "lr", or settings that these groups cannot express.
    """
    if config.get("lr") is None:
        raise ValueError("the optimizer's config has no lr; give the largest learning rate of the run")
    if config.get("optimizer", "adam") != "adam":
        raise ValueError(f"optimizer={config['optimizer']!r}: only the groups of adam can be written; leave the optimizer out")
    for name in ("decoupled_lr", "param_groups"):
        if config.get(name):
            raise ValueError(f"{name}={config[name]!r} makes groups that are not written; leave the optimizer out")
    rate, decay = float(config["lr"]), float(config.get("weight_decay", 0.01))
    shared = {
        **_SWITCHES,
        **_SAME_FOR_ALL,
        "lr": rate,
        "max_lr": rate,
        "min_lr": config.get("min_lr"),
        "eps": float(config.get("adam_eps", 1e-8)),
        "betas": [float(config.get("adam_beta1", 0.9)), float(config.get("adam_beta2", 0.999))],
        "decoupled_weight_decay": bool(config.get("decoupled_weight_decay", True)),
    }
    apart = experts and int(config.get("expert_model_parallel_size") or 2) > 1
    return [
        {**shared, "wd_mult": factor, "weight_decay": factor * decay, "is_expert_parallel": expert}
        for expert in ((False, True) if apart else (False,))
        for factor in (1.0, 0.0)
    ]


def common_groups(groups: Sequence[Mapping[str, Any]], step: int) -> dict[Any, Any]:
    """The entry "optimizer" of their common state: one optimizer, or by number one of dense and one of expert-parallel parameters."""
    rows = [{**row, "betas": tuple(row["betas"]), "step": step} if "betas" in row else {**row, "step": step} for row in groups]
    parts = [[row for row in rows if bool(row.get("is_expert_parallel")) == expert] for expert in (False, True)]
    entries = [{"optimizer": {"param_groups": part}, "param_state_sharding_type": _LAYOUT} for part in parts if part]
    return entries[0] if len(entries) == 1 else dict(enumerate(entries))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or type(value) in (str, int, float, bool)


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
