# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How many requests ended, and why."""

import threading
from collections import Counter

from mcore_inference.requests import FinishReason


class EndCounts:
    """Requests that ended, by reason; counted in any thread, since texts are made by those who read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_reason: Counter[str] = Counter()

    def add(self, reason: FinishReason, count: int = 1) -> None:
        with self._lock:
            self.by_reason[reason.value] += count

    def move_to_error(self, reason: FinishReason) -> None:
        """Of a request that had ended by its tokens, and whose text the tokenizer fails at."""
        with self._lock:
            self.by_reason[reason.value] -= 1
            self.by_reason[FinishReason.ERROR.value] += 1
