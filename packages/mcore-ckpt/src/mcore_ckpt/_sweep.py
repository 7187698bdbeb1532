# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensors filled from files: from one that is read through and hashed, on the way; from the others, what is asked of them."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import ShardFile, open_shard
from mcore_ckpt._plan import Read, slabs
from mcore_ckpt._storage import (
    BLOCK_BYTES,
    FileRecord,
    StoredFile,
    Taker,
    bytes_as_tensor,
    digest_file,
    dtype_of,
    tensor_bytes,
)
from mcore_ckpt.chunks import Box

__all__ = ["Filling", "fill_from", "in_threads", "stored_part", "sweep_file"]

_SLAB_BYTES = 32 * 2**20
"""Of a mapped file that is copied out of at a time."""


@dataclass(frozen=True, eq=False)
class Filling:
    """A read and the tensor, or part of one, that it fills."""

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


def sweep_file(file: StoredFile, fillings: Sequence[Filling]) -> FileRecord:
    """Length and SHA-256 of a file that is read once from end to end, and what ``fillings`` ask of it on the way.

    Raises:
        CheckpointingException: it is no file of tensors, or they do not lie there as the manifest says.
    """
    if not fillings:
        return digest_file(file)
    shard = open_shard(file)
    by_key: dict[str, list[Filling]] = {}
    for filling in fillings:
        by_key.setdefault(filling.read.chunk.key, []).append(filling)
    takers: list[Taker] = []
    scattered: list[Filling] = []
    for key, its in by_key.items():
        begin = shard.begin(key)
        if begin is None:
            scattered += its
        else:
            takers += _takers(shard, begin, its)
    record = digest_file(file, sorted(takers, key=lambda taker: taker.begin))
    fill_from(shard, scattered)
    return record


def _takers(shard: ShardFile, begin: int, fillings: Sequence[Filling]) -> Iterable[Taker]:
    """Who takes the bytes of one stored tensor, the first of which is ``begin``."""
    chunk, dtype = fillings[0].read.chunk, fillings[0].target.dtype
    for filling in fillings:
        _check_slot(shard, filling.read, filling.target.dtype)
    if len(fillings) == 1 and _is_run(fillings[0]):
        (filling,) = fillings
        first = begin + _place(filling.read.box.relative_to(chunk.box), chunk.box) * dtype.itemsize
        yield Taker(first, first + filling.target.nbytes, tensor_bytes(filling.target))
        return
    for piece in slabs(chunk.box, max(1, BLOCK_BYTES // dtype.itemsize)):
        if any(piece.intersect(filling.read.box) for filling in fillings):
            first = begin + _place(piece.relative_to(chunk.box), chunk.box) * dtype.itemsize
            yield Taker(first, first + piece.num_elements * dtype.itemsize, partial(_hand_out, piece, fillings))


def _place(inner: Box, outer: Box) -> int:
    """Number of the first element of ``inner`` in a tensor of the shape of ``outer``."""
    place = 0
    for begin, size in zip(inner.offset, outer.shape, strict=True):
        place = place * size + begin
    return place


def _hand_out(piece: Box, fillings: Iterable[Filling], content: memoryview) -> None:
    """Copy what ``fillings`` want of ``piece`` out of its bytes."""
    stored: Tensor | None = None
    for filling in fillings:
        common = piece.intersect(filling.read.box)
        if common is not None:
            if stored is None:
                stored = bytes_as_tensor(content, filling.target.dtype, piece.shape)
            filling.target[common.relative_to(filling.read.box).slices()].copy_(stored[common.relative_to(piece).slices()])


def fill_from(shard: ShardFile, fillings: Iterable[Filling]) -> None:
    """Read what is asked of an open file; its digest is not compared.

    Raises:
        CheckpointingException: it does not lie there as the manifest says.
    """
    for filling in fillings:
        read, target = filling.read, filling.target
        _check_slot(shard, read, target.dtype)
        begin = shard.begin(read.chunk.key)
        if begin is not None and _is_run(filling):
            first = begin + _place(read.box.relative_to(read.chunk.box), read.chunk.box) * target.dtype.itemsize
            shard.file.read_into(first, tensor_bytes(target))
            continue
        for piece in slabs(read.box, max(1, _SLAB_BYTES // target.dtype.itemsize)):
            part = stored_part(shard, Read(read.name, read.chunk, piece), target.dtype)
            target[piece.relative_to(read.box).slices()].copy_(part)


def _is_run(filling: Filling) -> bool:
    """Whether a read fills memory of the host, from one end to the other, with bytes that follow one another in the file."""
    read, target = filling.read, filling.target
    if target.device.type != "cpu" or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return False
    return read.box.shape[1:] == read.chunk.box.shape[1:]


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
