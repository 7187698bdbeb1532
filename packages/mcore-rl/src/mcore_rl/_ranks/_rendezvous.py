# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that wait for each other with a limit of their own, before a collective that has only that of its group.

All of them come to their n-th rendezvous together, or none of them: whoever knows first that all are here, or gives up first, writes the
verdict of the turn into the store, and every rank ends as that says. Of unequal limits the shortest one holds.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from mcore_parallel import Group
from mcore_rl._ranks._ended import absence, announce, ended
from mcore_rl._ranks._placement import RankTimeoutError
from mcore_rl._stability import experimental_api

T = TypeVar("T")

_PREFIX = "mcore_rl rendezvous"
_FIRST_POLL_S, _LONGEST_POLL_S, _POLL_SHARE = 1e-3, 0.05, 0.02
_LOOK_S = 1.0
"""Between two looks whether those who are missing live."""


@experimental_api
def rendezvous(group: Group, timeout_s: float, purpose: str) -> None:
    """Wait until all ranks of a group are here; over its store, so that nothing is queued on a device meanwhile.

    Args:
        group: all of its ranks call this.
        timeout_s: limit of waiting for the others.
        purpose: what they come for, in the error.

    Raises:
        RankTimeoutError: on every rank, ranks did not come within the limit of the first that gave up, or died, which those of this machine
            are told for within seconds; names them. One that comes later is told who gave up. The next call is a new rendezvous.
    """
    meet(group, timeout_s, purpose)


def meet(group: Group, timeout_s: float, purpose: str, *, names: Sequence[str] = ()) -> None:
    """As ``rendezvous``; ``names`` are those of all ranks in errors, empty for their numbers.

    Raises:
        RankTimeoutError: as of ``rendezvous``.
        RuntimeError: a rank refused in its place (``agree``); names it.
    """
    if group.size == 1:
        return
    try:
        _meet(group, timeout_s, purpose, names)
    except dist.DistError as error:
        raise RankTimeoutError(
            f"the store of these ranks is gone, as when the rank that kept it dies ({purpose}: {error}); look at the log of that rank"
        ) from error


def _meet(group: Group, timeout_s: float, purpose: str, names: Sequence[str]) -> None:
    store = _store(group)
    # Nobody comes a second time before the turn has its verdict, so that the sum over all ranks says whether all are here.
    turn = store.add(f"{_PREFIX}/{group.rank}", 1)
    begin = time.monotonic()
    look = begin + _LOOK_S
    try:
        if turn == 1:
            announce(group)
        if store.add(f"{_PREFIX}/sum", 1) >= turn * group.size:
            _decide(group, turn, {})
        while not store.check([_verdict(turn)]):
            now = time.monotonic()
            is_over = now > begin + timeout_s
            if is_over or now > look:
                look = now + _LOOK_S
                # Until the limit only ranks of this machine are asked for: all of a large group, every second, are too many for the store.
                places = range(group.size) if is_over else ended(group, range(group.size))
                late = [place for place in places if store.add(f"{_PREFIX}/{place}", 0) < turn]
                if late:
                    why = absence(group, late, "did not come", purpose, waited_s=now - begin, timeout_s=timeout_s, names=names)
                    _decide(group, turn, {"by": group.rank, "late": late, "timeout_s": timeout_s, "why": why})
                elif is_over:
                    # All have come, and the last one has not counted itself yet.
                    _decide(group, turn, {})
                continue
            # What a wait takes longer by.
            time.sleep(min(_LONGEST_POLL_S, max(_FIRST_POLL_S, _POLL_SHARE * (now - begin))))
    except BaseException as error:
        _give_up(group, turn, purpose, error, names)
        raise
    verdict = json.loads(store.get(_verdict(turn)))
    if verdict.get("refused"):
        raise RuntimeError(verdict["why"])
    if verdict:
        raise RankTimeoutError(_why(verdict, group, timeout_s, purpose, names))
    if group.rank == 0 and turn > 1:
        # All have left the turn before.
        with contextlib.suppress(RuntimeError):
            store.delete_key(_verdict(turn - 1))


def withdraw(group: Group, purpose: str, error: BaseException, *, names: Sequence[str] = (), refused: bool = False) -> None:
    """In place of the next rendezvous of this rank, which cannot come: the others, at whatever time they come, end with why.

    Args:
        group: as of ``rendezvous``.
        purpose: as of ``rendezvous``.
        error: why.
        names: of all ranks, empty for their numbers.
        refused: the others get a RuntimeError in place of a `RankTimeoutError`.
    """
    if group.size == 1 or group.pg is None:
        return
    with contextlib.suppress(RuntimeError):
        store = _store(group)
        turn = store.add(f"{_PREFIX}/{group.rank}", 0) + 1
        # Before this rank counts as one that came.
        _give_up(group, turn, purpose, error, names, refused=refused)
        if store.add(f"{_PREFIX}/{group.rank}", 1) == 1:
            announce(group)
        store.add(f"{_PREFIX}/sum", 1)


def agree(group: Group, timeout_s: float, purpose: str, check: Callable[[], T], *, names: Sequence[str] = ()) -> T:
    """What ``check`` gives, where it does so on all ranks: what one refuses is refused on all, before they wait for each other elsewhere.

    Args:
        group: all of its ranks call this.
        timeout_s: limit of waiting for the others.
        purpose: what is checked, in the error.
        check: waits for no other rank.
        names: of all ranks, empty for their numbers.

    Raises:
        Exception: what ``check`` raised here.
        RuntimeError: it raised on another rank; names it, and says what.
        RankTimeoutError: as of ``rendezvous``.
    """
    try:
        checked = check()
    except Exception as error:
        withdraw(group, purpose, error, names=names, refused=True)
        raise
    meet(group, timeout_s, purpose, names=names)
    return checked


def _store(group: Group) -> Any:
    assert group.pg is not None
    return group.pg.get_group_store()


def _verdict(turn: int) -> str:
    return f"{_PREFIX}/turn {turn}"


def _decide(group: Group, turn: int, verdict: Mapping[str, Any]) -> None:
    """Write the verdict of a turn, empty where all have come; the first one stands."""
    _store(group).compare_set(_verdict(turn), "", json.dumps(verdict))


def _give_up(group: Group, turn: int, purpose: str, error: BaseException, names: Sequence[str], *, refused: bool = False) -> None:
    name = names[group.rank] if names else f"rank {group.ranks[group.rank]}"
    why = f"{name} {'refused' if refused else 'gave up'} ({purpose}): {type(error).__name__}: {error}"
    # The store may be what failed.
    with contextlib.suppress(RuntimeError):
        _decide(group, turn, {"by": group.rank, "late": [], "timeout_s": None, "why": why, "refused": refused})


def _why(verdict: Mapping[str, Any], group: Group, timeout_s: float, purpose: str, names: Sequence[str]) -> str:
    """What the rank of this process is told of a turn that was given up."""
    by, limit_s = verdict["by"], verdict["timeout_s"]
    name = names[by] if names else f"rank {group.ranks[by]}"
    if group.rank in verdict["late"]:
        return f"{name} gave up after timeout_s={limit_s:g}, before this rank came ({purpose}); begin again on all ranks"
    if limit_s in (None, timeout_s):
        return verdict["why"]
    return f"{verdict['why']}; {name} gave up first"
