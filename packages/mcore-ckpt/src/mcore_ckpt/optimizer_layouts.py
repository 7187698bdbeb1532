# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Optimizer state on disk in the two layouts that users of distributed optimizers know; both load into any layout.

``fully_reshardable`` keeps every state with the geometry of its weight, under ``optimizer.state.exp_avg.NAME``. ``dp_reshardable`` keeps
what each rank holds, flat and back to back, in one vector for each kind of state, and beside it a table of which box of which weight lies
where; so it depends on no size of a bucket, and few, long tensors are written. Nothing is gathered for either: a rank writes and reads its
own bytes.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import add
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch.distributed as dist

from mcore_ckpt._core import Chunk, Control, Manifest, ShardedTensor, Strictness, TensorRecord, as_parts, entries, load_as, save
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import Folder, dtype_code
from mcore_ckpt.chunks import Box, check_tiling, runs

__all__ = ["OPTIMIZER_LAYOUTS", "load_any_layout", "save_in_layout"]

OPTIMIZER_LAYOUTS = ("dp_reshardable", "fully_reshardable")
_STATE = re.compile(r"optimizer\.(master|exp_avg|exp_avg_sq|momentum)\.(.+)")
_STORED = re.compile(r"optimizer\.state\.(param|exp_avg|exp_avg_sq|momentum)\.(.+)")
_ON_DISK: Mapping[str, str] = MappingProxyType({"master": "param"})
_IN_STATE: Mapping[str, str] = MappingProxyType({"param": "master"})
_TABLE = "optimizer_layout"


def save_in_layout(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    layout: str,
    *,
    extra: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    format: str = "native",
) -> None:
    """`mcore_ckpt.save` with the optimizer's state in ``layout``. Collective over ``group``.

    Args:
        state: as for `mcore_ckpt.save`; entries ``optimizer.KIND.NAME`` (KIND master, exp_avg, exp_avg_sq or momentum) are the optimizer's.
        directory: as for `mcore_ckpt.save`.
        layout: one of `OPTIMIZER_LAYOUTS`.
        extra: as for `mcore_ckpt.save`; "optimizer_layout" is taken.
        group: as for `mcore_ckpt.save`.
        format: as for `mcore_ckpt.save`.

    Raises:
        ValueError: an unknown layout, or ``extra`` uses the name.
        CheckpointingException: as `mcore_ckpt.save`.
    """
    if layout not in OPTIMIZER_LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; the layouts are {', '.join(OPTIMIZER_LAYOUTS)}")
    if extra is not None and _TABLE in extra:
        raise ValueError(f"extra has an entry {_TABLE!r}, which this function writes; call it otherwise")
    if layout == "fully_reshardable":
        table: dict[str, Any] = {"type": layout}
        laid = {_stored_name(name): value for name, value in state.items()}
    else:
        laid, rows = _flatten(state, Control(group))
        table = {"type": layout, "rows": rows}
    save(laid, directory, extra={**(extra or {}), _TABLE: table}, group=group, format=format)


