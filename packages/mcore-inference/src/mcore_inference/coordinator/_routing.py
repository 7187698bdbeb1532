# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which engine gets a request: of those that are not too busy, the one that had the longest beginning of its prompt."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence

_BLOCK_TOKENS = 16
_BLOCK_CHARACTERS = 64
_MAX_BLOCKS = 1024
"""Of a prompt that are looked at."""


class PrefixRouter:
    """Chooses by the beginnings of prompts that each engine had, and by open tokens.

    Engines that have at most ``slack_tokens`` open tokens more than the least busy one may be chosen. Of these it is the one that had the
    longest beginning, in whole blocks, of equal ones the least busy, and of those each in turn. The chosen engine then knows the prompt.

    Args:
        slack_tokens: open tokens that an engine may have more than the least busy one; 0 for no affinity.
        max_blocks: that are remembered of each engine; the longest unused go first, of one prompt the last ones.
    """

    def __init__(self, slack_tokens: int, max_blocks: int = 65_536) -> None:
        self._slack, self._limit = slack_tokens, max_blocks
        self._known: dict[bytes, OrderedDict[int, None]] = {}
        """Of each engine, hashes of beginnings; with one all shorter ones are there, and later in the order."""
        self._turn = 0

    def choose(self, prompt: str | Sequence[int], open_tokens: Mapping[bytes, int]) -> bytes:
        """An engine for a prompt.

        Args:
            prompt: text or tokens.
            open_tokens: of every engine that takes requests; at least one.
        """
        limit = min(open_tokens.values()) + self._slack
        blocks = _blocks(prompt) if self._slack else []
        scores = {name: (-self._num_known(name, blocks), tokens) for name, tokens in open_tokens.items() if tokens <= limit}
        best = min(scores.values())
        equal = [name for name, score in scores.items() if score == best]
        self._turn += 1
        chosen = equal[self._turn % len(equal)]
        if blocks:
            self._learn(chosen, blocks)
        return chosen

    def forget(self, engine: bytes) -> None:
        """One that is gone."""
        self._known.pop(engine, None)

    def forget_all(self) -> None:
        """Caches are worth nothing any more."""
        self._known.clear()

    def _num_known(self, engine: bytes, blocks: Sequence[int]) -> int:
        known = self._known.get(engine)
        return 0 if known is None else bisect_left(blocks, True, key=lambda block: block not in known)

    def _learn(self, engine: bytes, blocks: Sequence[int]) -> None:
        known = self._known.setdefault(engine, OrderedDict())
        # The beginning last: it goes last.
        for block in reversed(blocks):
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._limit:
            known.popitem(last=False)


def _blocks(prompt: str | Sequence[int]) -> list[int]:
    """Hashes of the beginnings of a prompt, of one whole block, two, and so on."""
    size = _BLOCK_CHARACTERS if isinstance(prompt, str) else _BLOCK_TOKENS
    hashes: list[int] = []
    before = 0
    for end in range(size, min(len(prompt), size * _MAX_BLOCKS) + 1, size):
        part = prompt[end - size : end]
        before = hash((before, part if isinstance(part, str) else tuple(part)))
        hashes.append(before)
    return hashes
