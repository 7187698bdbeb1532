# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The block allocator against a set of what is handed out."""

import random

import pytest

from mcore_inference import BlockAllocator


@pytest.mark.parametrize("seed", range(5))
def test_random_traces_hand_out_every_block_once_and_get_all_back(seed: int) -> None:
    rng = random.Random(seed)
    allocator = BlockAllocator(rng.randint(2, 60))
    held: list[list[int]] = []
    for _ in range(4000):
        if rng.random() < 0.55:
            wanted = rng.randint(0, 8)
            available = allocator.is_memory_available(wanted)
            blocks = allocator.allocate_memory_blocks(wanted)
            assert (blocks is not None) == available
            if blocks is not None:
                assert len(blocks) == wanted
                held.append(blocks)
        elif held:
            allocator.release_memory_blocks(held.pop(rng.randrange(len(held))))
        out = [block for blocks in held for block in blocks]
        assert len(out) == len(set(out)) == allocator.total_used
        assert allocator.sink not in out
        assert allocator.total_used + allocator.total_avail == allocator.usable_count
    for blocks in held:
        allocator.release_memory_blocks(blocks)
    assert allocator.total_avail == allocator.usable_count


def test_a_request_for_too_many_blocks_takes_none() -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate_memory_blocks(4) is None
    assert allocator.total_avail == 3


@pytest.mark.parametrize("wrong", [[0, 0], [3], [1], [-1]])
def test_freeing_what_is_not_handed_out_is_an_error_and_frees_nothing(wrong: list[int]) -> None:
    allocator = BlockAllocator(4)
    assert allocator.allocate_memory_blocks(1) == [0]
    with pytest.raises(ValueError, match="not handed out"):
        allocator.release_memory_blocks(wrong)
    assert allocator.total_used == 1


def test_one_block_is_too_few() -> None:
    with pytest.raises(ValueError, match="num_blocks=1"):
        BlockAllocator(1)
