# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Loading: any layout from any layout, reading only the bytes this rank needs."""

import hashlib
import itertools
import json
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt._control import Control, threads_each
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import ShardFile, open_shard
from mcore_ckpt._plan import Read, assign_files, compare, plan_load
from mcore_ckpt._sharded import ShardedTensor, as_parts
from mcore_ckpt._storage import Folder, SafetensorsFile, StoredFile, digest_file, dtype_code, dtype_of, open_folder
from mcore_ckpt._strictness import Mismatches, Strictness, as_strictness
from mcore_ckpt.chunks import Box
from mcore_ckpt.manifest import Manifest, TensorRecord, read_manifest

__all__ = ["check_files", "find_mismatches", "load", "read_tensor", "stored_part"]


def load(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    strict: bool | Strictness = True,
    verify: bool = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill the tensors of ``state`` from the checkpoint in ``directory``, whatever layout wrote it. Collective over ``group``.

    Args:
        state: as for `save`; the tensors are written in place. A name that the checkpoint lacks is an error, unless ``strict`` says
            otherwise: leave it out of ``state`` to keep its value.
        strict: a stored tensor that no rank asks for is an error; False to load a part of a checkpoint; or a `Strictness`.
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
    strictness = as_strictness(strict)
    manifest, shards, found, num_threads = _survey(control, state, folder, strictness)
    if found.unexpected and strictness.unexpected == "raise":
        raise CheckpointingException(f"{folder} " + "; ".join(found.told(replace(strictness, missing="ignore", shape="ignore"), "raise")))
    if control.rank == 0:
        found.warn(strictness, f"loading {folder}")
    asked = manifest.tensors.keys() - set(found.unexpected)
    needed = {chunk.file for name in asked for chunk in manifest.tensors[name].chunks}
    share = assign_files({file: manifest.files[file].bytes for file in needed}, control.size)[control.rank]
    control.run(f"verifying {folder}", lambda: check_files(folder, manifest, share, digests=verify, num_threads=num_threads))
    control.run(
        f"reading {folder}",
        lambda: _fill(folder, shards, plan_load(((n, s.box) for n, parts in shards.items() for s in parts), manifest.tensors)),
    )
    return dict(manifest.extra)


def find_mismatches(state: Mapping[str, Any], directory: str | Path | Folder, *, group: dist.ProcessGroup | None = None) -> Mismatches:
    """What ``load`` would find to differ between ``state`` on all ranks and the checkpoint; nothing is loaded. Collective over ``group``.

    Raises:
        CheckpointingException: on every rank: not a checkpoint, or a value of the state that is no tensor.
    """
    everything = Strictness(missing="ignore", unexpected="ignore", shape="ignore")
    return _survey(Control(group), state, open_folder(directory), everything, check_dtypes=False)[2]


def _survey(
    control: Control, state: Mapping[str, Any], folder: Folder, strictness: Strictness, *, check_dtypes: bool = True
) -> tuple[Manifest, dict[str, list[ShardedTensor]], Mismatches, int]:
    """The manifest, the parts of ``state`` that can be filled from it, what does not fit over all ranks, and threads for this rank.

    Raises:
        CheckpointingException: something that ``strictness`` does not allow, but for unexpected tensors, which the caller judges.
    """
    opened: list[Manifest] = []
    asked = bytearray()
    shards: dict[str, list[ShardedTensor]] = {}

    def look() -> dict[str, Any]:
        manifest = read_manifest(folder)
        opened.append(manifest)
        shards.update((name, as_parts(name, value)) for name, value in state.items())
        wanted = {name: TensorRecord(dtype_code(parts[0].data.dtype), parts[0].global_shape) for name, parts in shards.items()}
        mine = compare(wanted, manifest.tensors)
        problems = mine.told(replace(strictness, unexpected="ignore"), "raise") if check_dtypes else []
        if problems:
            raise CheckpointingException("the state does not fit: " + "; ".join(problems))
        for name, part in wanted.items():
            stored = manifest.tensors.get(name)
            if stored is None or stored.shape != part.shape:
                del shards[name]
        asked.extend(name in wanted for name in manifest.tensors)
        # Every rank tells what differs, which is little; what it asks for is added up below.
        seen = hashlib.sha256(json.dumps([list(manifest.tensors), sorted(file.sha256 for file in manifest.files.values())]).encode())
        told = {"missing": mine.missing, "shapes": mine.shapes, "dtypes": mine.dtypes}
        return {"seen": seen.hexdigest(), "host": socket.gethostname(), **told}

    answers = control.run(f"opening {folder}", look)
    for rank, answer in zip(control.ranks, answers, strict=True):
        if answer["seen"] != answers[0]["seen"]:
            raise CheckpointingException(
                f"ranks {control.ranks[0]} and {rank} see different checkpoints in {folder}; they must share the file system"
            )
    (manifest,) = opened
    wanted = control.union(f"opening {folder}", bytes(asked))
    unexpected = [name for name, flag in zip(manifest.tensors, wanted, strict=True) if not flag]
    told = {key: tuple(sorted({one for answer in answers for one in answer[key]})) for key in ("missing", "shapes", "dtypes")}
    num_threads = threads_each([answer["host"] for answer in answers], control.rank)
    return manifest, shards, Mismatches(unexpected=tuple(sorted(unexpected)), **told), num_threads


def check_files(
    directory: str | Path | Folder, manifest: Manifest, names: Iterable[str], *, digests: bool = True, num_threads: int = 1
) -> None:
    """Compare files with what the manifest says about them, ``num_threads`` at a time.

    Raises:
        CheckpointingException: one is missing, a link, or not what was written; names the first.
    """
    folder = open_folder(directory)
    if num_threads == 1 or not digests:
        for name in names:
            _check_file(folder, manifest, name, digests)
    else:
        with ThreadPoolExecutor(num_threads, "verify") as pool:
            for _ in pool.map(lambda name: _check_file(folder, manifest, name, digests), names):
                pass


def _check_file(folder: Folder, manifest: Manifest, name: str, digests: bool) -> None:
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
                _copy(file, read, target)


def _copy(file: ShardFile, read: Read, target: Tensor) -> None:
    slices = _check_slot(file, read, target.dtype)
    whole_rows = read.box.shape[1:] == read.chunk.box.shape[1:]
    plain = target.device.type == "cpu" and target.is_contiguous() and not (target.is_conj() or target.is_neg())
    if isinstance(file, SafetensorsFile) and whole_rows and plain:
        file.fill(read.chunk.key, target, (slices[0].start, slices[0].stop) if slices else None)
    else:
        target.copy_(stored_part(file, read, target.dtype))


def stored_part(file: ShardFile, read: Read, dtype: torch.dtype) -> Tensor:
    """What ``read`` asks of an open file; copy what you keep.

    Raises:
        CheckpointingException: it does not lie there as the manifest says.
    """
    slices = _check_slot(file, read, dtype)
    if not slices:
        return file.tensor(read.chunk.key)
    return file.tensor(read.chunk.key, (slices[0].start, slices[0].stop))[:, *slices[1:]]


def _check_slot(file: ShardFile, read: Read, dtype: torch.dtype) -> tuple[slice, ...]:
    """Where ``read`` lies in the stored tensor of its chunk.

    Raises:
        CheckpointingException: see `stored_part`.
    """
    chunk, slot = read.chunk, file.slot(read.chunk.key)
    if slot is None or slot.shape != chunk.box.shape or dtype_of(slot.dtype) != dtype:
        said = "missing" if slot is None else f"{slot.dtype} {list(slot.shape)}"
        raise CheckpointingException(f"{file.file}: {chunk.key} is {said}, not what the manifest says")
    return read.box.relative_to(chunk.box).slices()


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
