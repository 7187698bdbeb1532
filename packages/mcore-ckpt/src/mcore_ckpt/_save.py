# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Saving: agree on a plan, write shards, commit by renaming the manifest into place."""

import contextlib
import json
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

import torch.distributed as dist
from torch import Tensor

from mcore_ckpt._control import Control
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._plan import SavePlan, ShardRecord, Write, pack_files, plan_save
from mcore_ckpt._sharded import ShardedTensor, as_parts
from mcore_ckpt._storage import FileRecord, dtype_code, remove_file, replace_file, sync_folder, write_safetensors
from mcore_ckpt.chunks import Box
from mcore_ckpt.manifest import MANIFEST_NAME, Chunk, Manifest, TensorRecord, check_extra, is_checkpoint

__all__ = ["AsyncRequest", "save"]

_DATA_FILE = re.compile(r"[0-9a-f]{8}-r[0-9]+-[0-9]+\.safetensors")


@overload
def save(
    state: Mapping[str, Any],
    directory: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    format: str = "native",
    asynchronous: Literal[False] = False,
    max_file_bytes: int = 4 * 2**30,
) -> None: ...
@overload
def save(
    state: Mapping[str, Any],
    directory: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    format: str = "native",
    asynchronous: Literal[True],
    max_file_bytes: int = 4 * 2**30,
) -> "AsyncRequest": ...
def save(
    state: Mapping[str, Any],
    directory: str | Path,
    *,
    extra: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    format: str = "native",
    asynchronous: bool = False,
    max_file_bytes: int = 4 * 2**30,
) -> "AsyncRequest | None":
    """Write ``state`` as a new checkpoint in ``directory``. Collective over ``group``.

    A part that several ranks hold is written by one of them. The checkpoint exists once its manifest has been renamed into
    place, after every file is on the disk; before that no reader sees anything, whatever is killed.

    Args:
        state: global name -> `ShardedTensor`, any `ShardLike`, DTensor or plain tensor (held alike by every rank that names it).
            Ranks may hold different names.
        directory: on a file system all ranks share. It may exist, but hold no checkpoint; what an unfinished save left is removed.
        extra: JSON values kept in the manifest. Equal on every rank that gives any.
        group: None for the default group, or for this process alone where torch.distributed is not initialised.
        format: "native".
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
    job = _prepare(Control(group), state, Path(directory), extra or {}, max_file_bytes)
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
            "and save new ones with format='native'"
        )
    if name != "native":
        raise ValueError(f"format={name!r} is not available; the formats of this release are: native")


@dataclass(frozen=True)
class _Job:
    """What this rank has to do for one save."""

    control: Control
    directory: Path
    extra: Mapping[str, Any]
    plan: SavePlan
    files: Mapping[str, list[Write]]
    """This rank's files by name."""
    shards: Mapping[tuple[str, Box], ShardedTensor]

    def write(self) -> list[list[Any]]:
        """Write this rank's files; [name, bytes, sha256] each. No collectives: it may run on another thread."""
        results = []
        try:
            for file, writes in self.files.items():
                entries = [(_key(write, self.plan), *self._entry(write)) for write in writes]
                record = write_safetensors(self.directory / file, entries)
                results.append([file, record.bytes, record.sha256])
            if results:
                sync_folder(self.directory)
        except BaseException:
            self.discard()
            raise
        return results

    def discard(self) -> None:
        """Remove this rank's files of a save that failed."""
        for file in self.files:
            with contextlib.suppress(OSError):
                remove_file(self.directory / file)

    def _entry(self, write: Write) -> tuple[str, tuple[int, ...], Callable[[], Tensor]]:
        tensor = self.plan.tensors[write.name]
        return tensor.dtype, write.box.shape, partial(_data, self.shards[write.name, write.box])


def _data(shard: ShardedTensor) -> Tensor:
    return shard.data


