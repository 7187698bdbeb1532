# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The requests of an engine from their arrival to their end."""

import itertools
import time
from collections import Counter
from collections.abc import Sequence

from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._admission import Admission
from mcore_inference.engine._end_counts import EndCounts
from mcore_inference.engine._process_age import process_age_s
from mcore_inference.engine._verification import Draw
from mcore_inference.requests import DynamicInferenceRequestRecord, FinishReason, StepFailedError


class LiveRequests:
    """Every request that an engine accepted and that has not ended, by number; each ends here, once, and leaves nothing behind.

    Args:
        admission: whose queue they enter.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._arrivals = itertools.count()
        self._ended: list[DynamicInferenceRequestRecord] = []
        self._grown: dict[int, DynamicInferenceRequestRecord] = {}
        """Watched ones with tokens that were not asked for."""
        self.entries: dict[int, ActiveRequest] = {}
        """By number, in the order of arrival."""
        self.end_counts = EndCounts()
        self.latencies = admission.latencies
        self.num_generated = 0
        """Tokens that were drawn."""
        self.seconds_to_first_token = 0.0
        """Age of this process when the first was drawn; 0 before."""

    @property
    def has_any(self) -> bool:
        """Whether one has not ended, or ended and was not taken."""
        return bool(self.entries or self._ended)

    @property
    def has_work(self) -> bool:
        """Whether a step has something to do, or to return."""
        admission = self._admission
        return bool(self._ended or (admission.num_in_flight if admission.holds_queue else self.entries))

    def number(self, wanted: int | None) -> tuple[int, int]:
        """The number and the place among all arrivals of a new request.

        Raises:
            ValueError: the number that it wants is in use.
        """
        order = next(self._arrivals)
        number = order if wanted is None else wanted
        while wanted is None and number in self.entries:
            order = number = next(self._arrivals)
        if number in self.entries:
            raise ValueError(f"request_id={number} is in use; choose another, or None")
        return number, order

    def add(self, entry: ActiveRequest) -> None:
        """Queue a request, or end it where it asks for nothing."""
        self.entries[entry.record.request_id] = entry
        if not entry.num_left and not entry.wants_prompt_log_probs:
            self.end(entry, FinishReason.LENGTH)
        else:
            self._admission.add(entry)

    def note_tokens(self, entries: Sequence[ActiveRequest]) -> None:
        """Count how long requests waited for the tokens that a step brings them now, since those before."""
        now = time.monotonic()
        # Most had theirs of the same step, so that few times are counted.
        last = Counter(entry.last_tokens_at for entry in entries)
        for entry in entries:
            entry.last_tokens_at = now
        for at, count in last.items():
            if at is not None:
                self.latencies.count_between_tokens(now - at, count)

    def append(self, entry: ActiveRequest, draw: Draw) -> None:
        """Give a request the token that was drawn for it, which may be its last."""
        if not self.num_generated:
            self.seconds_to_first_token = process_age_s()
        self.num_generated += draw[0] >= 0
        waits = entry.record.time_to_first_token is None
        end = entry.append(*draw)
        if waits:
            self.latencies.count_first_token(entry.record)
        if entry.is_watched:
            self._grown[entry.record.request_id] = entry.record
        if end is not None:
            self.end(entry, *end)
        elif entry.drafter is not None:
            entry.drafter.push(draw[0])

    def fail(self, entries: Sequence[ActiveRequest], error: Exception) -> None:
        """End the requests of a step that raised; some may have ended in it already."""
        for entry in entries:
            number = entry.record.request_id
            if self.entries.get(number) is entry:
                self.end(entry, FinishReason.ERROR, StepFailedError(number, f"the step failed: {type(error).__name__}: {error}"))

    def abort(self, request_id: int, error: Exception | None = None) -> DynamicInferenceRequestRecord | None:
        """End a request, by an error where there is one; ``take_ended`` does not return it. None when there is no such request."""
        entry = self.entries.get(request_id)
        if entry is None:
            return None
        self.end(entry, FinishReason.ABORT if error is None else FinishReason.ERROR, error)
        return self._ended.pop()

    def end(self, entry: ActiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        """The only way out of the engine."""
        record = entry.record
        del self.entries[record.request_id]
        self._grown.pop(record.request_id, None)
        if entry in self._admission.running:
            self._admission.release(entry)
        elif entry in self._admission.waiting:
            self._admission.remove(entry)
        reason = entry.finish(reason, error)
        self.end_counts.add(reason)
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.latencies.count_end(record)
        if (make := entry.text_maker()) is not None:
            # Nothing of the engine but its counts is kept by a record that nobody reads.
            record.defer_text(make, self.end_counts.add_failed_text)
        self._ended.append(record)

    def take_ended(self) -> list[DynamicInferenceRequestRecord]:
        """Records of those that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def take_grown(self) -> list[DynamicInferenceRequestRecord]:
        """Records of the watched requests that got tokens since the last call, and have not ended."""
        grown, self._grown = self._grown, {}
        return list(grown.values())

    def put_back(self, ended: Sequence[DynamicInferenceRequestRecord]) -> None:
        """Let the next ``take_ended`` return these again, first."""
        self._ended = [*ended, *self._ended]
