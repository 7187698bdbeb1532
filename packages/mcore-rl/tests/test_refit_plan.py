# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Whatever the two layouts, each element is written once, with its own value."""

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from mcore_ckpt.chunks import Box, runs
from mcore_rl import RefitPlan, RefitPlanError, WeightShard, plan_refit


def cuts(size: int, parts: int, generator: random.Random, even: bool) -> list[tuple[int, int]]:
    """Begin and length of consecutive parts; uneven ones may be empty."""
    if even and size % parts == 0:
        bounds = [size // parts * i for i in range(parts + 1)]
    else:
        bounds = [0, *sorted(generator.randint(0, size) for _ in range(parts - 1)), size]
    return [(low, high - low) for low, high in itertools.pairwise(bounds)]


def along(box: Box, dim: int, begin: int, length: int) -> Box:
    """The box with another extent of one dim."""
    offset, shape = list(box.offset), list(box.shape)
    offset[dim], shape[dim] = begin, length
    return Box(tuple(offset), tuple(shape))


def layout(weights: dict[str, tuple[int, ...]], generator: random.Random, first_rank: int) -> list[WeightShard]:
    """Some placement: pipeline stages, a cut along one or two dims, replicas, flat slices as of FSDP; padded rows now and then."""
    shards: list[WeightShard] = []
    num_stages = generator.choice((1, 1, 2))
    for name, real in weights.items():
        padding = generator.choice((0, 0, 1, 3)) if real and name.startswith("vocabulary") else 0
        shape = (real[0] + padding, *real[1:]) if real else real
        kind = generator.choice(("whole", "rows", "columns", "grid", "flat"))
        boxes = [[Box.whole(shape)]]
        if kind == "flat":
            ends = cuts(math.prod(shape), generator.randint(1, 4), generator, even=False)
            boxes = [[box for _, box in runs(shape, begin, begin + length)] for begin, length in ends]
        elif shape and kind != "whole":
            dims = {"rows": [0], "columns": [len(shape) - 1], "grid": sorted({0, len(shape) - 1})}[kind]
            for dim in dims:
                parts = cuts(shape[dim], generator.randint(1, 4), generator, generator.random() < 0.5)
                boxes = [[along(box, dim, *part)] for [box] in boxes for part in parts]
        stage, replicas = generator.randrange(num_stages), generator.choice((1, 1, 2))
        for replica in range(replicas):
            for number, parts in enumerate(boxes):
                rank = first_rank + stage * 32 + replica * len(boxes) + number
                shards += [WeightShard(name=name, rank=rank, shape=shape, box=box, real_shape=real if padding else None) for box in parts]
    return shards


def carry_out(plan: RefitPlan, whole: dict[str, Tensor], sources: list[WeightShard], destinations: list[WeightShard]) -> None:
    """Copies between shards alone; every element of the destinations begins as NaN and is counted."""
    held = {(s.name, s.rank, s.box): padded(whole[s.name], s.shape, -7.0)[s.box.slices()].clone() for s in sources}
    taken = {(s.name, s.rank, s.box): torch.full(s.box.shape, math.nan, dtype=torch.float64) for s in destinations}
    counts = {key: torch.zeros_like(value) for key, value in taken.items()}
    for copy in plan.copies:
        key = (copy.name, copy.destination_rank, copy.destination)
        taken[key][copy.destination_slices] = held[copy.name, copy.source_rank, copy.source][copy.source_slices]
        counts[key][copy.destination_slices] += 1
    for fill in plan.fills:
        key = (fill.name, fill.rank, fill.destination)
        taken[key][fill.slices] = 0.0
        counts[key][fill.slices] += 1
    for shard in destinations:
        key = (shard.name, shard.rank, shard.box)
        assert torch.equal(taken[key], padded(whole[shard.name], shard.shape, 0.0)[shard.box.slices()]), key
        assert counts[key].eq(1).all(), key


def padded(tensor: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    grown = torch.full(shape, value, dtype=torch.float64)
    grown[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return grown


@pytest.mark.parametrize("block", range(10))
def test_fifty_pairs_of_layouts_carry_every_weight(block: int) -> None:
    for number in range(50):
        generator = random.Random(f"{block} {number}")
        names = ["bias", "scalar", "square", "stack", "vocabulary"][: generator.randint(1, 5)]
        dims = {"bias": 1, "scalar": 0, "square": 2, "stack": 3, "vocabulary": 2}
        weights = {name: tuple(generator.randint(1, 9) for _ in range(dims[name])) for name in names}
        whole = {name: torch.randn(shape, dtype=torch.float64) for name, shape in weights.items()}
        sources = layout(weights, generator, 0)
        # The same ranks, others, or some of them.
        destinations = layout(weights, generator, generator.choice((0, 3, 64)))
        plan = plan_refit(sources, destinations)
        carry_out(plan, whole, sources, destinations)
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
