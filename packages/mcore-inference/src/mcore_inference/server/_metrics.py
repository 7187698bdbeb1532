# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What ``/metrics`` answers: the state of the engine, read when it is asked for."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from mcore_inference.requests import FinishReason
from mcore_inference.server._runner import Runner

_PREFIX = "mcore_inference_"
_COUNTERS = {
    "steps": "Steps of the engine that ended well.",
    "computed_tokens": "Tokens that went through the model.",
    "generated_tokens": "Tokens that were drawn for requests.",
    "graph_steps": "Steps that replayed a CUDA graph.",
    "failed_steps": "Steps that raised.",
    "preemptions": "Requests that lost their cache blocks and were computed again.",
    "prefix_cache_queries": "Prompt tokens that were looked up in the cache.",
    "prefix_cache_hits": "Prompt tokens that were found in the cache and not computed.",
    "evicted_blocks": "Known cache blocks that were given to other tokens.",
    "drafted_tokens": "Proposed tokens that were verified.",
    "accepted_tokens": "Proposed tokens that were drawn as well.",
}
_GAUGES = {
    "seconds_to_first_token": "Age of the engine's process when it drew its first token; 0 before.",
    "weight_version": "Number of completed weight loads.",
    "running_requests": "Requests that take part in steps.",
    "waiting_requests": "Requests in the queue.",
    "total_blocks": "Cache blocks that requests can hold.",
    "used_blocks": "Cache blocks in use.",
    "available_blocks": "Cache blocks that are free.",
    "idle_blocks": "Free cache blocks whose contents are known.",
    "utilization": "Share of the cache blocks in use, from 0 to 1.",
    "cached_tokens": "Tokens whose keys and values are in the cache.",
    "active_requests": "Request slots in use.",
    "max_requests": "Request slots.",
    "max_tokens": "Tokens that one step may compute.",
    "engines": "Engines that take requests.",
    "open_requests": "Requests that have no answer yet.",
    "open_tokens": "Tokens of the prompts and budgets of open requests.",
}


class EngineCollector(Collector):
    """Counters and gauges of one engine, or of the engines of a coordinator: those of them that ``stats`` has."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def collect(self) -> Iterator[Metric]:
        stats = self._runner.stats()
        for name, text in _COUNTERS.items():
            if name in stats:
                yield CounterMetricFamily(_PREFIX + name, text, value=stats[name])
        for name, text in _GAUGES.items():
            if name in stats:
                yield GaugeMetricFamily(_PREFIX + name, text, value=stats[name])
        finished = CounterMetricFamily(_PREFIX + "finished_requests", "Requests that ended, by reason.", labels=["reason"])
        for reason in FinishReason:
            finished.add_metric([reason.value], stats.get(f"finished_{reason.value}", 0.0))
        yield finished
        alive = GaugeMetricFamily(_PREFIX + "alive", "1 while the engine makes progress, 0 when it failed or hangs.")
        alive.add_metric([], float(self._runner.health().alive))
        yield alive


class ServerMetrics:
    """The registry of one server; two servers of a process share nothing."""

    def __init__(self, runner: Runner) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(runner))
        self._responses = Counter(
            _PREFIX + "http_responses", "HTTP responses, by status; 499 stands for a client that left.", ["status"], registry=self.registry
        )

    def count_response(self, status: int) -> None:
        self._responses.labels(status=str(status)).inc()
