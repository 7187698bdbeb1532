# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``torch_dist`` as Megatron writes it: layers stacked or apart, plain values in an entry or in common.pt."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import read_objects, read_places
from mcore_ckpt._reader import CheckpointReader
from mcore_ckpt._sharded import DeferredTensor
from mcore_ckpt._storage import Folder, StoredFile, dtype_of
from mcore_ckpt.chunks import Box
from mcore_ckpt.megatron._flat import FLAT_KEY, Domain, Flat, read_flat_states
from mcore_ckpt.megatron._groups import find_groups
from mcore_ckpt.megatron._names import LAYERS
from mcore_ckpt.megatron._source import Source

__all__ = ["open_dist"]

_COMMON_FILE = "common.pt"
_COMMON_ENTRY = "common_state/shard_0_1"
_OBJECT = re.compile(r"(?P<key>.+)/shard_(?P<place>\d+(?:\.\d+)*)_(?P<shape>\d+(?:\.\d+)*)")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>fp32_param|param|exp_avg_sq|exp_avg)\.(?P<key>.+)")
_STACKED = re.compile(re.escape(LAYERS) + r"(?!\d)(.+)")
_DOMAIN = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.(.+)")


def open_dist(folder: Folder, config: Mapping[str, Any], *, optimizer: bool = True) -> Source:
    """Open a checkpoint; only its metadata and plain values are read.

    Raises:
        CheckpointingException: damaged, or its optimizer state lies as no known release lays it.
    """
    reader = CheckpointReader(folder)
    objects, left = _objects(folder)
    common = _common(folder, objects)
    tensors: dict[str, DeferredTensor] = {}
    states: dict[tuple[str, str], DeferredTensor] = {}
    has_buckets = False
    for name in reader.manifest.tensors:
        if FLAT_KEY.fullmatch(name):
            has_buckets = True
            continue
        state = _STATE.fullmatch(name)
        for key, tensor in _by_layer(reader, name, state["key"] if state else name):
            if state is None:
                tensors[key] = tensor
            else:
                states["param" if state["kind"] == "fp32_param" else state["kind"], key] = tensor
    groups = [*find_groups(common), *(group for value in objects.values() for group in find_groups(value))]
    if has_buckets and optimizer:
        states |= read_flat_states(_domains(reader), tensors, {**(common.get("args") or {}), **config})
    return Source(tensors, common, states, tuple(groups), tuple(left))


def _by_layer(reader: CheckpointReader, name: str, key: str) -> list[tuple[str, DeferredTensor]]:
    record = reader.record(name)
    dtype, found = dtype_of(record.dtype), _STACKED.fullmatch(key)
    if found is None or not record.shape:
        return [(key, DeferredTensor(dtype, record.shape, partial(reader.read, name)))]
    shape = record.shape[1:]
    return [
        (f"{LAYERS}{layer}.{found[1]}", DeferredTensor(dtype, shape, partial(_row, reader, name, layer, shape)))
        for layer in range(record.shape[0])
    ]


def _row(reader: CheckpointReader, name: str, layer: int, shape: tuple[int, ...]) -> Tensor:
    return reader.read(name, Box((layer, *(0 for _ in shape)), (1, *shape)))[0]


def _objects(folder: Folder) -> tuple[dict[str, Any], list[str]]:
    """Entries that are no tensors, of the kinds that are used here, by key; the names of the others."""
    found, left = {}, []
    for name, (file, begin, length) in read_places(folder).items():
        entry = _OBJECT.fullmatch(name)
        if entry is None or not (name == _COMMON_ENTRY or _DOMAIN.fullmatch(entry["key"])):
            left.append(name)
            continue
        value = read_objects(file, begin, length)
        # What lies in an entry is a list of the parts of one rank.
        found[entry["key"]] = value[0] if isinstance(value, list) and len(value) == 1 else value
    return found, left


def _common(folder: Folder, objects: dict[str, Any]) -> dict[str, Any]:
    value = objects.get("common_state")
    if value is None and folder.size(_COMMON_FILE) is not None:
        value = read_objects(StoredFile(folder, _COMMON_FILE))
    if value is not None and not isinstance(value, dict):
        raise CheckpointingException(f"{folder}: its common state is {type(value).__name__}; a dict is expected")
    return value or {}


def _domains(reader: CheckpointReader) -> list[Domain]:
    """Flat buckets by the model-parallel rank whose parameters they hold."""
    found: dict[tuple[int, int], dict[tuple[int, int], dict[str, Flat]]] = {}
    for name, record in reader.manifest.tensors.items():
        place = FLAT_KEY.fullmatch(name)
        if place is not None:
            buffer = found.setdefault((int(place["chain"] or 0), int(place["domain"])), {})
            bucket = buffer.setdefault((int(place["buffer"]), int(place["bucket"])), {})
            bucket[place["kind"]] = Flat(dtype_of(record.dtype), record.shape[0], partial(_range, reader, name))
    domains = []
    for (chain, number), buckets in sorted(found.items()):
        numbers = sorted({buffer for buffer, _ in buckets})
        domains.append(Domain(chain, number, [[buckets[key] for key in sorted(buckets) if key[0] == buffer] for buffer in numbers]))
    return domains


def _range(reader: CheckpointReader, name: str, begin: int, end: int) -> Tensor:
    return reader.read(name, Box((begin,), (end - begin,)))
