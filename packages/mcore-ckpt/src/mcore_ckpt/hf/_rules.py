# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The language in which the weights of a family are described, and the tensor transforms it needs.

Sizes by letter: D hidden, V vocabulary, F feed-forward, A attention heads, K key-value heads, H width of a head,
Q = A*H, C = K*H, QKV = Q + 2*C, R = (A/K + 2)*H rows of one key-value group in our fused QKV,
E experts, X width of one, XD of its input, SX of the shared ones, L layers; `measure` lists the others.
"""

import enum
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._errors import list_names

__all__ = ["LETTERS", "RANK", "Dim", "Form", "HFPart", "PartLayout", "WeightRule", "WeightSite", "join", "rename_weights", "sites", "split"]

Dim = int | str
LETTERS = frozenset(
    (
        *("L", "D", "V", "F", "X", "2X", "XD", "SX", "A", "K", "H", "Q", "C", "QKV", "R", "E", "P", "types"),
        *("qr", "kr", "krr", "qh", "vh", "kvh", "qrope", "Aqh", "Akvh", "Avh"),
        *("mh", "mi", "mg", "ms", "mk", "mc", "mp", "mc/g", "mp/g"),
    )
)
"""The sizes that a shape may name: those of `measure`."""
RANK = "rank"
"""Of an adapter's B, which is split like the weight; no family has it."""
_BLANKS = {"layer", "pair", "expert"}


class PartLayout(enum.Enum):
    """How the parts of a form make up our tensor."""

    STACK = "stack"
    """Equal parts one after another in memory order: our tensor is their stack, reshaped. One part: a reshape."""
    GROUPED = "grouped"
    """The rows of each part are blocks, and each block is `Form.groups` equal pieces. Ours has group by group its piece of every block:
    queries, keys and values become [K, R, D], per key-value group its A/K query heads, its key, its value."""
    TURNED = "turned"
    """One part of `Form.groups` equal pieces, the last `Form.turned` rows of each in another order: rows 2 i and 2 i + 1 there, which the
    rotary embedding turns together, are rows i and i + half here."""
    PAIRS = "pairs"
    """One part of [E, 2 X], in which gate and value take turns; ours is [E, 2, X]."""
    PAIRS_TRANSPOSED = "pairs_transposed"
    """The same with inputs before outputs, [E, D, 2 X]; ours is [E, 2, X, D]."""
    TRANSPOSED = "transposed"
    """One part with its last two dims exchanged."""


@dataclass(frozen=True)
class HFPart:
    """A tensor of the other side: name with ``{layer}``, ``{pair}`` (half of that), ``{expert}`` to fill in; shape in letters."""

    name: str
    shape: tuple[Dim, ...]
    blocks: tuple[Dim, ...] = ()
    """Rows of its blocks, with `PartLayout.GROUPED`; none for a single one."""


@dataclass(frozen=True)
class Form:
    """One way in which the other side spells our tensor; with ``{expert}`` in the names, all parts of expert 0 come first, and so on."""

    parts: tuple[HFPart, ...]
    layout: PartLayout = PartLayout.STACK
    groups: Dim = 1
    turned: Dim = 0


@dataclass(frozen=True)
class WeightRule:
    """Our tensor (name with ``{layer}``, shape in letters) and its spellings there; the first is the one that is written."""

    name: str
    shape: tuple[Dim, ...]
    forms: tuple[Form, ...]
    when: str = ""
    """Config fields, joined by " and ", some after "not ", that must be true, or set, for the tensor to exist; nothing for always."""
    kinds: str = ""
    """Symbols of the hybrid layer pattern at which it exists, or without one E for layers with experts and - for those without; nothing for
    all layers."""
    float32: bool = False
    """Kept in 32 bits whatever dtype the others are converted to."""

    def __post_init__(self) -> None:
        parts = [part for form in self.forms for part in form.parts]
        if not parts or not all(form.parts for form in self.forms):
            raise ValueError(f"rule {self.name}: forms={self.forms!r} must name at least one HFPart each; say where the tensor is stored")
        for name in (self.name, *(part.name for part in parts)):
            if unknown := {blank for _, blank, _, _ in Formatter().parse(name) if blank is not None} - _BLANKS:
                raise ValueError(f"rule {self.name}: {name!r} has {sorted(unknown)} to fill in; only {sorted(_BLANKS)} are known")
        counts = [form.groups for form in self.forms] + [form.turned for form in self.forms]
        for dim in (*self.shape, *counts, *(dim for part in parts for dim in (*part.shape, *part.blocks))):
            if isinstance(dim, str) and dim not in LETTERS and dim != RANK:
                raise ValueError(f"rule {self.name}: size {dim!r} is none of {', '.join(sorted(LETTERS))}; use one of them or an int")


def rename_weights(rules: Sequence[WeightRule], new: Mapping[str, str]) -> tuple[WeightRule, ...]:
    """The same tensors under other names in files: each part of a name that ``new`` has becomes the one it says, longest first.

    Args:
        rules: of a family.
        new: parts of the names there, ``{layer}`` to fill in, and what they become.

    Raises:
        ValueError: a part that no name has.

    Example:
        >>> rule = WeightRule("embedding.weight", ("V", "D"), (Form((HFPart("model.embed_tokens.weight", ("V", "D")),)),))
        >>> rename_weights([rule], {"model.embed_tokens": "wte"})[0].forms[0].parts[0].name
        'wte.weight'
    """
    names = {part.name for rule in rules for form in rule.forms for part in form.parts}
    if absent := [old for old in new if not any(old in name for name in names)]:
        raise ValueError(f"new={absent[0]!r}: no name has this part; the names are {list_names(names)}")
    pattern = re.compile("|".join(re.escape(old) for old in sorted(new, key=len, reverse=True)) or r"(?!)")

    def renamed(form: Form) -> Form:
        return replace(form, parts=tuple(replace(part, name=pattern.sub(lambda match: new[match[0]], part.name)) for part in form.parts))

    return tuple(replace(rule, forms=tuple(renamed(form) for form in rule.forms)) for rule in rules)


