# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which cache blocks are free: bookkeeping on the host, no device and no tensor."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from mcore_inference._stability import experimental_api
from mcore_inference.cache._prefix import BlockKey, PrefixIndex
from mcore_inference.cache._snapshots import StateSnapshots


@experimental_api
class BlockAllocator:
    """Hands out block numbers and takes them back; all or nothing.

    Several requests may hold one block. A block whose contents are known (``register``) keeps them when its last holder gives it
    back; it counts as free, can be held again (``acquire``), and loses its contents only when nothing else is free, the one given back
    longest ago first.

    The last block is a sink for padding tokens: it is counted in ``total_count`` and never handed out.

    Args:
        num_blocks: all blocks, the sink included.
        num_snapshots: of recurrent states behind known blocks.

    Example:
        >>> allocator = BlockAllocator(4)
        >>> allocator.allocate_memory_blocks(2)
        [0, 1]
        >>> allocator.allocate_memory_blocks(2) is None
        True

    Raises:
        ValueError: fewer than two blocks.
    """

    def __init__(self, num_blocks: int, num_snapshots: int = 0) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: one to use and the sink; give the cache more memory")
        self.total_count = num_blocks
        self.num_evicted = 0
        """Known blocks that were handed out again for other tokens."""
        self._prefixes = PrefixIndex()
        self.snapshots = StateSnapshots(num_snapshots)
        """Behind blocks that are known; they go with them."""
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
        return len(self._free) + len(self._idle)

    @property
    def total_used(self) -> int:
        """Blocks that are held, each counted once."""
        return len(self._holders)

    @property
    def num_idle(self) -> int:
        """Free blocks whose contents are known."""
        return len(self._idle)

    def num_holders(self, block: int) -> int:
        """How often a block is held."""
        return self._holders.get(block, 0)

    def is_memory_available(self, num_blocks: int) -> bool:
        return num_blocks <= self.total_avail

    def allocate_memory_blocks(self, num_blocks: int) -> list[int] | None:
        """This many distinct blocks, or None (and nothing taken) when fewer are free.

        Raises:
            ValueError: a negative number.
        """
        if num_blocks < 0:
            raise ValueError(f"num_blocks={num_blocks} must not be negative")
        if num_blocks > self.total_avail:
            return None
        taken = [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def release_memory_blocks(self, blocks: Iterable[int]) -> None:
        """Give blocks back, those of one request in the order of its tokens.

        Raises:
            ValueError: a block that is not handed out (freed twice, the sink, foreign); nothing is freed then.
        """
        returned = list(blocks)
        if not self._holders.keys() >= set(returned) or len(set(returned)) != len(returned):
            wrong = sorted(block for block in set(returned) if block not in self._holders or returned.count(block) > 1)
            raise ValueError(f"blocks {wrong} are not handed out; each block is freed once by the request that holds it")
        # Reversed, so that a block is evicted before the one that it follows, and traces read in order.
        for block in reversed(returned):
            if self._holders[block] > 1:
                self._holders[block] -= 1
                continue
            del self._holders[block]
            if block in self._prefixes:
                self._idle[block] = None
            else:
                self._free.append(block)

    # -- known contents ----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Blocks that hold the longest known beginning of a sequence; nothing is taken."""
        return self._prefixes.match(keys)

    def is_followed(self, block: int) -> bool:
        """Whether the contents of a block behind this one are known."""
        return self._prefixes.is_followed(block)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Hold blocks that ``match`` found.

        Raises:
            ValueError: a block that is neither held nor known; nothing is taken then.
        """
        wrong = sorted(block for block in blocks if block not in self._holders and block not in self._idle)
        if wrong:
            raise ValueError(f"blocks {wrong} hold nothing that is known; acquire what match returned")
        for block in blocks:
            self._idle.pop(block, None)
            self._holders[block] = self._holders.get(block, 0) + 1

    def register(self, block: int, key: BlockKey, parent: int | None) -> int | None:
        """Say what a held block holds, once it is full and written.

        Args:
            block: not known yet.
            key: its tokens and those before.
            parent: the known block before it, None for the first.

        Returns:
            The block to go on with: ``block``; or another that held the same before, for which its holder can give up ``block``; or None
            where other tokens have the same hash: the block stays unknown.
        """
        assert block in self._holders, "a block is registered by its holder"
        return self._prefixes.add(block, key, parent)

    def forget(self) -> None:
        """Forget what blocks hold, as when the weights change; held blocks stay held."""
        self._prefixes.clear()
        self.snapshots.clear()
        # The one given back last is reused first, as among blocks without contents.
        self._free.extend(self._idle)
        self._idle.clear()

    def reset(self) -> None:
        """Every block free, and nothing known."""
        self._free = list(range(self.total_count - 2, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders: dict[int, int] = {}
        self._prefixes.clear()
        self.snapshots.clear()

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        self._prefixes.remove(block)
        self.snapshots.drop(block)
        self.num_evicted += 1
        return block
