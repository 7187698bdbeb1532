# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How many requests ended, and why."""

import threading
from collections import Counter

from mcore_inference.requests import FinishReason


class EndCounts:
    """Requests that ended, by reason, and texts that failed behind the end; counted in any thread, since texts are made by those who read
    them. No count falls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.by_reason: Counter[str] = Counter()
        self.failed_texts = 0
        """Of requests that had ended by their tokens; they stay counted by the reason that they had then."""

    def add(self, reason: FinishReason, count: int = 1) -> None:
        with self._lock:
            self.by_reason[reason.value] += count

    def add_failed_text(self) -> None:
        """Of a request that had ended by its tokens, and whose text the tokenizer fails at."""
        with self._lock:
            self.failed_texts += 1
