# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How long requests waited for their tokens, as histograms that grow."""

import itertools
from bisect import bisect_left

from mcore_inference._figures import HISTOGRAMS
from mcore_inference.requests import DynamicInferenceRequestRecord

_TICK_S = 2.0**-20
"""Times are counted in these, so that sums of them are exact: in which order engines are summed changes no total."""


class Latencies:
    """Counts of the times of requests, in the buckets of ``HISTOGRAMS``."""

    def __init__(self) -> None:
        self._counts = {name: [0] * (len(histogram.bounds) + 1) for name, histogram in HISTOGRAMS.items()}
        """Of each bucket, without those below it; the last is of times over all bounds."""
        self._sums = dict.fromkeys(HISTOGRAMS, 0.0)

    def count_first_token(self, record: DynamicInferenceRequestRecord) -> None:
        """Of a request that just drew it."""
        self._count("time_to_first_token_seconds", record.time_to_first_token)

    def count_end(self, record: DynamicInferenceRequestRecord) -> None:
        """Of a request that was completed."""
        self._count("e2e_request_latency_seconds", record.latency)
        self._count("time_per_output_token_seconds", record.time_per_output_token)

    def count_queue_time(self, seconds: float) -> None:
        """Of a request that runs for the first time."""
        self._count("request_queue_time_seconds", seconds)

    def count_between_tokens(self, seconds: float, num_requests: int) -> None:
        """Of requests whose last tokens came as long ago."""
        self._count("inter_token_latency_seconds", seconds, num_requests)

    def _count(self, name: str, seconds: float | None, times: int = 1) -> None:
        if seconds is not None:
            self._counts[name][bisect_left(HISTOGRAMS[name].bounds, seconds)] += times
            self._sums[name] += times * round(seconds / _TICK_S) * _TICK_S

    def figures(self) -> dict[str, float]:
        """Of each histogram the counts up to each bound, the count of all, and the sum of the times."""
        figures: dict[str, float] = {}
        for name, histogram in HISTOGRAMS.items():
            figures |= zip((*histogram.bucket_names(name), f"{name}_count"), itertools.accumulate(self._counts[name]), strict=True)
            figures[f"{name}_sum"] = self._sums[name]
        return figures
