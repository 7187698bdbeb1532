# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What rollouts say of themselves, against the definitions."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from mcore_rl import TokenRollout
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._rollouts._statistics import example_numbers, group_rewards, pair_counts, token_versions, truncated_share


def rollout(*answer: int, prompt: tuple[int, ...] = (1, 2), reward: float = 0.0, **fields: Any) -> TokenRollout:
    return TokenRollout(
        trajectory=(*prompt, *answer),
        reward=reward,
        generation_mask=(False,) * len(prompt) + (True,) * len(answer),
        logprobs=(-1.0,) * len(answer),
        env_id="e",
        problem_id="p",
        **fields,
    )


def headers(groups: Sequence[Sequence[TokenRollout]]) -> list[list[RolloutHeader]]:
    return [[RolloutHeader.of(one) for one in group] for group in groups]


def group_similarity(groups: Sequence[Sequence[TokenRollout]]) -> float | None:
    shared, most = pair_counts(groups)
    return shared / most if most else None


def test_equal_answers_are_alike_and_those_without_a_common_pair_are_not() -> None:
    assert group_similarity([[rollout(3, 4, 5)] * 3, [rollout(7)] * 2]) == 1.0
    assert group_similarity([[rollout(3, 4), rollout(4, 3)]]) == 0.0
    # (none, 3) of {(none, 3), (3, 4)} and {(none, 3), (3, 5)}; the prompts do not count.
    assert group_similarity([[rollout(3, 4), rollout(3, 5, prompt=(9,))]]) == 0.5
    assert group_similarity([]) is group_similarity([[rollout(3)], []]) is group_similarity([[rollout(), rollout()]]) is None


@pytest.mark.parametrize("seed", range(5))
def test_it_is_the_share_over_all_pairs_of_answers(seed: int) -> None:
    generator = random.Random(seed)
    groups = [
        [rollout(*(generator.randrange(3) for _ in range(generator.randrange(7)))) for _ in range(generator.randrange(1, 6))]
        for _ in range(4)
    ]
    common = total = 0
    for group in groups:
        answers = [one.trajectory[2:] for one in group]
        pairs = [{(answer[i - 1] if i else None, answer[i]) for i in range(len(answer))} for answer in answers]
        for one, other in itertools.combinations(pairs, 2):
            common, total = common + 2 * len(one & other), total + len(one) + len(other)
    assert total and group_similarity(groups) == pytest.approx(common / total, abs=1e-15)


def test_pairs_are_of_the_tokens_that_the_policy_wrote_in_any_turn_and_of_any_vocabulary() -> None:
    most = 2**31 - 1
    fields: dict[str, Any] = {"reward": 0.0, "logprobs": [-1.0] * 3, "env_id": "e", "problem_id": "p"}
    # The policy wrote (most, most, 0) in two turns, and (most, 0, most): (none, most) and (most, 0) are common to both.
    turns = TokenRollout(trajectory=[7, most, most, 8, 0], generation_mask=[False, True, True, False, True], **fields)
    other = TokenRollout(trajectory=[most, 0, most], generation_mask=[True] * 3, **fields)
    assert pair_counts([[turns, other]]) == (4, 6)
    # (none, 1) and (0, 1) are two pairs.
    assert pair_counts([[rollout(1), rollout(0, 1)]]) == (0, 3)


def test_tokens_are_counted_by_the_weights_that_drew_them() -> None:
    groups = [[rollout(3, 4, weight_versions=(5, 6)), rollout(3, 4, 4, weight_versions=(6, 6, 7))], [rollout(8)]]
    assert token_versions(groups) == {5: 1, 6: 3, 7: 1} and not token_versions([[rollout(8)]])


def test_examples_are_the_best_and_the_worst_of_the_first_group_that_has_two() -> None:
    group = [rollout(3, reward=0.5), rollout(4, reward=1.0), rollout(5, reward=-1.0)]
    assert example_numbers(headers([[], [rollout(9)], group])) == (2, 3)
    assert example_numbers(headers([[rollout(3), rollout(4)]])) == (0, 1)
    assert example_numbers(headers([[], [rollout(9)]])) == (0,) and example_numbers([]) == ()


def test_the_share_of_truncated_answers() -> None:
    assert truncated_share(headers([[rollout(3, finish_reason="length"), rollout(4)], [rollout(5), rollout(6)]])) == 0.25


def test_each_group_has_mean_and_deviation_of_its_rewards() -> None:
    groups = [[rollout(1, reward=1.0), rollout(1, reward=0.0)], [], [rollout(1, reward=0.25)]]
    assert group_rewards(headers(groups)) == ((0.5, 0.5), (0.25, 0.0))
