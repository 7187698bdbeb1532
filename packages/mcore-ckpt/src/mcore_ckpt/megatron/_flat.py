# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Optimizer state in the flat buckets of a data-parallel buffer, found again by parameter.

A buffer holds the parameters of one model-parallel rank from the last registered to the first, each beginning at a multiple of 64
elements of its bucket; the lengths of the buckets are stored, so no bucket size is assumed. The order of registration is not stored: every
order of the known releases is tried, and one is believed only where the masters in the buckets round to the stored weights.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core import DeferredTensor
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import StoredTensor
from mcore_ckpt.megatron._names import LAYERS, Cut, cut, is_gated, join_cut, rule_of

__all__ = ["FLAT_KEY", "Domain", "Flat", "gathered_domain", "is_gathered", "read_flat_states"]

FLAT_KEY = re.compile(
    r"(?:chained_(?P<chain>\d+)\.)?optimizer\.distributed\.dp_group_idx_(?P<domain>\d+)\.gbuf_idx_(?P<buffer>\d+)\."
    r"dtype_\([^)]*\)\.bucket_idx_(?P<bucket>\d+)\.(?P<kind>\w+)"
)
_ALIGNMENT = 64
_COMPARED = 256
_NORM1 = ("input_layernorm.weight", "input_layernorm.bias")
_QKV = tuple(f"self_attention.linear_qkv.{part}" for part in ("layer_norm_weight", "layer_norm_bias", "weight", "bias"))
_PROJ = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias")
_QK_NORM = ("self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight")
_NORM2 = ("pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias")
_ROUTER = ("mlp.router.weight", "mlp.router.bias")
_FC1 = tuple(f"mlp.linear_fc1.{part}" for part in ("layer_norm_weight", "layer_norm_bias", "weight", "bias"))
_FC2 = ("mlp.linear_fc2.weight", "mlp.linear_fc2.bias")
_FUSED_NORMS = (*_NORM1, *_PROJ, *_QKV, *_QK_NORM, *_NORM2, *_ROUTER, *_FC1, *_FC2)
# Norms of their own are stored under the names that they have inside the products which follow them.
_OWN_NORMS = (
    *(*_NORM1, *_QKV[:2]), *_PROJ, *_QKV[2:], *_QK_NORM, *(*_NORM2, *_FC1[:2]), *_ROUTER, *_FC1[2:], *_FC2,
)  # fmt: skip
_ORDERS = (_FUSED_NORMS, _OWN_NORMS)
_EXPERTS = tuple(tuple(f"mlp.experts.experts.linear_fc{product}.{part}" for part in ("weight", "bias")) for product in (1, 2))
"""Of each product."""


@dataclass(frozen=True)
class Flat:
    """One kind of state of one bucket."""

    dtype: torch.dtype
    numel: int
    read: Callable[[int, int], Tensor]
    """Elements from the first number to the second."""


@dataclass(frozen=True)
class Domain:
    """The buffers of one model-parallel rank: of each its buckets, of each its states by kind."""

    chain: int
    """0 for the dense parameters, 1 for those of experts."""
    number: int
    buffers: Sequence[Sequence[Mapping[str, Flat]]]
    coalesced: bool = False
    """Each buffer is given as one bucket, which holds all of them without the padding between; where they end is not said."""


@dataclass(frozen=True)
class _FlatUnit:
    """A parameter as a rank registers it: a weight, or that of one expert."""

    key: str
    expert: int | None
    rank: int
    """Among the tensor-parallel ranks."""


@dataclass(frozen=True)
class _Placed:
    """Where a rank's part lies."""

    bucket: Mapping[str, Flat]
    begin: int
    shape: tuple[int, ...]

    def read(self, kind: str, end: int | None = None) -> Tensor:
        """The part, or its first elements, flat."""
        numel = math.prod(self.shape)
        part = self.bucket[kind].read(self.begin, self.begin + (numel if end is None else min(end, numel)))
        return part.reshape(self.shape) if end is None else part


