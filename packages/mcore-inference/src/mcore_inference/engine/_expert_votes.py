# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What ranks that share experts say before their steps, and what follows from it: pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Vote:
    """What a rank says before a step."""

    has_work: bool
    hold: str | None
    """Why this rank cannot step; None where it can."""
    weight_version: int
    """-1 after a load that failed half-way."""
    load_version: int | None = None
    """Of the weights that this rank is to load; None where it loads none."""
    load_policy: str | None = None
    """What that load does with requests in flight."""
    max_steps: int = 1
    """Steps that this rank may make before its next vote."""
    num_left: int = 1
    """Steps after which the work of this rank has ended, at most."""
    graph_rows: int | None = None
    """Rows of the smallest recording that holds its next steps, which have one token a request, or are dummy steps; None where a step is
    another one, or nothing is recorded."""
    max_graph_rows: int = 0
    """Rows of its largest recording."""
    is_home: bool = False
    """Whether experts, which may lie elsewhere, are at home since weights were loaded: they move before the next step."""


@dataclass(frozen=True)
class Decision:
    """What follows from the votes of all ranks."""

    steps: bool
    """Whether every rank runs the model ``num_steps`` times."""
    hold: str | None = None
    """Who keeps the ranks from stepping, and why."""
    num_steps: int = 1
    graph_rows: int | None = None
    """Rows of the recording that every rank replays in each of the steps: the most that any rank needs. None for steps without one."""
    loads: bool = False
    """Whether every rank loads its weights now, in place of a step."""
    load_error: str | None = None
    """Why no rank loads what all want to load."""
    missing: tuple[int, ...] = ()
    """Ranks that do not load, while others wait to."""
    unequal: str | None = None
    """Whose weights differ from those of the first rank."""


def decide(votes: Sequence[Vote]) -> Decision:
    """All step where one has work, unless one cannot or has other weights than the first; all load once all want to load the same."""
    missing = tuple(rank for rank, vote in enumerate(votes) if vote.load_version is None)
    if len(missing) == len(votes):
        return _step(votes, ())
    if missing:
        return _step(votes, missing)
    first = votes[0]
    for rank, vote in enumerate(votes):
        if (vote.load_version, vote.load_policy) != (first.load_version, first.load_policy):
            return Decision(False, load_error=f"ep rank {rank} {_load(vote)} and ep rank 0 {_load(first)}; make one call on all")
    if first.load_policy != "drain" or not any(vote.has_work for vote in votes):
        return Decision(False, loads=True)
    decision = _step(votes, ())
    if decision.hold is None:
        return decision
    return Decision(False, load_error=f"in_flight='drain' needs steps, and {decision.hold}; end that, or choose recompute or keep")


def _step(votes: Sequence[Vote], missing: tuple[int, ...]) -> Decision:
    unequal = _unequal(votes)
    for rank, vote in enumerate(votes):
        if vote.hold is not None:
            return Decision(False, f"ep rank {rank} {vote.hold}", missing=missing, unequal=unequal)
    if unequal is not None:
        return Decision(False, unequal, missing=missing, unequal=unequal)
    left = [vote.num_left for vote in votes if vote.has_work]
    num_steps = max(1, min(*(vote.max_steps for vote in votes), max(left, default=1)))
    return Decision(bool(left), num_steps=num_steps, graph_rows=_graph_rows(votes) if left else None, missing=missing)


def _graph_rows(votes: Sequence[Vote]) -> int | None:
    """Ranks that exchange tokens hold equally many in a recording, so all replay one of the same size, or none does."""
    wanted = [vote.graph_rows for vote in votes if vote.graph_rows is not None]
    if len(wanted) < len(votes) or max(wanted) > min(vote.max_graph_rows for vote in votes):
        return None
    return max(wanted)


def _unequal(votes: Sequence[Vote]) -> str | None:
    first = votes[0].weight_version
    for rank, vote in enumerate(votes):
        if vote.weight_version < 0:
            return f"ep rank {rank} has weights of a load that failed half-way; repeat it"
        if first >= 0 and vote.weight_version != first:
            return f"ep rank {rank} has weight_version={vote.weight_version} and ep rank 0 {first}; load the same weights on all"
        if first >= 0 and vote.is_home != votes[0].is_home:
            late = 0 if vote.is_home else rank
            return f"ep rank {late} has not loaded weight_version={first} again, as others have; load the same weights on all"
    return None


def _load(vote: Vote) -> str:
    return f"calls load_weights(version={vote.load_version}, in_flight={vote.load_policy!r})"
