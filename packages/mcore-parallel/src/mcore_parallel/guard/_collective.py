# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What torch's flight recorder says about the collectives of this process."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

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
