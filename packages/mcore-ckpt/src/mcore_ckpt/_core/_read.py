# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Files of tensors read: one from end to end with its digest, or only the ranges that are asked for."""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mcore_ckpt._core._load_plan import Read, plan_load, slabs
from mcore_ckpt._core._manifest import Manifest, TensorRecord, read_manifest
from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._formats import ShardFile, open_shard
from mcore_ckpt._storage import (
    BLOCK_BYTES,
    ByteRangeSink,
    FileRecord,
    Folder,
    StoredFile,
    bytes_as_tensor,
    digest_file,
    dtype_of,
    itemsize,
    open_folder,
    tensor_bytes,
)
from mcore_ckpt.chunks import Box

__all__ = [
    "DAMAGED",
    "SLAB_BYTES",
    "CheckpointReader",
    "ReadTarget",
    "check_file",
    "check_files",
    "fill_from",
    "in_threads",
    "read_and_verify",
    "stored_part",
]

DAMAGED = "its SHA-256 is not the one in the manifest; the file is damaged"
_SLAB_BYTES = 8 * 2**20
"""Of a mapped file, from which a thread copies at a time."""


@dataclass(frozen=True, eq=False)
class ReadTarget:
    """A read, and the tensor or view that it fills."""

    read: Read
    target: Tensor


