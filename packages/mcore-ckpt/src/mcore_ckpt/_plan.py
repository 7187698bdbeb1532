# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who writes what, and what fills what: saving and loading decided as data, before a byte moves.

Every rank computes the same save plan from the same records, so a mistake in the state is the same error on every rank.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_ckpt._errors import CheckpointingException, list_names
from mcore_ckpt._storage import itemsize
from mcore_ckpt.chunks import Box, check_tiling
from mcore_ckpt.manifest import Chunk, TensorRecord

__all__ = ["Read", "SavePlan", "ShardRecord", "Write", "assign_files", "compare", "pack_files", "plan_load", "plan_save"]


@dataclass(frozen=True)
class ShardRecord:
    """What a rank tells the others about one part it holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    """Of the global tensor."""
    box: Box
    replica: int

    def to_json(self) -> list[Any]:
        """As a list for the wire."""
        return [self.name, self.dtype, list(self.shape), *self.box.to_json(), self.replica]

    @classmethod
    def from_json(cls, value: list[Any]) -> "ShardRecord":
        """Inverse of ``to_json``."""
        name, dtype, shape, offset, size, replica = value
        return cls(name, dtype, tuple(shape), Box(tuple(offset), tuple(size)), replica)


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
class Read:
    """Copy indices ``box`` of the global tensor ``name`` out of ``chunk``."""

    name: str
    chunk: Chunk
    box: Box


def plan_save(records: Sequence[Sequence[ShardRecord]]) -> SavePlan:
    """Assign each distinct part to one of the ranks that hold it, so that the ranks write about equally many bytes.

    The parts held with replica 0 must tile their tensor. Parts with few holders are placed first, then large ones, each on
    its holder with the least to write (the lowest rank of equals): the result depends on the records only.

    Args:
        records: per rank, what it holds.

    Raises:
        CheckpointingException: ranks disagree about a tensor, or parts overlap or leave a gap; names tensor and ranks.
    """
    tensors: dict[str, TensorRecord] = {}
    first_rank: dict[str, int] = {}
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    main: dict[str, set[Box]] = defaultdict(set)
    for rank, held in enumerate(records):
        for record in held:
            known = tensors.setdefault(record.name, TensorRecord(record.dtype, record.shape))
            first_rank.setdefault(record.name, rank)
            if (known.dtype, known.shape) != (record.dtype, record.shape):
                raise CheckpointingException(
                    f"{record.name} is {known.dtype} {list(known.shape)} on rank {first_rank[record.name]} "
                    f"and {record.dtype} {list(record.shape)} on rank {rank}"
                )
            if record.box.num_elements:
                holders[record.name][record.box].append(rank)
                if record.replica == 0:
                    main[record.name].add(record.box)
    jobs = []
    for name, tensor in tensors.items():
        parts = sorted(main[name])
        try:
            check_tiling(tensor.shape, parts)
        except ValueError as error:
            ranks = sorted({rank for owners in holders[name].values() for rank in owners})
            raise CheckpointingException(
                f"{name} (on ranks {ranks}): {error}; the parts with replica 0 must cover it exactly once"
            ) from error
        for box in parts:
            jobs.append((sorted(set(holders[name][box])), Write(name, box, box.num_elements * itemsize(tensor.dtype))))
    jobs.sort(key=lambda job: (len(job[0]), -job[1].num_bytes, job[1].name, job[1].box))
    load = [0] * len(records)
    writes: list[list[Write]] = [[] for _ in records]
    for ranks, write in jobs:
        writer = min(ranks, key=lambda rank: (load[rank], rank))
        load[writer] += write.num_bytes
        writes[writer].append(write)
    # In order of name again: neighbours in the model are neighbours on disk, whatever the balancing did.
    return SavePlan(tensors, tuple(tuple(sorted(rows, key=lambda row: (row.name, row.box))) for rows in writes))


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


def compare(wanted: Mapping[str, TensorRecord], stored: Mapping[str, TensorRecord]) -> list[str]:
    """What is wrong with asking a checkpoint of ``stored`` tensors for ``wanted`` ones; one line a kind, empty when nothing is."""
    problems = []
    missing = wanted.keys() - stored.keys()
    if missing:
        problems.append(f"missing from the checkpoint: {list_names(missing, stored.keys() - wanted.keys())}")
    both = sorted(wanted.keys() & stored.keys())
    shapes = [f"{n} (stored {list(stored[n].shape)}, asked {list(wanted[n].shape)})" for n in both if stored[n].shape != wanted[n].shape]
    dtypes = [f"{n} (stored {stored[n].dtype}, asked {wanted[n].dtype})" for n in both if stored[n].dtype != wanted[n].dtype]
    if shapes:
        problems.append(f"other global shape: {list_names(shapes)}")
    if dtypes:
        problems.append(f"other dtype: {list_names(dtypes)}; load into the stored dtype and convert after")
    return problems


def plan_load(wanted: Iterable[tuple[str, Box]], stored: Mapping[str, TensorRecord]) -> list[Read]:
    """Which boxes of which chunks fill the ``wanted`` parts, in order of file so that each file is opened once.

    The reads of a part tile it, because the chunks tile the tensor.
    """
    reads = []
    for name, box in wanted:
        for chunk in stored[name].chunks:
            common = chunk.box.intersect(box)
            if common is not None:
                reads.append(Read(name, chunk, common))
    return sorted(reads, key=lambda read: (read.chunk.file, read.name, read.box))


def assign_files(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Files divided over ranks, the largest first to whoever has the fewest bytes."""
    load = [0] * num_ranks
    shares: list[list[str]] = [[] for _ in range(num_ranks)]
    for name in sorted(sizes, key=lambda file: (-sizes[file], file)):
        rank = min(range(num_ranks), key=lambda r: (load[r], r))
        load[rank] += sizes[name]
        shares[rank].append(name)
    return shares
