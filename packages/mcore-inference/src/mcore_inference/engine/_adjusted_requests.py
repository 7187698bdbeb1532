# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The requests of an engine with penalties, biases, bad words or a least number of tokens."""

from collections.abc import Sequence

from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.sampling import AdjustRows, ScoreAdjuster


class AdjustedRequests:
    """Keeps the state of such requests on the device while they have a slot; one that gets a slot again begins anew from its tokens.

    Args:
        context: of the engine.
        vocab_size: ids that exist.
    """

    def __init__(self, context: DynamicInferenceContext, vocab_size: int) -> None:
        self._context = context
        self.adjuster = ScoreAdjuster(context.builder.last_tokens, vocab_size)
        self._owners: dict[int, ActiveRequest] = {}
        """Line to its request."""

    def rows(self, places: Sequence[tuple[ActiveRequest, int]]) -> AdjustRows | None:
        """Rows of a step whose scores are adjusted; None where there are none.

        Args:
            places: of each row its request, and how many of the request's proposals it assumes. The draw of a request without proposals
                is the next token of its output.
        """
        rows = [row for row, (entry, _) in enumerate(places) if entry.adjusts]
        if not rows:
            return None
        self._drop_gone()
        entries = [places[row][0] for row in rows]
        lines = [self._context.line(entry.record.request_id) for entry in entries]
        for entry, line in dict(zip(entries, lines, strict=True)).items():
            self._catch_up(entry, line)
        drafts = [entry.drafts[:count] for entry, count in (places[row] for row in rows)]
        counted = [line for entry, line in zip(entries, lines, strict=True) if not entry.drafts]
        return self.adjuster.rows(rows, lines, drafts, counted)

    def clear(self) -> None:
        """Give the memory back; no request has a pending token."""
        self._owners.clear()
        self.adjuster.clear()

    def _drop_gone(self) -> None:
        """Take the lines of requests that ended or lost their slots."""
        for line, owner in list(self._owners.items()):
            number = owner.record.request_id
            if owner.ended or not self._context.holds(number) or self._context.line(number) != line:
                del self._owners[line]
                self.adjuster.release(line)

    def _catch_up(self, entry: ActiveRequest, line: int) -> None:
        """Count what the host knows of the request and the device does not: all of it, or the tokens that were drawn as proposals.

        Without penalties and bad words nothing is counted, and no output is read, which a step with prompts would do for each request.
        """
        record = entry.record
        if self._owners.get(line) is not entry:
            assert not entry.num_pending, "the device counts what it draws"
            self._owners[line] = entry
            self.adjuster.begin(line, entry.params, entry.stop_ids, record.prompt_tokens, record.generated_tokens, entry.bad_words)
        elif entry.counts_output and record.num_generated > (counted := int(self.adjuster.num_counted[line])):
            self.adjuster.extend(line, record.generated_tokens[counted:])
