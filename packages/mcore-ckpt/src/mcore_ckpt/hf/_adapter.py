# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Low-rank adapters (LoRA) by our names as those of the tensors of a family, and merged into them.

Ours are ``layers.0.mlp.up.lora.A`` [r, I] and ``.lora.B`` [*out, r] of a weight ``layers.0.mlp.up.weight`` [*out, I]. Where the other side
has several weights for one of ours, each has an adapter there: A is the same for all, and B is split like the weight.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt.hf._config import complete, measure
from mcore_ckpt.hf._fields import Family
from mcore_ckpt.hf._rules import RANK, Form, PartLayout, WeightSite, join, sites, split

__all__ = ["HFAdapterConfig", "adapted_sites", "is_adapter", "join_adapter", "merge_adapter", "split_adapter"]

_WEIGHT, _A, _B = ".weight", ".lora.A", ".lora.B"
_EXPERTS_A, _EXPERTS_B = "_lora.A", "_lora.B"
"""Of a stack of experts ``experts.up`` [E, *out, I]: ``experts.up_lora.A`` [E, r, I] and ``.B`` [E, *out, r]."""
_LAYOUTS = (PartLayout.STACK, PartLayout.GROUPED, PartLayout.TURNED)
Pair = tuple[Tensor, Tensor]
"""A [r, I] and B [O, r]."""


@dataclass(frozen=True, kw_only=True)
class HFAdapterConfig:
    """What all adapters of a model share.

    Raises:
        ValueError: a number out of its range.

    Example:
        >>> HFAdapterConfig(rank=8, alpha=16.0).scaling
        2.0
    """

    rank: int
    """r."""
    alpha: float
    """The product of A and B counts alpha / rank times."""
    dropout: float = 0.0
    """Of training."""
    base_model: str = ""
    """Folder or name of the model that it belongs to."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank={self.rank} must be at least 1")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha={self.alpha} must be a number")

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name is one of the matrices of an adapter."""
    return name.endswith((_A, _B, _EXPERTS_A, _EXPERTS_B))


def merge_adapter(
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor], scaling: float
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a model with ``scaling * B A`` added to the weights that have an adapter, in float32 or wider, one at a time.

    Args:
        tensors: our names and whole tensors.
        adapter: ``lora.A`` and ``lora.B`` by our names, those of stacked experts too.
        scaling: alpha / rank.

    Raises:
        CheckpointingException: an adapter of which a half or the weight is missing, or that does not fit; a weight of one byte an element.

    Example:
        >>> adapter = {"up.lora.A": torch.ones(1, 2), "up.lora.B": torch.ones(3, 1)}
        >>> dict(merge_adapter({"up.weight": torch.zeros(3, 2)}, adapter, 0.5))["up.weight"][0]
        tensor([0.5000, 0.5000])
    """
    pairs = _pairs(adapter)
    stream: Any = tensors.items() if isinstance(tensors, Mapping) else tensors
    for name, tensor in stream:
        pair = pairs.pop(name, None)
        if pair is None:
            yield name, tensor
            continue
        A, B = pair
        experts = A.dim() - 2
        if A.shape != (*B.shape[:experts], B.shape[-1], tensor.shape[-1]) or B.shape[:-1] != tensor.shape[:-1]:
            raise CheckpointingException(f"the adapter {list(B.shape)} x {list(A.shape)} does not fit {name} {list(tensor.shape)}")
        if tensor.dtype.itemsize == 1:
            raise CheckpointingException(f"{name} is in {tensor.dtype} and can take no sum; merge into the weights as they were loaded")
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        delta = (B.flatten(experts, -2).to(dtype) @ A.to(dtype)).reshape(tensor.shape)
        yield name, (tensor.to(dtype) + scaling * delta).to(tensor.dtype)
    if pairs:
        raise CheckpointingException(f"adapters of weights this model does not have: {list_names(pairs)}")


def adapted_sites(family: Family, config: Mapping[str, Any]) -> dict[str, WeightSite]:
    """The weights of a model that an adapter in this form can have, by our names."""
    full = complete(config, family)
    return {site.name: site for site in sites(family.rules, measure(full), full) if any(_is_linear(site, f) for f in site.rule.forms)}


def split_adapter(tensors: Mapping[str, Tensor], family: Family, config: Mapping[str, Any]) -> dict[str, Pair]:
    """Adapters by the modules of the family, ``model.layers.0.self_attn.q_proj``.

    Raises:
        CheckpointingException: an adapter of which a half is missing, that does not fit, or that this form cannot express.
    """
    linears = adapted_sites(family, config)
    pairs = _pairs(tensors)
    if stacks := [name for name, (A, _) in pairs.items() if A.dim() > 2]:
        raise CheckpointingException(f"{list_names(stacks)}: adapters of experts have no form there; merge them instead")
    if unknown := pairs.keys() - linears.keys():
        raise CheckpointingException(f"family {family.name} with this config has no linear layers {list_names(unknown, linears)}")
    theirs: dict[str, Pair] = {}
    for name, (A, B) in pairs.items():
        site = linears[name]
        form = site.rule.forms[0]
        rank = A.shape[0]
        if not _is_linear(site, form):
            raise CheckpointingException(f"{name} is no matrix of its own in family {family.name}; merge the adapter instead")
        if A.shape != (rank, site.shape[-1]) or B.shape != (*site.shape[:-1], rank):
            raise CheckpointingException(f"the adapter {list(B.shape)} x {list(A.shape)} does not fit {name} {list(site.shape)}")
        narrow, narrow_form = _narrow(site, form, rank)
        for (weight, _), part in zip(site.parts(form), split(B, narrow_form, narrow), strict=True):
            theirs[weight.removesuffix(_WEIGHT)] = A, part
    return theirs


def join_adapter(theirs: Mapping[str, Pair], family: Family, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Inverse of `split_adapter`. All adapters get one rank: where those of the parts of one weight differ in A, or a part has none, the
    rank of ours is the sum of theirs; smaller ones are filled up with zeros. The scale stays.

    Raises:
        CheckpointingException: an adapter of a module that the model does not have, or of another shape.
    """
    left = dict(theirs)
    pairs: dict[str, Pair] = {}
    for name, site in adapted_sites(family, config).items():
        for form in site.rule.forms:
            modules = [weight.removesuffix(_WEIGHT) for weight, _ in site.parts(form)]
            if _is_linear(site, form) and any(module in left for module in modules):
                pairs[name] = _joined(site, form, [left.pop(module, None) for module in modules])
                break
    if left:
        raise CheckpointingException(f"family {family.name} with this config has no linear layers {list_names(left)} to adapt")
    rank = max((A.shape[0] for A, _ in pairs.values()), default=0)
    tensors: dict[str, Tensor] = {}
    for name, (A, B) in pairs.items():
        more = rank - A.shape[0]
        stem = name.removesuffix(_WEIGHT)
        tensors[stem + _A] = torch.cat([A, A.new_zeros(more, A.shape[1])])
        tensors[stem + _B] = torch.cat([B, B.new_zeros(*B.shape[:-1], more)], -1)
    return tensors


