# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which engine gets a request: the one with the least work, or one whose cache knows how the prompt begins."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

_PREFIX_TOKENS = 64
_PREFIX_CHARACTERS = 256


class PrefixRouter:
    """Chooses by open tokens, and sends prompts that begin alike to one engine while that costs little balance.

    Args:
        slack_tokens: open tokens that the engine that knows the prefix may have more than the least busy one; 0 for no affinity.
        max_prefixes: prefixes that are remembered; the longest unused goes first.
    """

    def __init__(self, slack_tokens: int, max_prefixes: int = 65_536) -> None:
        self._slack = slack_tokens
        self._limit = max_prefixes
        self._homes: OrderedDict[int, bytes] = OrderedDict()
        self._turn = 0

    def choose(self, prompt: str | Sequence[int], open_tokens: Mapping[bytes, int]) -> bytes:
        """An engine for a prompt.

        Args:
            prompt: text or tokens.
            open_tokens: of every engine that takes requests; at least one.
        """
        least = min(open_tokens.values())
        prefix = _prefix(prompt) if self._slack else None
        if prefix is not None:
            home = self._homes.get(prefix)
            if home is not None and open_tokens.get(home, least + self._slack + 1) <= least + self._slack:
                self._homes.move_to_end(prefix)
                return home
        # Equal ones in turn.
        idle = [name for name, tokens in open_tokens.items() if tokens == least]
        self._turn += 1
        chosen = idle[self._turn % len(idle)]
        if prefix is not None:
            self._homes[prefix] = chosen
            self._homes.move_to_end(prefix)
            if len(self._homes) > self._limit:
                self._homes.popitem(last=False)
        return chosen


def _prefix(prompt: str | Sequence[int]) -> int | None:
    """What prompts that share their beginning have in common; None for a prompt that is too short to matter."""
    length = _PREFIX_CHARACTERS if isinstance(prompt, str) else _PREFIX_TOKENS
    if len(prompt) < length:
        return None
    return hash(prompt[:length] if isinstance(prompt, str) else tuple(prompt[:length]))