def _key(write: Write, plan: SavePlan) -> str:
    """The plain name where the whole tensor is in one chunk: such a file reads like any other safetensors file."""
    if write.box == Box.whole(plan.tensors[write.name].shape):
        return write.name
    return f"{write.name}@{'.'.join(map(str, write.box.offset))}"


def _prepare(control: Control, state: Mapping[str, Any], directory: Path, extra: Mapping[str, Any], max_file_bytes: int) -> _Job:
    shards: dict[tuple[str, Box], ShardedTensor] = {}

    def describe() -> dict[str, Any]:
        check_extra(extra)
        records = []
        for name, value in state.items():
            for shard in as_parts(name, value):
                shards[name, shard.box] = shard
                records.append(ShardRecord(name, dtype_code(shard.data.dtype), shard.global_shape, shard.box, shard.replica).to_json())
        token = None
        if control.rank == 0:
            token = secrets.token_hex(4)
            _open_directory(directory)
        return {"records": records, "extra": json.dumps(extra, sort_keys=True), "directory": str(directory.absolute()), "token": token}

    answers = control.run(f"preparing to save {directory}", describe)
    for key in ("directory", "extra"):
        said = {answer[key]: rank for rank, answer in reversed(list(zip(control.ranks, answers, strict=True))) if answer[key] != "{}"}
        if len(said) > 1:
            (one, first), (other, second) = list(said.items())[:2]
            raise CheckpointingException(
                f"{key} differs between ranks: {one[:200]} on rank {first}, {other[:200]} on rank {second}; pass the same on all"
            )
    plan = plan_save([[ShardRecord.from_json(record) for record in answer["records"]] for answer in answers])
    token = answers[0]["token"]
    packed = pack_files(plan.writes[control.rank], max_file_bytes)
    files = {f"{token}-r{control.rank:05d}-{number:03d}.safetensors": writes for number, writes in enumerate(packed)}
    given = next((json.loads(answer["extra"]) for answer in answers if answer["extra"] != "{}"), {})
    return _Job(control, directory, given, plan, files, shards)


def _open_directory(directory: Path) -> None:
    if is_checkpoint(directory):
        raise CheckpointingException(f"{directory} already holds a checkpoint; choose another folder or remove it first")
    directory.mkdir(parents=True, exist_ok=True)
    sync_folder(directory.parent)
    for entry in list(directory.iterdir()):
        if _DATA_FILE.fullmatch(entry.name) or entry.name == f"{MANIFEST_NAME}.partial":
            remove_file(entry)


def _commit(job: _Job, write: Callable[[], list[list[Any]]]) -> None:
    """Gather what the ranks wrote; the first rank makes it a checkpoint."""
    control, directory = job.control, job.directory

    def publish() -> None:
        if control.rank:
            return
        files = {name: FileRecord(size, digest) for rows in written for name, size, digest in rows}
        for name, record in files.items():
            size = (directory / name).stat().st_size
            if size != record.bytes:
                raise CheckpointingException(
                    f"{name} has {size} bytes here, its writer wrote {record.bytes}; do the ranks share the folder?"
                )
        replace_file(directory / MANIFEST_NAME, Manifest(tensors=_place(job.plan, answers), files=files, extra=job.extra).encode())

    def report() -> dict[str, Any]:
        rows = write()
        return {"rows": rows, "chunks": [[w.name, *w.box.to_json(), file, _key(w, job.plan)] for file, ws in job.files.items() for w in ws]}

    try:
        answers = control.run(f"writing {directory}", report)
        written = [answer["rows"] for answer in answers]
        control.run(f"committing {directory}", publish)
    except CheckpointingException:
        # A rename that was made but could not be confirmed leaves a checkpoint; its files must then stay.
        if not is_checkpoint(directory):
            job.discard()
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
        self._thread = threading.Thread(target=self._write, args=(self._job,), name=f"save {job.directory.name}", daemon=True)
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


def _snapshot(shard: ShardedTensor) -> ShardedTensor:
    return ShardedTensor(shard.data.detach().to("cpu", copy=True), shard.global_shape, shard.offset, shard.replica)
