# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Saving: agree on a plan, write shards, commit by renaming the manifest into place."""

import hashlib
import json
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist

from mcore_ckpt._core._assets import AssetSource, check_assets, digest_names
from mcore_ckpt._core._async import AsyncRequest
from mcore_ckpt._core._commit import SIDE_NAMES, Job, commit
from mcore_ckpt._core._control import Control, threads_each
from mcore_ckpt._core._manifest import check_extra, is_checkpoint
from mcore_ckpt._core._save_plan import (
    Layout,
    PlanCache,
    SavePlan,
    ShardRecord,
    Share,
    Write,
    decode_layouts,
    encode_layout,
    pack_files,
    plan_layouts,
    take_share,
    tell_writes,
)
from mcore_ckpt._core._sharded import DeferredTensor, ShardedTensor, as_writable, entries
from mcore_ckpt._core._staging import Staging
from mcore_ckpt._core._worker import Worker
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import FORMATS, METADATA_NAME, Place, asset_file, own_file, shard_name
from mcore_ckpt._storage import Folder, dtype_code, open_folder
from mcore_ckpt.chunks import Box

__all__ = ["DEFAULT_FILE_BYTES", "SaveOptions", "check_format", "run_save", "save"]

DEFAULT_FILE_BYTES = 4 * 2**30
_MIN_FILE_BYTES = 64 * 2**20
"""Less is not worth a file and a thread of its own."""


