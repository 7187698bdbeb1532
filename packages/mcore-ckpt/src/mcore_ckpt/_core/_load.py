# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Loading: any layout from any layout, reading only the bytes this rank needs."""

import hashlib
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_ckpt._core._control import Control, threads_each
from mcore_ckpt._core._load_plan import Mismatches, Read, Strictness, as_strictness, assign_files, compare, plan_load
from mcore_ckpt._core._manifest import Manifest, TensorRecord, read_manifest
from mcore_ckpt._core._nested import VALUES, FlatState, check_values, flatten_state
from mcore_ckpt._core._read import DAMAGED, ReadTarget, check_file, check_files, fill_from, in_threads, read_and_verify
from mcore_ckpt._core._sharded import ShardedTensor, as_parts
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import open_shard
from mcore_ckpt._storage import Folder, StoredFile, dtype_code, dtype_of, itemsize, open_folder
from mcore_ckpt.chunks import Box

__all__ = ["find_mismatches", "load", "load_as", "read_tensor"]


def load(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    strict: bool | Strictness = True,
    verify: bool | Literal["first"] = True,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Fill the tensors of ``state`` from the checkpoint in ``directory``, whatever layout wrote it. Collective over ``group``.

    Args:
        state: as for `save`; the tensors are written in place, and other values replaced. A name that the checkpoint lacks is an
            error, unless ``strict`` says otherwise: leave it out of ``state`` to keep its value.
        strict: a stored tensor that no rank asks for is an error; False to load a part of a checkpoint; or a `Strictness`.
        verify: compare the SHA-256 of every file that is read; the ranks share the files, and each file is read once for both.
            "first" compares all before anything is written, which takes a second reading. False compares lengths only.
        group: as for `save`.

    Returns:
        The extra values that were saved.

    Raises:
        CheckpointingException: on every rank: not a checkpoint; missing, unexpected, differently shaped or typed tensors, all
            listed, with nothing written yet; a damaged file, by name: unless its length tells or ``verify`` is "first", some of the
            tensors hold values of the checkpoint then, and the state is good for loading another only.
        ValueError: ``verify`` is none of these.
    """
    return load_as(lambda manifest: manifest, state, directory, strict=strict, verify=verify, group=group)


def load_as(
    view: Callable[[Manifest], Manifest],
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    strict: bool | Strictness,
    verify: bool | Literal["first"],
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """`load` of what ``view`` makes of the manifest, on every rank the same: other names, or other boxes in the same files."""
    if verify not in (True, False, "first"):
        raise ValueError(f"verify={verify!r} must be True, False or 'first'")
    control, folder = Control(group), open_folder(directory)
    strictness = as_strictness(strict)
    manifest, shards, mismatches, num_threads, flat = _survey(control, state, folder, strictness, view)
    if mismatches.unexpected and strictness.unexpected == "raise":
        raise CheckpointingException(
            f"{folder} " + "; ".join(mismatches.lines(replace(strictness, missing="ignore", shape="ignore"), "raise"))
        )
    if control.rank == 0:
        mismatches.warn(strictness, f"loading {folder}")
    requested = manifest.tensors.keys() - set(mismatches.unexpected)
    sizes = {chunk.file: manifest.files[chunk.file].bytes for name in requested for chunk in manifest.tensors[name].chunks}
    reads = plan_load(((n, s.box) for n, parts in shards.items() for s in parts), manifest.tensors)
    share = assign_files(sizes, control.size, _readers(control, folder, sizes, reads, manifest) if verify is True else None)[control.rank]
    first = verify == "first"
    control.run(f"verifying {folder}", lambda: check_files(folder, manifest, share, digests=first, num_threads=num_threads))
    verified = share if verify is True else []
    control.run(f"reading {folder}", lambda: _fill(folder, manifest, shards, reads, verified, num_threads))
    extra = dict(manifest.extra)
    flat.restore(extra.pop(VALUES, {}))
    return extra


def find_mismatches(state: Mapping[str, Any], directory: str | Path | Folder, *, group: dist.ProcessGroup | None = None) -> Mismatches:
    """The mismatches between ``state`` on all ranks and the checkpoint; nothing is loaded. Collective over ``group``.

    Raises:
        CheckpointingException: on every rank: not a checkpoint, or a value of the state that is no tensor.
    """
    everything = Strictness(missing="ignore", unexpected="ignore", shape="ignore")
    return _survey(Control(group), state, open_folder(directory), everything, lambda manifest: manifest, check_dtypes=False)[2]


def _survey(
    control: Control,
    state: Mapping[str, Any],
    folder: Folder,
    strictness: Strictness,
    view: Callable[[Manifest], Manifest],
    *,
    check_dtypes: bool = True,
) -> tuple[Manifest, dict[str, list[ShardedTensor]], Mismatches, int, FlatState]:
    """The manifest, the parts of ``state`` that can be filled from it, what does not fit over all ranks, threads for this rank, and the
    state without its nesting.

    Raises:
        CheckpointingException: something that ``strictness`` does not allow, but for unexpected tensors, which the caller judges.
    """
    opened: list[tuple[Manifest, FlatState]] = []
    requested = bytearray()
    shards: dict[str, list[ShardedTensor]] = {}

    def look() -> dict[str, Any]:
        manifest, flat = view(read_manifest(folder)), flatten_state(state)
        opened.append((manifest, flat))
        shards.update((name, as_parts(name, value)) for name, value in flat.tensors.items())
        check_values(flat, manifest.extra.get(VALUES, {}), missing=strictness.missing == "raise")
        _check_targets(shards)
        wanted = {name: TensorRecord(dtype_code(parts[0].data.dtype), parts[0].global_shape) for name, parts in shards.items()}
        mine = compare(wanted, manifest.tensors)
        problems = mine.lines(replace(strictness, unexpected="ignore"), "raise") if check_dtypes else []
        if problems:
            raise CheckpointingException("the state does not fit: " + "; ".join(problems))
        for name, part in wanted.items():
            stored = manifest.tensors.get(name)
            if stored is None or stored.shape != part.shape:
                del shards[name]
        requested.extend(name in wanted for name in manifest.tensors)
        # Every rank reports its mismatches, which are few; the requested names are united below.
        seen = hashlib.sha256(json.dumps([list(manifest.tensors), sorted(file.sha256 for file in manifest.files.values())]).encode())
        differing = {"missing": mine.missing, "shapes": mine.shapes, "dtypes": mine.dtypes}
        return {"seen": seen.hexdigest(), "host": socket.gethostname(), **differing}

    answers = control.run(f"opening {folder}", look)
    for rank, answer in zip(control.ranks, answers, strict=True):
        if answer["seen"] != answers[0]["seen"]:
            raise CheckpointingException(
                f"ranks {control.ranks[0]} and {rank} see different checkpoints in {folder}; they must share the file system"
            )
    ((manifest, flat),) = opened
    wanted = control.union(f"opening {folder}", bytes(requested))
    unexpected = [name for name, flag in zip(manifest.tensors, wanted, strict=True) if not flag]
    differing = {key: tuple(sorted({one for answer in answers for one in answer[key]})) for key in ("missing", "shapes", "dtypes")}
    num_threads = threads_each([answer["host"] for answer in answers], control.rank)
    return manifest, shards, Mismatches(unexpected=tuple(sorted(unexpected)), **differing), num_threads, flat


def _check_targets(shards: Mapping[str, list[ShardedTensor]]) -> None:
    for name, parts in shards.items():
        for part in parts:
            if any(step == 0 and size > 1 for step, size in zip(part.data.stride(), part.data.shape, strict=True)):
                raise CheckpointingException(f"{name}: its elements share memory (it was expanded); clone it before loading")


def _readers(control: Control, folder: Folder, files: Iterable[str], reads: Iterable[Read], manifest: Manifest) -> dict[str, int]:
    """For each file the rank that reads the most of it, which verifies it on the way. Ties go to a different rank for each file."""
    mine = dict.fromkeys(sorted(files), 0)
    for read in reads:
        mine[read.chunk.file] += read.box.num_elements * itemsize(manifest.tensors[read.name].dtype)
    size = control.size
    bids = [num_bytes * size + (control.rank - place) % size for place, num_bytes in enumerate(mine.values())]
    best = control.largest(f"sharing the files of {folder}", bids)
    return {file: (bid + place) % size for place, (file, bid) in enumerate(zip(mine, best, strict=True))}


def _fill(
    folder: Folder,
    manifest: Manifest,
    shards: Mapping[str, list[ShardedTensor]],
    reads: Iterable[Read],
    verified: Iterable[str] = (),
    num_threads: int = 1,
) -> None:
    """Do ``reads``: from the files in ``verified`` while they are hashed, from the others only the ranges that are needed."""
    wanted: dict[str, list[ReadTarget]] = {file: [] for file in verified}
    for read in reads:
        part = next(part for part in shards[read.name] if part.box.contains(read.box))
        target = part.data.detach()[read.box.relative_to(part.box).slices()]
        wanted.setdefault(read.chunk.file, []).append(ReadTarget(read, target))

    def read_all(name: str) -> None:
        file, expected = StoredFile(folder, name), manifest.files[name]
        try:
            record = read_and_verify(file, wanted.pop(name))
        except CheckpointingException:
            # A file that cannot be parsed is reported as damaged where its digest differs.
            check_file(folder, manifest, name, digests=True)
            raise
        if expected.sha256 and record != expected:
            raise CheckpointingException(f"{file}: {DAMAGED}")

    def read_ranges(name: str) -> None:
        fill_from(open_shard(StoredFile(folder, name)), wanted[name])

    targets = [part.data for parts in shards.values() for part in parts]
    in_threads(read_all, verified, num_threads, targets)
    in_threads(read_ranges, list(wanted), num_threads, targets)


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
    _fill(folder, manifest, {name: [whole]}, plan_load([(name, Box.whole(record.shape))], manifest.tensors))
    return whole.data
