# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that train and ranks that serve, in one world."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_parallel import Group, ParallelPlan, ProcessGroups
from mcore_rl._ranks._ended import absence, announce
from mcore_rl._ranks._exchange import decode_json, encode_json
from mcore_rl._stability import experimental_api

_ANY_TIME_S = 365 * 86400.0
_CLOSED_S = 0.1
"""A wait that ends so long before its limit, or longer, ended because the connection was closed."""
_HANG_UP_TAG = 0x6D63


@experimental_api
class RankTimeoutError(TimeoutError):
    """A rank did not come in time, gave up, or died; names it."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which ranks of a world train, and which serve; ``split`` makes it on every rank.

    Raises:
        ValueError: a half without a rank.

    Example:
        >>> placement = Placement.split(ParallelPlan(tp=2))  # of four ranks, two train and two serve
        >>> model = GPTModel(sizes, placement.groups) if placement.groups is not None else None
    """

    world: Group
    """All ranks. Weights go over it."""
    host: Group
    """The same ranks over gloo, for what is on the host."""
    num_trainers: int
    """Ranks that train, the first of the world."""
    groups: ProcessGroups | None = field(repr=False)
    """Layout of the trained model; None on a rank that serves."""
    ahead: Group | None = field(default=None, repr=False)
    """The same ranks over gloo once more, for what a thread exchanges meanwhile; None leaves ``gather_ahead`` out."""

    def __post_init__(self) -> None:
        if not 0 < self.num_trainers < self.world.size:
            raise ValueError(
                f"{self.num_trainers} of {self.world.size} ranks train, which leaves no rank to a half; start more, or lower a degree"
            )

    @classmethod
    def split(cls, plan: ParallelPlan, *, timeout_s: float | None = None) -> "Placement":
        """The first ``plan.world_size`` ranks train in that layout, the others serve; every rank of the world calls it.

        Args:
            plan: layout of the trained model.
            timeout_s: limit of each collective of the trainers; None for torch's.

        Raises:
            ValueError: no rank is left to serve.
        """
        if (size := dist.get_world_size() if dist.is_initialized() else 1) <= plan.world_size:
            raise ValueError(
                f"{plan} takes {plan.world_size} of {size} ranks and leaves none to serve; start more ranks, or lower a degree"
            )
        world = Group.of(_default_group())
        host = world if dist.get_backend(world.pg) == "gloo" else Group.of(_gloo())
        ahead = Group.of(_gloo())
        announce(world)
        groups = ProcessGroups.build(plan, leave_idle=True, timeout_s=timeout_s)
        trains = world.rank < plan.world_size
        return cls(world=world, host=host, num_trainers=plan.world_size, groups=groups if trains else None, ahead=ahead)

    @property
    def trains(self) -> bool:
        """Whether this rank trains; otherwise it serves."""
        return self.world.rank < self.num_trainers

    @property
    def num_engines(self) -> int:
        """Ranks that serve."""
        return self.world.size - self.num_trainers

    @property
    def engine_rank(self) -> int:
        """Of this rank among those that serve; negative on one that trains."""
        return self.world.rank - self.num_trainers

    def gather(self, value: Any, timeout_s: float, purpose: str) -> list[Any]:
        """JSON values of all ranks, in rank order.

        Args:
            value: of this rank.
            timeout_s: limit of waiting for the others.
            purpose: what they come for, in the error.

        Raises:
            RankTimeoutError: ranks that did not come, or were lost before all of their value was here; names them and their half, and tells
                those of this machine that died. It closes the connections of this rank: the others end with the same error, at once or as
                the one that is missing comes, and so does every later call.
        """
        return self._gather(self.host, value, timeout_s, timeout_s, purpose)

    def gather_ahead(self, value: Any, timeout_s: float, purpose: str) -> list[Any]:
        """As ``gather``, in another thread than that; the others may take any time to come, and have ``timeout_s`` for their values then.

        A rank that dies is named at once; one that only stays away is not.
        """
        assert self.ahead is not None
        return self._gather(self.ahead, value, _ANY_TIME_S, timeout_s, purpose)

    def _gather(self, group: Group, value: Any, arrival_s: float, timeout_s: float, purpose: str) -> list[Any]:
        data = encode_json(value, torch.device("cpu"))
        begin = time.monotonic()
        arrivals, late = _swap(group, [torch.tensor([data.numel()])] * group.size, [1] * group.size, arrival_s)
        if late:
            raise self._lost(late, "did not come", purpose, begin, arrival_s)
        lengths = [int(length) for length in arrivals]
        return [decode_json(received) for received in self._swapped(group, [data] * group.size, lengths, timeout_s, purpose)]

    def _swapped(self, group: Group, parcels: Sequence[Tensor], lengths: Sequence[int], timeout_s: float, purpose: str) -> list[Tensor]:
        begin = time.monotonic()
        values, lost = _swap(group, parcels, lengths, timeout_s)
        if lost:
            raise self._lost(lost, "came, and did not exchange all", purpose, begin, timeout_s)
        return values

    def _lost(self, ranks: Sequence[int], what: str, purpose: str, begin: float, timeout_s: float) -> RankTimeoutError:
        waited_s = time.monotonic() - begin
        return RankTimeoutError(absence(self.world, ranks, what, purpose, waited_s=waited_s, timeout_s=timeout_s, names=half_names(self)))


