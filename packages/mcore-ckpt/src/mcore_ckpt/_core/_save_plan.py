# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The plan of a save, as data: which rank writes which part.

The first rank plans for all; ranks that hold the same parts are planned once, and each rank receives its own writes only. The memory of
the other ranks does not grow with their number. A mistake in the state is the same error on every rank.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt._core._control import Control
from mcore_ckpt._core._manifest import TensorRecord
from mcore_ckpt._errors import CheckpointingException
from mcore_ckpt._storage import itemsize
from mcore_ckpt.chunks import Box, check_tiling

__all__ = [
    "PlanCache",
    "RankLayout",
    "RankShare",
    "SavePlan",
    "ShardRecord",
    "Write",
    "agree_on_share",
    "decode_layouts",
    "decode_share",
    "encode_layout",
    "encode_writes",
    "pack_files",
    "plan_layouts",
    "plan_save",
    "text_digest",
]


@dataclass(frozen=True)
class ShardRecord:
    """One part that a rank holds, without its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the global tensor."""
    box: Box
    replica: int


@dataclass(frozen=True)
class RankLayout:
    """The parts that several ranks hold alike, such as data-parallel replicas of one shard. They are planned once."""

    names: Sequence[str]
    """Of the tensors, one for each part."""
    kinds: Sequence[tuple[str, tuple[int, ...], Box]]
    """For each part: element type and shape of the tensor, and which box of it; equal ones are one object."""
    ranks: tuple[int, ...]
    main: Sequence[bool]
    """For each part: whether one of the ranks holds it with replica 0."""


def encode_layout(records: Sequence[ShardRecord]) -> tuple[str, list[list[int]]]:
    """What a rank holds, as text that is equal for ranks that hold alike, and its replica numbers in runs of [number, length].

    Layers repeat, so element types, shapes and boxes stand in a table of their own.
    """
    runs: list[list[int]] = []
    kinds: dict[tuple[str, tuple[int, ...], Box], int] = {}
    for record in records:
        if runs and runs[-1][0] == record.replica:
            runs[-1][1] += 1
        else:
            runs.append([record.replica, 1])
    places = [kinds.setdefault((record.dtype, record.shape, record.box), len(kinds)) for record in records]
    table = [[dtype, shape, *box.to_json()] for dtype, shape, box in kinds]
    return json.dumps([[record.name for record in records], places, table], separators=(",", ":")), runs


def decode_layouts(texts: Sequence[str], owners: Sequence[Sequence[int]], runs: Sequence[Sequence[Sequence[int]]]) -> list[RankLayout]:
    """Inverse of `encode_layout` for all ranks at once.

    Args:
        texts: the distinct ones.
        owners: for each text, the ranks that sent it.
        runs: for each rank, its replica numbers.
    """
    layouts = []
    for text, ranks in zip(texts, owners, strict=True):
        names, places, table = json.loads(text)
        kinds = [(dtype, tuple(shape), Box(tuple(offset), tuple(size))) for dtype, shape, offset, size in table]
        main = [False] * len(names)
        for rank in ranks:
            place = 0
            for replica, length in runs[rank]:
                if replica == 0:
                    main[place : place + length] = [True] * length
                place += length
        layouts.append(RankLayout(names, [kinds[place] for place in places], tuple(ranks), main))
    return layouts


@dataclass(frozen=True)
class Write:
    """One box that a rank writes."""

    name: str
    box: Box
    num_bytes: int


