# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The files that one rank writes, and the commit: renaming the manifest into place."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mcore_ckpt._core._assets import AssetSource
from mcore_ckpt._core._control import Control, LostContact
from mcore_ckpt._core._manifest import MANIFEST_NAME, AssetRecord, Chunk, Manifest, TensorRecord, is_checkpoint
from mcore_ckpt._core._save_plan import Write
from mcore_ckpt._core._sharded import DeferredTensor, ShardedTensor
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import BACKEND_NAME, METADATA_NAME, Place, side_files, write_shard
from mcore_ckpt._storage import FileRecord, Folder, StoredFile, WatchedFolder, write_hashed
from mcore_ckpt.chunks import Box

__all__ = ["SIDE_NAMES", "SaveJob", "commit"]

SIDE_NAMES = tuple(name + end for name in (METADATA_NAME, BACKEND_NAME, MANIFEST_NAME) for end in ("", ".partial"))
"""Files beside the shards; only a commit writes the manifest."""


@dataclass(frozen=True, kw_only=True)
class SaveJob:
    """One rank's part of one save."""

    control: Control
    directory: Folder
    extra: Mapping[str, Any]
    format: str
    tensors: Mapping[str, TensorRecord]
    """The tensors of ``files``; on the first rank, all of the checkpoint. Their chunks are still empty."""
    files: Mapping[str, list[Write]]
    """This rank's files by name."""
    shards: Mapping[tuple[str, Box], ShardedTensor | DeferredTensor]
    num_threads: int = 1
    """Files written at a time."""
    assets: Mapping[str, AssetSource] = field(default_factory=dict)
    """By file; on the first rank only."""
    values: Mapping[str, Place] = field(default_factory=dict)
    """As in `SaveOptions`."""

    @property
    def names(self) -> list[str]:
        """Names of all files that this rank writes."""
        return [*self.files, *self.assets]

    def write(self, on_bytes: Callable[[int], None] | None = None) -> list[list[Any]]:
        """Write this rank's files and assets; [name, bytes, sha256, keys of its tensors] each. No collectives: any thread will do.

        Args:
            on_bytes: told of bytes as they are written; what it raises ends the save.
        """
        failures: list[BaseException] = []

        def passed(count: int) -> None:
            if failures:
                raise CheckpointingException("another file of this rank failed")
            if on_bytes is not None:
                on_bytes(count)

        folder = WatchedFolder(self.directory, passed)

        def write_one(file: str) -> list[Any]:
            try:
                return self._write_file(folder, file)
            except BaseException as error:
                failures.append(error)
                raise

        try:
            if self.num_threads == 1 or len(self.files) < 2:
                results = [write_one(file) for file in self.names]
            else:
                self._finish_devices()
                with ThreadPoolExecutor(self.num_threads, "save") as pool:
                    results = list(pool.map(write_one, self.names))
            if results:
                self.directory.sync()
        except BaseException:
            self.discard()
            if failures:
                # The first failure; the others follow from it.
                raise failures[0] from None
            raise
        return results

    def _finish_devices(self) -> None:
        """Wait for what this thread has queued on devices: other threads queue their copies elsewhere."""
        devices = {shard.data.device for shard in self.shards.values() if isinstance(shard, ShardedTensor) and shard.data.is_cuda}
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def _write_file(self, folder: Folder, file: str) -> list[Any]:
        if file in self.assets:
            written = write_hashed(StoredFile(folder, file), [self.assets[file].read()])
            return [file, written.bytes, written.sha256, []]
        writes = self.files[file]
        keys = [_key(write, self.tensors) for write in writes]
        entries = [(key, *self._entry(write)) for key, write in zip(keys, writes, strict=True)]
        record, places = write_shard(StoredFile(folder, file), entries)
        return [file, record.bytes, record.sha256, [places[key] for key in keys]]

    def discard(self) -> None:
        """Remove this rank's files of a save that failed."""
        for file in self.names:
            with contextlib.suppress(OSError):
                self.directory.remove(file)

    def _entry(self, write: Write) -> tuple[str, tuple[int, ...], Callable[[], Tensor]]:
        tensor = self.tensors[write.name]
        return tensor.dtype, write.box.shape, partial(_data, self.shards[write.name, write.box])


