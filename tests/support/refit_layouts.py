# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Random placements of weights, and a refit between two of them by hand."""

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mcore_ckpt.chunks import Box, runs
from mcore_rl import RefitPlan, WeightShard


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


def random_layout(shapes: dict[str, tuple[int, ...]], generator: random.Random, first_rank: int) -> list[WeightShard]:
    """Some placement: pipeline stages, a cut along one or two dims, replicas, flat slices as of FSDP; padded rows now and then."""
    shards: list[WeightShard] = []
    num_stages = generator.choice((1, 1, 2))
    for name, real in shapes.items():
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


def carried(
    plan: RefitPlan, whole: Mapping[str, Tensor], sources: Sequence[WeightShard], destinations: Sequence[WeightShard]
) -> Iterator[tuple[WeightShard, Tensor, Tensor]]:
    """Copies between shards alone: each destination with what it has then, and what it should have.

    Raises:
        AssertionError: an element is written not once.
    """
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
        assert counts[key].eq(1).all(), key
        yield shard, taken[key], padded(whole[shard.name], shard.shape, 0.0)[shard.box.slices()]


def padded(tensor: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
    grown = torch.full(shape, value, dtype=torch.float64)
    grown[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return grown
