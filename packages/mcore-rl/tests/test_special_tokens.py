# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Texts begin once, and turns of the policy end with their end, whoever made the tokens."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mcore_rl import ContrastiveRollout, ContrastiveRolloutGenerator, GRPOConfig, TokenRollout, TrajectoryError
from mcore_rl._loop._dpo import ask_pairs
from mcore_rl._rollouts._collect import Collection, Drawn, draw

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
    """An agent elsewhere that made these groups."""

    def __init__(self, *groups: list[TokenRollout]) -> None:
        self.groups = groups

    async def get_grouped_rollouts(self, *_: Any, **__: Any) -> AsyncIterator[list[TokenRollout]]:
        for group in self.groups:
            yield group


class MadePairs(ContrastiveRolloutGenerator):
    """Pairs that somebody wrote down."""

    def __init__(self, *pairs: ContrastiveRollout) -> None:
        self.pairs = pairs

    async def get_contrastive_rollouts(self, *_: Any, **__: Any) -> list[ContrastiveRollout]:
        return [*self.pairs]


def config_of(num_groups: int, **ids: int | None) -> GRPOConfig:
    return GRPOConfig(num_groups=num_groups, group_size=2, seq_len=16, **{"bos_id": BOS, "eod_id": EOD, **ids})  # type: ignore[arg-type]


def drawn(*made: TokenRollout, **ids: int | None) -> list[list[TokenRollout]]:
    agent: Any = Made([*made])
    taken = draw(config_of(1, **ids), agent, None, 1)  # type: ignore[arg-type]
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
    assert drawn(made, right) == [[right]] and message in caplog.text
    assert drawn(made, bos_id=None, eod_id=None) == [[made]]
    with pytest.raises(TrajectoryError, match=message):
        drawn(made, made)


def test_a_draw_of_second_beginnings_alone_fails_and_one_group_of_them_is_lost() -> None:
    made, right = rollout("113452", "000011"), rollout("1345672", "0000111")
    agent: Any = Made([made, made], [made])
    failure = draw(config_of(2), agent, None, 2).failure  # type: ignore[arg-type]
    assert isinstance(failure, TrajectoryError) and "have the chat template or the tokenizer write it, not both" in str(failure)
    agent = Made([made, made], [right])
    taken = draw(config_of(2), agent, None, 2)  # type: ignore[arg-type]
    assert taken.failure is None and taken.groups == [[right]] and isinstance(taken.lost, TrajectoryError)
    # One problem of a rank among others says nothing of the tokenizer, and is the cause where nobody has more.
    agent = Made([made, made])
    taken = draw(config_of(2), agent, None, 1)  # type: ignore[arg-type]
    assert taken.failure is None and taken.groups == []
    with pytest.raises(RuntimeError, match="no rollout of 2 groups of 2 is left: .* has bos_id=1 twice in a row") as raised:
        Collection.of(config_of(2), taken.groups, lost=taken.lost)
    assert raised.value.__cause__ is taken.lost


def test_pairs_of_second_beginnings_alone_do_not_pass_for_equal_rewards() -> None:
    def pair(tokens: str, mask: str) -> ContrastiveRollout:
        made = rollout(tokens, mask)
        return ContrastiveRollout(chosen=made, rejected=dataclasses.replace(made, reward=0.0))

    doubled, right = pair("113452", "000011"), pair("1345672", "0000111")

    def asked(*pairs: ContrastiveRollout, num_pairs: int = 2) -> Drawn:
        return asyncio.run(ask_pairs(config_of(2), MadePairs(*pairs), None, num_pairs))

    with pytest.raises(TrajectoryError, match="have the chat template or the tokenizer write it, not both"):
        asked(doubled, doubled)
    assert asked(doubled, right).groups == [[right.chosen, right.rejected]]
    one = asked(doubled, num_pairs=1)
    assert one.groups == []
    with pytest.raises(RuntimeError, match="no pair of 2 is left, .* has bos_id=1 twice in a row") as raised:
        Collection.of(config_of(2), one.groups, pairs=True, lost=one.lost)
    assert raised.value.__cause__ is one.lost


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
