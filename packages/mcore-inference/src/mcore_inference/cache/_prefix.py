# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which cache blocks hold which tokens: a table on the host, no device and no tensor."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from mcore_inference._stability import experimental_api

__all__ = ["BlockKey", "PrefixChain", "PrefixIndex"]


@experimental_api
@dataclass(frozen=True, kw_only=True, slots=True)
class BlockKey:
    """Identity of a full block: its tokens, and a hash of them and of all tokens before them.

    Equal keys and values follow from equal tokens from the first one on, as long as the weights stay.
    """

    digest: bytes
    """SHA-256 of the digest of the block before, or of the chain's root, and the tokens."""
    tokens: bytes
    """Token ids as int32."""


@experimental_api
class PrefixChain:
    """Keys of the full blocks of one growing sequence.

    Args:
        block_size: tokens of a block.
        root: digest that the first block continues. Sequences whose keys and values are not those of the model alone, such as an adapter's,
            have one of their own.

    Example:
        >>> one, other = PrefixChain(2), PrefixChain(2)
        >>> one.grow([1, 2, 3, 4, 5])
        >>> other.grow([1, 2, 7, 4])
        >>> [a == b for a, b in zip(one.keys, other.keys)]
        [True, False]
    """

    def __init__(self, block_size: int, root: bytes = b"") -> None:
        self._block_size, self._root = block_size, root
        self.keys: list[BlockKey] = []

    def grow(self, tokens: Sequence[int]) -> None:
        """Append the keys that are missing.

        Args:
            tokens: the whole sequence; it goes on from what it was before.
        """
        size = self._block_size
        done = len(self.keys)
        if len(tokens) < (done + 1) * size:
            return
        words = np.asarray(tokens[done * size : len(tokens) // size * size], dtype="<i4").tobytes()
        before = self.keys[-1].digest if self.keys else self._root
        for start in range(0, len(words), 4 * size):
            mine = words[start : start + 4 * size]
            before = _digest(before, mine)
            self.keys.append(BlockKey(digest=before, tokens=mine))


def _digest(before: bytes, tokens: bytes) -> bytes:
    return hashlib.sha256(before + tokens).digest()


class PrefixIndex:
    """Finds the blocks that hold the beginning of a sequence.

    A block is known by its key and by the block before it. Tokens are compared beside the hash, block by block from the first one
    on, so two sequences with equal hashes are never taken for each other. A block must not be removed before those behind it.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._contents: dict[int, tuple[BlockKey, int | None]] = {}
        self._num_followers = Counter[int | None]()

    def __contains__(self, block: object) -> bool:
        return block in self._contents

    def __len__(self) -> int:
        return len(self._contents)

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks of the longest known beginning."""
        blocks: list[int] = []
        parent: int | None = None
        for key in keys:
            block = self._find(key, parent)
            if block is None:
                break
            blocks.append(block)
            parent = block
        return blocks

    def add(self, block: int, key: BlockKey, parent: int | None) -> int | None:
        """Make a block known.

        Args:
            block: not known yet.
            key: what it holds.
            parent: the known block before it, None for the first.

        Returns:
            The block that holds this: ``block``, or one that was known before; None, and nothing changes, where other tokens have the
            same hash.
        """
        assert block not in self and (parent is None or parent in self), "a block is known once, behind one that is known"
        if key.digest in self._blocks:
            return self._find(key, parent)
        self._blocks[key.digest] = block
        self._contents[block] = key, parent
        self._num_followers[parent] += 1
        return block

    def is_followed(self, block: int) -> bool:
        """Whether a known block comes behind this one."""
        return self._num_followers[block] > 0

    def remove(self, block: int) -> None:
        """Forget one block."""
        key, parent = self._contents.pop(block)
        del self._blocks[key.digest]
        self._num_followers[parent] -= 1

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
        self._contents.clear()
        self._num_followers.clear()

    def _find(self, key: BlockKey, parent: int | None) -> int | None:
        block = self._blocks.get(key.digest)
        if block is None:
            return None
        known, before = self._contents[block]
        return block if before == parent and known.tokens == key.tokens else None
