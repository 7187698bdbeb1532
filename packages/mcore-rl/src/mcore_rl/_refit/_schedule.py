# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""In which buckets the copies of a refit go, and what each rank sends, receives and copies in each: planned without a tensor."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from mcore_ckpt.chunks import Box
from mcore_rl._refit._message import WeightMessage, cut_box
from mcore_rl._refit._plan import RefitPlan, WeightCopy, WeightShard, plan_refit


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Weights that go together, and what of them this rank copies, receives and sends."""

    boxes: list[tuple[str, Box]]
    """In the order of the model; weights larger than a bucket are cut."""
    where: str
    """Of all buckets, for errors."""
    own: list[WeightCopy]
    """From this rank to itself."""
    incoming: Mapping[int, WeightMessage]
    """By the rank that sends it."""
    outgoing: Mapping[int, WeightMessage]
    """By the rank that receives it."""

    @property
    def names(self) -> list[str]:
        """Weights with a box in this bucket."""
        return list(dict.fromkeys(name for name, _ in self.boxes))


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What all ranks agreed on."""

    plan: RefitPlan
    buckets: list[Bucket]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    takes_slices: bool
    """Whether it takes boxes of them, or all of each in one tensor."""
    largest: Mapping[int, int]
    """Bytes of the largest message to each rank that this one sends to."""
    limit: int
    """Bytes of a bucket."""

    @classmethod
    def of(cls, layouts: Sequence[Sequence[Any]], rank: int, limit: int) -> "Schedule":
        """Of one rank, from the layouts of all: what each has, what it takes (None for whole weights), and its place."""
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for name, shape, _, dtype in chain.from_iterable(listing for listing, _, _ in layouts):
            shapes.setdefault(name, tuple(shape))
            dtypes.setdefault(name, getattr(torch, dtype))
        sources = [
            WeightShard(name=name, rank=rank, shape=tuple(shape), box=Box.from_json(box))
            for rank, (listing, _, _) in enumerate(layouts)
            for name, shape, box, _ in listing
        ]
        destinations = [
            WeightShard(name=name, rank=rank, shape=tuple(shape), box=Box.from_json(box))
            for rank, (_, taken, _) in enumerate(layouts)
            for name, shape, box in (taken if taken is not None else [[n, s, [[0] * len(s), list(s)]] for n, s in shapes.items()])
        ]
        places = {rank: " ".join(place) for rank, (_, _, place) in enumerate(layouts) if place is not None}
        plan = plan_refit(sources, destinations, places=places)
        own, buckets = layouts[rank][1], _buckets(plan, shapes, dtypes, limit, rank)
        largest: dict[int, int] = {}
        for bucket in buckets:
            largest |= {peer: max(largest.get(peer, 0), message.num_bytes) for peer, message in bucket.outgoing.items()}
        return cls(
            plan=plan,
            buckets=buckets,
            shapes=shapes,
            dtypes=dtypes,
            takes_slices=own is not None,
            largest=largest,
            limit=limit,
        )


def _buckets(
    plan: RefitPlan, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], limit: int, rank: int
) -> list[Bucket]:
    """All weights in buckets of at most ``limit`` bytes, or of one element."""
    listed: list[list[tuple[str, Box]]] = []
    room = 0
    for name, shape in shapes.items():
        for box in cut_box(Box.whole(shape), max(1, limit // dtypes[name].itemsize)):
            size = math.prod(box.shape) * dtypes[name].itemsize
            if size > room or not listed:
                listed.append([])
                room = limit
            listed[-1].append((name, box))
            room -= size
    copies: dict[str, list[WeightCopy]] = {name: [] for name in shapes}
    for copy in plan.copies:
        if rank in (copy.source_rank, copy.destination_rank):
            copies[copy.name].append(copy)
    buckets = []
    for number, boxes in enumerate(listed, 1):
        own: list[WeightCopy] = []
        incoming: dict[int, list[WeightCopy]] = {}
        outgoing: dict[int, list[WeightCopy]] = {}
        for copy in chain.from_iterable(_within(copies[name], box) for name, box in boxes):
            if copy.source_rank == copy.destination_rank == rank:
                own.append(copy)
            elif copy.destination_rank == rank:
                incoming.setdefault(copy.source_rank, []).append(copy)
            else:
                outgoing.setdefault(copy.destination_rank, []).append(copy)
        buckets.append(
            Bucket(
                boxes=boxes,
                where=f"bucket {number} of {len(listed)}, from {boxes[0][0]} on",
                own=own,
                incoming={peer: WeightMessage.of((copy, dtypes[copy.name]) for copy in incoming[peer]) for peer in sorted(incoming)},
                outgoing={peer: WeightMessage.of((copy, dtypes[copy.name]) for copy in outgoing[peer]) for peer in sorted(outgoing)},
            )
        )
    return buckets


def _within(copies: Iterable[WeightCopy], box: Box) -> list[WeightCopy]:
    """What of them lies in a box of the weight."""
    common = ((copy, copy.box.intersect(box)) for copy in copies)
    return [copy if part == copy.box else dataclasses.replace(copy, box=part) for copy, part in common if part is not None]
