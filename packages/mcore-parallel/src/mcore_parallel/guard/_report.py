# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The report of a stalled run: who waits where by torch's flight recorder, who is missing, and what the missing ranks do."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d


def rank_list(ranks: Iterable[int]) -> str:
    """Sorted ranks with runs joined: ``rank 3``, ``ranks 0-2, 5``.

    Example:
        >>> rank_list([5, 0, 1, 2])
        'ranks 0-2, 5'
    """
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text or 'none'}"


# What torch writes when nobody said what a group is for.
_UNTOLD = {"default_pg": "world", "undefined": ""}


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One entry of the flight recorder."""

    group: str
    """Name of the process group, equal on its ranks."""
    purpose: str
    """What the group was made for, as its maker described it; empty if not."""
    sequence: int
    """Number of the collective in its group, from 1; transfers between two ranks count on their own."""
    operation: str
    """Backend and operation."""
    shapes: str
    """Sizes and element types of what goes in."""
    is_p2p: bool
    finished: bool


def collectives() -> list[Collective]:
    """The newest collectives of this process in the order of their start, for every backend that records; empty if none does."""
    by_id = {}
    for trace in _traces(entries=True):
        for entry in trace.get("entries", []):
            collective = _read(entry)
            by_id[collective.group, collective.is_p2p, collective.sequence, entry["record_id"]] = entry["time_created_ns"], collective
    return [collective for _, collective in sorted(by_id.values(), key=lambda item: item[0])]


def progress() -> str:
    """A text that changes whenever this process starts a collective or one of its collectives ends; cheap."""
    return json.dumps([trace.get("pg_status", {}) for trace in _traces(entries=False)], sort_keys=True)


def group_ranks(name: str) -> list[int]:
    """The global ranks of a process group of this process; empty when it has none of that name."""
    try:
        resolve: Any = _distributed_c10d._resolve_process_group
        return dist.get_process_group_ranks(resolve(name))
    except (RuntimeError, LookupError, ValueError):
        return []


def _read(entry: Mapping[str, Any]) -> Collective:
    name, purpose = map(str, entry["process_group"])
    sizes = ", ".join(f"{kind}{size}" for kind, size in zip(entry.get("input_dtypes", []), entry.get("input_sizes", []), strict=False))
    return Collective(
        group=name,
        purpose=_UNTOLD.get(purpose, purpose),
        sequence=entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"],
        operation=entry["profiling_name"],
        shapes=sizes,
        is_p2p=entry["is_p2p"],
        finished=entry["retired"] or entry["state"] == "completed",
    )


def _traces(*, entries: bool) -> list[dict[str, Any]]:
    """NCCL has a recorder of its own, the other backends share one; a torch built without NCCL lacks the first."""
    dumps = [getattr(_distributed_c10d, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")]
    # The pickled dumps hold stacks too, but nothing here reads pickles.
    return [json.loads(dump(entries, False)) for dump in dumps if dump is not None]


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status of one rank of a stalled run."""

    rank: int
    step: int | None = None
    """Last step the trainer told; None if it tells none."""
    phase: str = ""
    waiting: Sequence[Collective] = ()
    """Collectives it has started that have not ended; the oldest of each group."""
    newest: Mapping[str, Collective] = field(default_factory=dict)
    """Group -> the last collective it has started there."""
    members: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Group -> global ranks, for the groups of ``waiting``."""
    stacks: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Thread -> frames, the main thread first."""
    complaint: str = ""
    """Why this rank raised the alarm; empty if it did not."""
    at_work: bool = False
    """It runs Python or reads and writes files, and waits for no rank."""
    idle_s: float = 0.0
    """Since it last began a step, or began or ended a collective."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RankStatus":
        waiting = [Collective(**entry) for entry in values["waiting"]]
        return cls(**{**values, "waiting": waiting, "newest": {name: Collective(**entry) for name, entry in values["newest"].items()}})

    @property
    def where(self) -> str:
        step = "" if self.step is None else f"step {self.step}"
        return ", ".join(part for part in (step, self.phase) if part)


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """A collective that does not end."""

    collective: Collective
    members: tuple[int, ...]
    waiting: tuple[int, ...]
    missing: tuple[int, ...]


def compose(statuses: Iterable[RankStatus], gone: Mapping[int, str], world_size: int) -> str:
    """The report.

    Args:
        statuses: of the ranks that answered.
        gone: rank -> what became of it, for ranks that did not answer (died, raised, finished).
        world_size: number of ranks.
    """
    by_rank = {status.rank: status for status in statuses}
    gone = {rank: gone.get(rank, "gave no answer") for rank in range(world_size) if rank not in by_rank}
    waits = _waits(by_rank)
    waiting = {rank for wait in waits for rank in wait.waiting}
    missing = {rank for wait in waits for rank in wait.missing}
    # A missing rank that waits in another collective is held up itself; what others wait for in the end are the rest.
    culprits = sorted((missing - waiting) | set(gone)) or sorted(missing) or sorted(set(by_rank) - waiting)
    lines = [_headline(by_rank, waits, waiting, culprits)]
    for wait in waits:
        lines += ["", *_describe(wait, by_rank, gone)]
    lost = sorted(set(gone) - missing)
    if lost:
        lines += ["", *(f"rank {rank}: {gone[rank]}" for rank in lost)]
    lines += _stacks([by_rank[rank] for rank in culprits if rank in by_rank], every_thread=True)
    rest = [by_rank[rank] for rank in sorted(by_rank) if rank not in culprits]
    lines += _stacks(rest, every_thread=False)
    return "\n".join(lines)


def _headline(by_rank: Mapping[int, RankStatus], waits: Sequence[_Wait], waiting: set[int], culprits: Sequence[int]) -> str:
    complaints = sorted({status.complaint for status in by_rank.values() if status.complaint})
    why = complaints[0] if complaints else "the run is stalled"
    if waits:
        return f"{why}: {rank_list(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {rank_list(culprits)}"
    return f"{why}: no rank waits in a recorded collective; look at {rank_list(culprits)}"


def _waits(by_rank: Mapping[int, RankStatus]) -> list[_Wait]:
    """The collectives that ranks wait in, and who of their group has not come to them."""
    ranks: dict[tuple[str, bool, int], dict[int, Collective]] = {}
    members: dict[str, set[int]] = {}
    for status in by_rank.values():
        for name, group in status.members.items():
            members.setdefault(name, set()).update(group)
        for entry in status.waiting:
            ranks.setdefault((entry.group, entry.is_p2p, entry.sequence), {})[status.rank] = entry
    waits = []
    for (name, is_p2p, sequence), entries in sorted(ranks.items()):
        everybody = members.get(name, set()) | set(entries)
        came = {rank for rank in everybody if rank in entries or (not is_p2p and _reached(by_rank.get(rank), name, sequence))}
        first = next(iter(entries.values()))
        waits.append(_Wait(collective=first, members=tuple(everybody), waiting=tuple(entries), missing=tuple(sorted(everybody - came))))
    return waits


def _reached(status: RankStatus | None, group: str, sequence: int) -> bool:
    newest = None if status is None else status.newest.get(group)
    return newest is not None and newest.sequence >= sequence


def _describe(wait: _Wait, by_rank: Mapping[int, RankStatus], gone: Mapping[int, str]) -> list[str]:
    entry = wait.collective
    name = f"{entry.purpose} (name {entry.group})" if entry.purpose else entry.group
    kind = "transfer" if entry.is_p2p else "collective"
    lines = [
        f"group {name}, {rank_list(wait.members)}: {kind} {entry.sequence}, {entry.operation} {entry.shapes}",
        f"  waiting: {rank_list(wait.waiting)}",
    ]
    started: dict[str, list[int]] = {}
    for rank in wait.waiting:
        for own in by_rank[rank].waiting:
            if (own.group, own.is_p2p, own.sequence) == (entry.group, entry.is_p2p, entry.sequence):
                started.setdefault(f"{own.operation} {own.shapes}", []).append(rank)
    if len(started) > 1 and not entry.is_p2p:
        lines.append("  they do not run the same: " + "; ".join(f"{rank_list(ranks)} {what}" for what, ranks in started.items()))
    for rank in wait.missing:
        lines.append(f"  missing: rank {rank}, {gone[rank] if rank in gone else _last(by_rank[rank], entry)}")
    return lines


def _last(status: RankStatus, entry: Collective) -> str:
    """What a missing rank did last in the group it is missed in."""
    newest = status.newest.get(entry.group)
    last = f"last started {newest.sequence}, {newest.operation}" if newest else "no collective of this group is on its record"
    held = status.waiting[0] if status.waiting else None
    at = f"; itself waits in group {held.purpose or held.group}, {held.sequence}, {held.operation}" if held else ""
    return f"alive{' at ' + status.where if status.where else ''}; {last}{at}"


def _stacks(statuses: Sequence[RankStatus], *, every_thread: bool) -> list[str]:
    """Stacks with the ranks that share them."""
    shared: dict[tuple[tuple[str, tuple[str, ...]], ...], list[int]] = {}
    for status in statuses:
        threads = [(name, tuple(frames)) for name, frames in status.stacks.items()]
        shared.setdefault(tuple(threads if every_thread else threads[:1]), []).append(status.rank)
    lines = []
    for threads, ranks in shared.items():
        for name, frames in threads:
            lines += ["", f"{rank_list(ranks)}, thread {name}:", *(f"  {frame}" for frame in frames)]
    return lines
