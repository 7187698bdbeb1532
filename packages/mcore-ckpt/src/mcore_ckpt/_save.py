# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Saving: agree on a plan, write shards, commit by renaming the manifest into place."""

import contextlib
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import Tensor

from mcore_ckpt._control import Control, LostContact
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import FORMATS, METADATA_NAME, own_file, shard_name, side_files, write_shard
from mcore_ckpt._plan import PlanCache, SavePlan, ShardRecord, Write, decode_layouts, encode_layout, pack_files, plan_layouts
from mcore_ckpt._sharded import DeferredTensor, ShardedTensor, as_parts
from mcore_ckpt._storage import FileRecord, Folder, StoredFile, dtype_code, open_folder
from mcore_ckpt.chunks import Box
from mcore_ckpt.manifest import MANIFEST_NAME, Chunk, Manifest, TensorRecord, check_extra, is_checkpoint

__all__ = ["AsyncRequest", "save"]

DEFAULT_FILE_BYTES = 4 * 2**30
_SIDE_NAMES = tuple(name + end for name in (METADATA_NAME, "metadata.json", MANIFEST_NAME) for end in ("", ".partial"))
"""What a save writes beside its shards; a manifest only by committing."""


@overload
def save(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    extra: Mapping[str, Any] | None = None,
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
    group: dist.ProcessGroup | None = None,
    format: str = "native",
    asynchronous: Literal[True],
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> "AsyncRequest": ...
def save(
    state: Mapping[str, Any],
    directory: str | Path | Folder,
    *,
    extra: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    format: str = "native",
    asynchronous: bool = False,
    max_file_bytes: int = DEFAULT_FILE_BYTES,
) -> "AsyncRequest | None":
    """Write ``state`` as a new checkpoint in ``directory``. Collective over ``group``.

    A part that several ranks hold is written by one of them. The checkpoint exists once its manifest has been renamed into
    place, after every file is on the disk; before that no reader sees anything, whatever is killed.

    Args:
        state: global name -> `ShardedTensor`, any `ShardLike`, DTensor or plain tensor (held alike by every rank that names it).
            Ranks may hold different names.
        directory: a path on a file system all ranks share, the address of an object store (``s3://bucket/run``, by fsspec), or a
            `mcore_ckpt.storage.Folder`. It may exist, but hold no checkpoint; what an unfinished save left is removed.
        extra: JSON values kept in the manifest. Equal on every rank that gives any.
        group: None for the default group, or for this process alone where torch.distributed is not initialised.
        format: "native", safetensors and a manifest; or "torch_dist", which `torch.distributed.checkpoint` reads too, with the same
            manifest beside.
        asynchronous: return once the state is copied to host memory; a thread writes. The checkpoint exists when the
            request's ``wait()`` has returned on every rank.
        max_file_bytes: data a shard file holds before the next is begun.

    Raises:
        CheckpointingException: on every rank, naming the rank at fault and its cause.
        ValueError: an unknown format.
    """
    check_format(format)
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes={max_file_bytes} must be at least 1")
    return run_save(state, open_folder(directory), extra, group, format, asynchronous, max_file_bytes, None)


def run_save(
    state: Mapping[str, Any],
    directory: Folder,
    extra: Mapping[str, Any] | None,
    group: dist.ProcessGroup | None,
    format: str,
    asynchronous: bool,
    max_file_bytes: int,
    cache: PlanCache | None,
) -> "AsyncRequest | None":
    """`save` with a place to keep its plan in; a cache belongs to one group."""
    job = _prepare(Control(group), state, directory, extra or {}, format, max_file_bytes, cache)
    if asynchronous:
        return AsyncRequest(job)
    _commit(job, job.write)
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


@dataclass(frozen=True)
class _Job:
    """What this rank has to do for one save."""

    control: Control
    directory: Folder
    extra: Mapping[str, Any]
    format: str
    plan: SavePlan
    files: Mapping[str, list[Write]]
    """This rank's files by name."""
    shards: Mapping[tuple[str, Box], ShardedTensor | DeferredTensor]

    def write(self) -> list[list[Any]]:
        """Write this rank's files; [name, bytes, sha256, keys of its tensors] each. No collectives: it may run on another thread."""
        results = []
        try:
            for file, writes in self.files.items():
                keys = [_key(write, self.plan) for write in writes]
                entries = [(key, *self._entry(write)) for key, write in zip(keys, writes, strict=True)]
                record, places = write_shard(StoredFile(self.directory, file), entries)
                results.append([file, record.bytes, record.sha256, [places[key] for key in keys]])
            if results:
                self.directory.sync()
        except BaseException:
            self.discard()
            raise
        return results

    def discard(self) -> None:
        """Remove this rank's files of a save that failed."""
        for file in self.files:
            with contextlib.suppress(OSError):
                self.directory.remove(file)

    def _entry(self, write: Write) -> tuple[str, tuple[int, ...], Callable[[], Tensor]]:
        tensor = self.plan.tensors[write.name]
        return tensor.dtype, write.box.shape, partial(_data, self.shards[write.name, write.box])


def _data(shard: ShardedTensor | DeferredTensor) -> Tensor:
    return shard.data


def _key(write: Write, plan: SavePlan) -> str:
    """The plain name where the whole tensor is in one chunk: such a file reads like any other safetensors file."""
    if write.box == Box.whole(plan.tensors[write.name].shape):
        return write.name
    return f"{write.name}@{'.'.join(map(str, write.box.offset))}"


def _prepare(
    control: Control,
    state: Mapping[str, Any],
    directory: Folder,
    extra: Mapping[str, Any],
    format: str,
    max_file_bytes: int,
    cache: PlanCache | None,
) -> _Job:
    shards: dict[tuple[str, Box], ShardedTensor | DeferredTensor] = {}
    layout = ""

    def describe() -> dict[str, Any]:
        nonlocal layout
        check_extra(extra)
        records = []
        for name, value in state.items():
            for shard in [value] if isinstance(value, DeferredTensor) else as_parts(name, value):
                shards[name, shard.box] = shard
                records.append(ShardRecord(name, dtype_code(shard.dtype), shard.global_shape, shard.box, shard.replica))
        layout, runs = encode_layout(records)
        token = None
        if control.rank == 0:
            token = secrets.token_hex(4)
            _open_directory(directory)
        told = {"layout": hashlib.sha256(layout.encode()).hexdigest(), "length": len(layout.encode()), "runs": runs}
        facts = {"extra": json.dumps(extra, sort_keys=True), "directory": directory.address, "token": token}
        return {**told, **facts, "cached": cache.key if cache is not None else ""}

    answers = control.run(f"preparing to save {directory}", describe)
    for key in ("directory", "extra"):
        said = {answer[key]: rank for rank, answer in reversed(list(zip(control.ranks, answers, strict=True))) if answer[key] != "{}"}
        if len(said) > 1:
            (one, first), (other, second) = list(said.items())[:2]
            raise CheckpointingException(
                f"{key} differs between ranks: {one[:200]} on rank {first}, {other[:200]} on rank {second}; pass the same on all"
            )
    plan = _agree(control, directory, layout, answers, cache)
    token = answers[0]["token"]
    packed = pack_files(plan.writes[control.rank], max_file_bytes)
    files = {shard_name(format, token, control.rank, number): writes for number, writes in enumerate(packed)}
    given = next((json.loads(answer["extra"]) for answer in answers if answer["extra"] != "{}"), {})
    return _Job(control, directory, given, format, plan, files, shards)


def _agree(control: Control, directory: Folder, layout: str, answers: list[Any], cache: PlanCache | None) -> SavePlan:
    """The plan, the same on every rank: of the last save where nothing changed, else of the distinct layouts."""
    key = hashlib.sha256(json.dumps([[answer["layout"], answer["runs"]] for answer in answers]).encode()).hexdigest()
    if cache is not None and cache.plan is not None and all(answer["cached"] == key for answer in answers):
        return cache.plan
    owners: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        owners.setdefault(answer["layout"], []).append(rank)
    first = {ranks[0]: answers[ranks[0]]["length"] for ranks in owners.values()}
    texts = control.share(f"planning to save {directory}", layout, first)
    plan = plan_layouts(decode_layouts(texts, list(owners.values()), [answer["runs"] for answer in answers]), control.size)
    if cache is not None:
        cache.key, cache.plan = key, plan
    return plan


def _open_directory(directory: Folder) -> None:
    if is_checkpoint(directory):
        raise CheckpointingException(f"{directory} already holds a checkpoint; choose another folder or remove it first")
    names = directory.names()
    unfinished = [name for name in names if own_file(name)]
    if METADATA_NAME in names and not unfinished:
        raise CheckpointingException(f"{directory} already holds a checkpoint of another system ({METADATA_NAME}); choose another folder")
    directory.create()
    for name in [*unfinished, *_SIDE_NAMES]:
        if name in names:
            directory.remove(name)


def _commit(job: _Job, write: Callable[[], list[list[Any]]]) -> None:
    """Gather what the ranks wrote; the first rank makes it a checkpoint."""
    control, directory = job.control, job.directory

    def publish() -> None:
        if control.rank:
            return
        files = {name: FileRecord(size, digest) for rows in written for name, size, digest, _ in rows}
        for name, record in files.items():
            size = directory.size(name)
            if size != record.bytes:
                seen = "is not" if size is None else f"has {size} bytes"
                raise CheckpointingException(f"{name} {seen} here, its writer wrote {record.bytes}; do the ranks share the folder?")
        tensors = _place(job.plan, answers)
        stored = {name: (t.dtype, t.shape, [(chunk.file, chunk.key, chunk.box) for chunk in t.chunks]) for name, t in tensors.items()}
        for name, content in side_files(job.format, stored).items():
            directory.publish(name, content)
        directory.publish(MANIFEST_NAME, Manifest(tensors=tensors, files=files, extra=job.extra).encode())

    def report() -> dict[str, Any]:
        rows = write()
        chunks = [[w.name, *w.box.to_json(), file, key] for file, *_, keys in rows for w, key in zip(job.files[file], keys, strict=True)]
        return {"rows": rows, "chunks": chunks}

    try:
        answers = control.run(f"writing {directory}", report)
        written = [answer["rows"] for answer in answers]
        control.run(f"committing {directory}", publish)
    except LostContact:
        # The first rank may be committing at this very moment: the files stay, and go with the next save if it was not.
        raise
    except CheckpointingException:
        # A rename that was made but could not be confirmed leaves a checkpoint; its files must then stay. The first rank knows.
        if not control.run(f"looking at {directory}", lambda: control.rank == 0 and is_checkpoint(directory))[0]:
            job.discard()
            if control.rank == 0:
                for name in _SIDE_NAMES:
                    with contextlib.suppress(OSError):
                        directory.remove(name)
            # No rank writes any more; the last one to get here finds nothing left.
            with contextlib.suppress(OSError):
                directory.remove_all(only_empty=True)
        raise


def _place(plan: SavePlan, answers: list[Any]) -> dict[str, TensorRecord]:
    chunks: dict[str, list[Chunk]] = {name: [] for name in plan.tensors}
    for answer in answers:
        for name, offset, shape, file, key in answer["chunks"]:
            chunks[name].append(Chunk(file, key, Box(tuple(offset), tuple(shape))))
    return {name: TensorRecord(tensor.dtype, tensor.shape, tuple(chunks[name])) for name, tensor in plan.tensors.items()}


class AsyncRequest:
    """A save whose files a thread of this process writes.

    The state was copied to host memory before ``save`` returned: training may change it at once. The thread uses no
    collectives; the commit is part of ``wait()``, which is therefore collective. A request that is never waited for leaves no checkpoint.
    """

    def __init__(self, job: _Job) -> None:
        needed = {(write.name, write.box) for writes in job.files.values() for write in writes}
        staged: dict[tuple[str, Box], ShardedTensor] = {}
        self._error: BaseException | None = None
        try:
            staged = {key: _snapshot(shard) for key, shard in job.shards.items() if key in needed}
        except Exception as error:
            # The other ranks have gone on: they hear of it in wait(), like of any failed write.
            self._error = error
        self._job: _Job | None = replace(job, shards=staged)
        self._rows: list[list[Any]] = []
        self._then: list[Callable[[], None]] = []
        self._thread = threading.Thread(target=self._write, args=(self._job,), name=f"save {job.directory}", daemon=True)
        self._thread.start()

    def _write(self, job: _Job) -> None:
        if self._error is not None:
            return
        try:
            self._rows = job.write()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """Whether this rank's files are written, or failed; ``wait()`` then has only the commit left to do. Not collective."""
        return not self._thread.is_alive()

    def then(self, action: Callable[[], None]) -> None:
        """Call ``action`` on this rank once the checkpoint is committed, inside ``wait()``."""
        self._then.append(action)

    def wait(self) -> None:
        """Wait for the files of all ranks and commit the checkpoint. Collective; a second call does nothing.

        Raises:
            CheckpointingException: on every rank, when any of them could not write.
        """
        # The copy of the state, and the group, are not kept past the commit by whoever keeps the request.
        job, self._job = self._job, None
        if job is None:
            return
        self._thread.join()
        _commit(job, self._result)
        for action in self._then:
            action()

    def _result(self) -> list[list[Any]]:
        if self._error is not None:
            raise self._error
        return self._rows


def _snapshot(shard: ShardedTensor | DeferredTensor) -> ShardedTensor:
    return ShardedTensor(shard.data.detach().to("cpu", copy=True), shard.global_shape, shard.box.offset, shard.replica)