def load_any_layout(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    strict: bool | Strictness = True,
    verify: bool | Literal["first"] = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """`mcore_ckpt.load`, whichever layout the optimizer's state has on disk, `save`'s own included. Collective over ``group``.

    Args:
        state: as for `save_in_layout`, in any layout of ranks.
        directory: as for `mcore_ckpt.load`.
        strict: as for `mcore_ckpt.load`.
        verify: as for `mcore_ckpt.load`.
        group: as for `mcore_ckpt.load`.

    Returns:
        The extra values that were saved.

    Raises:
        CheckpointingException: as `mcore_ckpt.load`; or a table of flat state that cannot be true.
    """
    return load_as(_as_state, state, directory, strict=strict, verify=verify, group=group)


def _as_state(manifest: Manifest) -> Manifest:
    """The manifest with the optimizer's tensors as a state names them, and without the table."""
    table = manifest.extra.get(_TABLE)
    if table is None:
        return manifest
    kind = table.get("type") if isinstance(table, Mapping) else None
    if kind == "dp_reshardable":
        assert isinstance(table, Mapping)
        try:
            tensors = _unflatten(manifest, table.get("rows"))
        except (TypeError, ValueError) as error:
            raise CheckpointingException(f"the table of its optimizer state is malformed: {error}") from error
    elif kind == "fully_reshardable":
        tensors = {_state_name(name): record for name, record in manifest.tensors.items()}
    else:
        raise CheckpointingException(f"its optimizer layout {kind!r} is none of {', '.join(OPTIMIZER_LAYOUTS)}; upgrade mcore-ckpt")
    return replace(manifest, tensors=tensors, extra={key: value for key, value in manifest.extra.items() if key != _TABLE})


def _stored_name(name: str) -> str:
    match = _STATE.fullmatch(name)
    return name if match is None else f"optimizer.state.{_ON_DISK.get(match[1], match[1])}.{match[2]}"


def _state_name(name: str) -> str:
    match = _STORED.fullmatch(name)
    return name if match is None else f"optimizer.{_IN_STATE.get(match[1], match[1])}.{match[2]}"


def _flatten(state: Mapping[str, Any], control: Control) -> tuple[dict[str, Any], list[Any]]:
    """The state with the optimizer's tensors as ranges of vectors, and the table of all ranks; a tensor without elements stays."""
    held: dict[str, list[ShardedTensor]] = {}

    def tell() -> list[Any]:
        states = {name: as_parts(name, value) for name, value in entries(state) if _STATE.fullmatch(name)}
        held.update({name: parts for name, parts in states.items() if math.prod(parts[0].global_shape)})
        return [
            [name, dtype_code(part.dtype), list(part.global_shape), *part.box.to_json()]
            for name, parts in held.items()
            for part in parts
            if part.replica == 0 and part.data.numel()
        ]

    totals: dict[str, int] = {}
    rows: list[Any] = []
    places: dict[tuple[str, Box], tuple[str, int]] = {}
    tilings: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    for answer in control.run("laying the optimizer's state out", tell):
        for name, code, shape, offset, size in answer:
            box = Box(tuple(offset), tuple(size))
            # Copies that count alike on several ranks have one place.
            if (name, box) not in places:
                match = _STATE.fullmatch(name)
                assert match is not None
                vector = f"optimizer.distributed.{_ON_DISK.get(match[1], match[1])}.{code}"
                places[name, box] = (vector, totals.get(vector, 0))
                totals[vector] = totals.get(vector, 0) + box.num_elements
                rows.append([name, vector, places[name, box][1], shape, offset, size])
                tilings.setdefault(name, (tuple(shape), []))[1].append(box)
    for name, (shape, boxes) in tilings.items():
        try:
            check_tiling(shape, boxes)
        except ValueError as error:
            raise CheckpointingException(f"{name}: {error}; the parts with replica 0 must cover it exactly once") from error
    laid: dict[str, Any] = {name: value for name, value in state.items() if name not in held}
    for name, parts in held.items():
        for part in parts:
            place = places.get((name, part.box))
            if place is not None:
                vector, start = place
                laid.setdefault(vector, []).append(ShardedTensor(part.data.reshape(-1), (totals[vector],), (start,), part.replica))
    return laid, rows


def _unflatten(manifest: Manifest, table: Any) -> dict[str, TensorRecord]:
    """The tensors of a manifest, those of ``table`` as boxes that lie in vectors, and the vectors left out.

    Raises:
        ValueError: rows that cannot be true.
        TypeError: no rows.
    """
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    places: dict[str, list[Chunk]] = {}
    spans: dict[str, list[tuple[int, int, str]]] = {}
    for name, vector, start, shape, offset, size in table:
        box = Box.from_json([offset, size])
        if vector not in manifest.tensors:
            raise ValueError(f"there is no tensor {vector}")
        record, last = manifest.tensors[vector], start + box.num_elements
        whole = Box.whole(tuple(shape))
        if type(start) is not int or start < 0 or len(record.shape) != 1 or last > record.shape[0] or not whole.contains(box):
            raise ValueError(f"the row of {name} does not fit")
        if kinds.setdefault(str(name), (record.dtype, whole.shape)) != (record.dtype, whole.shape):
            raise ValueError(f"the rows of {name} contradict each other")
        spans.setdefault(vector, []).append((start, last, str(name)))
        places.setdefault(str(name), []).append(Chunk(vector, "", box, start))
    for vector, vector_spans in spans.items():
        vector_spans.sort()
        for (_, last, name), (start, _, other) in pairwise(vector_spans):
            if start < last:
                raise ValueError(f"{name} and {other} overlap in {vector}")
    pieces = {vector: sorted(manifest.tensors[vector].chunks, key=lambda chunk: chunk.box.offset) for vector in spans}
    begins = {vector: [chunk.box.offset[0] for chunk in chunks] for vector, chunks in pieces.items()}
    tensors = {name: record for name, record in manifest.tensors.items() if name not in spans}
    for name, rows in places.items():
        check_tiling(kinds[name][1], [row.box for row in rows])
        tensors[name] = TensorRecord(
            *kinds[name], tuple(chunk for row in rows for chunk in _in_vector(row, begins[row.file], pieces[row.file]))
        )
    return tensors


def _in_vector(row: Chunk, begins: Sequence[int], pieces: Sequence[Chunk]) -> Iterator[Chunk]:
    """The chunks of a row: it is one where a piece of its vector holds all of it, as it was saved."""
    assert row.start is not None
    position, last = row.start, row.start + row.box.num_elements
    number = bisect_right(begins, position) - 1
    while position < last:
        piece = pieces[number]
        upto = min(last, piece.box.end[0])
        for first, box in runs(row.box.shape, position - row.start, upto - row.start):
            place = Box(tuple(map(add, row.box.offset, box.offset)), box.shape)
            yield Chunk(piece.file, piece.key, place, row.start + first - piece.box.offset[0])
        position, number = upto, number + 1