def _joined(site: WeightSite, form: Form, parts: Sequence[Pair | None]) -> Pair:
    present = [pair for pair in parts if pair is not None]
    for (weight, shape), pair in zip(site.parts(form), parts, strict=True):
        if pair is not None and (pair[0].shape[1] != shape[1] or pair[1].shape[0] != shape[0]):
            raise CheckpointingException(
                f"the adapter {list(pair[1].shape)} x {list(pair[0].shape)} does not fit {weight}, which config.json means as {list(shape)}"
            )
    first = present[0][0]
    if len(present) == len(parts) and all(torch.equal(A, first) for A, _ in present):
        narrow, narrow_form = _narrow(site, form, first.shape[0])
        return first, join([B for _, B in present], narrow_form, narrow)
    rank = sum(A.shape[0] for A, _ in present)
    wide, begin = [], 0
    for (_, shape), pair in zip(site.parts(form), parts, strict=True):
        block = first.new_zeros(shape[0], rank)
        if pair is not None:
            block[:, begin : begin + pair[1].shape[1]] = pair[1]
            begin += pair[1].shape[1]
        wide.append(block)
    narrow, narrow_form = _narrow(site, form, rank)
    return torch.cat([A for A, _ in present]), join(wide, narrow_form, narrow)


def _pairs(tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    """A and B by the name of the weight."""
    pairs: dict[str, Pair] = {}
    for name in tensors:
        stacked = name.endswith((_EXPERTS_A, _EXPERTS_B))
        a, b = (_EXPERTS_A, _EXPERTS_B) if stacked else (_A, _B)
        if not name.endswith((a, b)):
            raise CheckpointingException(f"{name} belongs to no adapter; names end in {_A} or {_B}")
        stem = name.removesuffix(a).removesuffix(b)
        if stem + a not in tensors or stem + b not in tensors:
            raise CheckpointingException(f"the adapter of {stem} lacks {a if name.endswith(b) else b}")
        pairs[stem if stacked else stem + _WEIGHT] = tensors[stem + a], tensors[stem + b]
    return pairs


def _is_linear(site: WeightSite, form: Form) -> bool:
    """Whether the parts are matrices with the inputs of ours."""
    return (
        site.name.endswith(_WEIGHT)
        and not site.name.endswith("embedding.weight")
        and form.layout in _LAYOUTS
        and len(site.shape) > 1
        and not any("{expert}" in part.name for part in form.parts)
        and all(name.endswith(_WEIGHT) and len(shape) == 2 and shape[1] == site.shape[-1] for name, shape in site.parts(form))
    )


def _narrow(site: WeightSite, form: Form, rank: int) -> tuple[WeightSite, Form]:
    """The same for B, whose last dim is the rank."""
    parts = tuple(dataclasses.replace(part, shape=(*part.shape[:-1], RANK)) for part in form.parts)
    narrow = dataclasses.replace(form, parts=parts)
    rule = dataclasses.replace(site.rule, shape=(*site.rule.shape[:-1], RANK), forms=(narrow,))
    return WeightSite(rule, site.layer, {**site.sizes, RANK: rank}), narrow