def in_threads(work: Callable[[str], None], names: Iterable[str], num_threads: int, targets: Iterable[Tensor] = ()) -> None:
    """Do ``work`` for each name, ``num_threads`` at a time; raises what the first of them raised.

    Args:
        work: what to do.
        names: for what.
        num_threads: 1 does it here.
        targets: tensors that it writes to. Threads queue elsewhere on a device, so what this one has queued there is waited for.
    """
    if num_threads == 1:
        for name in names:
            work(name)
        return
    for device in {target.device for target in targets if target.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
    with ThreadPoolExecutor(num_threads, "load") as pool:
        for _ in pool.map(work, names):
            pass


def check_files(
    directory: str | Path | Folder, manifest: Manifest, names: Iterable[str], *, digests: bool = True, num_threads: int = 1
) -> None:
    """Compare files with the manifest, ``num_threads`` at a time.

    Raises:
        CheckpointingException: one is missing, a link, or not what was written; names the first.
    """
    folder = open_folder(directory)
    in_threads(lambda name: check_file(folder, manifest, name, digests), names, num_threads if digests else 1)


def check_file(folder: Folder, manifest: Manifest, name: str, digests: bool) -> None:
    file, expected = StoredFile(folder, name), manifest.files[name]
    size = folder.size(name)
    if size is None:
        raise CheckpointingException(f"{file}: missing, or not a plain file")
    if size != expected.bytes:
        raise CheckpointingException(f"{file}: {size} bytes instead of {expected.bytes}; the file is damaged")
    # Another system's checkpoint has no digests.
    if digests and expected.sha256 and digest_file(file) != expected:
        raise CheckpointingException(f"{file}: {DAMAGED}")


def read_and_verify(file: StoredFile, read_targets: Sequence[ReadTarget]) -> FileRecord:
    """Read a file once from end to end: hash it, and fill ``read_targets`` from the same bytes. Returns its length and SHA-256.

    Raises:
        CheckpointingException: it is no file of tensors, or they do not lie there as the manifest says.
    """
    if not read_targets:
        return digest_file(file)
    shard = open_shard(file)
    by_chunk: dict[tuple[str, int | None], list[ReadTarget]] = {}
    for read_target in read_targets:
        by_chunk.setdefault((read_target.read.chunk.key, read_target.read.chunk.start), []).append(read_target)
    sinks: list[ByteRangeSink] = []
    scattered: list[ReadTarget] = []
    for chunk_targets in by_chunk.values():
        begin = _begin(shard, chunk_targets[0])
        if begin is None:
            scattered += chunk_targets
        else:
            sinks += _sinks(shard, begin, chunk_targets)
    record = digest_file(file, sorted(sinks, key=lambda sink: sink.begin))
    fill_from(shard, scattered)
    return record


def _begin(shard: ShardFile, read_target: ReadTarget) -> int | None:
    """First byte in the file of the chunk that is read; None where its elements do not follow one another."""
    begin, start = shard.begin(read_target.read.chunk.key), read_target.read.chunk.start
    return begin if begin is None or start is None else begin + start * read_target.target.dtype.itemsize


def _sinks(shard: ShardFile, begin: int, read_targets: Sequence[ReadTarget]) -> Iterable[ByteRangeSink]:
    """Sinks for the bytes of one chunk, which begins at byte ``begin``."""
    chunk, dtype = read_targets[0].read.chunk, read_targets[0].target.dtype
    for read_target in read_targets:
        _check_slot(shard, read_target.read, read_target.target.dtype)
    if len(read_targets) == 1 and _is_run(read_targets[0]):
        (read_target,) = read_targets
        first = begin + _place(read_target.read.box.relative_to(chunk.box), chunk.box) * dtype.itemsize
        yield ByteRangeSink(first, first + read_target.target.nbytes, tensor_bytes(read_target.target))
        return
    for piece in slabs(chunk.box, max(1, BLOCK_BYTES // dtype.itemsize)):
        if any(piece.intersect(read_target.read.box) for read_target in read_targets):
            first = begin + _place(piece.relative_to(chunk.box), chunk.box) * dtype.itemsize
            yield ByteRangeSink(first, first + piece.num_elements * dtype.itemsize, partial(_hand_out, piece, read_targets))


def _place(inner: Box, outer: Box) -> int:
    """Number of the first element of ``inner`` in a tensor of the shape of ``outer``."""
    place = 0
    for begin, size in zip(inner.offset, outer.shape, strict=True):
        place = place * size + begin
    return place


def _hand_out(piece: Box, read_targets: Iterable[ReadTarget], content: memoryview) -> None:
    """Copy the overlaps of ``piece`` with ``read_targets`` out of its bytes."""
    stored: Tensor | None = None
    for read_target in read_targets:
        common = piece.intersect(read_target.read.box)
        if common is not None:
            if stored is None:
                stored = bytes_as_tensor(content, read_target.target.dtype, piece.shape)
            read_target.target[common.relative_to(read_target.read.box).slices()].copy_(stored[common.relative_to(piece).slices()])


def fill_from(shard: ShardFile, read_targets: Iterable[ReadTarget]) -> None:
    """Fill ``read_targets`` from an open file; its digest is not compared.

    Raises:
        CheckpointingException: it does not lie there as the manifest says.
    """
    for read_target in read_targets:
        read, target = read_target.read, read_target.target
        _check_slot(shard, read, target.dtype)
        begin = _begin(shard, read_target)
        if begin is not None and _is_run(read_target):
            first = begin + _place(read.box.relative_to(read.chunk.box), read.chunk.box) * target.dtype.itemsize
            shard.file.read_into(first, tensor_bytes(target))
            continue
        # Whole rows of the chunk are mapped, whatever part of them is wanted.
        row, stored_row = math.prod(read.box.shape[1:]), math.prod(read.chunk.box.shape[1:])
        for piece in slabs(read.box, max(1, _SLAB_BYTES // target.dtype.itemsize * row // max(1, stored_row))):
            part = stored_part(shard, Read(read.name, read.chunk, piece), target.dtype)
            target[piece.relative_to(read.box).slices()].copy_(part)


def _is_run(read_target: ReadTarget) -> bool:
    """Whether a read fills memory of the host, from one end to the other, with bytes that follow one another in the file."""
    read, target = read_target.read, read_target.target
    if target.device.type != "cpu" or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return False
    return read.box.shape[1:] == read.chunk.box.shape[1:]


def stored_part(file: ShardFile, read: Read, dtype: torch.dtype) -> Tensor:
    """What ``read`` asks of an open file; copy what you keep.

    Raises:
        CheckpointingException: it does not lie there as the manifest says.
    """
    slices, chunk = _check_slot(file, read, dtype), read.chunk
    rows = (slices[0].start, slices[0].stop) if slices else (0, 1)
    if chunk.start is not None:
        inner = math.prod(chunk.box.shape[1:])
        flat = file.tensor(chunk.key, (chunk.start + rows[0] * inner, chunk.start + rows[1] * inner))
        stored = flat.reshape((rows[1] - rows[0], *chunk.box.shape[1:]) if slices else ())
    else:
        stored = file.tensor(chunk.key, rows if slices else None)
    return stored[:, *slices[1:]] if slices else stored


def _check_slot(file: ShardFile, read: Read, dtype: torch.dtype) -> tuple[slice, ...]:
    """Where ``read`` lies in the stored tensor of its chunk.

    Raises:
        CheckpointingException: see `stored_part`.
    """
    chunk, slot = read.chunk, file.slot(read.chunk.key)
    if chunk.start is None:
        fits = slot is not None and slot.shape == chunk.box.shape
    else:
        fits = slot is not None and len(slot.shape) == 1 and chunk.start + chunk.box.num_elements <= slot.shape[0]
    if slot is None or not fits or dtype_of(slot.dtype) != dtype:
        stored = "missing" if slot is None else f"{slot.dtype} {list(slot.shape)}"
        raise CheckpointingException(f"{file.file}: {chunk.key} is {stored}, not what the manifest says")
    return read.box.relative_to(chunk.box).slices()


SLAB_BYTES = 32 * 2**20
"""Copied at once: what a mapped file holds in memory beside the tensor that is filled."""


class CheckpointReader:
    """Reads tensors of a checkpoint one by one; each file is opened once.

    Args:
        directory: a committed checkpoint, of this library or one that torch wrote.

    Raises:
        CheckpointingException: it is none.
    """

    def __init__(self, directory: str | Path | Folder) -> None:
        self.folder = open_folder(directory)
        self.manifest: Manifest = read_manifest(self.folder)
        self._files: dict[str, ShardFile] = {}

    def record(self, name: str) -> TensorRecord:
        """What the manifest says about a tensor.

        Raises:
            CheckpointingException: no such tensor; names the nearest.
        """
        if name not in self.manifest.tensors:
            raise CheckpointingException(f"{self.folder} has no tensor {list_names([name], self.manifest.tensors)}")
        return self.manifest.tensors[name]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor, or all of it, in host memory of its own; digests are not compared.

        Raises:
            CheckpointingException: no such tensor, or it does not lie where the manifest says.
        """
        record = self.record(name)
        box = Box.whole(record.shape) if box is None else box
        target = torch.empty(box.shape, dtype=dtype_of(record.dtype))
        room = max(1, SLAB_BYTES // itemsize(record.dtype))
        for read in plan_load([(name, box)], {name: record}):
            for piece in slabs(read.box, room):
                part = stored_part(self._open(read.chunk.file), Read(name, read.chunk, piece), target.dtype)
                target[piece.relative_to(box).slices()].copy_(part)
        return target

    def _open(self, name: str) -> ShardFile:
        if name not in self._files:
            check_files(self.folder, self.manifest, [name], digests=False)
            self._files[name] = open_shard(StoredFile(self.folder, name))
        return self._files[name]
