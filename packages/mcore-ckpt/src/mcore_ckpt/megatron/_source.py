# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A checkpoint of theirs as whole tensors by per-layer key, each read when it is asked for, and its plain values."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt._sharded import DeferredTensor

__all__ = ["Source", "find_steps", "plain"]

_JSON = (str, int, float, bool)


@dataclass(frozen=True)
class Source:
    """What was found, before names are translated."""

    tensors: Mapping[str, DeferredTensor]
    """Weights by per-layer key, ``decoder.layers.3.mlp.linear_fc2.weight``."""
    common: Mapping[str, Any]
    """Values that are no tensors: args, iteration and others."""
    states: Mapping[tuple[str, str], DeferredTensor] = field(default_factory=dict)
    """Optimizer state by kind ("param", "exp_avg", "exp_avg_sq") and per-layer key."""
    step: int | None = None
    """Updates that the optimizer made."""
    left: tuple[str, ...] = ()
    """Entries that are not carried over."""

    @property
    def args(self) -> Mapping[str, Any]:
        """The settings of the run that wrote it; empty where it does not say."""
        found = self.common.get("args")
        return found if isinstance(found, Mapping) else {}


def find_steps(value: Any, depth: int = 0) -> Iterator[int]:
    """Counts of updates in the parameter groups of an optimizer's plain values."""
    if depth > 8:
        return
    if isinstance(value, Mapping):
        groups = value.get("param_groups")
        for group in groups if isinstance(groups, list) else []:
            if isinstance(group, Mapping) and type(group.get("step")) in (int, float):
                yield int(group["step"])
        for item in value.values():
            yield from find_steps(item, depth + 1)
    elif isinstance(value, list | tuple) and len(value) < 64:
        for item in value:
            yield from find_steps(item, depth + 1)


def plain(value: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries that JSON holds as they are."""
    return {str(key): item for key, item in value.items() if re.fullmatch(r"\w+", str(key)) and (item is None or type(item) in _JSON)}
