# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that are not only late: their processes on this machine are gone."""

import contextlib
import json
import time
from collections.abc import Sequence

from mcore_parallel import Group
from mcore_parallel.guard import ProcessMark

_PREFIX = "mcore_rl process"
_DEATH_S = 1.0
"""A process that dies closes its connections this long before the system says that it is gone, at most."""
_POLL_S = 0.02


def announce(group: Group) -> None:
    """Make the process of this rank known to the ranks of a group on this machine."""
    mark = ProcessMark.own()
    if group.pg is None or not mark.host:
        return
    store = group.pg.get_group_store()
    # A list for each machine: of the others a rank can see no process, and there may be thousands.
    number = store.add(f"{_PREFIX}/{mark.host}", 1)
    store.set(f"{_PREFIX}/{mark.host}/{number}", json.dumps([group.rank, mark.to_json()]))


def ended(group: Group, places: Sequence[int], *, wait_s: float = 0.0) -> list[int]:
    """Those ranks that are known to be gone: of this machine, and announced.

    Args:
        group: the ranks, as of ``announce``.
        places: numbers of ranks in the group.
        wait_s: limit of waiting until one is gone.
    """
    end = time.monotonic() + wait_s
    marks = {place: mark for place, mark in _neighbours(group).items() if place in places}
    while True:
        gone = [place for place, mark in sorted(marks.items()) if mark.state() == "gone"]
        if gone or not marks or time.monotonic() >= end:
            return gone
        time.sleep(_POLL_S)


def _neighbours(group: Group) -> dict[int, ProcessMark]:
    """By their numbers in the group, those that announced themselves on this machine."""
    assert group.pg is not None
    store, prefix = group.pg.get_group_store(), f"{_PREFIX}/{ProcessMark.own().host}"
    # The store may have gone with the rank that kept it.
    with contextlib.suppress(RuntimeError):
        keys = [f"{prefix}/{number + 1}" for number in range(store.add(prefix, 0))]
        # One that has its number may not have written yet.
        entries = [json.loads(store.get(key)) for key in keys if store.check([key])]
        return {place: ProcessMark.from_json(text) for place, text in entries}
    return {}


def absence(
    group: Group, places: Sequence[int], what: str, purpose: str, *, waited_s: float, timeout_s: float, names: Sequence[str] = ()
) -> str:
    """Why ranks are waited for in vain: those that are gone died, of the others ``what``.

    Args:
        group: as of ``ended``.
        places: numbers of the ranks in the group.
        what: those that live did not do.
        purpose: what they were to come for.
        waited_s: so long; where that is short of the limit, a connection was closed, as when a process dies.
        timeout_s: the limit.
        names: of all ranks of the group; empty for their numbers.
    """
    names = names or [f"rank {rank}" for rank in group.ranks]
    # A wait may end a moment before its limit.
    broke = waited_s < 0.9 * timeout_s
    dead = ended(group, places, wait_s=_DEATH_S if broke else 0.0)
    late = [place for place in places if place not in dead]
    parts = [f"{_joined(names, dead)} died, no process is left"] if dead else []
    parts += [f"{_joined(names, late)} {what}{', its connection is closed' if broke else f' within {timeout_s=:g}'}"] if late else []
    return f"{', and '.join(parts)} ({purpose}); look at the log of that rank"


def _joined(names: Sequence[str], places: Sequence[int]) -> str:
    return " and ".join(names[place] for place in places)
