# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Boxes, tilings, and the parts that objects of other libraries are."""

import random
import time

import pytest
import torch

from mcore_ckpt import ShardedTensor
from mcore_ckpt.chunks import Box, check_tiling, find_overlap, subtract
from mcore_ckpt.chunks._box import runs
from mcore_ckpt.chunks._tiling import find_gap


def indices(box):
    return {
        tuple(int(i) for i in row)
        for row in torch.cartesian_prod(*map(torch.arange, box.shape)).reshape(-1, len(box.shape)) + torch.tensor(box.offset)
    }


def random_box(rng, num_dims, limit=6):
    offset = tuple(rng.randrange(limit) for _ in range(num_dims))
    return Box(offset, tuple(rng.randrange(1, limit) for _ in range(num_dims)))


def random_tiling(rng, shape, num_cuts):
    boxes = [Box.whole(shape)]
    for _ in range(num_cuts):
        box = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(shape))
        cut = rng.randint(0, box.shape[dim])
        first, second, corner = list(box.shape), list(box.shape), list(box.offset)
        first[dim], second[dim], corner[dim] = cut, box.shape[dim] - cut, box.offset[dim] + cut
        boxes += [Box(box.offset, tuple(first)), Box(tuple(corner), tuple(second))]
    rng.shuffle(boxes)
    return boxes


def test_intersection_and_difference_are_those_of_the_index_sets():
    rng = random.Random(1)
    for _ in range(150):
        num_dims = rng.choice((2, 3))
        one, other = random_box(rng, num_dims, 5), random_box(rng, num_dims, 5)
        common = one.intersect(other)
        assert (indices(common) if common else set()) == indices(one) & indices(other)
        pieces = subtract(one, other)
        assert find_overlap(pieces) is None
        assert set().union(*map(indices, pieces)) == indices(one) - indices(other)
        assert one.contains(other) == (indices(other) <= indices(one))


def test_random_tilings_are_accepted_and_any_lost_or_doubled_part_is_not():
    rng = random.Random(2)
    for _ in range(200):
        shape = tuple(rng.randrange(1, 9) for _ in range(rng.choice((1, 2, 3, 4))))
        boxes = random_tiling(rng, shape, rng.randrange(8))
        check_tiling(shape, boxes)
        solid = [box for box in boxes if box.num_elements]
        lost = rng.choice(solid)
        rest = [box for box in solid if box != lost]
        with pytest.raises(ValueError, match="no part holds"):
            check_tiling(shape, rest)
        gap = find_gap(Box.whole(shape), rest)
        assert gap is not None and lost.contains(gap)
        with pytest.raises(ValueError, match="overlap"):
            check_tiling(shape, [*boxes, lost])


def test_a_scalar_is_one_part_and_an_empty_tensor_needs_none():
    check_tiling((), [Box((), ())])
    check_tiling((0, 3), [])
    check_tiling((0, 3), [Box((0, 0), (0, 3))])
    with pytest.raises(ValueError, match="no part holds"):
        check_tiling((), [])
    with pytest.raises(ValueError, match="overlap"):
        check_tiling((), [Box((), ()), Box((), ())])


def test_parts_outside_or_of_another_rank_are_named():
    with pytest.raises(ValueError, match=r"\[2:5\] lies outside shape \[4\]"):
        check_tiling((4,), [Box((2,), (3,))])
    with pytest.raises(ValueError, match="has 1 dims, the tensor 2"):
        check_tiling((4, 4), [Box((2,), (2,))])
    with pytest.raises(ValueError, match="int of at least 0"):
        Box((-1,), (2,))
    with pytest.raises(ValueError, match="int of at least 0"):
        Box((True,), (2,))


def test_a_thousand_parts_are_checked_quickly():
    grid = [Box((row * 2, column * 3), (2, 3)) for row in range(64) for column in range(64)]
    check_tiling((128, 192), grid)
    check_tiling((4, 4096), [Box((0, column), (4, 1)) for column in range(4096)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"global_shape": (4, 3), "offset": (3, 0)}, "reaches outside"),
        ({"global_shape": (4,), "offset": (0, 0)}, "equally many dims"),
        ({"global_shape": (4, 3), "offset": (0, 0), "replica": -1}, "replica=-1"),
        ({"global_shape": (4, 3), "offset": (-1, 0)}, "at least 0"),
    ],
)
def test_a_part_that_does_not_fit_its_tensor_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ShardedTensor(torch.zeros(2, 3), **fields)


def test_a_tensor_without_dense_storage_is_refused():
    for data in (torch.zeros(2, 2, device="meta"), torch.zeros(2, 2).to_sparse()):
        with pytest.raises(ValueError, match="dense tensor with storage"):
            ShardedTensor(data, (2, 2), (0, 0))


def test_any_run_of_elements_is_boxes_of_consecutive_ones():
    rng = random.Random(4)
    for shape in ((), (1,), (9,), (4, 5), (3, 1, 4), (2, 3, 2, 2)):
        numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for _ in range(60):
            begin, end = sorted(rng.randint(0, numbers.numel()) for _ in range(2))
            boxes = list(runs(shape, begin, end))
            for first, box in boxes:
                part = numbers[box.slices()].flatten()
                assert part.tolist() == list(range(first, first + box.num_elements))
            assert [number for first, box in boxes for number in range(first, first + box.num_elements)] == list(range(begin, end))
            assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_overlaps_are_those_that_comparing_every_pair_finds():
    rng, seen = random.Random(8), set()
    for _ in range(600):
        num_dims = rng.randint(1, 4)
        if rng.random() < 0.5:
            boxes = random_tiling(rng, (7,) * num_dims, rng.randint(1, 25))
            if rng.random() < 0.5:
                boxes.append(random_box(rng, num_dims, 3))
        else:
            boxes = [random_box(rng, num_dims, 30) for _ in range(rng.randint(2, 6))]
        pair = find_overlap(boxes)
        solid = [box for box in boxes if box.num_elements]
        overlapping = any(solid[i].intersect(solid[j]) for i in range(len(solid)) for j in range(i))
        assert (pair is not None) == overlapping
        assert pair is None or (pair[0] != pair[1] and boxes[pair[0]].intersect(boxes[pair[1]]))
        seen.add((num_dims, overlapping))
    assert len(seen) == 8


@pytest.mark.journey
def test_large_grids_are_checked_in_a_moment():
    for counts in ((20_000,), (150, 150), (30, 30, 20), (12, 12, 12, 8)):
        corners = [()]
        for count in counts:
            corners = [(*corner, 3 * i) for corner in corners for i in range(count)]
        boxes = [Box(corner, (3,) * len(counts)) for corner in corners]
        random.Random(1).shuffle(boxes)
        start = time.perf_counter()
        check_tiling(tuple(3 * count for count in counts), boxes)
        assert time.perf_counter() - start < 5
