# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A checkpoint copied under other names, into other files or another format, a part at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mcore_ckpt._core import (
    DEFAULT_FILE_BYTES,
    CheckpointReader,
    DeferredTensor,
    SaveOptions,
    TensorRecord,
    Write,
    asset_sources,
    check_files,
    check_format,
    check_json_value,
    is_checkpoint,
    run_save,
    threads_each,
)
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import read_objects, read_places
from mcore_ckpt._storage import Folder, WatchedFolder, dtype_of, open_folder
from mcore_ckpt.chunks import Box

__all__ = ["Rewrite", "rewrite"]


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """What a copy changes; nothing by default.

    Raises:
        ValueError: an unknown format, or a number below 1.

    Example:
        >>> Rewrite(rename=lambda name: name.removeprefix("module."), format="torch_dist").format
        'torch_dist'
    """

    rename: Callable[[str], str | None] | None = None
    """From a stored name to the new one; None drops the tensor."""
    extra: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    """From the extra values to the new ones."""
    format: str = "native"
    """As for `mcore_ckpt.save`."""
    num_parts: int | None = None
    """Cut every tensor along its first dim as this many ranks of ``Shard(0)`` hold it, each rank's parts in files of its own; None keeps
    the parts as they are."""
    max_file_bytes: int = DEFAULT_FILE_BYTES
    """As for `mcore_ckpt.save`."""

    def __post_init__(self) -> None:
        check_format(self.format)
        if self.num_parts is not None and self.num_parts < 1:
            raise ValueError(f"num_parts={self.num_parts} must be at least 1, or None to keep the parts")
        if self.max_file_bytes < 1:
            raise ValueError(f"max_file_bytes={self.max_file_bytes} must be at least 1")


def rewrite(
    checkpoint: str | Path | Folder,
    output: str | Path | Folder,
    changes: Rewrite,
    *,
    verify: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> list[str]:
    """Write a new checkpoint with the tensors and assets of another. Not collective: call it in one process.

    Host memory holds one part (see ``num_parts``) and 32 MiB, or one asset, at a time.

    Args:
        checkpoint: a committed checkpoint, of this library or one that torch wrote, whose entries of JSON values go into ``extra``.
        output: where to write, as for `mcore_ckpt.save`.
        changes: what is to be different.
        verify: compare the SHA-256 of every file first.
        on_bytes: told of bytes as they are compared and as they are written.

    Returns:
        Names of entries of a checkpoint of torch that are neither tensors nor JSON values, and were left out.

    Raises:
        CheckpointingException: ``checkpoint`` is none, or damaged; ``output`` holds one; two tensors get one name; no tensor is left.
    """
    reader, target = CheckpointReader(checkpoint), open_folder(output)
    if is_checkpoint(target):
        raise CheckpointingException(f"{target} already holds a checkpoint; choose another folder or remove it first")
    names = _renamed(reader, changes)
    if verify:
        seen = reader.folder if on_bytes is None else WatchedFolder(reader.folder, on_bytes)
        check_files(seen, reader.manifest, sorted(reader.manifest.files), num_threads=threads_each([""], 0))
    state: dict[str, list[DeferredTensor]] = {}
    file_groups: dict[tuple[str, Box], int] = {}
    for old, new in names.items():
        record = reader.manifest.tensors[old]
        state[new] = []
        for number, box in enumerate(_parts(record, changes.num_parts)):
            file_groups[new, box] = number if changes.num_parts is not None else 0
            state[new].append(DeferredTensor(dtype_of(record.dtype), record.shape, partial(reader.read, old, box), part=box))

    def file_group(write: Write) -> int:
        return file_groups[write.name, write.box]

    entries, left = _entries(reader)
    values = {**entries, **reader.manifest.extra}
    extra = values if changes.extra is None else changes.extra(values)
    assets = asset_sources(reader.folder, reader.manifest)
    options = SaveOptions(format=changes.format, max_file_bytes=changes.max_file_bytes, file_group=file_group, assets=assets)
    place = target if on_bytes is None else WatchedFolder(target, on_bytes)
    run_save(state, place, extra, None, options)
    return left


def _entries(reader: CheckpointReader) -> tuple[dict[str, Any], list[str]]:
    """Entries that are no tensors: the values of those that JSON can hold, the names of the others."""
    values, left = {}, []
    places = read_places(reader.folder) if reader.manifest.others else {}
    for name in sorted(reader.manifest.others):
        try:
            value = read_objects(*places[name])
            check_json_value(value)
            values[name] = value
        except (KeyError, ValueError, RecursionError, CheckpointingException):
            left.append(name)
    return values, left


def _renamed(reader: CheckpointReader, changes: Rewrite) -> dict[str, str]:
    """Old name to new name, of what is kept."""
    names, owners = {}, {}
    for old in reader.manifest.tensors:
        new = old if changes.rename is None else changes.rename(old)
        if new is None:
            continue
        if new in owners:
            raise CheckpointingException(f"{owners[new]} and {old} would both be called {new}; rename or drop one of them")
        owners[new] = old
        names[old] = new
    if not names and reader.manifest.tensors:
        raise CheckpointingException(f"nothing would be left of {reader.folder}, which holds {list_names(reader.manifest.tensors)}")
    return names


def _parts(record: TensorRecord, num_parts: int | None) -> list[Box]:
    whole = Box.whole(record.shape)
    if num_parts is None:
        return [chunk.box for chunk in record.chunks] or [whole]
    if not record.shape or not whole.num_elements:
        return [whole]
    rows = -(-record.shape[0] // num_parts)
    starts = range(0, record.shape[0], rows)
    return [Box((begin, *whole.offset[1:]), (min(rows, record.shape[0] - begin), *record.shape[1:])) for begin in starts]
