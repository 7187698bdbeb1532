# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the rollouts of an iteration say of themselves."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_rl._packing._header import RolloutHeader
from mcore_rl._stability import experimental_api
from mcore_rl._types import TokenRollout, as_array

Groups = Sequence[Sequence[TokenRollout]]
Headers = Sequence[Sequence[RolloutHeader]]


def pair_counts(groups: Groups) -> tuple[int, int]:
    """How alike the answers of a group are: of pairs of neighbouring tokens, those that two answers have in common, and all.

    Of all pairs of answers A, B of one group, 2 sum |A and B| and sum (|A| + |B|), where an answer is the set of its pairs of neighbours,
    the first token having none before it. Their quotient is 1 where all answers of each group are equal, 0 where none shares a pair.
    Tokens are ids below 2**31; the time is that of sorting them.
    """
    shared = most = 0
    for group in filter(None, groups):
        answers = [pairs[_begins(pairs)] for pairs in map(_pairs, group)]
        all_pairs = np.sort(np.concatenate(answers))
        counts = np.diff(np.flatnonzero(_begins(all_pairs)), append=len(all_pairs))
        shared += int((counts * (counts - 1)).sum())
        most += (len(answers) - 1) * len(all_pairs)
    return shared, most


def token_versions(groups: Groups) -> Counter[int]:
    """How many tokens were drawn from which weights, of those of which that is known."""
    counts: Counter[int] = Counter()
    for versions in [rollout.weight_versions or () for group in groups for rollout in group]:
        # Few, and counting one of them costs a fraction of looking each token up.
        for version in set(versions):
            counts[version] += versions.count(version)
    return counts


def example_numbers(groups: Headers) -> tuple[int, ...]:
    """Numbers among all of the best and the worst answer of the first group that has two; else of the first answer."""
    begin = 0
    for group in groups:
        if len(group) > 1:
            places = range(len(group))
            best, worst = max(places, key=lambda i: group[i].reward), min(reversed(places), key=lambda i: group[i].reward)
            return begin + best, begin + worst
        begin += len(group)
    return (0,) if begin else ()


@experimental_api
@dataclass(frozen=True, kw_only=True)
class EnvironmentReport:
    """What the answers to the problems of one environment earned in an iteration."""

    num_rollouts: int
    mean_reward: float
    std_reward: float
    mean_length: float
    """Generated tokens an answer."""
    truncated: float
    """Share of the answers that the limit of tokens ended."""


def environment_reports(groups: Headers) -> dict[str, EnvironmentReport]:
    """By the name of the environment, in alphabetical order."""
    reports = {}
    for env_id in sorted({header.env_id for group in groups for header in group}):
        own = [header for group in groups for header in group if header.env_id == env_id]
        rewards = torch.tensor([header.reward for header in own], dtype=torch.float64)
        reports[env_id] = EnvironmentReport(
            num_rollouts=len(own),
            mean_reward=rewards.mean().item(),
            std_reward=rewards.std(correction=0).item(),
            mean_length=sum(header.num_generated for header in own) / len(own),
            truncated=truncated_share([own]),
        )
    return reports


def group_rewards(groups: Headers) -> tuple[tuple[float, float], ...]:
    """Mean and standard deviation (of a population) of the rewards of each group that has some."""
    rewards = [torch.tensor([header.reward for header in group], dtype=torch.float64) for group in groups if group]
    return tuple((group.mean().item(), group.std(correction=0).item()) for group in rewards)


def truncated_share(groups: Headers) -> float:
    """Of the answers, those that the limit of tokens ended."""
    flat = [header.finish_reason == "length" for group in groups for header in group]
    return sum(flat) / len(flat)


def _pairs(rollout: TokenRollout) -> NDArray[np.int64]:
    """Ascending, one number for each token that the policy wrote and the one that it wrote before it, if there is one."""
    trajectory, written = np.asarray(as_array(rollout.trajectory, "q")), np.asarray(as_array(rollout.generation_mask, "b"))
    pairs = trajectory[written != 0]
    pairs[1:] += (pairs[:-1] + 1) << 31
    pairs.sort()
    return pairs


def _begins(ordered: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of these are the first of their value."""
    begins = np.ones(len(ordered), dtype=np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:])
    return begins
