# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests that decode together, for as long as none joins or ends."""

import dataclasses
from functools import cached_property

import numpy as np

from mcore_inference.attention import DecodeContexts
from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._adjusted_requests import AdjustedRequests
from mcore_inference.sampling import AdjustRows, DrawRows, PlainRows

__all__ = ["DecodeBatch"]


class DecodeBatch:
    """Requests that draw one token a step, as arrays: what a step of them costs the host hardly grows with their number.

    It holds while the same requests decode; a request that joins or ends makes a new one.

    Args:
        entries: with a slot in the context.
        context: of the engine.
        vocab_size: ids that exist.
        adjusted: whose scores are adjusted, which may be some of these.
        contexts: of the requests; None where steps gather them.
    """

    def __init__(
        self,
        entries: list[ActiveRequest],
        context: DynamicInferenceContext,
        vocab_size: int,
        adjusted: AdjustedRequests,
        contexts: DecodeContexts | None,
    ) -> None:
        self.entries, self.contexts = entries, contexts
        lines = [context.line(entry.record.request_id) for entry in entries]
        self.lines_R = np.array(lines)
        # Scores of a request that may end now, and asks for nothing else, are adjusted no more.
        bans = [entry.num_without_end for entry in entries if entry.adjusts and not entry.always_adjusts]
        self.steps_left = min(*(entry.num_left for entry in entries), *bans, 2**63)
        """Until a request of it has drawn all its tokens, or may end."""
        self.params, self._seeds = [entry.params for entry in entries], [entry.seed for entry in entries]
        self._position_R = np.array([entry.position for entry in entries])
        self._vocab_size, self._device, self._rows = vocab_size, context.device, None
        self._adjusted, adjusts = adjusted, any(entry.adjusts for entry in entries)
        self._plain = None if adjusts else PlainRows.of(self.params, self._seeds, self._position_R.tolist())

    @cached_property
    def adjust_rows(self) -> AdjustRows | None:
        """Rows whose scores are adjusted, for whoever draws; None where there are none."""
        return self._adjusted.rows([(entry, 0) for entry in self.entries])

    @property
    def plain(self) -> PlainRows | None:
        """Its draws where a recorded step can make them."""
        return None if self._plain is None else dataclasses.replace(self._plain, position_R=self._position_R.copy())

    @property
    def rows(self) -> DrawRows:
        """Its draws, on the device."""
        if self._rows is None:
            positions = self._position_R.tolist()
            self._rows = DrawRows.of(self.params, self._seeds, positions, self.lines_R.tolist(), self._vocab_size, self._device)
        return self._rows

    def advance(self) -> None:
        """One token was drawn for each."""
        self.steps_left -= 1
        self._position_R += 1
        if self._rows is not None:
            settings = self._rows.settings
            self._rows = dataclasses.replace(self._rows, settings=dataclasses.replace(settings, position=settings.position + 1))
        for entry in self.entries:
            entry.num_pending += 1
