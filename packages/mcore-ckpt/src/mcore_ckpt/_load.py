# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Loading: any layout from any layout, reading only the bytes this rank needs."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt._control import Control
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import ShardFile, open_shard
from mcore_ckpt._plan import Read, assign_files, compare, plan_load
from mcore_ckpt._sharded import ShardedTensor, as_parts
from mcore_ckpt._storage import Folder, StoredFile, digest_file, dtype_code, dtype_of, open_folder
from mcore_ckpt.chunks import Box
from mcore_ckpt.manifest import Manifest, TensorRecord, read_manifest

__all__ = ["check_files", "load", "read_tensor"]


def load(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    strict: bool = True,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill the tensors of ``state`` from the checkpoint in ``directory``, whatever layout wrote it. Collective over ``group``.

    Args:
        state: as for `save`; the tensors are written in place. A name that the checkpoint lacks is always an error:
            leave it out of ``state`` to keep its value.
        strict: a stored tensor that no rank asks for is an error; False to load a part of a checkpoint.
        verify: compare the SHA-256 of every file that is read before anything is written; the ranks share the files.
            False compares lengths only.
        group: as for `save`.

    Returns:
        The extra values that were saved.

    Raises:
        CheckpointingException: on every rank: not a checkpoint; missing, unexpected, differently shaped or typed tensors, all
            listed, with nothing written yet; a damaged file, by name.
    """
    control, folder = Control(group), open_folder(directory)
    opened: list[Manifest] = []
    shards: dict[str, list[ShardedTensor]] = {}

    def survey() -> dict[str, Any]:
        manifest = read_manifest(folder)
        opened.append(manifest)
        shards.update((name, as_parts(name, value)) for name, value in state.items())
        wanted = {name: TensorRecord(dtype_code(parts[0].data.dtype), parts[0].global_shape) for name, parts in shards.items()}
        problems = compare(wanted, manifest.tensors)
        if problems:
            raise CheckpointingException("the state does not fit: " + "; ".join(problems))
        return {"names": list(wanted), "files": sorted(file.sha256[:16] for file in manifest.files.values())}

    answers = control.run(f"opening {folder}", survey)
    (manifest,) = opened
    for rank, answer in zip(control.ranks, answers, strict=True):
        if answer["files"] != answers[0]["files"]:
            raise CheckpointingException(
                f"ranks {control.ranks[0]} and {rank} see different checkpoints in {folder}; they must share the file system"
            )
    asked = {name for answer in answers for name in answer["names"]}
    unexpected = manifest.tensors.keys() - asked
    if strict and unexpected:
        names = list_names(unexpected, asked)
        raise CheckpointingException(f"{folder} holds tensors nobody asks for: {names}; pass strict=False to leave them")

    needed = {chunk.file for name in asked for chunk in manifest.tensors[name].chunks}
    share = assign_files({file: manifest.files[file].bytes for file in needed}, control.size)[control.rank]
    control.run(f"verifying {folder}", lambda: check_files(folder, manifest, share, digests=verify))
    control.run(
        f"reading {folder}",
        lambda: _fill(folder, shards, plan_load(((n, s.box) for n, parts in shards.items() for s in parts), manifest.tensors)),
    )
    return dict(manifest.extra)


def check_files(directory: str | Path | Folder, manifest: Manifest, names: Iterable[str], *, digests: bool = True) -> None:
    """Compare files with what the manifest says about them.

    Raises:
        CheckpointingException: one is missing, a link, or not what was written; names it.
    """
    folder = open_folder(directory)
    for name in names:
        file, expected = StoredFile(folder, name), manifest.files[name]
        size = folder.size(name)
        if size is None:
            raise CheckpointingException(f"{file}: missing, or not a plain file")
        if size != expected.bytes:
            raise CheckpointingException(f"{file}: {size} bytes instead of {expected.bytes}; the file is damaged")
        # Another system's checkpoint has no digests.
        if digests and expected.sha256 and digest_file(file) != expected:
            raise CheckpointingException(f"{file}: its SHA-256 is not the one in the manifest; the file is damaged")


def _fill(folder: Folder, shards: Mapping[str, list[ShardedTensor]], reads: list[Read]) -> None:
    for name, same_file in itertools.groupby(reads, key=lambda read: read.chunk.file):
        file = open_shard(StoredFile(folder, name))
        with torch.no_grad():
            for read in same_file:
                shard = next(part for part in shards[read.name] if part.box.contains(read.box))
                target = shard.data[read.box.relative_to(shard.box).slices()]
                target.copy_(_stored(file, read, shard.data.dtype))


def _stored(file: ShardFile, read: Read, dtype: torch.dtype) -> Tensor:
    chunk, slot = read.chunk, file.slot(read.chunk.key)
    if slot is None or slot.shape != chunk.box.shape or dtype_of(slot.dtype) != dtype:
        said = "missing" if slot is None else f"{slot.dtype} {list(slot.shape)}"
        raise CheckpointingException(f"{file.file}: {chunk.key} is {said}, not what the manifest says")
    slices = read.box.relative_to(chunk.box).slices()
    if not slices:
        return file.tensor(chunk.key)
    return file.tensor(chunk.key, (slices[0].start, slices[0].stop))[:, *slices[1:]]


def read_tensor(directory: str | Path | Folder, name: str, manifest: Manifest | None = None) -> Tensor:
    """One whole tensor of a checkpoint in host memory. Not collective; digests are not compared.

    Args:
        manifest: of ``directory``, if it was read already.

    Raises:
        CheckpointingException: no such tensor; names the nearest.
    """
    manifest = manifest or read_manifest(directory)
    if name not in manifest.tensors:
        raise CheckpointingException(f"{directory} has no tensor {list_names([name], manifest.tensors)}")
    record = manifest.tensors[name]
    folder = open_folder(directory)
    # The files first: no memory is taken for a tensor that cannot be in them.
    check_files(folder, manifest, {chunk.file for chunk in record.chunks}, digests=False)
    whole = ShardedTensor(torch.empty(record.shape, dtype=dtype_of(record.dtype)), record.shape, (0,) * len(record.shape))
    _fill(folder, {name: [whole]}, plan_load([(name, Box.whole(record.shape))], manifest.tensors))
    return whole.data
