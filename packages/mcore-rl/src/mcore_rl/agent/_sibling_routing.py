# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts of tokens that an engine found in its prefix cache: those that another answer to the same prompt recorded."""

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor

from mcore_rl._types import TokenRollout


def routed_as_siblings(group: Sequence[TokenRollout]) -> list[TokenRollout]:
    """The answers of a group, whose tokens without recorded experts have those of an answer with the same tokens up to there.

    The experts of a token follow from it and those before it. What no answer recorded stays at -1.

    Args:
        group: answers to one problem.
    """
    recorded = [rollout for rollout in group if rollout.routed_experts is not None]
    return [rollout if rollout.routed_experts is None else _filled(rollout, rollout.routed_experts, recorded) for rollout in group]


def _filled(rollout: TokenRollout, experts_TLK: Tensor, siblings: Sequence[TokenRollout]) -> TokenRollout:
    places_N = _missing(experts_TLK).nonzero().flatten()
    if not len(places_N):
        return rollout
    filled_TLK, tokens = experts_TLK.clone(), list(rollout.trajectory)
    for sibling in siblings:
        theirs = sibling.routed_experts
        if sibling is rollout or theirs is None or theirs.shape[1:] != filled_TLK.shape[1:]:
            continue
        most = min(int(places_N[-1]) + 1, len(theirs))
        shared_N = places_N[places_N < _common(tokens, list(sibling.trajectory), most)]
        known_N = shared_N[~_missing(theirs[shared_N])]
        filled_TLK[known_N] = theirs[known_N]
        places_N = places_N[_missing(filled_TLK[places_N])]
        if not len(places_N):
            break
    return dataclasses.replace(rollout, routed_experts=filled_TLK)


def _common(ours: list[int], theirs: list[int], most: int) -> int:
    """How many of the first ``most`` tokens both begin with."""
    # Python compares slices much faster than tokens one by one.
    return bisect_left(range(most), True, key=lambda place: ours[: place + 1] != theirs[: place + 1])


def _missing(experts_TLK: Tensor) -> Tensor:
    """[T] bool."""
    return (experts_TLK < 0).flatten(1).any(1)