@dataclass(frozen=True)
class SavePlan:
    """The tensors (their chunks still empty) and what each rank writes of them."""

    tensors: Mapping[str, TensorRecord]
    writes: tuple[tuple[Write, ...], ...]


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a plan."""

    tensors: Mapping[str, TensorRecord]
    """Those that it has to do with; on the first rank, which writes the manifest, all of them."""
    writes: Sequence[Write]


class PlanCache:
    """The plan of the last save. While the structure stays the same, ranks exchange digests only."""

    def __init__(self) -> None:
        self.key = ""
        self.share: RankShare | None = None


def plan_save(records: Sequence[Sequence[ShardRecord]]) -> SavePlan:
    """`plan_layouts` of what each rank holds.

    Raises:
        CheckpointingException: see there.
    """
    encoded = [encode_layout(held) for held in records]
    owners: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(encoded):
        owners.setdefault(text, []).append(rank)
    return plan_layouts(decode_layouts(list(owners), list(owners.values()), [runs for _, runs in encoded]), len(records))


def plan_layouts(layouts: Sequence[RankLayout], num_ranks: int) -> SavePlan:
    """Assign each distinct part to one of the ranks that hold it, so that the ranks write about equally many bytes.

    The parts held with replica 0 must tile their tensor. Parts with few holders are placed first, then large ones, each on
    its holder with the least to write (the lowest rank of equals): the result depends on the layouts only.

    Args:
        layouts: each rank is in one of them.
        num_ranks: how many there are.

    Raises:
        CheckpointingException: ranks disagree about a tensor, or parts overlap or leave a gap; names tensor and ranks.
    """
    tensors: dict[str, TensorRecord] = {}
    first_rank: dict[str, int] = {}
    holders: dict[str, dict[Box, tuple[int, ...]]] = defaultdict(dict)
    main: dict[str, set[Box]] = defaultdict(set)
    for layout in layouts:
        rank = layout.ranks[0]
        for name, (dtype, shape, box), is_main in zip(layout.names, layout.kinds, layout.main, strict=True):
            known = tensors.get(name)
            if known is None:
                known = tensors[name] = TensorRecord(dtype, shape)
                first_rank[name] = rank
            if known.dtype != dtype or known.shape != shape:
                raise CheckpointingException(
                    f"{name} is {known.dtype} {list(known.shape)} on rank {first_rank[name]} and {dtype} {list(shape)} on rank {rank}"
                )
            if box.num_elements:
                owners = holders[name]
                owners[box] = owners[box] + layout.ranks if box in owners else layout.ranks
                if is_main:
                    main[name].add(box)
    jobs: list[tuple[int, int, str, Box, tuple[int, ...]]] = []
    ascending: dict[tuple[int, ...], tuple[int, ...]] = {}
    sound: set[tuple[tuple[int, ...], frozenset[Box]]] = set()
    for name, tensor in tensors.items():
        _check_parts(name, tensor, main[name], holders[name], sound)
        width = itemsize(tensor.dtype)
        for box in main[name]:
            ranks = holders[name][box]
            ranks = ascending.setdefault(ranks, tuple(sorted(ranks)))
            jobs.append((len(ranks), -box.num_elements * width, name, box, ranks))
    jobs.sort(key=lambda job: (job[0], job[1], job[2], job[3].offset))
    load = [0] * num_ranks
    writes: list[list[Write]] = [[] for _ in range(num_ranks)]
    for _, negative_bytes, name, box, ranks in jobs:
        # They ascend: of equals it is the lowest.
        writer = ranks[0] if len(ranks) == 1 else min(ranks, key=load.__getitem__)
        load[writer] -= negative_bytes
        writes[writer].append(Write(name, box, -negative_bytes))
    # In order of name again: neighbours in the model are neighbours on disk, whatever the balancing did.
    return SavePlan(tensors, tuple(tuple(sorted(rows, key=lambda row: (row.name, row.box.offset))) for rows in writes))


def encode_writes(layouts: Sequence[RankLayout], plan: SavePlan) -> Iterator[str]:
    """For each rank the positions, in its own layout, of the parts that it writes, as JSON."""
    layout_of = {rank: layout for layout in layouts for rank in layout.ranks}
    for rank, writes in enumerate(plan.writes):
        layout = layout_of[rank]
        # By name first: that is quick to compare, and most of what a rank holds others write.
        order: dict[str, dict[Box, int]] = {}
        for number, write in enumerate(writes):
            order.setdefault(write.name, {})[write.box] = number
        places = [0] * len(writes)
        for place, name in enumerate(layout.names):
            if name in order and (number := order[name].get(layout.kinds[place][2])) is not None:
                places[number] = place
        yield json.dumps(places, separators=(",", ":"))


def decode_share(records: Sequence[ShardRecord], positions: str, plan: SavePlan | None) -> RankShare:
    """The share of a rank that holds ``records``; inverse of `encode_writes`.

    Args:
        positions: this rank's text from `encode_writes`.
        plan: where this rank made it.
    """
    mine = [records[place] for place in json.loads(positions)]
    writes = [Write(record.name, record.box, record.box.num_elements * itemsize(record.dtype)) for record in mine]
    return RankShare({record.name: TensorRecord(record.dtype, record.shape) for record in mine} if plan is None else plan.tensors, writes)


def _check_parts(
    name: str,
    tensor: TensorRecord,
    parts: set[Box],
    holders: Mapping[Box, tuple[int, ...]],
    sound: set[tuple[tuple[int, ...], frozenset[Box]]],
) -> None:
    """Check that ``parts`` tile ``tensor``; tilings that passed are remembered, because layers repeat."""
    tiling = (tensor.shape, frozenset(parts))
    if tiling in sound:
        return
    try:
        check_tiling(tensor.shape, sorted(parts))
    except ValueError as error:
        ranks = sorted({rank for owners in holders.values() for rank in owners})
        raise CheckpointingException(f"{name} (on ranks {ranks}): {error}; the parts with replica 0 must cover it exactly once") from error
    sound.add(tiling)


def pack_files(writes: Sequence[Write], max_file_bytes: int) -> list[list[Write]]:
    """Consecutive writes packed into files of at most ``max_file_bytes`` of data; a larger part gets a file of its own."""
    files: list[list[Write]] = []
    room = 0
    for write in writes:
        if not files or write.num_bytes > room:
            files.append([])
            room = max_file_bytes
        files[-1].append(write)
        room -= write.num_bytes
    return files


def agree_on_share(
    control: Control, what: str, layout: str, records: Sequence[ShardRecord], answers: list[Any], cache: PlanCache | None
) -> RankShare:
    """What this rank writes: the cached share where no rank's structure changed, else its part of the first rank's plan.

    Args:
        what: for messages.
        layout: this rank's, as `encode_layout` gives it.
        records: this rank's parts.
        answers: of each rank the digest and length of its layout, its replica runs and the key of its cache.
        cache: of the save before; updated.
    """
    key = text_digest(json.dumps([[answer["layout"], answer["runs"]] for answer in answers]))
    if cache is not None and cache.share is not None and all(answer["cached"] == key for answer in answers):
        return cache.share
    owners: dict[str, list[int]] = {}
    for rank, answer in enumerate(answers):
        owners.setdefault(answer["layout"], []).append(rank)
    texts = control.collect(what, layout, {ranks[0]: answers[ranks[0]]["length"] for ranks in owners.values()})
    planned: list[tuple[list[RankLayout], SavePlan]] = []

    def plan() -> None:
        if control.rank == 0:
            layouts = decode_layouts(texts, list(owners.values()), [answer["runs"] for answer in answers])
            planned.append((layouts, plan_layouts(layouts, control.size)))

    control.run(what, plan)
    positions = control.scatter(what, (text for layouts, save_plan in planned for text in encode_writes(layouts, save_plan)))
    share = decode_share(records, positions, planned[0][1] if planned else None)
    if cache is not None:
        cache.key, cache.share = key, share
    return share


def text_digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
