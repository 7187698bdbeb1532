# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensors filled from files: from one that is read through and hashed, on the way; from the others, what is asked of them."""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mcore_ckpt._core._plan import Read, slabs
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._formats import ShardFile, open_shard
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

_SLAB_BYTES = 8 * 2**20
"""Of a mapped file, from which a thread copies at a time."""


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
    by_chunk: dict[tuple[str, int | None], list[Filling]] = {}
    for filling in fillings:
        by_chunk.setdefault((filling.read.chunk.key, filling.read.chunk.start), []).append(filling)
    takers: list[Taker] = []
    scattered: list[Filling] = []
    for its in by_chunk.values():
        begin = _begin(shard, its[0])
        if begin is None:
            scattered += its
        else:
            takers += _takers(shard, begin, its)
    record = digest_file(file, sorted(takers, key=lambda taker: taker.begin))
    fill_from(shard, scattered)
    return record


def _begin(shard: ShardFile, filling: Filling) -> int | None:
    """First byte in the file of the chunk that is read; None where its elements do not follow one another."""
    begin, start = shard.begin(filling.read.chunk.key), filling.read.chunk.start
    return begin if begin is None or start is None else begin + start * filling.target.dtype.itemsize


def _takers(shard: ShardFile, begin: int, fillings: Sequence[Filling]) -> Iterable[Taker]:
    """Who takes the bytes of one chunk, the first of which is ``begin``."""
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
        begin = _begin(shard, filling)
        if begin is not None and _is_run(filling):
            first = begin + _place(read.box.relative_to(read.chunk.box), read.chunk.box) * target.dtype.itemsize
            shard.file.read_into(first, tensor_bytes(target))
            continue
        # Whole rows of the chunk are mapped, whatever part of them is wanted.
        row, stored_row = math.prod(read.box.shape[1:]), math.prod(read.chunk.box.shape[1:])
        for piece in slabs(read.box, max(1, _SLAB_BYTES // target.dtype.itemsize * row // max(1, stored_row))):
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
        said = "missing" if slot is None else f"{slot.dtype} {list(slot.shape)}"
        raise CheckpointingException(f"{file.file}: {chunk.key} is {said}, not what the manifest says")
    return read.box.relative_to(chunk.box).slices()
