# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A checkpoint of theirs as whole tensors by per-layer key, each read when it is asked for, and its plain values."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mcore_ckpt._core import DeferredTensor

__all__ = ["Source", "plain"]

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
        found = self.common.get("args")
        return found if isinstance(found, Mapping) else {}


def plain(value: Mapping[Any, Any]) -> dict[str, Any]:
    """The entries that JSON holds as they are."""
    return {str(key): item for key, item in value.items() if re.fullmatch(r"\w+", str(key)) and (item is None or type(item) in _JSON)}
