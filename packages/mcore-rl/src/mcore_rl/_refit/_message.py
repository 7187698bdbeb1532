# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Boxes of weights one behind the other, as bytes: what goes from one rank to another."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_ckpt.chunks import Box
from mcore_rl._refit._plan import WeightCopy

_ALIGNMENT = 16


@dataclass(frozen=True)
class WeightMessage:
    """What goes from one rank to another in one bucket."""

    places: list[tuple[WeightCopy, torch.dtype, slice]]
    """Bytes of each box."""
    num_bytes: int

    @classmethod
    def of(cls, copies: Iterable[tuple[WeightCopy, torch.dtype]]) -> "WeightMessage":
        """Boxes in this order, each where its dtype is aligned."""
        places, end = [], 0
        for copy, dtype in copies:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + copy.box.num_elements * dtype.itemsize
            places.append((copy, dtype, slice(begin, end)))
        return cls(places, end)

    def split(self, limit: int) -> list["WeightMessage"]:
        """The same in parts of at most ``limit`` bytes, but no less than one element; boxes are cut where one part has no room for them."""
        if self.num_bytes <= limit:
            return [self]
        parts: list[list[tuple[WeightCopy, torch.dtype]]] = []
        room = 0
        for copy, dtype, _ in self.places:
            for box in cut_box(copy.box, max(1, limit // dtype.itemsize)):
                size = -(-box.num_elements * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
                if size > room or not parts:
                    parts.append([])
                    room = limit
                parts[-1].append((copy if box == copy.box else dataclasses.replace(copy, box=box), dtype))
                room -= size
        return [WeightMessage.of(part) for part in parts]

    def empty(self, device: torch.device) -> Tensor:
        """Room for its bytes."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def pack(self, held: Mapping[tuple[str, Box], Tensor], buffer: Tensor) -> None:
        """Write the bytes of what this rank holds into a buffer of at least ``num_bytes``."""
        for copy, dtype, span in self.places:
            buffer[span].view(dtype).view(copy.box.shape).copy_(held[copy.name, copy.source][copy.source_slices])

    def unpack(self, buffer: Tensor) -> Iterator[tuple[str, Box, Tensor]]:
        """Name, box and value of each part of a buffer, in its memory."""
        for copy, dtype, span in self.places:
            # Detached, or its base would keep the buffer when it itself no longer does.
            yield copy.name, copy.box, buffer[span].view(dtype).view(copy.box.shape).detach()


def cut_box(box: Box, most: int) -> Sequence[Box]:
    """A box in boxes of at most so many elements, halved along the first dim that can be."""
    if box.num_elements <= most:
        return [box]
    dim = next(dim for dim, size in enumerate(box.shape) if size > 1)
    half = box.shape[dim] // 2
    first = (*box.shape[:dim], half, *box.shape[dim + 1 :])
    second = (*box.shape[:dim], box.shape[dim] - half, *box.shape[dim + 1 :])
    begin = (*box.offset[:dim], box.offset[dim] + half, *box.offset[dim + 1 :])
    return [*cut_box(Box(box.offset, first), most), *cut_box(Box(begin, second), most)]
