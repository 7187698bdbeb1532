# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""States of the engines of a group, and which signal leads from which to which."""

import enum
from collections.abc import Mapping
from types import MappingProxyType

from mcore_inference._stability import experimental_api
from mcore_inference.coordinator._messages import Pause, Resume, Signal, Stop, Suspend, Unpause


@experimental_api
class GroupState(enum.StrEnum):
    """What all engines of a coordinator are in between two signals."""

    RUNNING = "running"
    PAUSED = "paused"
    """No engine steps; requests keep their place in the cache."""
    SUSPENDED = "suspended"
    """Paused, and the cache's memory is free."""
    STOPPED = "stopped"
    """The end."""


class MemberState(enum.StrEnum):
    """What one engine is to its coordinator: from joining to serving to draining, from each of them out, and from there to joining."""

    JOINING = "joining"
    """It asks to be taken, or was given up: it gets nothing."""
    SERVING = "serving"
    """It takes requests."""
    DRAINING = "draining"
    """It ends the requests that it has, takes no more, and leaves then; signals and weights are for it as for all."""


_MOVES: Mapping[type[Signal], Mapping[GroupState, GroupState]] = MappingProxyType(
    {
        Pause: {GroupState.RUNNING: GroupState.PAUSED},
        Unpause: {GroupState.PAUSED: GroupState.RUNNING},
        Suspend: {GroupState.PAUSED: GroupState.SUSPENDED},
        Resume: {GroupState.SUSPENDED: GroupState.PAUSED},
        Stop: dict.fromkeys((GroupState.RUNNING, GroupState.PAUSED, GroupState.SUSPENDED), GroupState.STOPPED),
    }
)
_ALREADY: Mapping[type[Signal], tuple[GroupState, ...]] = MappingProxyType(
    {
        Pause: (GroupState.PAUSED, GroupState.SUSPENDED),
        Unpause: (GroupState.RUNNING,),
        Suspend: (GroupState.SUSPENDED,),
        Resume: (GroupState.PAUSED,),
        Stop: (GroupState.STOPPED,),
    }
)
"""States in which a signal has nothing to do."""


def state_after(signal: type[Signal], state: GroupState) -> GroupState:
    """The state that a signal leads to; the same one where it has nothing to do.

    Raises:
        ValueError: the signal is not allowed here; names what is.
    """
    if state in _ALREADY[signal]:
        return state
    after = _MOVES[signal].get(state)
    if after is None:
        name = signal.__name__.lower()
        raise ValueError(f"{name} is not possible while the engines are {state}; it is when they are {', '.join(_MOVES[signal])}")
    return after


def signals_between(state: GroupState, target: GroupState) -> list[type[Signal]]:
    """Signals that lead an engine of one state to another, in order; nothing leads out of ``STOPPED``."""
    line = [GroupState.RUNNING, GroupState.PAUSED, GroupState.SUSPENDED]
    if target is GroupState.STOPPED:
        return [] if state is target else [Stop]
    begin, end = line.index(state), line.index(target)
    forward: list[type[Signal]] = [Pause, Suspend]
    backward: list[type[Signal]] = [Unpause, Resume]
    return forward[begin:end] if begin <= end else backward[end:begin][::-1]
