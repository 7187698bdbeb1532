# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The block allocator against a set of what is handed out, and against a model of what blocks hold."""

import random
from collections import Counter
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from mcore_inference import BlockAllocator
from mcore_inference.cache import PrefixChain, _prefix

SIZE = 2


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


class SharedBlocks(RuleBasedStateMachine):
    """Sequences over two token ids that come and go; the model knows what was written into each block."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(9)
        self.held: list[list[int]] = []
        self.written: dict[int, tuple[int, ...]] = {}
        """Of each known block all tokens up to its end."""
        self.idle: list[int] = []

    def match(self, tokens: list[int]) -> list[int]:
        """The blocks that should be found."""
        known = {text: block for block, text in self.written.items()}
        found = []
        for end in range(SIZE, len(tokens) + 1, SIZE):
            if (block := known.get(tuple(tokens[:end]))) is None:
                break
            found.append(block)
        return found

    def found(self, tokens: list[int], chain: PrefixChain) -> list[int]:
        blocks = self.allocator.match(chain.keys)
        assert blocks == self.match(tokens)
        return blocks

    def register(self, block: int, chain: PrefixChain, index: int, parent: int | None, text: tuple[int, ...]) -> int | None:
        before = {known: number for number, known in self.written.items()}.get(text)
        kept = self.allocator.register(block, chain.keys[index], parent)
        assert kept == (block if before is None else before)
        return kept

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9))
    def come(self, tokens: list[int]) -> None:
        chain = PrefixChain(SIZE)
        chain.grow(tokens[:3])
        chain.grow(tokens)
        assert len(chain.keys) == len(tokens) // SIZE
        blocks = self.found(tokens, chain)
        self.allocator.acquire(blocks)
        self.idle = [block for block in self.idle if block not in blocks]
        needed = -(-len(tokens) // SIZE) - len(blocks)
        plain = 8 - len({block for held in self.held for block in held} | set(blocks) | set(self.idle))
        taken = self.allocator.allocate_memory_blocks(needed)
        assert (taken is None) == (needed > plain + len(self.idle))
        if taken is None:
            self.leave_with(blocks)
            return
        evicted, self.idle = self.idle[: max(0, needed - plain)], self.idle[max(0, needed - plain) :]
        assert set(evicted) <= set(taken), "the ones given back longest ago go first, and only when no other is free"
        for block in evicted:
            del self.written[block]
        first = len(blocks)
        blocks += taken
        for index in range(first, len(tokens) // SIZE):
            text = tuple(tokens[: (index + 1) * SIZE])
            kept = self.register(blocks[index], chain, index, blocks[index - 1] if index else None, text)
            if kept is None:
                break
            if kept == blocks[index]:
                self.written[kept] = text
            else:
                self.allocator.acquire([kept])
                self.allocator.release_memory_blocks([blocks[index]])
                blocks[index] = kept
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(place=st.integers(0, 1000))
    def leave(self, place: int) -> None:
        self.leave_with(self.held.pop(place % len(self.held)))

    def leave_with(self, blocks: list[int]) -> None:
        self.allocator.release_memory_blocks(blocks)
        left = {block for held in self.held for block in held}
        self.idle += [block for block in reversed(blocks) if block not in left and block in self.written]

    @precondition(lambda self: not self.held)
    @rule()
    def forget(self) -> None:
        self.allocator.forget()
        self.written, self.idle = {}, []

    @invariant()
    def every_block_is_free_idle_or_held_and_counted(self) -> None:
        holders = Counter(block for held in self.held for block in held)
        assert dict(holders) == self.allocator._holders
        assert list(self.allocator._idle) == self.idle
        everything = [*self.allocator._free, *self.idle, *holders]
        assert sorted(everything) == list(range(8))
        assert self.allocator.total_avail == 8 - self.allocator.total_used == 8 - len(holders)

    @invariant()
    def a_known_block_follows_a_known_one(self) -> None:
        texts = set(self.written.values())
        for block, text in self.written.items():
            assert self.allocator.is_followed(block) == any(other[:-SIZE] == text for other in texts)
        assert all(len(text) == SIZE or text[:-SIZE] in texts for text in texts)


class CollidingBlocks(SharedBlocks):
    """The same with a hash of two values: fewer blocks are found, and none of other tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = mock.patch.object(_prefix, "_digest", lambda before, tokens: bytes([sum(before) + sum(tokens) & 1]))
        self._patch.start()

    def teardown(self) -> None:
        self._patch.stop()

    def found(self, tokens: list[int], chain: PrefixChain) -> list[int]:
        blocks = self.allocator.match(chain.keys)
        assert blocks == self.match(tokens)[: len(blocks)]
        return blocks

    def register(self, block: int, chain: PrefixChain, index: int, parent: int | None, text: tuple[int, ...]) -> int | None:
        kept = self.allocator.register(block, chain.keys[index], parent)
        assert kept in (None, block) or self.written[kept] == text
        return kept


@pytest.mark.parametrize("machine", [pytest.param(SharedBlocks, marks=pytest.mark.journey), CollidingBlocks])
def test_shared_blocks_hold_what_was_written_and_go_when_nobody_needs_them(machine: type[SharedBlocks]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=60, stateful_step_count=25, deadline=None))


def test_blocks_that_nobody_knows_cannot_be_shared() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate_memory_blocks(1)
    allocator.acquire([0])
    with pytest.raises(ValueError, match=r"blocks \[1\] hold nothing"):
        allocator.acquire([0, 1])
    assert allocator.num_holders(0) == 2
