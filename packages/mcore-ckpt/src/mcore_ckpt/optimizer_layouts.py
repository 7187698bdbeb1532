# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Optimizer state on disk in the two layouts that users of distributed optimizers know; both load into any layout.

``fully_reshardable`` keeps every state with the geometry of its weight, under ``optimizer.state.exp_avg.NAME``. ``dp_reshardable`` keeps
what each rank holds, flat and back to back, in one vector for each kind of state, and beside it a table of which box of which weight lies
where; so it depends on no size of a bucket, and few, long tensors are written. Nothing is gathered for either: a rank writes and reads its
own bytes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from mcore_ckpt._control import Control
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._load import check_files, load
from mcore_ckpt._plan import assign_files, slabs
from mcore_ckpt._reader import CheckpointReader
from mcore_ckpt._save import save
from mcore_ckpt._sharded import ShardedTensor, as_parts
from mcore_ckpt._storage import Folder, dtype_code, itemsize, open_folder
from mcore_ckpt._strictness import Strictness, as_strictness
from mcore_ckpt.chunks import Box

__all__ = ["OPTIMIZER_LAYOUTS", "load_any_layout", "save_in_layout"]

OPTIMIZER_LAYOUTS = ("dp_reshardable", "fully_reshardable")
_STATE = re.compile(r"optimizer\.(master|exp_avg|exp_avg_sq|momentum)\.(.+)")
_ON_DISK: Mapping[str, str] = MappingProxyType({"master": "param"})
_TABLE = "optimizer_layout"
_SLAB_BYTES = 16 * 2**20


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
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """`mcore_ckpt.load`, whichever layout the optimizer's state has on disk, `save`'s own included. Collective over ``group``.

    Beside the state, host memory holds 16 MiB at a time.

    Args:
        state: as for `save_in_layout`, in any layout of ranks.
        directory: as for `mcore_ckpt.load`.
        strict: as for `mcore_ckpt.load`.
        verify: as for `mcore_ckpt.load`.
        group: as for `mcore_ckpt.load`.

    Returns:
        The extra values that were saved.

    Raises:
        CheckpointingException: as `mcore_ckpt.load`.
    """
    folder, control = open_folder(directory), Control(group)
    opened: list[CheckpointReader] = []
    control.run(f"opening {folder}", lambda: opened.append(CheckpointReader(folder)))
    (reader,) = opened
    table = reader.manifest.extra.get(_TABLE)
    kind = table.get("type") if isinstance(table, Mapping) else None
    options: dict[str, Any] = {"verify": verify, "group": group}
    if kind == "dp_reshardable":
        assert isinstance(table, Mapping)
        extra = _load_flat(state, reader, _rows(folder, table.get("rows")), as_strictness(strict), control, options)
    elif kind == "fully_reshardable":
        extra = load({_stored_name(name): value for name, value in state.items()}, folder, strict=strict, **options)
    elif table is None:
        return load(state, folder, strict=strict, **options)
    else:
        raise CheckpointingException(
            f"{folder}: its optimizer layout {kind!r} is none of {', '.join(OPTIMIZER_LAYOUTS)}; upgrade mcore-ckpt"
        )
    del extra[_TABLE]
    return extra


def _stored_name(name: str) -> str:
    found = _STATE.fullmatch(name)
    return name if found is None else f"optimizer.state.{_ON_DISK.get(found[1], found[1])}.{found[2]}"


@dataclass(frozen=True)
class _Row:
    """A box of one tensor, and where it begins in which vector."""

    vector: str
    box: Box
    start: int


def _flatten(state: Mapping[str, Any], control: Control) -> tuple[dict[str, Any], list[Any]]:
    """The state with the optimizer's tensors as ranges of vectors, and the table of all ranks."""
    held: dict[str, list[ShardedTensor]] = {}

    def tell() -> list[Any]:
        held.update({name: as_parts(name, value) for name, value in state.items() if _STATE.fullmatch(name)})
        return [
            [name, dtype_code(part.dtype), list(part.global_shape), *part.box.to_json()]
            for name, parts in held.items()
            for part in parts
            if part.replica == 0 and part.data.numel()
        ]

    totals: dict[str, int] = {}
    rows: list[Any] = []
    places: dict[tuple[str, Box], tuple[str, int]] = {}
    for answer in control.run("laying the optimizer's state out", tell):
        for name, code, shape, offset, size in answer:
            box = Box(tuple(offset), tuple(size))
            # Copies that count alike on several ranks have one place.
            if (name, box) not in places:
                found = _STATE.fullmatch(name)
                assert found is not None
                vector = f"optimizer.distributed.{_ON_DISK.get(found[1], found[1])}.{code}"
                places[name, box] = (vector, totals.get(vector, 0))
                totals[vector] = totals.get(vector, 0) + box.num_elements
                rows.append([name, vector, places[name, box][1], shape, offset, size])
    laid: dict[str, Any] = {name: value for name, value in state.items() if name not in held}
    for name, parts in held.items():
        for part in parts:
            place = places.get((name, part.box))
            if place is not None:
                vector, start = place
                laid.setdefault(vector, []).append(ShardedTensor(part.data.reshape(-1), (totals[vector],), (start,), part.replica))
    return laid, rows