def _data(shard: ShardedTensor | DeferredTensor) -> Tensor:
    return shard.data


def _key(write: Write, tensors: Mapping[str, TensorRecord]) -> str:
    """The plain name where the whole tensor is in one chunk: such a file reads like any other safetensors file."""
    if write.box == Box.whole(tensors[write.name].shape):
        return write.name
    return f"{write.name}@{'.'.join(map(str, write.box.offset))}"


def commit(job: SaveJob, write: Callable[[], list[list[Any]]]) -> None:
    """Gather the records of all ranks' files; the first rank publishes the manifest. Collective."""
    control, directory = job.control, job.directory

    def publish() -> None:
        if control.rank:
            return
        written = [json.loads(text) for text in texts]
        files = {name: FileRecord(size, digest) for rows, _ in written for name, size, digest in rows}
        for name, record in files.items():
            size = directory.size(name)
            if size != record.bytes:
                seen = "is not" if size is None else f"has {size} bytes"
                raise CheckpointingException(f"{name} {seen} here, its writer wrote {record.bytes}; do the ranks share the folder?")
        tensors = _place(job.tensors, (chunks for _, chunks in written))
        stored = {name: (t.dtype, t.shape, [(chunk.file, chunk.key, chunk.box) for chunk in t.chunks]) for name, t in tensors.items()}
        sides = side_files(job.format, stored, job.values)
        for name, content in sides.items():
            directory.publish(name, content)
        side_records = {name: FileRecord(len(content), hashlib.sha256(content).hexdigest()) for name, content in sides.items()}
        records = {name: files.pop(name) for name in job.assets}
        assets = {job.assets[name].name: AssetRecord(name, record.bytes, record.sha256) for name, record in records.items()}
        manifest = Manifest(tensors=tensors, files=files, extra=job.extra, assets=assets, side_files=side_records)
        directory.publish(MANIFEST_NAME, manifest.encode())

    mine = ""

    def report() -> int:
        nonlocal mine
        rows = write()
        pairs = [(file, w, key) for file, *_, keys in rows if file in job.files for w, key in zip(job.files[file], keys, strict=True)]
        chunks = [[w.name, *w.box.to_json(), file, key] for file, w, key in pairs]
        mine = json.dumps([[row[:3] for row in rows], chunks], separators=(",", ":"))
        return len(mine.encode())

    try:
        lengths = control.run(f"writing {directory}", report)
        texts = control.collect(f"writing {directory}", mine, dict(enumerate(lengths)))
        control.run(f"committing {directory}", publish)
    except LostContact:
        # The first rank may be committing at this very moment: the files stay, and go with the next save if it was not.
        raise
    except CheckpointingException:
        # A rename that was made but could not be confirmed leaves a checkpoint; its files must then stay. The first rank knows.
        if not control.run(f"looking at {directory}", lambda: control.rank == 0 and is_checkpoint(directory))[0]:
            job.discard()
            if control.rank == 0:
                for name in SIDE_NAMES:
                    with contextlib.suppress(OSError):
                        directory.remove(name)
            # No rank writes any more; the last one to get here finds nothing left.
            with contextlib.suppress(OSError):
                directory.remove_all(only_empty=True)
        raise


def _place(tensors: Mapping[str, TensorRecord], written: Iterable[Any]) -> dict[str, TensorRecord]:
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for rows in written:
        for name, offset, shape, file, key in rows:
            chunks[name].append(Chunk(file, key, Box(tuple(offset), tuple(shape))))
    return {name: TensorRecord(tensor.dtype, tensor.shape, tuple(chunks[name])) for name, tensor in tensors.items()}