def read_flat_states(
    domains: Sequence[Domain], tensors: Mapping[str, DeferredTensor], args: Mapping[str, Any]
) -> dict[tuple[str, str], DeferredTensor]:
    """The states of whole parameters, by kind and key.

    Args:
        domains: all of the checkpoint.
        tensors: the weights, by per-layer key.
        args: with the parallel sizes of the run that wrote it.

    Raises:
        CheckpointingException: the sizes are not known, that of a rank is missing, or no known order of parameters fits what is stored.
    """
    model = _Model(tensors, args)
    model.check(domains)
    for order in _ORDERS:
        for grouped in (False, True):
            placed = model.place(domains, order, grouped)
            if placed is not None and model.agrees(placed):
                return model.states(placed)
    raise CheckpointingException(
        "the flat optimizer state fits no known order of the model's parameters; save it as fully_reshardable with the "
        "system that wrote it, or leave the optimizer out"
    )


class _Model:
    """Sizes of the run that wrote the buckets."""

    def __init__(self, tensors: Mapping[str, DeferredTensor], args: Mapping[str, Any]) -> None:
        self.tensors, self.gated = tensors, is_gated({key: tensor.global_shape for key, tensor in tensors.items()})
        if args.get("tensor_model_parallel_size") is None:
            raise CheckpointingException(
                "the flat optimizer state needs the parallel sizes of its run, which the checkpoint does not say; give "
                "tensor_model_parallel_size, pipeline_model_parallel_size and expert_model_parallel_size in the config"
            )
        self.tp = int(args["tensor_model_parallel_size"])
        self.pp, self.ep = (int(args.get(f"{name}_model_parallel_size") or 1) for name in ("pipeline", "expert"))
        self.etp = int(args.get("expert_tensor_parallel_size") or (1 if self.ep > 1 else self.tp))
        chunks = args.get("virtual_pipeline_model_parallel_size")
        self.chunks = int(chunks) if chunks else 1
        self.num_layers = 1 + max((int(key.split(".")[2]) for key in tensors if key.startswith(LAYERS)), default=-1)
        if self.num_layers % (self.pp * self.chunks):
            raise CheckpointingException(
                f"{self.num_layers} layers over {self.pp * self.chunks} uneven stages: their flat optimizer state is not "
                "read; save it as fully_reshardable with the system that wrote it"
            )

    def check(self, domains: Sequence[Domain]) -> None:
        """That every model-parallel rank with parameters is there."""
        there = {(domain.chain, domain.number) for domain in domains}
        counts = {0: self.tp * self.pp, 1: self.etp * self.ep * self.pp if self.ep > 1 else 0}
        for chain, count in counts.items():
            for number in range(count):
                wanted = Domain(chain, number, ())
                if (chain, number) not in there and any(self._units(wanted, chunk, _FUSED_NORMS, False) for chunk in range(self.chunks)):
                    name = "expert- and model-parallel" if chain else "model-parallel"
                    raise CheckpointingException(
                        f"there is no flat optimizer state of {name} rank {number} (dp_group_idx_{number}) of {count}; copy the "
                        "checkpoint again, or leave the optimizer out"
                    )

    def place(self, domains: Sequence[Domain], order: Sequence[str], grouped: bool) -> dict[_FlatUnit, _Placed] | None:
        """Every unit of every domain; None where the lengths do not fit this order."""
        placed: dict[_FlatUnit, _Placed] = {}
        for domain in domains:
            chunks: list[list[list[_FlatUnit]]] = []
            for chunk in range(self.chunks):
                units = self._units(domain, chunk, order, grouped)
                by_type: dict[torch.dtype, list[_FlatUnit]] = {}
                for unit in units:
                    by_type.setdefault(self.tensors[unit.key].dtype, []).append(unit)
                chunks.append(list(by_type.values()))
            buffers = [units for chunk in chunks for units in chunk]
            if len(buffers) != len(domain.buffers):
                return None
            for units, buckets in zip(buffers, domain.buffers, strict=True):
                fits = self._search(units, buckets[0], placed) if domain.coalesced else self._fill(units, buckets, placed)
                if not fits:
                    return None
        return placed

    def _units(self, domain: Domain, chunk: int, order: Sequence[str], grouped: bool) -> list[_FlatUnit]:
        """Parameters of one model chunk of a rank, in the order of registration."""
        tp = self.etp if domain.chain else self.tp
        rank, rest = domain.number % tp, domain.number // tp
        expert_rank, stage = (rest % self.ep, rest // self.ep) if domain.chain else (0, rest)
        each = self.num_layers // (self.pp * self.chunks)
        first = (chunk * self.pp + stage) * each
        layers = [f"{LAYERS}{layer}." for layer in range(first, first + each)]
        if domain.chain:
            return [unit for layer in layers for unit in self._experts(layer, rank, expert_rank, grouped)]
        keys = [f"{layer}{part}" for layer in layers for part in order]
        if stage == 0 and chunk == 0:
            keys = ["embedding.word_embeddings.weight", "embedding.position_embeddings.weight", *keys]
        if stage == self.pp - 1 and chunk == self.chunks - 1:
            keys += ["decoder.final_layernorm.weight", "decoder.final_layernorm.bias", "output_layer.weight"]
            if "output_layer.weight" not in self.tensors and (self.pp > 1):
                keys.append("embedding.word_embeddings.weight")
        return [_FlatUnit(key, None, rank) for key in keys if key in self.tensors]

    def _experts(self, layer: str, rank: int, expert_rank: int, grouped: bool) -> list[_FlatUnit]:
        products = [[layer + name for name in names if layer + name in self.tensors] for names in _EXPERTS]
        if not products[0]:
            return []
        each = self.tensors[products[0][0]].global_shape[0] // self.ep
        experts = range(expert_rank * each, (expert_rank + 1) * each)
        if grouped:
            pairs = [(key, one) for keys in products for one in experts for key in keys]
        else:
            pairs = [(key, one) for one in experts for keys in products for key in keys]
        return [_FlatUnit(key, one, rank) for key, one in pairs]

    def _fill(self, units: Sequence[_FlatUnit], buckets: Sequence[Mapping[str, Flat]], placed: dict[_FlatUnit, _Placed]) -> bool:
        waiting = [(unit, self._shape(unit)) for unit in units]
        for bucket in buckets:
            numel = next(iter(bucket.values())).numel
            position = 0
            while waiting:
                unit, shape = waiting[-1]
                begin = -(-position // _ALIGNMENT) * _ALIGNMENT
                if begin + math.prod(shape) > numel:
                    break
                placed.setdefault(unit, _Placed(bucket, begin, shape))
                position = begin + math.prod(shape)
                waiting.pop()
            if not 0 <= numel - position < _ALIGNMENT:
                return False
        return not waiting

    def _search(self, units: Sequence[_FlatUnit], bucket: Mapping[str, Flat], placed: dict[_FlatUnit, _Placed]) -> bool:
        """Place units where each begins in its bucket or begins the next one; the masters say which."""
        # (end of what is placed, start of its bucket) -> the places so far, the last first.
        reached: dict[tuple[int, int], tuple[Any, ...]] = {(0, 0): ()}
        for unit in reversed(units):
            shape, further = self._shape(unit), dict[tuple[int, int], tuple[Any, ...]]()
            weight = self._part(unit, self.tensors[unit.key].read())
            for (position, start), path in reached.items():
                aligned = start + -(-(position - start) // _ALIGNMENT) * _ALIGNMENT
                for begin, origin in ((aligned, start), (position, position)):
                    end = begin + math.prod(shape)
                    if end > bucket["param"].numel or (end, origin) in further:
                        continue
                    candidate = _Placed(bucket, begin, shape)
                    if _rounds_to(candidate, weight):
                        further[end, origin] = ((unit, candidate), path)
            reached = further
        paths = [path for (end, _), path in reached.items() if 0 <= bucket["param"].numel - end < _ALIGNMENT]
        path = paths[0] if paths else ()
        while path:
            (unit, candidate), path = path
            placed.setdefault(unit, candidate)
        return bool(paths)

    def _cut(self, unit: _FlatUnit) -> tuple[Cut, int]:
        rule = rule_of(unit.key, gated=self.gated)
        return (Cut.WHOLE if rule is None else rule.cut), (self.tp if unit.expert is None else self.etp)

    def _shape(self, unit: _FlatUnit) -> tuple[int, ...]:
        shape = self.tensors[unit.key].global_shape[0 if unit.expert is None else 1 :]
        how, size = self._cut(unit)
        return tuple(cut(torch.empty(shape, device="meta"), how, unit.rank, size).shape)

    def agrees(self, placed: Mapping[_FlatUnit, _Placed]) -> bool:
        """Whether each master rounds to its weight; the first elements of every part are compared."""
        by_key: dict[str, list[_FlatUnit]] = {}
        for unit in placed:
            by_key.setdefault(unit.key, []).append(unit)
        for key, units in by_key.items():
            whole = self.tensors[key].read()
            for unit in units:
                if "param" not in placed[unit].bucket:
                    return True
                if not _rounds_to(placed[unit], self._part(unit, whole)):
                    return False
        return True

    def _part(self, unit: _FlatUnit, whole: Tensor) -> Tensor:
        """What the unit's rank holds of a whole weight."""
        how, size = self._cut(unit)
        return cut(whole if unit.expert is None else whole[unit.expert], how, unit.rank, size)

    def states(self, placed: Mapping[_FlatUnit, _Placed]) -> dict[tuple[str, str], DeferredTensor]:
        """By kind and key."""
        tensors = {}
        by_key: dict[str, dict[tuple[int, int], _Placed]] = {}
        for unit, place in placed.items():
            by_key.setdefault(unit.key, {})[unit.expert or 0, unit.rank] = place
        for key, places in by_key.items():
            how, _ = self._cut(_FlatUnit(key, 0 if ".experts." in key else None, 0))
            shape = self.tensors[key].global_shape
            for kind, flat in next(iter(places.values())).bucket.items():
                tensors[kind, key] = DeferredTensor(flat.dtype, shape, partial(_joined, places, kind, how, ".experts." in key))
        return tensors


def _rounds_to(placed: _Placed, weight: Tensor) -> bool:
    """Whether the first elements of a master are those of its weight."""
    first = weight.reshape(-1)[:_COMPARED]
    return torch.equal(placed.read("param", _COMPARED).to(first.dtype), first)


def _joined(places: Mapping[tuple[int, int], _Placed], kind: str, how: Cut, stacked: bool) -> Tensor:
    """A whole tensor from the parts of all ranks."""
    experts: dict[int, list[Tensor]] = {}
    for (expert, _), place in sorted(places.items(), key=lambda item: item[0]):
        if how is Cut.WHOLE and expert in experts:
            continue
        experts.setdefault(expert, []).append(place.read(kind))
    wholes = [join_cut(parts, how) for parts in experts.values()]
    return torch.stack(wholes) if stacked else wholes[0]


_KINDS = ("param", "exp_avg", "exp_avg_sq")


def is_gathered(content: Any) -> bool:
    """Whether it is of a release (0.7 and later) that keeps no padding between buckets."""
    return isinstance(content, Mapping) and bool(content.get("buckets_coalesced"))


def gathered_domain(where: str, content: Mapping[Any, Any], chain: int, number: int) -> Domain:
    """The buffers of one rank.

    Args:
        where: for messages.
        content: of which `is_gathered`, read with its tensors deferred.
        chain: as in `Domain`, as is ``number``.

    Raises:
        CheckpointingException: a buffer or a state of one is missing, or the states of one differ in length.
    """
    numbers = sorted(key for key in content if type(key) is int)
    if missing := sorted(set(range(max(numbers, default=0) + 1)) - set(numbers)):
        raise CheckpointingException(f"{where}: no buffer {missing[0]} of the flat optimizer state")
    buffers = []
    for buffer in numbers:
        for states in content[buffer].values() if isinstance(content[buffer], Mapping) else ():
            by_kind = {kind: states.get(kind) for kind in _KINDS} if isinstance(states, Mapping) else {}
            flat = {kind: value for kind, value in by_kind.items() if isinstance(value, StoredTensor) and len(value.shape) == 1}
            if absent := [kind for kind in _KINDS if kind not in flat]:
                raise CheckpointingException(f"{where}: buffer {buffer} of the flat optimizer state has no flat {list_names(absent)}")
            lengths = {kind: value.shape[0] for kind, value in flat.items()}
            if len(set(lengths.values())) > 1:
                raise CheckpointingException(f"{where}: the states of buffer {buffer} have different lengths, {lengths}")
            buffers.append([{kind: Flat(value.dtype, value.shape[0], value.read) for kind, value in flat.items()}])
    return Domain(chain, number, buffers, coalesced=True)
