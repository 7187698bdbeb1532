# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Saving: agree on a plan, write shards, commit by renaming the manifest into place."""

import json
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist

from mcore_ckpt._core._assets import AssetSource, check_assets, digest_names
from mcore_ckpt._core._async import AsyncRequest
from mcore_ckpt._core._commit import SIDE_NAMES, SaveJob, commit
from mcore_ckpt._core._control import Control, threads_each
from mcore_ckpt._core._manifest import check_extra, check_json_value, is_checkpoint
from mcore_ckpt._core._nested import flatten_state, with_values
from mcore_ckpt._core._save_plan import PlanCache, ShardRecord, Write, agree_on_share, encode_layout, pack_files, text_digest
from mcore_ckpt._core._sharded import DeferredTensor, ShardedTensor, as_writable
from mcore_ckpt._core._staging import Staging
from mcore_ckpt._core._worker import Worker
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import FORMATS, METADATA_NAME, Place, asset_file, own_file, shard_name
from mcore_ckpt._storage import Folder, dtype_code, open_folder
from mcore_ckpt.chunks import Box

__all__ = ["DEFAULT_FILE_BYTES", "SaveOptions", "check_format", "run_save", "save"]

DEFAULT_FILE_BYTES = 4 * 2**30
_MIN_FILE_BYTES = 64 * 2**20
"""Smaller parts share a file and its thread."""


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
            Ranks may hold different names. It may be nested, ``{"model": ..., "optimizer": ...}``: a tensor's name is then the path to it,
            joined by dots. Numbers, strings, bools and None in it, and lists of them, are kept with ``extra``.
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
    """Format, file size and the buffers that one save of a group leaves to its next."""

    format: str = "native"
    max_file_bytes: int = DEFAULT_FILE_BYTES
    cache: PlanCache | None = None
    staging: Staging | None = None
    worker: Worker | None = None
    file_group: Callable[[Write], int] | None = None
    """Group number of each part; parts of different groups share no file."""
    assets: Mapping[str, Any] = field(default_factory=dict)
    """As for `save`, or `AssetSource` values."""
    values: Mapping[str, Place] = field(default_factory=dict)
    """Non-tensor entries for other readers; their files are in the folder already."""


def run_save(
    state: Mapping[str, Any],
    directory: Folder,
    extra: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None,
    options: SaveOptions,
    *,
    asynchronous: bool = False,
) -> AsyncRequest | None:
    """`save` with internal options."""
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
) -> SaveJob:
    cache, file_group = options.cache, options.file_group
    shards: dict[tuple[str, Box], ShardedTensor | DeferredTensor] = {}
    records: list[ShardRecord] = []
    sources: list[AssetSource] = []
    layout = extra_text = ""

    def describe() -> dict[str, Any]:
        nonlocal layout, extra_text
        check_extra(extra)
        flat = flatten_state(state)
        everything = with_values(extra, flat)
        check_json_value(everything)
        for name, value in flat.tensors.items():
            for shard in as_writable(name, value):
                shards[name, shard.box] = shard
                records.append(ShardRecord(name, dtype_code(shard.dtype), shard.global_shape, shard.box, shard.replica))
        layout, runs = encode_layout(records)
        token = None
        if control.rank == 0:
            sources.extend(check_assets(options.assets))
            token = secrets.token_hex(4)
            _open_directory(directory)
        layout_facts = {"layout": text_digest(layout), "length": len(layout.encode()), "runs": runs}
        extra_text = json.dumps(everything, sort_keys=True)
        extra_facts = {"extra": [extra_text[:200], text_digest(extra_text)], "extra_length": len(extra_text.encode())}
        facts = {"directory": [directory.address], "token": token, "host": socket.gethostname(), "assets": digest_names(options.assets)}
        return {**layout_facts, **extra_facts, **facts, "cached": cache.key if cache is not None else ""}

    answers = control.run(f"preparing to save {directory}", describe)
    _check_equal(control, answers)
    share = agree_on_share(control, f"planning to save {directory}", layout, records, answers, cache)
    token, writes = answers[0]["token"], share.writes
    file_groups = [writes] if file_group is None else [list(rows) for _, rows in groupby(sorted(writes, key=file_group), key=file_group)]
    # As many files at a time as this rank has cores: hashing one file is single-threaded.
    # Deferred tensors are read one at a time.
    deferred = any(isinstance(shard, DeferredTensor) for shard in shards.values())
    num_threads = 1 if deferred else threads_each([answer["host"] for answer in answers], control.rank)
    even = -(-sum(write.num_bytes for write in writes) // num_threads)
    file_bytes = min(options.max_file_bytes, max(_MIN_FILE_BYTES, even))
    packed = [rows for those in file_groups for rows in pack_files(those, file_bytes)]
    files = {shard_name(options.format, token, control.rank, number): rows for number, rows in enumerate(packed)}
    # Only the first rank writes the manifest, so only it needs the extra values of another.
    source = next((place for place, answer in enumerate(answers) if answer["extra"][0] != "{}"), 0)
    texts = control.collect(f"preparing to save {directory}", extra_text, {source: answers[source]["extra_length"]})
    manifest_extra = json.loads(texts[0]) if texts else {}
    return SaveJob(
        control=control,
        directory=directory,
        extra=manifest_extra,
        format=options.format,
        tensors=share.tensors,
        files=files,
        shards=shards,
        num_threads=num_threads,
        assets={asset_file(token, source.name): source for source in sources},
        values=options.values,
    )


def _check_equal(control: Control, answers: list[Any]) -> None:
    """Check that all ranks pass the same folder, extra values and assets; a rank may pass no extra values and no assets.

    Raises:
        CheckpointingException: they differ; names two ranks.
    """
    for key in ("directory", "extra"):
        ranked = reversed(list(zip(control.ranks, answers, strict=True)))
        rank_by_value = {tuple(answer[key]): rank for rank, answer in ranked if answer[key][0] != "{}"}
        if len(rank_by_value) > 1:
            (one, first), (other, second) = list(rank_by_value.items())[:2]
            raise CheckpointingException(
                f"{key} differs between ranks: {one[0]} on rank {first}, {other[0]} on rank {second}; pass the same on all"
            )
    for rank, answer in zip(control.ranks, answers, strict=True):
        if answer["assets"] not in ("", answers[0]["assets"]):
            raise CheckpointingException(
                f"rank {rank} gives other assets than rank {control.ranks[0]}, whose are kept; pass the same, or none on the others"
            )


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
