# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which part of a weight goes from which rank to which: planned from two lists of named shards, without a tensor."""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from mcore_ckpt.chunks import Box, find_overlap, subtract
from mcore_rl._stability import experimental_api


@experimental_api
class RefitPlanError(ValueError):
    """Two layouts between which weights cannot be carried; names the weight."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class WeightShard:
    """A box of a weight that a rank holds.

    A rank may hold several boxes of one weight, as fully sharded data parallelism cuts them, and several ranks the same box.

    Raises:
        RefitPlanError: a box outside the weight.
    """

    name: str
    rank: int
    shape: tuple[int, ...]
    """Of the whole weight, padding included."""
    box: Box
    real_shape: tuple[int, ...] | None = None
    """Of the whole weight without padding, which lies behind it; None where there is none."""

    def __post_init__(self) -> None:
        if len(self.box.shape) != len(self.shape) or not Box.whole(self.shape).contains(self.box):
            raise RefitPlanError(f"{self.name} of rank {self.rank}: {self.box} lies outside shape {list(self.shape)}")
        if len(self.real.shape) != len(self.shape) or not Box.whole(self.shape).contains(self.real):
            raise RefitPlanError(f"{self.name} of rank {self.rank}: real_shape={self.real_shape} exceeds shape {list(self.shape)}")

    @property
    def real(self) -> Box:
        """What is no padding."""
        return Box.whole(self.shape if self.real_shape is None else self.real_shape)


@experimental_api
@dataclass(frozen=True, order=True)
class WeightCopy:
    """One box from one rank to another, or to itself."""

    name: str
    destination_rank: int
    destination: Box
    """The shard that is written."""
    box: Box
    """What is copied, in the whole weight."""
    source_rank: int
    source: Box
    """The shard that is read."""

    @property
    def source_slices(self) -> tuple[slice, ...]:
        """Cut it out of the shard that is read."""
        return self.box.relative_to(self.source).slices()

    @property
    def destination_slices(self) -> tuple[slice, ...]:
        """Cut it out of the shard that is written."""
        return self.box.relative_to(self.destination).slices()


@experimental_api
@dataclass(frozen=True, order=True)
class WeightFill:
    """A box of padding, which is set to zero."""

    name: str
    rank: int
    destination: Box
    box: Box

    @property
    def slices(self) -> tuple[slice, ...]:
        """Cut it out of the shard that is written."""
        return self.box.relative_to(self.destination).slices()


@experimental_api
@dataclass(frozen=True, kw_only=True)
class RefitPlan:
    """Copies that write every element of a destination exactly once, the same whatever the order of the shards; ``plan_refit`` makes it.

    Example:
        Two ranks hold the rows of a weight, a third takes it whole:

        >>> rows = [WeightShard(name="w", rank=rank, shape=(4, 2), box=Box((2 * rank, 0), (2, 2))) for rank in (0, 1)]
        >>> plan = plan_refit(rows, [WeightShard(name="w", rank=2, shape=(4, 2), box=Box((0, 0), (4, 2)))])
        >>> [(copy.source_rank, copy.destination_rank, copy.destination_slices[0]) for copy in plan.copies]
        [(0, 2, slice(0, 2, None)), (1, 2, slice(2, 4, None))]
    """

    copies: tuple[WeightCopy, ...]
    fills: tuple[WeightFill, ...]
    digest: str
    """SHA-256 of all copies and fills: equal plans have equal ones, on every machine."""


@experimental_api
def plan_refit(
    sources: Iterable[WeightShard], destinations: Iterable[WeightShard], *, places: Mapping[int, str] | None = None
) -> RefitPlan:
    """Intersect two layouts of the same weights.

    A destination reads what its own rank holds, and of equal boxes on several other ranks one, by turns, so that replicas share the work;
    one of its own place before others.

    Args:
        sources: the shards of all ranks that have the weights.
        destinations: the shards of all ranks that take them.
        places: device of each rank, equal for ranks that share one; None, or without a rank, where none is near.

    Raises:
        RefitPlanError: a weight on one side only, of two shapes, that no source holds in full, or that one rank holds twice.
    """
    read, written = _by_name(sources, "source"), _by_name(destinations, "destination")
    if missing := sorted(written.keys() - read.keys()):
        raise RefitPlanError(f"no source has {_some(missing)}; make the two models one, or leave them out of the destination")
    if unused := sorted(read.keys() - written.keys()):
        raise RefitPlanError(f"no destination takes {_some(unused)}; make the two models one, or leave them out of the source")
    on_place: dict[str, set[int]] = defaultdict(set)
    for rank, place in (places or {}).items():
        on_place[place].add(rank)
    near = {rank: on_place[place] for rank, place in (places or {}).items()}
    copies: list[WeightCopy] = []
    fills: list[WeightFill] = []
    for name in sorted(written):
        here, there = read[name], written[name]
        _check_shapes(name, here, there)
        for shard in there:
            copies += _copies(shard, here, near.get(shard.rank, set()))
            fills += [WeightFill(name, shard.rank, shard.box, box) for box in subtract(shard.box, shard.real)]
    ordered, padded = tuple(sorted(copies)), tuple(sorted(fills))
    return RefitPlan(copies=ordered, fills=padded, digest=_digest(ordered, padded))


def _by_name(shards: Iterable[WeightShard], side: str) -> dict[str, list[WeightShard]]:
    """In one order, without empty shards, each part of a weight once a rank."""
    named: dict[str, list[WeightShard]] = defaultdict(list)
    for shard in sorted(shards, key=lambda shard: (shard.name, shard.rank, shard.box)):
        named[shard.name] += [shard] if shard.box.num_elements else []
    for name, parts in named.items():
        ranks: dict[int, list[Box]] = defaultdict(list)
        for part in parts:
            ranks[part.rank].append(part.box)
        for rank, boxes in ranks.items():
            if (pair := find_overlap(boxes)) is not None:
                raise RefitPlanError(f"{name} is twice on {side} rank {rank}: {boxes[pair[0]]} and {boxes[pair[1]]}; list each part once")
    return dict(named)


def _check_shapes(name: str, sources: Sequence[WeightShard], destinations: Sequence[WeightShard]) -> None:
    for side, shards in (("source", sources), ("destination", destinations)):
        if len(shapes := {(shard.shape, shard.real.shape) for shard in shards}) > 1:
            raise RefitPlanError(f"{name} has several shapes on the {side} ranks: {sorted(shape for shape, _ in shapes)}")
    real = {shard.real.shape for shard in (*sources, *destinations)}
    if len(real) > 1:
        raise RefitPlanError(
            f"{name} has several shapes without padding: {sorted(real)}; set real_shape where one of them is padded, or make the models one"
        )


def _copies(wanted: WeightShard, sources: Sequence[WeightShard], near: Set[int]) -> list[WeightCopy]:
    """What fills one shard of a destination, but its padding."""
    need = wanted.box.intersect(wanted.real)
    left = [] if need is None else [need]
    copies: list[WeightCopy] = []
    for source in _preferred(wanted.rank, sources, near):
        if not left:
            break
        rest: list[Box] = []
        for piece in left:
            common = piece.intersect(source.box)
            if common is None:
                rest.append(piece)
                continue
            copies.append(WeightCopy(wanted.name, wanted.rank, wanted.box, common, source.rank, source.box))
            rest += subtract(piece, common)
        left = rest
    if left:
        raise RefitPlanError(f"no source holds {left[0]} of {wanted.name}, which rank {wanted.rank} takes; list all shards")
    return copies


def _preferred(rank: int, sources: Sequence[WeightShard], near: Set[int]) -> list[WeightShard]:
    """What is on the rank itself, then of each box the replica whose turn it is, of those near if there are any."""
    own = [source for source in sources if source.rank == rank]
    replicas: dict[Box, list[WeightShard]] = defaultdict(list)
    for source in sources:
        if source.rank != rank:
            replicas[source.box].append(source)
    for box, equal in replicas.items():
        replicas[box] = [source for source in equal if source.rank in near] or equal
    return own + [equal[rank % len(equal)] for equal in replicas.values()]


def _digest(copies: Sequence[WeightCopy], fills: Sequence[WeightFill]) -> str:
    listing = [
        [[copy.name, copy.source_rank, copy.source.to_json(), copy.destination_rank, copy.destination.to_json(), copy.box.to_json()]
         for copy in copies],
        [[fill.name, fill.rank, fill.destination.to_json(), fill.box.to_json()] for fill in fills],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(listing, separators=(",", ":")).encode()).hexdigest()


def _some(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
