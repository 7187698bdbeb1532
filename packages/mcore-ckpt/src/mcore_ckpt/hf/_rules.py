# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The language in which a family of models is described, and the two tensor transforms it needs.

Sizes by letter: D hidden, V vocabulary, F feed-forward, A attention heads, K key-value heads, H width of a head,
Q = A*H, C = K*H, R = (A/K + 2)*H rows of one key-value group in our fused QKV, E experts, L layers.
"""

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["ConfigField", "Dim", "Family", "Form", "Layout", "Part", "Rule", "Site", "join", "split"]

Dim = int | str


class Layout(enum.Enum):
    """How the parts of a form make up our tensor."""

    STACK = "stack"
    """Equal parts one after another in memory order: our tensor is their stack, reshaped. One part: a reshape."""
    GROUPED_QKV = "grouped_qkv"
    """Query [A*H, D], key and value [K*H, D] become [K, R, D]: per key-value group its A/K query heads, its key, its value."""


@dataclass(frozen=True)
class Part:
    """A tensor of the other side: name with ``{layer}`` and ``{expert}`` to fill in, and its shape in letters."""

    name: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class Form:
    """One way in which the other side spells our tensor; with ``{expert}`` in the names, all parts of expert 0 come first, and so on."""

    parts: tuple[Part, ...]
    layout: Layout = Layout.STACK


@dataclass(frozen=True)
class Rule:
    """Our tensor (name with ``{layer}``, shape in letters) and its spellings there; the first is the one that is written."""

    name: str
    shape: tuple[Dim, ...]
    forms: tuple[Form, ...]
    when_tied: bool = True
    """False: the tensor does not exist of its own when embedding and output weights are shared."""


@dataclass(frozen=True)
class ConfigField:
    """Our config field, its name there, and the value to take when it is absent there (`...` when it must be present)."""

    ours: str
    theirs: str
    default: Any = ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """Everything that is particular to one family of models."""

    name: str
    model_type: str
    architecture: str
    fields: tuple[ConfigField, ...]
    rope_theta: float
    """Rotary base when the other config is silent about it."""
    fixed: Mapping[str, Any]
    """Config entries that are always written, and whose other values mean a model that we do not describe."""
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = field(default=())
    """Endings of names there that carry no weights."""

    def sites(self, sizes: Mapping[str, int], *, tied: bool) -> Iterator["Site"]:
        """Every tensor of a model with these sizes, in the order of the rules, layer by layer."""
        for rule in self.rules:
            if tied and not rule.when_tied:
                continue
            for layer in range(sizes["L"]) if "{layer}" in rule.name else [0]:
                yield Site(rule, layer, sizes)


@dataclass(frozen=True)
class Site:
    """A rule at one layer of a model of known sizes."""

    rule: Rule
    layer: int
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        """Our name."""
        return self.rule.name.format(layer=self.layer)

    @property
    def shape(self) -> tuple[int, ...]:
        """Our shape."""
        return _measure(self.rule.shape, self.sizes)

    def parts(self, form: Form) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the other side's tensors, in order."""
        experts = range(self.sizes["E"]) if any("{expert}" in part.name for part in form.parts) else [0]
        return [
            (part.name.format(layer=self.layer, expert=expert), _measure(part.shape, self.sizes))
            for expert in experts
            for part in form.parts
        ]


def _measure(shape: tuple[Dim, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[dim] if isinstance(dim, str) else dim for dim in shape)


def split(ours: Tensor, form: Form, site: Site) -> list[Tensor]:
    """Our tensor as the parts of ``form``; views where that is possible."""
    shapes = [shape for _, shape in site.parts(form)]
    if form.layout is Layout.GROUPED_QKV:
        heads, width = site.sizes["A"] // site.sizes["K"], site.sizes["H"]
        pieces = ours.split([heads * width, width, width], dim=1)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
    assert len(set(shapes)) == 1 and math.prod(shapes[0]) * len(shapes) == ours.numel()
    return list(ours.reshape(len(shapes), *shapes[0]).unbind())


def join(parts: Sequence[Tensor], form: Form, site: Site) -> Tensor:
    """Inverse of `split`; always memory of its own."""
    if form.layout is Layout.GROUPED_QKV:
        groups, inner = site.sizes["K"], site.sizes["D"]
        return torch.cat([part.reshape(groups, -1, inner) for part in parts], dim=1)
    return torch.stack(list(parts)).reshape(site.shape)
