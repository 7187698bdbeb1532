# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The requests of an engine: which wait, which run, and the cache blocks that they share."""

import bisect
import dataclasses
import time
from collections.abc import Iterable, Sequence

import numpy as np

from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._latencies import Latencies
from mcore_inference.requests import Status
from mcore_inference.scheduling import RequestView, StepPlan, first_chunk, plan_step


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Beginning:
    """What the cache has of a request that waits."""

    prefix: Sequence[int] = ()
    """Blocks behind which it goes on."""
    num_matched: int = 0
    """Further ones that are known."""
    snapshot_ends: Sequence[int] = ()


class Admission:
    """Requests that wait and requests that run, each by priority and then in the order of arrival.

    Args:
        context: gives running requests their slots and blocks.
        num_batches: of requests that are in steps at the same time, each with its share of them.
    """

    def __init__(self, context: DynamicInferenceContext, num_batches: int = 1) -> None:
        self._context, self._num_batches = context, num_batches
        self.waiting: list[ActiveRequest] = []
        self.running: list[ActiveRequest] = []
        self.holds_queue = False
        """Whether only requests that have begun are admitted."""
        self.num_preemptions = 0
        self.num_released = 0
        """How often a request ceased to run."""
        self.num_queue_changes = 0
        """How often a request came to the queue or left it."""
        self.num_looked_up = self.num_found = 0
        """Tokens of admitted requests that were looked up in the cache, and those found there."""
        self.latencies = Latencies()

    def add(self, entry: ActiveRequest) -> None:
        """Queue a request; one that was preempted comes back to its place."""
        self.num_queue_changes += 1
        bisect.insort(self.waiting, entry, key=lambda other: other.rank)

    def remove(self, entry: ActiveRequest) -> None:
        """Take a request out of the queue."""
        self.num_queue_changes += 1
        self.waiting.remove(entry)

    def joins_decoding(self, num_decoding: int, num_new_blocks: int) -> bool:
        """Whether ``plan`` would admit a request to a step in which all others decode.

        Beside such requests nobody is passed over: only the keys of prompts in progress make a request wait for others. So the first in the
        queue decides.

        Args:
            num_decoding: all running requests that are in the step.
            num_new_blocks: that they take in it.
        """
        if not self.waiting or len(self.running) >= self._context.max_requests:
            return False
        head = next((entry for entry in self.waiting if entry.has_begun or not self.holds_queue), None)
        if head is None:
            return False
        limits = self._context.limits()
        budget, free = limits.max_tokens - num_decoding, limits.free_blocks - num_new_blocks
        return first_chunk(self._waiting_view(head), limits, budget=budget, free=free, num_running=num_decoding)[0] > 0

    def plan(self, *, admits: bool = True) -> StepPlan:
        """The next step, without requests that only wait for their last results.

        Args:
            admits: False where no waiting request may join.
        """
        running = self.going_on()
        limits = self._context.limits()
        # What only waits for its results holds a place still.
        limits = dataclasses.replace(limits, max_requests=limits.max_requests - len(self.running) + len(running))
        views = [self.view(entry) for entry in running]
        queue = self.waiting if admits else []
        if self._num_batches > 1:
            # Those that wait may find no blocks, so they leave no more of those that run to a step.
            share, own = (
                max(1, -(-count // self._num_batches)) for count in (min(limits.max_requests, len(running) + len(queue)), len(running))
            )
            limits = dataclasses.replace(limits, max_step_requests=share, max_step_running=own)
        waiting = (self._waiting_view(entry) for entry in queue if entry.has_begun or not self.holds_queue)
        return plan_step(views, waiting, limits, self._context.freed_by)

    @property
    def num_in_flight(self) -> int:
        """Requests that run, or were preempted after their first token."""
        return len(self.running) + sum(entry.has_begun for entry in self.waiting)

    @property
    def may_go_on(self) -> bool:
        """Whether a step could take a request that is in none, or admit one."""
        return bool(self.waiting) or any(self._context.num_cached(entry.record.request_id) < entry.num_tokens for entry in self.running)

    @property
    def next_only_decodes(self) -> bool:
        """Whether the next step computes one drawn token of each of its requests."""
        going_on = self.going_on()
        lines_R = np.array([self._context.line(entry.record.request_id) for entry in going_on], dtype=np.int64)
        decodes = all(self.decodes(entry) for entry in going_on)
        return decodes and not self.joins_decoding(len(going_on), self._context.num_lacking(lines_R))

    def going_on(self) -> list[ActiveRequest]:
        """Running requests with something to compute."""
        return [entry for entry in self.running if entry.num_left or self._is_computing(entry)]

    def view(self, entry: ActiveRequest) -> RequestView:
        """A running request as the scheduler sees it."""
        number = entry.record.request_id
        num_cached = self._context.num_cached(number)
        return RequestView(
            request_id=number,
            num_tokens=entry.num_tokens,
            num_cached=num_cached,
            num_blocks=self._context.num_blocks(number),
            keys=entry.keys[num_cached // self._context.block_size :],
            chunk_ends=entry.snapshot_ends,
        )

    def decodes(self, entry: ActiveRequest) -> bool:
        """Whether the one token that is not in the cache was drawn in this segment, so that the device holds it."""
        drawn = len(entry.segment.generated_tokens) + entry.num_pending
        return drawn > 0 and self._context.num_cached(entry.record.request_id) == entry.num_tokens - 1

    def admit(self, entry: ActiveRequest, weight_version: int) -> None:
        """From the queue to the running requests, with the blocks of its cached beginning."""
        segment, beginning = entry.segment, self._beginning(entry)
        prefix, entry.snapshot_ends = beginning.prefix, beginning.snapshot_ends
        if not entry.was_admitted:
            entry.was_admitted = True
            self.latencies.count_queue_time(time.monotonic() - entry.started)
        self._context.add_request(entry.record.request_id, prefix, adapter=entry.adapter)
        self.remove(entry)
        bisect.insort(self.running, entry, key=lambda other: other.rank)
        if entry.shares_prefix:
            self.num_looked_up += entry.num_tokens
            self.num_found += len(prefix) * self._context.block_size
        if len(entry.record.requests) == 1:
            segment.cached_prompt_tokens = len(prefix) * self._context.block_size
        segment.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
        segment.weight_version = weight_version
        segment.add_event_add()

    def note_pause(self, entries: Iterable[ActiveRequest]) -> None:
        """Record that these stop, where that is asked for."""
        if self._context.config.track_paused_request_events:
            for entry in entries:
                entry.segment.add_event_pause()

    @property
    def longest_waiting_s(self) -> float:
        """Age of the oldest request in the queue; 0 without any. Any thread may ask."""
        now = time.monotonic()
        return max((now - entry.started for entry in list(self.waiting)), default=0.0)

    def preempt(self, entry: ActiveRequest) -> None:
        """Back to the queue, to be computed again; the tokens stay, and so does the place among all requests."""
        self.release(entry)
        self.add(entry)
        self.num_preemptions += 1
        segment = entry.segment
        segment.add_event_evict()
        segment.status = Status.WAITING_IN_QUEUE
        if segment.generated_tokens:
            entry.record.checkpoint()
        else:
            segment.finished_chunk_token_count = 0
            entry.reset_prompt_scores()

    def release(self, entry: ActiveRequest) -> None:
        """Take the slot and the blocks of a running request; what its blocks hold stays known."""
        number = entry.record.request_id
        self.running.remove(entry)
        self.num_released += 1
        entry.grow_keys()
        self._context.register(number, entry.keys)
        self._context.release(number)

    def drop_cache(self) -> None:
        """Preempt all running requests and forget what the blocks hold: it will not be so any more."""
        for entry in list(self.running):
            self.preempt(entry)
        self._context.allocator.forget()

    def keep_cache(self, weight_version: int) -> None:
        """Let running requests go on with what the cache holds for them, under new weights; nobody else finds it there."""
        for entry in self.running:
            segment = entry.segment
            if segment.generated_tokens:
                entry.record.checkpoint()
                entry.segment.status = segment.status
                entry.segment.finished_chunk_token_count = self._context.num_cached(entry.record.request_id)
            entry.segment.weight_version = weight_version
            # Equal tokens have other keys, values and states from now on.
            entry.chain, entry.snapshot_ends = None, ()
        self._context.allocator.forget()

    def _beginning(self, entry: ActiveRequest) -> _Beginning:
        if not entry.shares_prefix:
            return _Beginning()
        blocks = self._context.match(entry.keys, entry.num_tokens)
        count = self._context.num_resumable(blocks)
        ends = self._context.snapshot_ends(blocks, count, entry.num_tokens)
        return _Beginning(prefix=blocks[:count], num_matched=len(blocks) - count, snapshot_ends=ends)

    def _waiting_view(self, entry: ActiveRequest) -> RequestView:
        beginning = self._beginning(entry)
        prefix = beginning.prefix
        return RequestView(
            request_id=entry.record.request_id,
            num_tokens=entry.num_tokens,
            num_cached=len(prefix) * self._context.block_size,
            num_blocks=sum(self._context.allocator.num_holders(block) > 0 for block in prefix),
            keys=entry.keys[len(prefix) :] if entry.shares_prefix else (),
            num_matched=beginning.num_matched,
            chunk_ends=beginning.snapshot_ends,
        )

    def _is_computing(self, entry: ActiveRequest) -> bool:
        """Whether a prompt without a budget, whose log-probabilities are asked for, has tokens left."""
        return self._context.num_cached(entry.record.request_id) < len(entry.segment.prompt_tokens)
