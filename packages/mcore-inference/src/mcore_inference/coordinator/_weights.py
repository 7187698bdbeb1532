# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights on their way to engines: chunks as bytes in messages of bounded size, and back."""

import math
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mcore_inference.adapters import LoraWeights
from mcore_inference.coordinator._messages import LoadLora, LoadWeights, WeightBucket, WireChunk
from mcore_inference.engine import WeightLoadError, WeightSlice

_HEAD_BYTES = 256
"""Of a chunk's shape and offsets, at most."""


def pack(chunks: Iterable[tuple[str, Tensor | WeightSlice]], bucket_bytes: int) -> Iterator[list[WireChunk]]:
    """Chunks by buckets of at most ``bucket_bytes``; longer ones are cut into boxes.

    Raises:
        WeightLoadError: a chunk is no plain tensor.
    """
    bucket: list[WireChunk] = []
    num_bytes = 0
    for name, part in chunks:
        tensor = part.tensor if isinstance(part, WeightSlice) else part
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
            raise WeightLoadError(f"{name} is a {type(tensor).__name__}; give a plain tensor with memory, or a WeightSlice of one")
        offsets = part.offsets if isinstance(part, WeightSlice) else None
        for box, begin in _boxes(tensor.detach(), offsets, max(1, bucket_bytes - _HEAD_BYTES - len(name))):
            data = box.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            size = len(data) + _HEAD_BYTES + len(name)
            if bucket and num_bytes + size > bucket_bytes:
                yield bucket
                bucket, num_bytes = [], 0
            dtype = str(tensor.dtype).removeprefix("torch.")
            bucket.append(WireChunk(name=name, dtype=dtype, shape=list(box.shape), offsets=begin, data=data))
            num_bytes += size
    if bucket:
        yield bucket


def _boxes(tensor: Tensor, offsets: tuple[int, ...] | None, max_bytes: int) -> Iterator[tuple[Tensor, list[int] | None]]:
    """A tensor, or parts of it that are small enough, with their offsets in the parameter; None for a whole one."""
    if tensor.nbytes <= max_bytes or tensor.numel() <= 1:
        yield tensor, None if offsets is None else list(offsets)
        return
    begin = (0,) * tensor.dim() if offsets is None else offsets
    dim = max(range(tensor.dim()), key=lambda each: tensor.shape[each])
    half = tensor.shape[dim] // 2
    for start, part in ((0, tensor.narrow(dim, 0, half)), (half, tensor.narrow(dim, half, tensor.shape[dim] - half))):
        yield from _boxes(part, (*begin[:dim], begin[dim] + start, *begin[dim + 1 :]), max_bytes)


def unpack(chunk: WireChunk) -> tuple[str, Tensor | WeightSlice]:
    """A chunk as engines take it.

    Raises:
        WeightLoadError: an unknown dtype, or another number of bytes than its shape has.
    """
    dtype = getattr(torch, chunk.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightLoadError(f"{chunk.name} has the unknown dtype {chunk.dtype[:40]!r}")
    if min(chunk.shape, default=1) < 0 or math.prod(chunk.shape) * dtype.itemsize != len(chunk.data):
        raise WeightLoadError(f"{chunk.name} of shape {chunk.shape[:8]} and dtype {chunk.dtype} came with {len(chunk.data)} bytes")
    tensor = torch.frombuffer(bytearray(chunk.data), dtype=dtype) if chunk.data else torch.empty(0, dtype=dtype)
    tensor = tensor.view(chunk.shape)
    return chunk.name, (tensor if chunk.offsets is None else WeightSlice(tensor=tensor, offsets=tuple(chunk.offsets)))


class LoraReceiver:
    """The buckets of an adapter that a worker takes.

    Args:
        message: that began the load.
    """

    def __init__(self, message: LoadLora) -> None:
        self.message = message
        self._chunks: list[WireChunk] = []

    def put(self, bucket: WeightBucket) -> bool:
        """Whether it is the last one."""
        self._chunks += bucket.chunks
        return bucket.end == "whole"

    def weights(self) -> LoraWeights:
        """The adapter, in host memory.

        Raises:
            ValueError: parts of a matrix are missing or overlap, or matrices do not make an adapter.
            WeightLoadError: as of ``unpack``.
        """
        parts: dict[str, list[WeightSlice]] = {}
        for name, part in map(unpack, self._chunks):
            box = part if isinstance(part, WeightSlice) else WeightSlice(tensor=part, offsets=(0,) * part.dim())
            parts.setdefault(name, []).append(box)
        self._chunks = []
        tensors = {name: _joined(name, boxes) for name, boxes in parts.items()}
        return LoraWeights.of(tensors, rank=self.message.rank, alpha=self.message.alpha)


def _joined(name: str, boxes: Sequence[WeightSlice]) -> Tensor:
    """A matrix of its parts, which reach to its end."""
    first = boxes[0].tensor
    if len(boxes) == 1 and not any(boxes[0].offsets):
        return first
    ends = [[at + size for at, size in zip(box.offsets, box.tensor.shape, strict=True)] for box in boxes]
    shape = [max(sizes) for sizes in zip(*ends, strict=True)]
    if math.prod(shape) != sum(box.tensor.numel() for box in boxes):
        raise ValueError(f"{name} came in parts that are not a tensor of shape {shape}")
    # Where parts overlap others are missing, and no adapter has NaN.
    whole = torch.full(shape, math.nan, dtype=first.dtype)
    for box in boxes:
        region = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.tensor.shape, strict=True))
        whole[region] = box.tensor
    return whole


class WeightReceiver:
    """The buckets of one load, from the loop of a worker to the thread of its engine.

    Args:
        message: that began the load.
        take: called in the engine's thread with the number of each bucket that it begins to read, but the last.
    """

    def __init__(self, message: LoadWeights, take: Callable[[int], None]) -> None:
        self.message = message
        self._take = take
        self._buckets: queue.SimpleQueue[WeightBucket] = queue.SimpleQueue()

    def put(self, bucket: WeightBucket) -> None:
        """From the loop."""
        self._buckets.put(bucket)

    def give_up(self) -> None:
        """No bucket follows."""
        self.put(WeightBucket(call=self.message.call, index=0, chunks=[], end="aborted"))

    def chunks(self) -> Iterator[tuple[str, Tensor | WeightSlice]]:
        """In the engine's thread.

        Raises:
            WeightLoadError: the load was given up, or no bucket came in time.
        """
        while True:
            try:
                bucket = self._buckets.get(timeout=self.message.timeout_s)
            except queue.Empty:
                raise WeightLoadError(f"no weights came for {self.message.timeout_s:g} s") from None
            if bucket.end == "aborted":
                raise WeightLoadError("the load was given up before all weights were sent")
            if not bucket.end:
                self._take(bucket.index)
            for chunk in bucket.chunks:
                yield unpack(chunk)
            if bucket.end:
                return
