# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whatever the two layouts, each element is written once, with its own value."""

import random

import pytest
import torch

from mcore_ckpt.chunks import Box
from mcore_rl import RefitPlanError, WeightShard, plan_refit
from tests.support.refit_layouts import carried, random_layout


@pytest.mark.parametrize("block", range(10))
def test_fifty_pairs_of_layouts_carry_every_weight(block: int) -> None:
    for number in range(50):
        generator = random.Random(f"{block} {number}")
        names = ["bias", "scalar", "square", "stack", "vocabulary"][: generator.randint(1, 5)]
        dims = {"bias": 1, "scalar": 0, "square": 2, "stack": 3, "vocabulary": 2}
        weights = {name: tuple(generator.randint(1, 9) for _ in range(dims[name])) for name in names}
        whole = {name: torch.randn(shape, dtype=torch.float64) for name, shape in weights.items()}
        sources = random_layout(weights, generator, 0)
        # The same ranks, others, or some of them.
        destinations = random_layout(weights, generator, generator.choice((0, 3, 64)))
        plan = plan_refit(sources, destinations)
        for shard, value, expected in carried(plan, whole, sources, destinations):
            assert torch.equal(value, expected), shard
        generator.shuffle(sources)
        generator.shuffle(destinations)
        assert plan_refit(sources, destinations) == plan


def whole(name: str, rank: int, shape: tuple[int, ...] = (4, 2)) -> WeightShard:
    return WeightShard(name=name, rank=rank, shape=shape, box=Box.whole(shape))


def part(name: str, rank: int, begin: int, rows: int) -> WeightShard:
    return WeightShard(name=name, rank=rank, shape=(4, 2), box=Box((begin, 0), (rows, 2)))


def test_what_a_rank_holds_is_not_sent_and_replicas_take_turns() -> None:
    replicas = [whole("w", rank) for rank in (0, 1)]
    plan = plan_refit(replicas, [whole("w", rank) for rank in range(6)])
    assert {copy.destination_rank: copy.source_rank for copy in plan.copies} == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    # Of replicas the one on the same device, whoever's turn it is.
    places = {0: "a", 1: "b", 2: "b", 3: "a", 4: "c"}
    plan = plan_refit(replicas, [whole("w", rank) for rank in range(6)], places=places)
    assert {copy.destination_rank: copy.source_rank for copy in plan.copies} == {0: 0, 1: 1, 2: 1, 3: 0, 4: 0, 5: 1}
    # A rank with a half takes the other half only.
    plan = plan_refit([part("w", 0, 0, 2), part("w", 1, 2, 2)], [whole("w", 0)])
    assert [(copy.source_rank, copy.box.shape) for copy in plan.copies] == [(0, (2, 2)), (1, (2, 2))]


def test_the_digest_is_that_of_the_plan() -> None:
    plan = plan_refit([part("w", 0, 0, 2), part("w", 1, 2, 2)], [whole("w", 0)])
    assert plan.digest == "f9d9de7bd34fd722c0ad8f14e4f15aeb9a65c6e7a02974a92f7409239ffb7714"
    assert plan_refit([part("w", 0, 0, 1), part("w", 1, 1, 3)], [whole("w", 0)]).digest != plan.digest


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([whole("a", 0)], [whole("a", 0), whole("b", 0)], "no source has b; make the two models one"),
        ([whole("a", 0), whole("b", 0)], [whole("a", 1)], "no destination takes b"),
        ([part("a", 0, 0, 2), part("a", 1, 3, 1)], [whole("a", 0)], "no source holds .* of a, which rank 0 takes"),
        ([part("a", 0, 0, 3), part("a", 0, 2, 2)], [whole("a", 1)], "a is twice on source rank 0"),
        ([whole("a", 0)], [part("a", 1, 0, 3), part("a", 1, 2, 2)], "a is twice on destination rank 1"),
        ([whole("a", 0)], [whole("a", 0, (5, 2))], r"a has several shapes without padding: \[\(4, 2\), \(5, 2\)\]; set real_shape"),
        ([whole("a", 0), whole("a", 1, (5, 2))], [whole("a", 0)], "a has several shapes on the source ranks"),
    ],
    ids=["missing", "unused", "hole", "source twice", "destination twice", "shape", "two shapes"],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused_by_name(sources: list[WeightShard], destinations: list[WeightShard], message: str) -> None:
    with pytest.raises(RefitPlanError, match=message):
        plan_refit(sources, destinations)


def test_a_box_outside_its_weight_is_refused() -> None:
    with pytest.raises(RefitPlanError, match="w of rank 1: .* lies outside shape"):
        part("w", 1, 3, 2)
    with pytest.raises(RefitPlanError, match=r"real_shape=\(6, 2\) exceeds shape \[4, 2\]"):
        WeightShard(name="w", rank=0, shape=(4, 2), box=Box.whole((4, 2)), real_shape=(6, 2))
