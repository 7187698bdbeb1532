# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What an engine counts, for metrics."""

from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._assembly import EngineParts
from mcore_inference.requests import FinishReason


class EngineFigures:
    """Counters of an engine's parts and the state of its cache, under the names that metrics have for them."""

    def __init__(self, parts: EngineParts, context: DynamicInferenceContext) -> None:
        self._parts, self._context = parts, context

    def read(self, weight_version: int) -> dict[str, float]:
        """All of them now, beside the version of the weights."""
        requests, admission, executor = self._parts.requests, self._parts.admission, self._parts.executor
        verification, balance = self._parts.verification, self._parts.balance
        return {
            "steps": self._parts.loop.step_count,
            "computed_tokens": executor.num_computed,
            "generated_tokens": requests.num_generated,
            "graph_steps": executor.num_graph_steps,
            "preemptions": admission.num_preemptions,
            "drafted_tokens": verification.num_drafted,
            "accepted_tokens": verification.num_accepted,
            "prefix_cache_queries": admission.num_looked_up,
            "prefix_cache_hits": admission.num_found,
            "seconds_to_first_token": requests.seconds_to_first_token,
            "weight_version": weight_version,
            "running_requests": len(admission.running),
            "waiting_requests": len(admission.waiting),
            "longest_waiting_seconds": admission.longest_waiting_s,
            **{f"finished_{reason.value}": requests.end_counts.by_reason[reason.value] for reason in FinishReason},
            "failed_texts": requests.end_counts.failed_texts,
            "loras": len(self._parts.loras.names),
            "lora_slots": self._parts.loras.num_slots,
            **self._context.get_kvcache_utilization_stats(),
            **({} if balance is None else balance.stats()),
        }
