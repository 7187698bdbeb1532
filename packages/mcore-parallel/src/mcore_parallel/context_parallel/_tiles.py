# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The score matrices a rank has to compute, as data."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api
from mcore_parallel.context_parallel._zigzag import Segment

Window = tuple[int, int]
"""(left, right): a query sees keys at most so far before and behind it; -1 for no limit. Between blocks of different lengths
distances are counted from their ends: the last query stands at the last key."""


class Block(NamedTuple):
    """Scores of consecutive queries against consecutive keys of one sequence; every query sees a key."""

    query: int
    """Row of the first query."""
    queries: int
    key: int
    keys: int
    window: Window


@dataclass(frozen=True)
class Spans:
    """Runs of rows of a tensor [T, ...]. What a device needs to know of them is sent there once."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    _on_device: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def stride(self) -> int | None:
        """Rows from one run to the next when all runs are equally long and apart (1 for a single one); None otherwise."""
        steps = {b - a for a, b in itertools.pairwise(self.starts)} or {1}
        return steps.pop() if len(set(self.lengths)) == len(steps) == 1 else None

    def rows(self, device: torch.device) -> Tensor:
        """[sum(lengths)] int64, numbers of the rows."""
        if ("rows", device) not in self._on_device:
            parts = [torch.arange(start, start + length) for start, length in zip(self.starts, self.lengths, strict=True)]
            self._on_device["rows", device] = to_device(torch.cat(parts), device)
        return self._on_device["rows", device]

    def bounds(self, device: torch.device) -> Tensor:
        """[N + 1] int32, where each run begins when they stand behind one another, and the last one ends."""
        if ("bounds", device) not in self._on_device:
            bounds = [0, *itertools.accumulate(self.lengths)]
            self._on_device["bounds", device] = to_device(torch.tensor(bounds, dtype=torch.int32), device)
        return self._on_device["bounds", device]

    def view(self, x: Tensor) -> Tensor:
        """[N, L, ...] of ``x`` [T, ...], sharing its memory; there must be a ``stride``."""
        assert self.stride is not None
        strides = (self.stride * x.stride(0), *x.stride())
        return x.as_strided((len(self.starts), self.lengths[0], *x.shape[1:]), strides, x.storage_offset() + self.starts[0] * x.stride(0))


@internal_api
def sequence_of_tokens(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """[T] int64, the packed sequence of each token; nothing waits for the device.

    Args:
        cu_seqlens: [N + 1] bounds, on any device; some sequences may be empty.
        num_tokens: T, which the last bound is.
    """
    tokens = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return torch.searchsorted(cu_seqlens, tokens, right=True) - 1


@internal_api
@dataclass(frozen=True)
class DeviceBounds:
    """Packed sequences whose bounds the host does not know."""

    cu_seqlens: Tensor
    """[N + 1] int32 on the device; the last one is T."""
    max_seqlen: int
    """No sequence is longer."""


@internal_api
@dataclass(frozen=True)
class Tile:
    """Blocks of several sequences under one window; no row of queries or keys is in two of them."""

    queries: Spans
    keys: Spans
    window: Window
    within: DeviceBounds | None = None
    """Sequences that the one block of all rows consists of; None where blocks are sequences, or parts of them."""

    @classmethod
    def of_all(cls, num_rows: int, window: Window, within: DeviceBounds) -> "Tile":
        """All rows, in sequences that the device knows."""
        rows = Spans((0,), (num_rows,))
        return cls(rows, rows, window, within)

    @cached_property
    def is_even(self) -> bool:
        """All blocks have one shape and can be viewed as one batch."""
        return self.queries.stride is not None and self.keys.stride is not None


@internal_api
def to_device(x: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on a device; the host does not wait for what runs there."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@internal_api
def plan_tiles(queries: Sequence[Sequence[Segment]], keys: Sequence[Sequence[Segment]], window: Window) -> list[Tile]:
    """The tiles that cover every score the window lets through, and next to no other.

    Args:
        queries: of every sequence the segments of the queries.
        keys: of every sequence the segments of the keys.
        window: bounds of key position minus query position.
    """
    tiles: dict[tuple[int, Window], list[Block]] = {}
    for own, theirs in zip(queries, keys, strict=True):
        for order, block in enumerate(plan_blocks(own, theirs, window)):
            tiles.setdefault((order, block.window), []).append(block)
    return [
        Tile(
            Spans(tuple(block.query for block in blocks), tuple(block.queries for block in blocks)),
            Spans(tuple(block.key for block in blocks), tuple(block.keys for block in blocks)),
            key_range,
        )
        for (_, key_range), blocks in tiles.items()
    ]


def plan_blocks(queries: Sequence[Segment], keys: Sequence[Segment], window: Window) -> list[Block]:
    """The blocks of one sequence; neighbours that one window describes are one block, with no more queries than keys under a window."""
    blocks: list[Block] = []
    for own in queries:
        row: list[Block] = []
        for theirs in keys:
            block = _block(own, theirs, window)
            if block is None:
                continue
            if row and _extends_keys(row[-1], block):
                last = row.pop()
                block = block._replace(key=last.key, keys=last.keys + block.keys)
            row.append(block)
        if len(blocks) == len(row) == 1 and _extends_queries(blocks[0], row[0]):
            last, block = blocks.pop(), row.pop()
            row = [block._replace(query=last.query, queries=last.queries + block.queries)]
        blocks += row
    return [part for block in blocks for part in _no_taller_than_wide(block)]


def _block(own: Segment, theirs: Segment, window: Window) -> Block | None:
    """What the window leaves of two segments, cut to the queries and keys that meet at all."""
    left, right = window
    q0, q1 = own.position, own.position + own.length
    k0, k1 = theirs.position, theirs.position + theirs.length
    if left >= 0:
        k0, q1 = max(k0, q0 - left), min(q1, k1 + left)
    if right >= 0:
        k1, q0 = min(k1, q1 + right), max(q0, k0 - right)
    if q0 >= q1 or k0 >= k1:
        return None
    # Counted from the ends, as the kernels do.
    left = k1 - q1 + left if left >= 0 else -1
    right = q1 - k1 + right if right >= 0 else -1
    queries, keys = q1 - q0, k1 - k0
    # A limit that no pair of the block reaches is none.
    left = -1 if left >= keys - 1 else left
    right = -1 if right >= queries - 1 else right
    return Block(own.row + q0 - own.position, queries, theirs.row + k0 - theirs.position, keys, (left, right))


def _no_taller_than_wide(block: Block) -> list[Block]:
    """The block, cut where its limits begin and end if it has a window and more queries than keys.

    The flash kernels take no limit that exceeds the number of keys: they take it for none, and none on the right for that number.
    """
    left, right = block.window
    if block.window == (-1, -1) or block.queries <= block.keys:
        return [block]
    under_right = block.queries - right if right >= 0 else 0
    under_left = block.queries - block.keys + left + 1 if left >= 0 else block.queries
    parts = []
    for begin, end in itertools.pairwise(sorted({0, under_right, under_left, block.queries})):
        # Limits are counted from the last query.
        behind = block.queries - end
        window = left + behind if begin >= under_left else -1, right - behind if end <= under_right else -1
        parts.append(block._replace(query=block.query + begin, queries=end - begin, window=window))
    return parts


def _extends_keys(first: Block, second: Block) -> bool:
    same = (first.query, first.queries, first.key + first.keys) == (second.query, second.queries, second.key)
    return same and first.window == (-1, -1) and second.window[0] == -1


def _extends_queries(first: Block, second: Block) -> bool:
    if first.query + first.queries != second.query or first.key != second.key or first.window != second.window:
        return False
    if first.window == (-1, -1):
        return first.keys == second.keys
    # Under one staircase, on which the last query of the first block stands at its last key and sees none behind it.
    return first.window == (-1, 0) and second.keys - first.keys == second.queries
