# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Texts begin once, and turns of the policy end with their end, whoever made the tokens."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from mcore_rl import GRPOConfig, TokenRollout, TrajectoryError
from mcore_rl._collect import draw

BOS, EOD = 1, 2


def rollout(tokens: str, mask: str) -> TokenRollout:
    """Of digits; the mask has a 1 for each that the policy drew."""
    return TokenRollout(
        trajectory=tuple(map(int, tokens)),
        generation_mask=tuple(place == "1" for place in mask),
        logprobs=None,
        reward=1.0,
        env_id="sums",
        problem_id="7",
    )


class Made:
    """An agent elsewhere that made one group."""

    def __init__(self, *made: TokenRollout) -> None:
        self.made = made

    async def get_grouped_rollouts(self, *_: Any, **__: Any) -> AsyncIterator[list[TokenRollout]]:
        yield [*self.made]


def drawn(*made: TokenRollout, **ids: int | None) -> list[list[TokenRollout]]:
    config = GRPOConfig(num_groups=1, group_size=2, seq_len=16, **{"bos_id": BOS, "eod_id": EOD, **ids})  # type: ignore[arg-type]
    agent: Any = Made(*made)
    taken = draw(config, agent, None, 1)  # type: ignore[arg-type]
    if taken.failure is not None:
        raise taken.failure
    return taken.groups


@pytest.mark.parametrize(
    ("tokens", "mask"),
    [
        ("1345672", "0000111"),  # an answer with its end
        ("1345", "0011"),  # one that was cut off
        ("3452", "0011"),  # no beginning, as the tokenizer has it
        ("13425262", "00110011"),  # two turns with an end each
        ("1322452", "0000011"),  # ends in the prompt
        ("13151", "00111"),  # beginnings that the policy drew
        ("13", "00"),
    ],
)
def test_what_begins_and_ends_once_is_learnt_from(tokens: str, mask: str) -> None:
    made = rollout(tokens, mask)
    assert drawn(made) == [[made]]


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        (
            "113452",
            "000011",
            "an answer to problem '7' of environment 'sums' has bos_id=1 twice in a row at place 1 of its prompt; have",
        ),
        ("13451162", "00110001", "has bos_id=1 twice in a row at place 5 of its prompt"),
    ],
)
def test_a_second_beginning_loses_the_answer_by_name(tokens: str, mask: str, message: str, caplog: pytest.LogCaptureFixture) -> None:
    made, right = rollout(tokens, mask), rollout("1345672", "0000111")
    assert drawn(made) == [] and message in caplog.text
    assert drawn(made, right) == [[right]]
    assert drawn(made, bos_id=None, eod_id=None) == [[made]]


@pytest.mark.parametrize(
    ("tokens", "mask", "message"),
    [
        ("134252", "001111", "an answer to problem '7' of environment 'sums' goes on behind eod_id=2 at place 3, which the policy drew"),
        ("13422", "00011", "goes on behind eod_id=2 at place 3"),
    ],
)
def test_tokens_behind_an_end_are_refused_by_name(tokens: str, mask: str, message: str) -> None:
    with pytest.raises(TrajectoryError, match=message):
        drawn(rollout(tokens, mask))
    assert drawn(rollout(tokens, mask), bos_id=None, eod_id=None)


def test_a_token_that_both_begins_and_ends_may_stand_between_turns() -> None:
    made = rollout("2342562", "0011001")
    assert drawn(made, bos_id=EOD) == [[made]]
    with pytest.raises(ValueError, match="bos_id=-1 must be at least 0"):
        GRPOConfig(num_groups=1, group_size=2, seq_len=16, bos_id=-1)
