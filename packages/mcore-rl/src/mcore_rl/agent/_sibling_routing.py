# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts of tokens that an engine found in its prefix cache: those that another answer to the same prompt recorded."""

import dataclasses
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
    filled_TLK, tokens = experts_TLK.clone(), rollout.trajectory
    for sibling in siblings:
        theirs = sibling.routed_experts
        end = int(places_N[-1]) + 1
        if sibling is rollout or theirs is None or len(theirs) < end or theirs.shape[1:] != filled_TLK.shape[1:]:
            continue
        if list(sibling.trajectory[:end]) != list(tokens[:end]):
            continue
        filled_TLK[places_N] = theirs[places_N]
        places_N = places_N[_missing(filled_TLK[places_N])]
        if not len(places_N):
            break
    return dataclasses.replace(rollout, routed_experts=filled_TLK)


def _missing(experts_TLK: Tensor) -> Tensor:
    """[T] bool."""
    return (experts_TLK < 0).flatten(1).any(1)
