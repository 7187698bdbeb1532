# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``torch_dist`` as Megatron writes it: layers stacked or apart, plain values in an entry or in common.pt."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from mcore_ckpt._core import CheckpointReader, DeferredTensor
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import read_objects, read_places
from mcore_ckpt._storage import Folder, StoredFile, dtype_of
from mcore_ckpt.chunks import Box
from mcore_ckpt.megatron._flat import FLAT_KEY, Domain, Flat, gathered_domain, is_gathered, read_flat_states
from mcore_ckpt.megatron._names import LAYERS
from mcore_ckpt.megatron._source import MegatronSource, find_groups

__all__ = ["Ranges", "find_ranges", "open_dist"]


@dataclass(frozen=True)
class Ranges:
    """How a weight of ``shape`` lies in a tensor [*cuts, elements of a piece]."""

    shape: tuple[int, ...]
    cuts: tuple[int, ...]
    """Pieces along each dim."""

    @property
    def piece(self) -> tuple[int, ...]:
        """Shape of one cut."""
        return tuple(size // cuts for size, cuts in zip(self.shape, self.cuts, strict=True))

    def box(self, layer: int) -> Box:
        """What the stored tensor has of one index of the weight's first dim."""
        first, *others = self.piece
        numel, place = math.prod(others), layer // first
        offset, size = (0,) * len(others), self.cuts[1:]
        return Box((place, *offset, layer % first * numel), (1, *size, numel))

    def layer(self, stored: Tensor) -> Tensor:
        """One index of the weight's first dim from its `box`."""
        return _joined(stored[0], self.cuts[1:], self.piece[1:])

    def whole(self, stored: Tensor) -> Tensor:
        """The weight's geometry from all of it."""
        return _joined(stored, self.cuts, self.piece)


def find_ranges(name: str, stored: Sequence[int], shape: Sequence[int]) -> Ranges | None:
    """How a state is stored, by its shape and that of its weight; None where both are the same.

    Raises:
        CheckpointingException: as none of both; names it.
    """
    stored, shape = tuple(stored), tuple(shape)
    if stored == shape:
        return None
    if len(stored) == len(shape) + 1 and all(cuts and size % cuts == 0 for size, cuts in zip(shape, stored, strict=False)):
        ranges = Ranges(shape, stored[:-1])
        if math.prod(ranges.piece) == stored[-1]:
            return ranges
    raise CheckpointingException(
        f"{name} has the shape {list(stored)}, which is neither that of its weight, {list(shape)}, nor that of flat ranges of the "
        "weight's cuts (fully_sharded_model_space); leave the optimizer out, or save it as fully_reshardable with the system that wrote it"
    )


def _joined(stored: Tensor, cuts: Sequence[int], piece: Sequence[int]) -> Tensor:
    count = len(cuts)
    order = [dim for axis in range(count) for dim in (axis, count + axis)]
    return stored.reshape((*cuts, *piece)).permute(order).reshape([pieces * size for pieces, size in zip(cuts, piece, strict=True)])


_COMMON_FILE = "common.pt"
_COMMON_ENTRY = "common_state/shard_0_1"
_OBJECT = re.compile(r"(?P<key>.+)/shard_(?P<place>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>fp32_param|param|exp_avg_sq|exp_avg)\.(?P<key>.+)")
_STACKED = re.compile(re.escape(LAYERS) + r"(?!\d)(.+)")
_GATHERED = "param_state"
_DOMAIN = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")


def open_dist(folder: Folder, config: Mapping[str, Any], *, optimizer: bool = True) -> MegatronSource:
    """Open a checkpoint; only its metadata and plain values are read.

    Raises:
        CheckpointingException: damaged, or its optimizer state lies as no known release lays it.
    """
    reader = CheckpointReader(folder)
    objects, left = _objects(folder)
    common = _common(folder, objects)
    tensors: dict[str, DeferredTensor] = {}
    states: dict[tuple[str, str], DeferredTensor] = {}
    in_ranges: set[str] = set()
    for name, record in reader.manifest.tensors.items():
        state = _STATE.fullmatch(name)
        if FLAT_KEY.fullmatch(name) or (state is not None and not optimizer):
            continue
        if state is None:
            tensors |= _by_layer(reader, name, name, None)
            continue
        weight = reader.manifest.tensors.get(state["key"], record)
        ranges = find_ranges(name, record.shape, weight.shape)
        parts = _by_layer(reader, name, state["key"], ranges)
        states |= {("param" if state["kind"] == "fp32_param" else state["kind"], key): tensor for key, tensor in parts.items()}
        if ranges is not None:
            in_ranges.update(parts)
    _check_kinds(folder, in_ranges, states)
    groups = [*find_groups(common), *(group for value in objects.values() for group in find_groups(value))]
    domains = [*_domains(reader), *_gathered(folder, objects)] if optimizer else []
    if domains:
        states |= read_flat_states(domains, tensors, {**(common.get("args") or {}), **config})
    return MegatronSource(tensors, common, states, tuple(groups), tuple(left))


def _by_layer(reader: CheckpointReader, name: str, key: str, ranges: Ranges | None) -> dict[str, DeferredTensor]:
    """A tensor by per-layer key; ``ranges`` where it is a state that lies in flat ranges."""
    record = reader.record(name)
    shape = record.shape if ranges is None else ranges.shape
    dtype, stacked = dtype_of(record.dtype), _STACKED.fullmatch(key)
    if stacked is None or not shape:
        return {key: DeferredTensor(dtype, shape, partial(_whole, reader, name, ranges))}
    return {
        f"{LAYERS}{layer}.{stacked[1]}": DeferredTensor(dtype, shape[1:], partial(_row, reader, name, layer, shape[1:], ranges))
        for layer in range(shape[0])
    }


def _whole(reader: CheckpointReader, name: str, ranges: Ranges | None) -> Tensor:
    return reader.read(name) if ranges is None else ranges.whole(reader.read(name))


def _row(reader: CheckpointReader, name: str, layer: int, shape: tuple[int, ...], ranges: Ranges | None) -> Tensor:
    if ranges is not None:
        return ranges.layer(reader.read(name, ranges.box(layer)))
    return reader.read(name, Box((layer, *(0 for _ in shape)), (1, *shape)))[0]


def _check_kinds(folder: Folder, keys: set[str], states: Mapping[tuple[str, str], DeferredTensor]) -> None:
    """That each of these has all kinds of state that one of them has."""
    kinds = {kind for kind, key in states if key in keys}
    if missing := sorted(f"{kind} of {key}" for kind in kinds for key in keys if (kind, key) not in states):
        raise CheckpointingException(
            f"{folder}: the optimizer state lacks {list_names(missing)}, though it has that of other weights; copy the checkpoint again, "
            "or leave the optimizer out"
        )


def _objects(folder: Folder) -> tuple[dict[str, Any], list[str]]:
    """Entries that are no tensors, of the kinds that are used here, by key; the names of the others."""
    objects, left = {}, []
    for name, (file, begin, length) in read_places(folder).items():
        entry = _OBJECT.fullmatch(name)
        if entry is None or not (name == _COMMON_ENTRY or _DOMAIN.fullmatch(entry["key"])):
            left.append(name)
            continue
        value = read_objects(file, begin, length, deferred=True)
        # What lies in an entry is a list of the parts of one rank.
        objects[entry["key"]] = value[0] if isinstance(value, list) and len(value) == 1 else value
    return objects, left


def _common(folder: Folder, objects: dict[str, Any]) -> dict[str, Any]:
    value = objects.get("common_state")
    if value is None and folder.size(_COMMON_FILE) is not None:
        value = read_objects(StoredFile(folder, _COMMON_FILE))
    if value is not None and not isinstance(value, dict):
        raise CheckpointingException(f"{folder}: its common state is {type(value).__name__}; a dict is expected")
    return value or {}


def _domains(reader: CheckpointReader) -> list[Domain]:
    """Flat buckets by the model-parallel rank whose parameters they hold."""
    buckets_by_rank: dict[tuple[int, int], dict[tuple[int, int], dict[str, Flat]]] = {}
    for name, record in reader.manifest.tensors.items():
        place = FLAT_KEY.fullmatch(name)
        if place is not None:
            buffer = buckets_by_rank.setdefault((int(place["chain"] or 0), int(place["domain"])), {})
            bucket = buffer.setdefault((int(place["buffer"]), int(place["bucket"])), {})
            bucket[place["kind"]] = Flat(dtype_of(record.dtype), record.shape[0], partial(_range, reader, name))
    domains = []
    for (chain, number), buckets in sorted(buckets_by_rank.items()):
        numbers = sorted({buffer for buffer, _ in buckets})
        domains.append(Domain(chain, number, [[buckets[key] for key in sorted(buckets) if key[0] == buffer] for buffer in numbers]))
    return domains


def _gathered(folder: Folder, objects: Mapping[str, Any]) -> list[Domain]:
    """Buffers that data-parallel rank 0 gathered, by the model-parallel rank whose parameters they hold."""
    domains = []
    for key, value in sorted(objects.items()):
        place = _DOMAIN.fullmatch(key)
        if place is None or place[3] != _GATHERED:
            continue
        if not is_gathered(value):
            raise CheckpointingException(
                f"{folder}: {key} (dp_zero_gather_scatter) is of a release before 0.7, whose buckets are not read; leave the optimizer out"
            )
        domains.append(gathered_domain(f"{folder}: {key}", value, int(place[1] or 0), int(place[2])))
    return domains


def _range(reader: CheckpointReader, name: str, begin: int, end: int) -> Tensor:
    return reader.read(name, Box((begin,), (end - begin,)))
