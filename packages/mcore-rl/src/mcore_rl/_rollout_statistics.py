# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the rollouts of an iteration say of themselves."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_rl._header import RolloutHeader
from mcore_rl._stability import experimental_api
from mcore_rl._types import TokenRollout

Groups = Sequence[Sequence[TokenRollout]]
Headers = Sequence[Sequence[RolloutHeader]]


def pair_counts(groups: Groups) -> tuple[int, int]:
    """How alike the answers of a group are: of pairs of neighbouring tokens, those that two answers have in common, and all.

    Of all pairs of answers A, B of one group, 2 sum |A and B| and sum (|A| + |B|), where an answer is the set of its pairs of neighbours,
    the first token having none before it. Their quotient is 1 where all answers of each group are equal, 0 where none shares a pair.
    The time is linear in the tokens.
    """
    shared = most = 0
    for group in groups:
        answers = [{*zip((None, *answer), answer, strict=False)} for answer in map(_answer, group)]
        counts = Counter(pair for answer in answers for pair in answer)
        shared += sum(count * (count - 1) for count in counts.values())
        most += (len(answers) - 1) * sum(map(len, answers))
    return shared, most


def token_versions(groups: Groups) -> Counter[int]:
    """How many tokens were drawn from which weights, of those of which that is known."""
    return Counter(drawn for group in groups for rollout in group for drawn in rollout.weight_versions or ())


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


def truncated_share(groups: Headers) -> float:
    """Of the answers, those that the limit of tokens ended."""
    flat = [header.finish_reason == "length" for group in groups for header in group]
    return sum(flat) / len(flat)


def _answer(rollout: TokenRollout) -> list[int]:
    return [token for token, is_drawn in zip(rollout.trajectory, rollout.generation_mask, strict=True) if is_drawn]