@overload
def save(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    extra: Mapping[str, Any] | None = None,
    assets: Mapping[str, str | Path | bytes] | None = None,
    group: dist.ProcessGroup | None = None,
    format: str = "native",
    asynchronous: Literal[False] = False,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> None: ...
@overload
def save(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    extra: Mapping[str, Any] | None = None,
    assets: Mapping[str, str | Path | bytes] | None = None,
    group: dist.ProcessGroup | None = None,
    format: str = "native",
    asynchronous: Literal[True],
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> AsyncRequest: ...
def save(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    extra: Mapping[str, Any] | None = None,
    assets: Mapping[str, str | Path | bytes] | None = None,
    group: dist.ProcessGroup | None = None,
    format: str = "native",
    asynchronous: bool = False,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> AsyncRequest | None:
    """Write ``state`` as a new checkpoint in ``directory``. Collective over ``group``.

    A part that several ranks hold is written by one of them. The checkpoint exists once its manifest has been renamed into
    place, after every file is on the disk; before that no reader sees anything, whatever is killed.

    Args:
        state: global name -> `ShardedTensor`, any `ShardLike`, DTensor or plain tensor (held alike by every rank that names it).
            Ranks may hold different names.
        directory: a path on a file system all ranks share, the address of an object store (``s3://bucket/run``, by fsspec), or a
            `mcore_ckpt.storage.Folder`. It may exist, but hold no checkpoint; what an unfinished save left is removed.
        extra: JSON values kept in the manifest. Equal on every rank that gives any.
        assets: name -> content of a small file to keep beside the tensors, or its path: tokenizer, settings of the run. Names may have
            parts, ``tokenizer/tokenizer.json``; together at most 256 MiB. Those of the first rank are kept; others may give none.
        group: None for the default group, or for this process alone where torch.distributed is not initialised.
        format: "native", safetensors and a manifest; "torch_dist", which `torch.distributed.checkpoint` reads too, with the same
            manifest beside; or "fsdp_dtensor", as that without the file that says torch_dist.
        asynchronous: return once the state is copied to host memory; see `AsyncRequest`. The checkpoint exists when the request's
            ``wait()`` has returned on every rank.
        max_file_bytes: data a shard file holds before the next is begun.

    Raises:
        CheckpointingException: on every rank, naming the rank at fault and its cause.
        ValueError: an unknown format.
    """
    check_format(format)
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes={max_file_bytes} must be at least 1")
    options = SaveOptions(format=format, max_file_bytes=max_file_bytes, assets=assets or {})
    return run_save(state, open_folder(directory), extra, group, options, asynchronous=asynchronous)


@dataclass(frozen=True, kw_only=True)
class SaveOptions:
    """How to write, and what is kept from one save of a group to its next."""

    format: str = "native"
    max_file_bytes: int = DEFAULT_FILE_BYTES
    cache: PlanCache | None = None
    staging: Staging | None = None
    worker: Worker | None = None
    shelf: Callable[[Write], int] | None = None
    """A number for each part: parts of unequal numbers share no file."""
    assets: Mapping[str, Any] = field(default_factory=dict)
    """As for `save`, or sources."""
    values: Mapping[str, Place] = field(default_factory=dict)
    """For other readers, entries that are no tensors and lie in the folder already."""


def run_save(
    state: Mapping[str, Any],
    directory: Folder,
    extra: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None,
    options: SaveOptions,
    *,
    asynchronous: bool = False,
) -> AsyncRequest | None:
    """`save` by one who has more to say."""
    job = _prepare(Control(group), state, directory, extra or {}, options)
    if asynchronous:
        return AsyncRequest(job, options.staging, options.worker)
    commit(job, job.write)
    return None


def check_format(name: str) -> None:
    """Accept the formats this release writes.

    Raises:
        ValueError: another name; says where to go.
    """
    if name == "zarr":
        raise ValueError(
            "format='zarr' is not supported; rewrite such a checkpoint as torch_dist with the system that wrote it, "
            "and save new ones with format='torch_dist'"
        )
    if name not in FORMATS:
        raise ValueError(f"format={name!r} is not available; the formats of this release are: {', '.join(FORMATS)}")


def _prepare(
    control: Control,
    state: Mapping[str, Any],
    directory: Folder,
    extra: Mapping[str, Any],
    options: SaveOptions,
) -> Job:
    cache, shelf = options.cache, options.shelf
    shards: dict[tuple[str, Box], ShardedTensor | DeferredTensor] = {}
    records: list[ShardRecord] = []
    sources: list[AssetSource] = []
    layout = given = ""

    def describe() -> dict[str, Any]:
        nonlocal layout, given
        check_extra(extra)
        for name, value in entries(state):
            for shard in as_writable(name, value):
                shards[name, shard.box] = shard
                records.append(ShardRecord(name, dtype_code(shard.dtype), shard.global_shape, shard.box, shard.replica))
        layout, runs = encode_layout(records)
        token = None
        if control.rank == 0:
            sources.extend(check_assets(options.assets))
            token = secrets.token_hex(4)
            _open_directory(directory)
        told = {"layout": _digest(layout), "length": len(layout.encode()), "runs": runs}
        given = json.dumps(extra, sort_keys=True)
        noted = {"extra": [given[:200], _digest(given)], "extra_length": len(given.encode())}
        facts = {"directory": [directory.address], "token": token, "host": socket.gethostname(), "assets": digest_names(options.assets)}
        return {**told, **noted, **facts, "cached": cache.key if cache is not None else ""}

    answers = control.run(f"preparing to save {directory}", describe)
    for key in ("directory", "extra"):
        ranked = reversed(list(zip(control.ranks, answers, strict=True)))
        said = {tuple(answer[key]): rank for rank, answer in ranked if answer[key][0] != "{}"}
        if len(said) > 1:
            (one, first), (other, second) = list(said.items())[:2]
            raise CheckpointingException(
                f"{key} differs between ranks: {one[0]} on rank {first}, {other[0]} on rank {second}; pass the same on all"
            )
    for rank, answer in zip(control.ranks, answers, strict=True):
        if answer["assets"] not in ("", answers[0]["assets"]):
            raise CheckpointingException(
                f"rank {rank} gives other assets than rank {control.ranks[0]}, whose are kept; pass the same, or none on the others"
            )
    share = _agree(control, directory, layout, records, answers, cache)
    token, writes = answers[0]["token"], share.writes
    shelves = [writes] if shelf is None else [list(rows) for _, rows in groupby(sorted(writes, key=shelf), key=shelf)]
    # As many files at a time as this rank has cores: a digest follows a file from end to end, so one core cannot be helped by another.
    # Tensors that are made when their turn comes come one at a time.
    deferred = any(isinstance(shard, DeferredTensor) for shard in shards.values())
    num_threads = 1 if deferred else threads_each([answer["host"] for answer in answers], control.rank)
    even = -(-sum(write.num_bytes for write in writes) // num_threads)
    file_bytes = min(options.max_file_bytes, max(_MIN_FILE_BYTES, even))
    packed = [rows for those in shelves for rows in pack_files(those, file_bytes)]
    files = {shard_name(options.format, token, control.rank, number): rows for number, rows in enumerate(packed)}
    # The first rank writes the manifest: it alone needs what any of them gave.
    source = next((place for place, answer in enumerate(answers) if answer["extra"][0] != "{}"), 0)
    texts = control.collect(f"preparing to save {directory}", given, {source: answers[source]["extra_length"]})
    kept = json.loads(texts[0]) if texts else {}
    assets = {asset_file(token, source.name): source for source in sources}
    return Job(control, directory, kept, options.format, share.tensors, files, shards, num_threads, assets, options.values)


def _agree(
    control: Control, directory: Folder, layout: str, records: Sequence[ShardRecord], answers: list[Any], cache: PlanCache | None
) -> Share:
    """What this rank writes: as at the last save where nothing changed, else by a plan that the first rank makes."""
    key = _digest(json.dumps([[answer["layout"], answer["runs"]] for answer in answers]))
    if cache is not None and cache.share is not None and all(answer["cached"] == key for answer in answers):
        return cache.share
    owners: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        owners.setdefault(answer["layout"], []).append(rank)
    what = f"planning to save {directory}"
    texts = control.collect(what, layout, {ranks[0]: answers[ranks[0]]["length"] for ranks in owners.values()})
    made: list[tuple[list[Layout], SavePlan]] = []

    def plan() -> None:
        if control.rank == 0:
            layouts = decode_layouts(texts, list(owners.values()), [answer["runs"] for answer in answers])
            made.append((layouts, plan_layouts(layouts, control.size)))

    control.run(what, plan)
    told = control.deal(what, (text for layouts, its in made for text in tell_writes(layouts, its)))
    share = take_share(records, told, made[0][1] if made else None)
    if cache is not None:
        cache.key, cache.share = key, share
    return share


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _open_directory(directory: Folder) -> None:
    if is_checkpoint(directory):
        raise CheckpointingException(f"{directory} already holds a checkpoint; choose another folder or remove it first")
    names = directory.names()
    unfinished = [name for name in names if own_file(name)]
    if METADATA_NAME in names and not unfinished:
        raise CheckpointingException(f"{directory} already holds a checkpoint of another system ({METADATA_NAME}); choose another folder")
    directory.create()
    for name in [*unfinished, *SIDE_NAMES]:
        if name in names:
            directory.remove(name)
