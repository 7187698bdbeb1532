# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that are not only late: their processes on this machine are gone."""

import contextlib
import time
from collections.abc import Sequence

from mcore_parallel import Group
from mcore_parallel.guard import ProcessMark

_PREFIX = "mcore_rl process"
_DEATH_S = 1.0
"""A process that dies closes its connections this long before the system says that it is gone, at most."""
_POLL_S = 0.02


def announce(group: Group) -> None:
    """Make the process of this rank known to the others of a group."""
    if group.pg is not None:
        group.pg.get_group_store().set(f"{_PREFIX}/{group.rank}", ProcessMark.own().to_json())


def ended(group: Group, places: Sequence[int], *, wait_s: float = 0.0) -> list[int]:
    """Those ranks that are known to be gone: of this machine, and announced.

    Args:
        group: the ranks, as of ``announce``.
        places: numbers of ranks in the group.
        wait_s: limit of waiting until one is gone.
    """
    own, end = ProcessMark.own(), time.monotonic() + wait_s
    marks: dict[int, ProcessMark] = {}
    # The store may have gone with the rank that kept it.
    with contextlib.suppress(RuntimeError):
        assert group.pg is not None
        store = group.pg.get_group_store()
        marks = {place: ProcessMark.from_json(store.get(key)) for place in places if store.check([key := f"{_PREFIX}/{place}"])}
    marks = {place: mark for place, mark in marks.items() if own.host and mark.host == own.host}
    while True:
        gone = [place for place, mark in marks.items() if mark.state() == "gone"]
        if gone or not marks or time.monotonic() >= end:
            return gone
        time.sleep(_POLL_S)


def absence(group: Group, places: Sequence[int], what: str, purpose: str, *, broke: bool = False, names: Sequence[str] = ()) -> str:
    """Why ranks are waited for in vain: those that are gone died, of the others ``what``.

    Args:
        group: as of ``ended``.
        places: numbers of the ranks in the group.
        what: became of those that live, as far as this rank knows.
        purpose: what they were to come for.
        broke: a connection was closed before any limit, as when a process dies.
        names: of all ranks of the group; empty for their numbers.
    """
    names = names or [f"rank {rank}" for rank in group.ranks]
    dead = ended(group, places, wait_s=_DEATH_S if broke else 0.0)
    late = [place for place in places if place not in dead]
    parts = [f"{_joined(names, dead)} died, no process is left"] if dead else []
    parts += [f"{_joined(names, late)} {what}"] if late else []
    return f"{', and '.join(parts)} ({purpose}); look at the log of that rank"


def _joined(names: Sequence[str], places: Sequence[int]) -> str:
    return " and ".join(names[place] for place in places)
