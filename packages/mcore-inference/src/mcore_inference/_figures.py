# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What each figure of ``stats`` is, and how those of several engines become one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from mcore_inference.requests import FinishReason


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of one engine, or of several together."""

    help: str
    kind: Literal["counter", "gauge"] = "gauge"
    """A counter grows until its engine ends."""
    together: Literal["sum", "largest", "smallest", "share"] = "sum"
    """Of several engines; ``share`` is ``used_blocks`` of ``total_blocks``."""


def _counter(text: str) -> Figure:
    return Figure(help=text, kind="counter")


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Times of requests, whose counts are figures too: ``{name}_le_{bound}`` up to each bound, ``{name}_count`` and ``{name}_sum``."""

    help: str
    bounds: tuple[float, ...]
    """Of the buckets, in seconds, rising."""

    def bucket_names(self, name: str) -> list[str]:
        """Names of the figures that count times up to each bound."""
        return [f"{name}_le_{bound:g}" for bound in self.bounds]

    def figures(self, name: str) -> dict[str, Figure]:
        """All of them, by name."""
        return dict.fromkeys((*self.bucket_names(name), f"{name}_count", f"{name}_sum"), _counter(self.help))


_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)
"""Seconds."""
HISTOGRAMS: Mapping[str, Histogram] = MappingProxyType(
    {
        "time_to_first_token_seconds": Histogram(
            help="Seconds from a request's arrival to its first token.",
            bounds=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
        ),
        "time_per_output_token_seconds": Histogram(
            help="Mean seconds between tokens of a request that was completed, behind its first.",
            bounds=_BETWEEN_TOKENS,
        ),
        "inter_token_latency_seconds": Histogram(
            help="Seconds between two steps that brought tokens of a request; without speculation, between two of its tokens.",
            bounds=_BETWEEN_TOKENS,
        ),
        "request_queue_time_seconds": Histogram(
            help="Seconds from a request's arrival to the first step that computes some of it.",
            bounds=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
        ),
        "e2e_request_latency_seconds": Histogram(
            help="Seconds from a request's arrival to its completion.",
            bounds=(0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600, 1800),
        ),
    }
)
"""By name, as in ``/metrics``."""

FIGURES: Mapping[str, Figure] = MappingProxyType(
    {
        "steps": _counter("Steps of the engine that ended well."),
        "computed_tokens": _counter("Tokens that went through the model."),
        "generated_tokens": _counter("Tokens that were drawn for requests."),
        "graph_steps": _counter("Steps that replayed a CUDA graph."),
        "failed_steps": _counter("Steps that raised."),
        "preemptions": _counter("Requests that lost their cache blocks and were computed again."),
        "prefix_cache_queries": _counter("Prompt tokens that were looked up in the cache."),
        "prefix_cache_hits": _counter("Prompt tokens that were found in the cache and not computed."),
        "evicted_blocks": _counter("Known cache blocks that were given to other tokens."),
        "evicted_snapshots": _counter("Snapshots of recurrent states that gave way to others."),
        "drafted_tokens": _counter("Proposed tokens that were verified."),
        "accepted_tokens": _counter("Proposed tokens that were drawn as well."),
        **{figure: of for name, histogram in HISTOGRAMS.items() for figure, of in histogram.figures(name).items()},
        **{f"finished_{reason.value}": _counter(f"Requests that ended by {reason.value}.") for reason in FinishReason},
        "failed_texts": _counter("Requests that ended by stop or length, and whose text the tokenizer failed at when it was made."),
        "seconds_to_first_token": Figure(
            help="Age of the engine's process when it drew its first token, of several the largest; 0 before.", together="largest"
        ),
        "weight_version": Figure(help="Version of the weights, of several engines the smallest.", together="smallest"),
        "expert_rebalances": Figure(
            help="Times that experts were placed by their loads; of engines that share them the same.", kind="counter", together="largest"
        ),
        "moved_experts": Figure(help="Places that got another expert, of all ranks that share them.", kind="counter", together="largest"),
        "expert_imbalance": Figure(
            help="Tokens of the busiest rank over the mean, of a layer on average, before experts moved last.", together="largest"
        ),
        "expert_imbalance_after": Figure(help="The same of these tokens where experts lie now.", together="largest"),
        "running_requests": Figure(help="Requests that take part in steps."),
        "waiting_requests": Figure(help="Requests in the queue."),
        "longest_waiting_seconds": Figure(
            help="Seconds since the oldest request in the queue of an engine arrived; 0 without any.", together="largest"
        ),
        "total_blocks": Figure(help="Cache blocks that requests can hold."),
        "used_blocks": Figure(help="Cache blocks in use."),
        "available_blocks": Figure(help="Cache blocks that are free."),
        "idle_blocks": Figure(help="Free cache blocks whose contents are known."),
        "state_snapshots": Figure(help="Snapshots of recurrent states behind known cache blocks."),
        "utilization": Figure(help="Share of the cache blocks in use, from 0 to 1.", together="share"),
        "cached_tokens": Figure(help="Tokens whose keys and values are in the cache."),
        "active_requests": Figure(help="Request slots in use."),
        "max_requests": Figure(help="Request slots."),
        "max_tokens": Figure(help="Tokens that one step of an engine may compute, of several the largest.", together="largest"),
        "loras": Figure(help="Adapters that are loaded, of several engines the fewest.", together="smallest"),
        "lora_slots": Figure(help="Adapters that can be loaded at the same time, of several engines the fewest.", together="smallest"),
        "engines": Figure(help="Engines that take requests."),
        "draining_engines": Figure(help="Engines that end the requests they have, take no more, and leave then."),
        "draining": Figure(help="1 while it ends the requests it has, takes no more, and leaves then, else 0."),
        "lost_engines": _counter("Engines that were lost, or left without having drained."),
        "drained_engines": _counter("Engines that left when their requests were over."),
        "refused_peers": _counter("Engines and clients that a coordinator refused: another secret, protocol or name."),
        "refused_messages": _counter("Messages that a coordinator did not take: not understood, too long, or of strangers."),
        "open_requests": Figure(help="Requests that have no answer yet."),
        "open_tokens": Figure(help="Tokens of the prompts of open requests and of their answers, of each at most 1,024."),
    }
)
"""By name; each has an entry in ``/metrics`` where ``stats`` has it."""


def counters(stats: Mapping[str, float]) -> dict[str, float]:
    """Those of the figures that grow."""
    return {name: value for name, value in stats.items() if name in FIGURES and FIGURES[name].kind == "counter"}


def together(engines: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One figure of those of several engines; of names that are none of ``FIGURES`` nothing is known, and they are left out."""
    engines = list(engines)
    merged: dict[str, float] = {}
    for name, figure in FIGURES.items():
        values = [stats[name] for stats in engines if name in stats]
        if not values:
            continue
        if figure.together == "sum":
            merged[name] = sum(values)
        elif figure.together == "largest":
            merged[name] = max(values)
        elif figure.together == "smallest":
            merged[name] = min(values)
    total = merged.get("total_blocks", 0.0)
    if total > 0:
        merged["utilization"] = merged.get("used_blocks", 0.0) / total
    return merged
