# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One line of JSON for so many steps of an engine."""

import json
import logging
import time
from collections.abc import Callable, Mapping

_LOG = logging.getLogger("mcore_inference.steps")
COUNTERS = frozenset({
    "steps", "graph_steps", "computed_tokens", "generated_tokens", "preemptions", "prefix_cache_queries", "prefix_cache_hits",
    "evicted_blocks", "evicted_snapshots", "drafted_tokens", "accepted_tokens", "expert_rebalances", "moved_experts",
    "finished_stop", "finished_length", "finished_abort", "finished_error", "failed_texts",
})  # fmt: skip
"""Of the statistics, those that count; a line has what they grew by."""


class StepLog:
    """Writes a line to the logger ``mcore_inference.steps``, at INFO, every ``interval`` steps.

    Args:
        stats: of the engine, read once a line.
        interval: steps of a line.
    """

    def __init__(self, stats: Callable[[], Mapping[str, float]], interval: int) -> None:
        self._stats, self._interval = stats, interval
        self._before: Mapping[str, float] = {}
        self._since = time.monotonic()

    def note(self, step_count: int) -> None:
        """Note that so many steps were run; writes where a line is full."""
        if step_count % self._interval:
            return
        now, stats = time.monotonic(), self._stats()
        line = {name: value - self._before.get(name, 0) if name in COUNTERS else value for name, value in stats.items()}
        _LOG.info("%s", json.dumps({"step": step_count, "seconds": round(now - self._since, 6), **line}))
        self._before, self._since = stats, now