def sites(rules: Sequence[WeightRule], sizes: Mapping[str, int], full: Mapping[str, Any]) -> Iterator["WeightSite"]:
    """Every tensor of a model with these sizes and this complete config, in the order of the rules, layer by layer."""
    kinds = (full.get("hybrid_layer_pattern") or _kinds(full)).replace("|", "")
    for rule in rules:
        if not _holds(rule.when, full):
            continue
        for layer in range(sizes["L"]) if "{layer}" in rule.name else [0]:
            if not rule.kinds or kinds[layer] in rule.kinds:
                yield WeightSite(rule, layer, sizes)


def _kinds(full: Mapping[str, Any]) -> str:
    """E for each layer with experts, - for each without."""
    layers, freq = full["num_layers"], full.get("moe_layer_freq", 1)
    if not full.get("num_moe_experts"):
        return "-" * layers
    return "".join("E" if (layer % freq == 0 if isinstance(freq, int) else freq[layer]) else "-" for layer in range(layers))


def _holds(condition: str, full: Mapping[str, Any]) -> bool:
    for clause in condition.split(" and ") if condition else ():
        value: Any = full
        for key in clause.removeprefix("not ").split("."):
            value = None if value is None else value[key]
        if bool(value) == clause.startswith("not "):
            return False
    return True


@dataclass(frozen=True)
class WeightSite:
    """A rule at one layer of a model of known sizes."""

    rule: WeightRule
    layer: int
    sizes: Mapping[str, int]

    @property
    def name(self) -> str:
        """Our name."""
        return self.rule.name.format(layer=self.layer)

    @property
    def shape(self) -> tuple[int, ...]:
        """Our shape."""
        return self.measure(self.rule.shape)

    def dtype(self, wanted: torch.dtype | None) -> torch.dtype | None:
        """What to convert to when the model is converted to ``wanted``; None for nothing."""
        return torch.float32 if self.rule.float32 else wanted

    def measure(self, shape: tuple[Dim, ...]) -> tuple[int, ...]:
        """Letters as numbers."""
        return tuple(self.sizes[dim] if isinstance(dim, str) else dim for dim in shape)

    def parts(self, form: Form) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the other side's tensors, in order."""
        experts = range(self.sizes["E"]) if any("{expert}" in part.name for part in form.parts) else [0]
        return [
            (part.name.format(layer=self.layer, pair=self.layer // 2, expert=expert), self.measure(part.shape))
            for expert in experts
            for part in form.parts
        ]


def split(ours: Tensor, form: Form, site: WeightSite) -> list[Tensor]:
    """Our tensor as the parts of ``form``; views where that is possible."""
    shapes = [shape for _, shape in site.parts(form)]
    if form.layout is PartLayout.GROUPED:
        (groups,) = site.measure((form.groups,))
        inner = shapes[0][1:]
        rows = [site.measure(part.blocks or part.shape[:1]) for part in form.parts]
        pieces = iter(ours.reshape(groups, -1, *inner).split([count // groups for counts in rows for count in counts], dim=1))
        return [_concatenate([next(pieces).reshape(count, *inner) for count in counts]) for counts in rows]
    if form.layout is PartLayout.TURNED:
        return [_turn(ours, form, site, back=True).reshape(shapes[0])]
    if form.layout in (PartLayout.PAIRS, PartLayout.PAIRS_TRANSPOSED):
        rows = ours.transpose(1, 2).flatten(1, 2)
        return [rows if form.layout is PartLayout.PAIRS else rows.transpose(1, 2)]
    if form.layout is PartLayout.TRANSPOSED:
        return [ours.transpose(-1, -2)]
    assert len(set(shapes)) == 1 and math.prod(shapes[0]) * len(shapes) == ours.numel()
    return list(ours.reshape(len(shapes), *shapes[0]).unbind())


def _concatenate(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def join(parts: Sequence[Tensor], form: Form, site: WeightSite) -> Tensor:
    """Inverse of `split`; always memory of its own."""
    if form.layout is PartLayout.GROUPED:
        (groups,) = site.measure((form.groups,))
        blocks = [
            block.reshape(groups, -1, *tensor.shape[1:])
            for part, tensor in zip(form.parts, parts, strict=True)
            for block in tensor.split(site.measure(part.blocks or part.shape[:1]))
        ]
        return torch.cat(blocks, dim=1).reshape(site.shape)
    if form.layout is PartLayout.TURNED:
        return _turn(parts[0], form, site, back=False).reshape(site.shape)
    if form.layout in (PartLayout.PAIRS, PartLayout.PAIRS_TRANSPOSED):
        rows = parts[0] if form.layout is PartLayout.PAIRS else parts[0].transpose(1, 2)
        return rows.unflatten(1, (-1, 2)).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    if form.layout is PartLayout.TRANSPOSED:
        return parts[0].transpose(-1, -2).clone(memory_format=torch.contiguous_format)
    return torch.stack(list(parts)).reshape(site.shape)


def _turn(tensor: Tensor, form: Form, site: WeightSite, *, back: bool) -> Tensor:
    groups, rows = site.measure((form.groups, form.turned))
    pieces = tensor.reshape(groups, -1, site.shape[-1])
    straight, turned = pieces.split([pieces.shape[1] - rows, rows], dim=1)
    pairs = turned.unflatten(1, (2, rows // 2) if back else (rows // 2, 2))
    return torch.cat([straight, pairs.transpose(1, 2).flatten(1, 2)], dim=1)
