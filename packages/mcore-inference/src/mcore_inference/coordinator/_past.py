# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Counters of engines that are gone: totals over all engines never fall."""

from collections import OrderedDict
from collections.abc import Mapping

from mcore_inference._figures import counters

_MAX_WORKERS = 256
"""That are remembered to come back; counters of older ones stay in the sums."""


class PastCounters:
    """Sums over engines that were lost. One that comes back takes its own out again."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self._workers: OrderedDict[str, dict[str, float]] = OrderedDict()
        """Of those that may come back."""

    def add(self, worker: str, stats: Mapping[str, float]) -> None:
        """An engine is gone.

        Args:
            worker: what it called itself; empty for one that cannot come back.
            stats: that it reported last.
        """
        last = counters(stats)
        self._change(last, 1)
        if worker:
            self._workers[worker] = last
            if len(self._workers) > _MAX_WORKERS:
                self._workers.popitem(last=False)

    def take_back(self, worker: str) -> dict[str, float]:
        """Counters of an engine that comes back, which are in the sums no more; empty for a new one."""
        last = self._workers.pop(worker, {})
        self._change(last, -1)
        return last

    def check_growth(self, last: Mapping[str, float], new: Mapping[str, float]) -> None:
        """What an engine had counted before it began anew stays in the sums."""
        self._change({name: value for name, value in counters(last).items() if new.get(name, 0.0) < value}, 1)

    def _change(self, values: Mapping[str, float], sign: int) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + sign * value
