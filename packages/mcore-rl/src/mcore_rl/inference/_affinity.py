# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which of several engines answers a prompt."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# Answers; a batch of so many more takes an engine hardly longer a token, and a prompt that is computed again does.
_MOST_AHEAD = 16


@dataclass
class _Home:
    engine: int
    num_open: int = 0


class PromptAffinity:
    """The engine that answers the same prompt already, whose cache holds it, unless it has 16 answers more to draw than another one; else
    the one that has fewest.

    Agents ask for the answers of a group one by one. Event loops in several threads may call at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._homes: dict[tuple[int, ...], _Home] = {}

    @contextlib.contextmanager
    def engine(self, prompt: Sequence[int], loads: Sequence[float]) -> Iterator[int]:
        """Its number, while it answers.

        Args:
            prompt: token ids.
            loads: answers that each engine has to draw; infinite for one that is to get none, of which not all may be.
        """
        key, least = tuple(prompt), min(range(len(loads)), key=loads.__getitem__)
        with self._lock:
            home = self._homes.setdefault(key, _Home(least))
            if loads[home.engine] >= loads[least] + _MOST_AHEAD:
                home.engine = least
            home.num_open += 1
            number = home.engine
        try:
            yield number
        finally:
            with self._lock:
                home.num_open -= 1
                if not home.num_open:
                    del self._homes[key]
