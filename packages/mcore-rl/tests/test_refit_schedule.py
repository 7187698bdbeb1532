# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Buckets of a refit: each within its limit, together every element once, and equal on all ranks."""

import itertools
import random
from typing import Any

import pytest

from mcore_ckpt.chunks import Box
from mcore_rl._refit._schedule import Schedule


def rows(shape: tuple[int, ...], num_parts: int) -> list[Box]:
    """A weight cut along its first dim."""
    cuts = [shape[0] * part // num_parts for part in range(num_parts + 1)]
    return [Box((low, *[0] * (len(shape) - 1)), (high - low, *shape[1:])) for low, high in itertools.pairwise(cuts)]


def layouts_of(generator: random.Random, num_trainers: int, takers: list[Any]) -> list[list[Any]]:
    """Trainers that hold rows, then engines that take rows (a number of parts and which one) or whole weights (None)."""
    weights = []
    for number in range(generator.randint(1, 6)):
        shape = (generator.randint(2, 9), *(generator.randint(1, 9) for _ in range(generator.randint(0, 2))))
        weights.append((f"w{number}", shape, generator.choice(["float32", "bfloat16", "uint8"])))
    trainers = [
        [[[name, shape, rows(shape, num_trainers)[rank].to_json(), dtype] for name, shape, dtype in weights], [], None]
        for rank in range(num_trainers)
    ]
    engines = [
        [[], None if taker is None else [[name, shape, rows(shape, taker[0])[taker[1]].to_json()] for name, shape, _ in weights], None]
        for taker in takers
    ]
    return [*trainers, *engines]


@pytest.mark.parametrize("limit", [pytest.param(1, marks=pytest.mark.journey), pytest.param(8, marks=pytest.mark.journey), 50, 300, 10_000])
def test_buckets_are_within_the_limit_and_hold_each_element_once(limit: int) -> None:
    for seed in range(20):
        layouts = layouts_of(random.Random(f"{limit} {seed}"), 2, [None, (2, 0), (2, 1)])
        schedules = [Schedule.of(layouts, rank, limit) for rank in range(len(layouts))]
        assert len({tuple(map(str, (bucket.boxes for bucket in schedule.buckets))) for schedule in schedules}) == 1
        assert [schedule.takes_slices for schedule in schedules] == [True, True, False, True, True]
        for bucket in schedules[0].buckets:
            sizes = [box.num_elements * schedules[0].dtypes[name].itemsize for name, box in bucket.boxes]
            # Of an element that exceeds it there is one.
            assert sum(sizes) <= limit or [box.num_elements for _, box in bucket.boxes] == [1]
        for rank, (_, taken, _) in enumerate(layouts):
            came: dict[str, list[Box]] = {}
            for number, bucket in enumerate(schedules[rank].buckets):
                for source, message in bucket.incoming.items():
                    theirs = schedules[source].buckets[number].outgoing[rank]
                    assert [copy.box for copy, *_ in theirs.places] == [copy.box for copy, *_ in message.places]
                    for copy, *_ in message.places:
                        came.setdefault(copy.name, []).append(copy.box)
            boxes = [(name, Box.from_json(box)) for name, _, box in taken or []]
            if taken is None:
                boxes = [(name, Box.whole(shape)) for name, shape in schedules[rank].shapes.items()]
            for name, box in boxes:
                assert sum(part.num_elements for part in came.get(name, [])) == box.num_elements
                assert all(box.contains(part) for part in came.get(name, []))
