# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Ranks that took unequally much of a stream of numbers go on with all of it, in any number."""

import asyncio
import dataclasses
import json
import random

import pytest

from mcore_rl import StreamPosition
from mcore_rl.envs import CharacterShare


def taken(position: StreamPosition, counts: tuple[int, ...]) -> tuple[list[list[int]], StreamPosition]:
    """What so many ranks take from there, each as many as ``counts`` says, and where they are then."""
    stream = position.shared_by(len(counts))
    own = [
        [stream.number(rank + place * len(counts)) for place in range(before, before + count)]
        for rank, (before, count) in enumerate(zip(stream.num_taken, counts, strict=True))
    ]
    done = tuple(before + count for before, count in zip(stream.num_taken, counts, strict=True))
    return own, dataclasses.replace(stream, num_taken=done)


def test_as_many_ranks_go_on_as_if_they_had_not_stopped() -> None:
    whole, _ = taken(StreamPosition(), (5, 4, 6))
    first, position = taken(StreamPosition(), (3, 0, 2))
    position = StreamPosition.of(**json.loads(json.dumps(dataclasses.asdict(position))))
    rest, _ = taken(position, (2, 4, 4))
    assert [a + b for a, b in zip(first, rest, strict=True)] == whole


@pytest.mark.parametrize("seed", range(30))
def test_over_changes_of_the_number_of_ranks_no_number_is_lost_or_taken_twice(seed: int) -> None:
    draws = random.Random(seed)
    seen: list[int] = []
    position = StreamPosition(first=draws.randrange(9))
    begin = position.first
    for _ in range(6):
        own, position = taken(position, tuple(draws.randrange(5) for _ in range(draws.randrange(1, 5))))
        seen += [number for rank in own for number in rank]
    left = position.shared_by(len(position.num_taken) + 1)
    # What is left and what was taken are all the numbers before the first that nobody has come to.
    assert sorted([*seen, *left.left]) == list(range(begin, left.first)) and list(left.left) == sorted(left.left)


def test_an_environment_poses_what_ranks_that_were_slower_left() -> None:
    environment = CharacterShare([*"stuvwxyz"], "b")

    def posed(count: int) -> list[str]:
        return [asyncio.run(environment.get_prompt()).problem_id for _ in range(count)]

    position = StreamPosition(num_taken=(3, 1))
    environment.start_at(position, rank=1, num_ranks=2)
    assert posed(2) == ["3", "5"] and environment.num_posed == 3
    environment.start_at(position)
    assert posed(3) == ["3", "5", "6"] and environment.num_posed == 3
