# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which cache blocks are free: bookkeeping on the host, no device and no tensor."""

from collections.abc import Iterable

from mcore_inference._stability import experimental_api


@experimental_api
class BlockAllocator:
    """Hands out block numbers and takes them back; all or nothing.

    The last block is a sink for padding tokens: it is counted in ``total_count`` and never handed out.

    Args:
        num_blocks: all blocks, the sink included.

    Example:
        >>> allocator = BlockAllocator(4)
        >>> allocator.allocate_memory_blocks(2)
        [0, 1]
        >>> allocator.allocate_memory_blocks(2) is None
        True

    Raises:
        ValueError: fewer than two blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: one to use and the sink; give the cache more memory")
        self.total_count = num_blocks
        self.reset()

    @property
    def sink(self) -> int:
        """The block that padding tokens write to."""
        return self.total_count - 1

    @property
    def usable_count(self) -> int:
        """Blocks that requests can hold."""
        return self.total_count - 1

    @property
    def total_avail(self) -> int:
        """Free blocks."""
        return len(self._free)

    @property
    def total_used(self) -> int:
        return self.usable_count - len(self._free)

    def is_memory_available(self, num_blocks: int) -> bool:
        return num_blocks <= len(self._free)

    def allocate_memory_blocks(self, num_blocks: int) -> list[int] | None:
        """This many distinct blocks, or None (and nothing taken) when fewer are free.

        Raises:
            ValueError: a negative number.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks} must not be negative")
        if num_blocks > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(num_blocks)]
        self._used.update(taken)
        return taken

    def release_memory_blocks(self, blocks: Iterable[int]) -> None:
        """Take blocks back.

        Raises:
            ValueError: a block that is not handed out (freed twice, the sink, foreign); nothing is freed then.
        """
        returned = list(blocks)
        if not self._used.issuperset(returned) or len(set(returned)) != len(returned):
            wrong = sorted(block for block in set(returned) if block not in self._used or returned.count(block) > 1)
            raise ValueError(f"blocks {wrong} are not handed out; each block is freed once by the request that holds it")
        self._used.difference_update(returned)
        # Reversed, so that the block freed first is reused first and traces read in order.
        self._free.extend(reversed(returned))

    def reset(self) -> None:
        """Every block free."""
        self._free = list(range(self.total_count - 2, -1, -1))
        self._used: set[int] = set()
