# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Places of snapshots: each block has one of its own, and the one used longest ago gives way."""

import random

import pytest
import torch

from mcore_inference import MambaInferenceStateConfig
from mcore_inference.cache import BlockAllocator, PrefixChain, RecurrentStateCache, StateSnapshots
from mcore_inference.memory import cache_memory


@pytest.mark.parametrize("num_snapshots", [1, 2, 5])
def test_places_are_those_of_a_plain_list_by_last_use(num_snapshots: int) -> None:
    rng, snapshots = random.Random(num_snapshots), StateSnapshots(num_snapshots)
    used: list[tuple[int, int]] = []
    num_evicted = 0
    for _ in range(2_000):
        block, what = rng.randrange(12), rng.random()
        kept = dict(used)
        assert (block in snapshots) == (block in kept) and len(snapshots) == len(used)
        if what < 0.6:
            place = snapshots.take(block)
            assert (place is None) == (block in kept)
            if place is not None and len(used) == num_snapshots:
                num_evicted += 1
                assert place == used.pop(0)[1]
            used = [item for item in used if item[0] != block] + [(block, kept[block] if place is None else place)]
        elif what < 0.8 and block in kept:
            assert snapshots.use(block) == kept[block]
            used = [item for item in used if item[0] != block] + [(block, kept[block])]
        elif what < 0.99:
            snapshots.drop(block)
            used = [item for item in used if item[0] != block]
        else:
            snapshots.clear()
            used = []
        assert sorted(place for _, place in used) == sorted(set(range(num_snapshots)) - set(snapshots._free))
        assert snapshots.num_evicted == num_evicted


def test_without_places_nothing_is_kept() -> None:
    snapshots = StateSnapshots(0)
    assert snapshots.take(3) is None and 3 not in snapshots


def test_snapshots_go_with_blocks_that_are_evicted_forgotten_or_reset() -> None:
    allocator, chain = BlockAllocator(3, 2), PrefixChain(1)
    chain.grow([5, 6])

    def fill() -> list[int]:
        blocks = allocator.allocate_memory_blocks(2)
        assert blocks is not None
        for block, key, parent in zip(blocks, chain.keys, [None, blocks[0]], strict=True):
            allocator.register(block, key, parent)
            assert allocator.snapshots.take(block) is not None
        allocator.release_memory_blocks(blocks)
        return blocks

    first, second = fill()
    allocator.allocate_memory_blocks(1)
    assert first in allocator.snapshots and second not in allocator.snapshots
    for forget in (allocator.reset, allocator.forget, allocator.reset):
        forget()
        assert len(allocator.snapshots) == 0
        if forget == allocator.reset:
            fill()
            assert len(allocator.snapshots) == 2


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_copy_takes_all_layers_and_leaves_other_slots(device: str) -> None:
    config = MambaInferenceStateConfig("M*MM", (2, 1, 3), (2, 2, 2))
    states = RecurrentStateCache(config, 3, cache_memory(torch.device(device)), 2)
    assert states.num_bytes == 5 * config.bytes_per_request
    for layer, state in states.layers.items():
        for slot in range(5):
            state.conv[slot], state.memory[slot] = 10 * layer + slot, 100 + 10 * layer + slot
    if device == "cpu":
        states.copy(1, 4)
    else:
        mode = torch.cuda.get_sync_debug_mode()
        try:
            # Whoever waits is an error.
            torch.cuda.set_sync_debug_mode("error")
            states.copy(1, 4)
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    for layer, state in states.layers.items():
        for slot, source in enumerate([0, 1, 2, 3, 1]):
            assert (state.conv[slot] == 10 * layer + source).all() and (state.memory[slot] == 100 + 10 * layer + source).all()
