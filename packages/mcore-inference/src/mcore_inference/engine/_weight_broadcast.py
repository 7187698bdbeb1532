# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights on their way from the first rank of a split engine to the others, in buckets."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mcore_inference.engine._weights import WeightChunk, WeightLoadError, WeightSlice, ends_buffer
from mcore_parallel.groups import Group

_BUCKET_BYTES = 256 * 2**20
"""Of one broadcast; a longer chunk has one of its own."""
_ALIGNMENT = 16
"""Bytes at whose multiples a chunk begins, so that any dtype can be read in place."""


class WeightSender:
    """Sends the chunks of one load, as they are read.

    Args:
        group: the ranks of the model; this is the first.
        device: whose memory the group sends.
        tell: sends a message to all of them.
        watch: entered around each broadcast, which waits for the others without end; gives None when all have memory for it, or which one
            has none, and why.
    """

    def __init__(
        self,
        group: Group,
        device: torch.device,
        tell: Callable[[dict[str, Any]], None],
        watch: Callable[[], AbstractContextManager[str | None]],
    ) -> None:
        self._group, self._device, self._tell, self._watch = group, device, tell, watch
        self._is_whole = False
        self._has_ended = False

    def chunks(self, chunks: Iterable[WeightChunk]) -> Iterator[WeightChunk]:
        """The same chunks, each after it was sent.

        Raises:
            WeightLoadError: a rank has no memory for a bucket, which is sent to none then.
        """
        bucket: list[WeightChunk] = []
        num_bytes = 0
        for chunk in chunks:
            tensor = _tensor_of(chunk)
            if tensor is None:
                # Whoever checks chunks refuses this one by name.
                yield chunk
                continue
            bucket.append(chunk)
            num_bytes += _aligned(tensor.nbytes)
            if num_bytes >= _BUCKET_BYTES or ends_buffer(chunk[1]):
                self._send(bucket)
                yield from bucket
                bucket.clear()
                num_bytes = 0
        self._send(bucket)
        yield from bucket
        self._is_whole = True

    def end(self) -> None:
        """Say that no chunk follows, and whether all were read."""
        if not self._has_ended:
            self._has_ended = True
            self._tell({"chunks": None, "is_whole": self._is_whole})

    def _send(self, bucket: list[WeightChunk]) -> None:
        if not bucket:
            return
        heads: list[list[Any]] = []
        tensors = [_tensor_of(chunk) for chunk in bucket]
        flat = _buffer([tensor.nbytes for tensor in tensors if tensor is not None], self._device)
        at = 0
        for (name, part), tensor in zip(bucket, tensors, strict=True):
            assert tensor is not None, "others are not in buckets"
            offsets = part.offsets if isinstance(part, WeightSlice) else None
            heads.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offsets])
            flat[at : at + tensor.nbytes].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            at += _aligned(tensor.nbytes)
        self._tell({"chunks": heads})
        with self._watch() as refusal:
            self._tell({"is_sent": refusal is None})
            if refusal is not None:
                raise WeightLoadError(refusal)
            dist.broadcast(flat, group=self._group.pg, group_src=0)
            if flat.is_cuda:
                # The host would wait later, unwatched.
                torch.cuda.current_stream(flat.device).synchronize()


def received_chunks(
    next_message: Callable[[], Mapping[str, Any]], group: Group, device: torch.device, reach: Callable[[Exception | None], None]
) -> Iterator[WeightChunk]:
    """The chunks that the first rank sends; whoever takes them takes all, whatever fails meanwhile.

    Args:
        next_message: waits for a message of the first rank.
        group: the ranks of the model.
        device: whose memory the group sends.
        reach: called before each broadcast, with what leaves no memory for it.

    Raises:
        WeightLoadError: it did not send them all.
        Exception: what left no memory for a bucket here.
    """
    failure: Exception | None = None
    while True:
        message = next_message()
        heads = message["chunks"]
        if heads is None:
            if failure is not None:
                raise failure
            if not message["is_whole"]:
                raise WeightLoadError("the first rank did not send all weights")
            return
        sizes = [_num_bytes(dtype, shape) for _, dtype, shape, _ in heads]
        try:
            flat = _buffer(sizes, device)
        except Exception as error:
            failure = error
        reach(failure)
        if not next_message()["is_sent"]:
            continue
        dist.broadcast(flat, group=group.pg, group_src=0)
        at = 0
        for (name, dtype, shape, offsets), size in zip(heads, sizes, strict=True):
            tensor = flat[at : at + size].view(getattr(torch, dtype)).view(shape)
            yield name, (tensor if offsets is None else WeightSlice(tensor=tensor, offsets=tuple(offsets)))
            at += _aligned(size)


def _tensor_of(chunk: WeightChunk) -> Tensor | None:
    """The memory of a chunk; None for what has none that could be sent."""
    _, part = chunk
    tensor = part.tensor if isinstance(part, WeightSlice) else part
    return tensor if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta else None


def _buffer(sizes: Iterable[int], device: torch.device) -> Tensor:
    """For chunks of so many bytes, side by side."""
    return torch.empty(sum(_aligned(size) for size in sizes), dtype=torch.uint8, device=device)


def _num_bytes(dtype: str, shape: list[int]) -> int:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
