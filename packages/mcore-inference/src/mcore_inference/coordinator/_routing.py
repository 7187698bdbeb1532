# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which engine gets a request: one that had the beginning of its prompt, unless others are that much less busy."""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_BLOCK_TOKENS = 16
_BLOCK_CHARACTERS = 64
_MAX_BLOCKS = 1024
"""Of a prompt that are looked at."""
_WORTH = 0.125
"""Share of an engine's places for which it has the whole prompt: so much busier it may be than one that has nothing of it. A beginning is
computed once more in a part of a step, while each request beside it is in every step of its answer; an eighth costs these little."""


@dataclass(frozen=True, kw_only=True)
class EngineLoad:
    """How busy an engine is."""

    share: float
    """Of what it computes at a time: 1 where the next request waits, above where some do."""
    tokens: int
    """Of its open requests; decides between equal shares."""


class PrefixRouter:
    """Chooses by the beginnings of prompts that each engine had, and by load.

    It is the engine with the smallest ``share - 0.125 * match``, where ``match`` is the share of the prompt's whole blocks that the engine
    had before; of equal ones that with the fewest tokens, and of those each in turn. So an engine that computes as many requests as it can
    is never chosen beside an idle one. The chosen engine then knows the prompt.

    Args:
        max_blocks: that are remembered of each engine; the longest unused go first, of one prompt the last ones.
    """

    def __init__(self, max_blocks: int = 65_536) -> None:
        self._limit = max_blocks
        self._known: dict[bytes, OrderedDict[int, None]] = {}
        """Of each engine, hashes of beginnings; with one all shorter ones are there, and later in the order."""
        self._turn = 0

    def choose(self, prompt: str | Sequence[int], loads: Mapping[bytes, EngineLoad], root: str = "") -> bytes:
        """An engine for a prompt.

        Args:
            prompt: text or tokens.
            loads: of every engine that may get it; at least one.
            root: what else a beginning belongs to, such as a load of an adapter; prompts of another root share nothing.
        """
        blocks = _blocks(prompt, root)
        each = max(1, len(blocks))
        costs = {name: (load.share - _WORTH * self._num_known(name, blocks) / each, load.tokens) for name, load in loads.items()}
        best = min(costs.values())
        equal = [name for name, cost in costs.items() if cost == best]
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


def _blocks(prompt: str | Sequence[int], root: str = "") -> list[int]:
    """Hashes of the beginnings of a prompt, of one whole block, two, and so on."""
    size = _BLOCK_CHARACTERS if isinstance(prompt, str) else _BLOCK_TOKENS
    hashes: list[int] = []
    before = hash(root) if root else 0
    for end in range(size, min(len(prompt), size * _MAX_BLOCKS) + 1, size):
        part = prompt[end - size : end]
        before = hash((before, part if isinstance(part, str) else tuple(part)))
        hashes.append(before)
    return hashes
