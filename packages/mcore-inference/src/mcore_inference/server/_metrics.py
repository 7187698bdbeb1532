# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What ``/metrics`` answers: the state of the engine, read when it is asked for."""

import math
from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from mcore_inference._figures import FIGURES, HISTOGRAMS
from mcore_inference.requests import FinishReason
from mcore_inference.server._group import ServerCounts
from mcore_inference.server._runner import Runner

_PREFIX = "mcore_inference_"
_REASON = "finished_"
_OF_HISTOGRAMS = frozenset(figure for name, histogram in HISTOGRAMS.items() for figure in histogram.figures(name))
_OF_EACH_ENGINE = (
    "open_requests", "open_tokens", "waiting_requests", "utilization", "weight_version", "seconds_to_first_token", "draining",
)  # fmt: skip
_MAX_ENGINES = 256
"""That have entries of their own."""


@runtime_checkable
class HasEngines(Protocol):
    """A runner of several engines, ``CoordinatedRunner``."""

    def engine_stats(self) -> Mapping[str, Mapping[str, float]]:
        """``stats`` of each, by name."""
        ...


class EngineCollector(Collector):
    """Counters, gauges and histograms of one engine, or of the engines of a coordinator together: those that ``stats`` has. Of each engine
    of a coordinator some gauges, with its name."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[Metric]:
        stats = self._runner.stats()
        for name, figure in FIGURES.items():
            if name in stats and not name.startswith(_REASON) and name not in _OF_HISTOGRAMS:
                family = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
                yield family(_PREFIX + name, figure.help, value=stats[name])
        for name, histogram in HISTOGRAMS.items():
            if f"{name}_count" in stats:
                values = [stats.get(bucket, 0.0) for bucket in histogram.bucket_names(name)]
                buckets = list(zip(map(floatToGoString, (*histogram.bounds, math.inf)), (*values, stats[f"{name}_count"]), strict=True))
                yield HistogramMetricFamily(_PREFIX + name, histogram.help, buckets=buckets, sum_value=stats.get(f"{name}_sum", 0.0))
        finished = CounterMetricFamily(_PREFIX + "finished_requests", "Requests that ended, by reason.", labels=["reason"])
        for reason in FinishReason:
            finished.add_metric([reason.value], stats.get(f"{_REASON}{reason.value}", 0.0))
        yield finished
        health = self._runner.health()
        yield GaugeMetricFamily(
            _PREFIX + "alive",
            "1 while the engine makes progress, 0 when it failed or hangs, or the last of several did.",
            value=health.alive,
        )
        yield GaugeMetricFamily(
            _PREFIX + "last_step_age_seconds",
            "Seconds since the last step ended or work arrived, of several engines the largest; 0 when idle.",
            value=health.last_step_age_s or 0.0,
        )
        if isinstance(self._runner, HasEngines):
            engines = sorted(self._runner.engine_stats().items())[:_MAX_ENGINES]
            for name in _OF_EACH_ENGINE:
                family = GaugeMetricFamily(f"{_PREFIX}engine_{name}", f"Of each engine: {FIGURES[name].help}", labels=["engine"])
                for engine, values in engines:
                    if name in values:
                        family.add_metric([engine], values[name])
                yield family


class ResponseCollector(Collector):
    """Answers of a server, or of all that share its address."""

    def __init__(self, counts: ServerCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        text = "HTTP responses, by status; 499 stands for a client that left."
        family = CounterMetricFamily(_PREFIX + "http_responses", text, labels=["status"])
        for status, count in self._counts.responses().items():
            family.add_metric([str(status)], count)
        yield family


class ServerMetrics:
    """The registry of one server; two servers of a process share nothing."""

    def __init__(self, runner: Runner, counts: ServerCounts) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(runner))
        self.registry.register(ResponseCollector(counts))
