# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The flat layout as a plan."""

import itertools
import math
import random

import pytest

from megatron_fsdp._layout import Segment, plan_layout

SIZES = (1, 1, 2, 3, 5, 7, 8, 16, 64)


def random_shapes(seed: int) -> tuple[list[tuple[int, ...]], int]:
    draw = random.Random(seed)
    shapes = [tuple(draw.choice((0, *SIZES * 9)) for _ in range(draw.randint(0, 4))) for _ in range(draw.randint(1, 8))]
    return shapes, draw.choice((1, 2, 3, 4, 5, 7, 8, 16))


@pytest.mark.parametrize("seed", range(100))
def test_every_element_has_one_place_and_every_row_one_rank(seed):
    shapes, num_shards = random_shapes(seed)
    layout = plan_layout(shapes, num_shards)
    assert [segment.shape for segment in layout.segments] == shapes
    spans = sorted((segment.offset, segment.offset + segment.numel) for segment in layout.segments if segment.numel)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(spans))
    assert not spans or spans[-1][1] <= layout.numel
    for segment in layout.segments:
        ranges = [segment.rows(rank, layout.shard_numel) for rank in range(num_shards)]  # asserts that no row is split
        assert [row for first, last in ranges for row in range(first, last)] == list(range(segment.num_rows))


@pytest.mark.parametrize("seed", range(100))
def test_padding_is_at_most_five_percent_or_64_elements_a_rank(seed):
    shapes, num_shards = random_shapes(seed)
    total = sum(math.prod(shape) for shape in shapes)
    assert plan_layout(shapes, num_shards).numel <= total + max(total * 0.05, 64 * num_shards) + num_shards


@pytest.mark.parametrize("num_shards", [8, 64, 256, 1024])
def test_a_transformer_block_wastes_under_five_percent(num_shards):
    shapes = [(8, 768, 4096), (4096, 4096), (2, 14336, 4096), (4096, 14336), (4096,), (4096,)]
    layout = plan_layout(shapes, num_shards)
    assert layout.numel < 1.05 * sum(math.prod(shape) for shape in shapes)
    assert num_shards == 1024 or all(segment.row_numel >= 4096 for segment in layout.segments if len(segment.shape) > 1)


@pytest.mark.parametrize("seed", range(100))
def test_boxes_cover_a_range_of_merged_rows_in_memory_order(seed):
    draw = random.Random(seed)
    shape = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 4)))
    segment = Segment(shape, draw.randint(1, len(shape)), 0)
    first = draw.randint(0, segment.num_rows)
    last = draw.randint(first, segment.num_rows)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    covered = []
    for offsets, sizes in segment.boxes(first, last):
        start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        covered += range(start, start + math.prod(sizes))
    assert covered == list(range(first * segment.row_numel, last * segment.row_numel))