def half_names(placement: Placement) -> list[str]:
    """Of all ranks, with what they do: for errors."""
    return [f"rank {rank} ({'trains' if place < placement.num_trainers else 'serves'})" for place, rank in enumerate(placement.world.ranks)]


def exchange_parcels(
    placement: Placement, parcels: Sequence[Tensor], lengths: Sequence[int], timeout_s: float, purpose: str, *, ahead: bool = False
) -> list[Tensor]:
    """What each rank of a placement sends to this one; all call it together, right after a ``gather``.

    Args:
        placement: these ranks.
        parcels: uint8 on the host, for each rank.
        lengths: bytes that come from each rank.
        timeout_s: limit of it all.
        purpose: what they bring, in the error.
        ahead: in the thread of ``gather_ahead``.

    Raises:
        RankTimeoutError: ranks that were lost, or whose bytes were not here in time; names them and their half.
    """
    group = placement.ahead if ahead else placement.host
    assert group is not None
    return placement._swapped(group, parcels, lengths, timeout_s, purpose)


def _swap(group: Group, own: Sequence[Tensor], lengths: Sequence[int], timeout_s: float) -> tuple[list[Tensor], list[int]]:
    """What each rank of a gloo group sends to this one, and the ranks with whom that failed within a limit; all call it together.

    Args:
        group: these ranks.
        own: for each rank, of one dimension; empty ones are not sent.
        lengths: numbers of elements that the ranks send.
        timeout_s: limit of it all.
    """
    end = time.monotonic() + timeout_s
    values = [part if peer == group.rank else part.new_empty(length) for peer, (part, length) in enumerate(zip(own, lengths, strict=True))]
    arrivals: dict[int, dist.Work | None] = {}
    departures: dict[int, dist.Work | None] = {}
    late: list[int] = []
    for peer in range(group.size):
        if peer == group.rank:
            continue
        try:
            if lengths[peer]:
                arrivals[peer] = dist.irecv(values[peer], group=group.pg, group_src=peer)
            if len(own[peer]):
                departures[peer] = dist.isend(own[peer], group=group.pg, group_dst=peer)
        except RuntimeError:
            # Its connection is closed: it died, or gave up.
            late.append(peer)
    for works in (arrivals, departures):
        if late:
            break
        for peer, work in works.items():
            if not _done(work, end):
                late.append(peer)
                if time.monotonic() < end - _CLOSED_S:
                    # Its connection is closed, and the others may come as late as they like.
                    break
    if late:
        hang_up(group, [peer for peer in range(group.size) if peer != group.rank and peer not in late])
    return values, sorted(late)


def hang_up(group: Group, peers: Sequence[int]) -> None:
    """Close the connections of a gloo group to these ranks: what they wait for from this one fails at once, and so does what comes later.

    A rank that gives up in the middle of an exchange would leave the others waiting to their own limits, and the next exchange would read
    messages of this one.
    """
    for peer in peers:
        with contextlib.suppress(RuntimeError):
            # Gloo closes a connection on which a wait ends without its message; nobody sends one with this tag.
            work = dist.irecv(torch.empty(1), group=group.pg, group_src=peer, tag=_HANG_UP_TAG)
            assert work is not None
            work.wait(timedelta(milliseconds=1))


def _done(work: "dist.Work | None", end: float) -> bool:
    try:
        return work is not None and work.wait(timedelta(seconds=max(0.001, end - time.monotonic())))
    except RuntimeError:
        return False


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _gloo() -> dist.ProcessGroup:
    group: Any = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