def _rows(folder: Folder, table: Any) -> dict[str, tuple[tuple[int, ...], list[_Row]]]:
    """Shape and rows by tensor, of the table in a manifest.

    Raises:
        CheckpointingException: it is malformed.
    """
    found: dict[str, tuple[tuple[int, ...], list[_Row]]] = {}
    try:
        for name, vector, start, shape, offset, size in table:
            box = Box.from_json([offset, size])
            if type(start) is not int or start < 0 or not Box.whole(tuple(shape)).contains(box):
                raise ValueError(f"the row of {name} does not fit")
            found.setdefault(str(name), (tuple(shape), []))[1].append(_Row(str(vector), box, start))
    except (TypeError, ValueError) as error:
        raise CheckpointingException(f"{folder}: the table of its optimizer state is malformed: {error}") from error
    return found


def _load_flat(
    state: Mapping[str, Any],
    reader: CheckpointReader,
    rows: Mapping[str, tuple[tuple[int, ...], list[_Row]]],
    strictness: Strictness,
    control: Control,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    folder, manifest = reader.folder, reader.manifest
    vectors = {row.vector for _, of_one in rows.values() for row in of_one}
    wanted: dict[str, list[ShardedTensor]] = {}

    def look() -> list[str]:
        wanted.update({name: as_parts(name, value) for name, value in state.items() if _STATE.fullmatch(name)})
        problems = _misfits(wanted, rows, reader, strictness)
        if problems:
            raise CheckpointingException("the state does not fit: " + "; ".join(problems))
        return list(state)

    asked = {name for answer in control.run(f"opening {folder}", look) for name in answer}
    unexpected = (manifest.tensors.keys() - vectors | rows.keys()) - asked
    if unexpected and strictness.unexpected == "raise":
        raise CheckpointingException(f"{folder} holds tensors nobody asks for: {list_names(sorted(unexpected), sorted(asked))}")
    rest = {name: value for name, value in state.items() if name not in wanted}
    extra = load(rest, folder, strict=replace(strictness, unexpected="ignore"), **options)
    files = {chunk.file for vector in vectors if vector in manifest.tensors for chunk in manifest.tensors[vector].chunks}
    share = assign_files({file: manifest.files[file].bytes for file in files}, control.size)[control.rank]
    control.run(f"verifying {folder}", lambda: check_files(folder, manifest, share, digests=options["verify"]))
    control.run(f"reading {folder}", lambda: _fill(wanted, rows, reader))
    return extra


def _misfits(
    wanted: dict[str, list[ShardedTensor]],
    rows: Mapping[str, tuple[tuple[int, ...], list[_Row]]],
    reader: CheckpointReader,
    strictness: Strictness,
) -> list[str]:
    """What does not fit and is not ignored, one line each; takes what is ignored out of ``wanted``."""
    problems: list[str] = []
    ignored: set[str] = set()
    for name, parts in wanted.items():
        if name not in rows:
            ignored.add(name)
            if strictness.missing == "raise":
                problems.append(f"missing from the checkpoint: {list_names([name], rows)}")
            continue
        shape, of_one = rows[name]
        for part in parts:
            codes = {reader.record(row.vector).dtype for row in of_one}
            if part.global_shape != shape:
                ignored.add(name)
                if strictness.shape == "raise":
                    problems.append(f"other global shape: {name} (stored {list(shape)}, asked {list(part.global_shape)})")
            elif codes != {dtype_code(part.dtype)}:
                problems.append(f"other dtype: {name} (stored {', '.join(sorted(codes))}, asked {dtype_code(part.dtype)})")
            elif sum(common.num_elements for row in of_one if (common := row.box.intersect(part.box))) != part.box.num_elements:
                problems.append(f"{name}: its rows do not cover {part.box}")
    for name in ignored:
        del wanted[name]
    return problems


def _fill(
    wanted: Mapping[str, Iterable[ShardedTensor]], rows: Mapping[str, tuple[tuple[int, ...], list[_Row]]], reader: CheckpointReader
) -> None:
    with torch.no_grad():
        for name, parts in wanted.items():
            for part in parts:
                for row in rows[name][1]:
                    common = row.box.intersect(part.box)
                    if common is not None and common.num_elements:
                        _copy(part, row, common, reader)


def _copy(part: ShardedTensor, row: _Row, common: Box, reader: CheckpointReader) -> None:
    """Fill ``common`` of the part from the row, by ranges of whole rows of its first dim."""
    room = max(1, _SLAB_BYTES // itemsize(reader.record(row.vector).dtype))
    inner = row.box.num_elements // row.box.shape[0] if row.box.shape else 1
    for piece in slabs(common, max(room, inner)):
        inside = piece.relative_to(row.box)
        first, count = (inside.offset[0], inside.shape[0]) if inside.shape else (0, 1)
        flat = reader.read(row.vector, Box((row.start + first * inner,), (count * inner,)))
        stored = flat.reshape((count, *row.box.shape[1:]) if row.box.shape else ())
        rest = inside.slices()[1:]
        part.data[piece.relative_to(part.box).slices()].copy_(stored[:, *rest] if rest else stored)
