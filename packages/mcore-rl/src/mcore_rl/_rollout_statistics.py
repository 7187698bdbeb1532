# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the rollouts of an iteration say of themselves."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from mcore_rl._types import TokenRollout

Groups = Sequence[Sequence[TokenRollout]]


def group_similarity(groups: Groups) -> float | None:
    """How alike the answers of a group are: of pairs of neighbouring tokens, the share that two answers have in common.

    Of all pairs of answers A, B of one group, 2 sum |A and B| / sum (|A| + |B|), where an answer is the set of its pairs of neighbours, the
    first token having none before it. 1 where all answers of each group are equal, 0 where none shares a pair; None without two answers.
    The time is linear in the tokens.
    """
    shared = most = 0
    for group in groups:
        answers = [{*zip((None, *answer), answer, strict=False)} for answer in map(_answer, group)]
        counts = Counter(pair for answer in answers for pair in answer)
        shared += sum(count * (count - 1) for count in counts.values())
        most += (len(answers) - 1) * sum(map(len, answers))
    return shared / most if most else None


def token_versions(groups: Groups) -> Counter[int]:
    """How many tokens were drawn from which weights, of those of which that is known."""
    return Counter(drawn for group in groups for rollout in group for drawn in rollout.weight_versions or ())


def examples(groups: Groups) -> tuple[TokenRollout, ...]:
    """The best and the worst answer of the first group that has two, without its routing; else the first answer."""
    for group in groups:
        if len(group) > 1:
            pair = max(group, key=lambda one: one.reward), min(reversed(group), key=lambda one: one.reward)
            return tuple(dataclasses.replace(one, routed_experts=None) for one in pair)
    return tuple(dataclasses.replace(one, routed_experts=None) for group in groups for one in group)[:1]


def truncated_share(groups: Groups) -> float:
    """Of the answers, those that the limit of tokens ended."""
    flat = [rollout.finish_reason == "length" for group in groups for rollout in group]
    return sum(flat) / len(flat)


def _answer(rollout: TokenRollout) -> list[int]:
    return [token for token, is_drawn in zip(rollout.trajectory, rollout.generation_mask, strict=True) if is_drawn]
