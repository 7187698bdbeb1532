# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokens that are proposed for running requests, and which of them count."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._admission import Admission
from mcore_inference.scheduling import StepPlan, plan_drafts

Draw = tuple[int, float, dict[int, float]]
"""A token, its log-probability, and the best tokens."""


class Proposals(Protocol):
    """Who proposes tokens for the requests of one engine."""

    def count(self, entry: ActiveRequest, limit: int) -> int:
        """Tokens that can be proposed for a request that decodes, at most ``limit``."""
        ...

    def fill(self, running: Sequence[ActiveRequest], granted: Mapping[int, int]) -> None:
        """Put as many proposals into the ``drafts`` of requests as the plan has room for.

        Args:
            running: requests that ran before this step and run on.
            granted: of some of them, by number, what ``count`` said or less.
        """
        ...


class NgramProposals:
    """Proposals from each request's own text."""

    def count(self, entry: ActiveRequest, limit: int) -> int:
        entry.drafts = [] if entry.drafter is None else entry.drafter.propose(limit)
        return len(entry.drafts)

    def fill(self, running: Sequence[ActiveRequest], granted: Mapping[int, int]) -> None:
        for entry in running:
            entry.drafts = entry.drafts[: granted.get(entry.record.request_id, 0)]


class Verification:
    """Proposals of one engine: asked for before a step, granted by its plan, judged by its draws.

    Args:
        context: of the engine.
        admission: its running requests.
        proposals: who makes them; None for nobody.
    """

    def __init__(self, context: DynamicInferenceContext, admission: Admission, proposals: Proposals | None) -> None:
        self._context, self._admission, self._proposals = context, admission, proposals
        self._granted: Mapping[int, int] = {}
        self.num_drafted = self.num_accepted = 0
        """Proposed tokens that were verified, and those that were drawn as well."""

    def propose(self) -> dict[int, int]:
        """Of each running request that has proposals, how many."""
        self._granted, counts = {}, dict[int, int]()
        if self._proposals is None:
            return counts
        for entry in self._admission.running:
            entry.drafts = []
            # The last token of a budget is drawn in any case.
            if entry.num_left > 1 and self._admission.decodes(entry):
                counts[entry.record.request_id] = self._proposals.count(entry, entry.num_left - 1)
        return {number: count for number, count in counts.items() if count}

    def grant(self, plan: StepPlan, drafts: Mapping[int, int]) -> StepPlan:
        """The plan with as many of the proposals as it has room for; the others are dropped."""
        views = [self._admission.view(entry) for entry in self._admission.running]
        granted = self._granted = plan_drafts(plan, views, drafts, self._context.limits())
        for entry in self._admission.running:
            if entry.record.request_id not in granted:
                # One that the plan preempts must not bring them back.
                entry.drafts = []
        ordered = sorted(plan.work, key=lambda item: item.num_tokens + granted.get(item.request_id, 0) > 1)
        return dataclasses.replace(plan, work=tuple(ordered))

    def fill(self, admitted: Sequence[int]) -> None:
        """Make the proposals that were granted, once the plan's requests are where it puts them.

        Args:
            admitted: requests that begin to run with the plan.
        """
        if self._proposals is not None:
            running = [entry for entry in self._admission.running if entry.record.request_id not in admitted]
            self._proposals.fill(running, self._granted)

    def take(
        self,
        sampled: Sequence[ActiveRequest],
        proposed: Sequence[Sequence[int]],
        draws: Sequence[Draw],
        append: Callable[[ActiveRequest, Draw], None],
    ) -> dict[int, int]:
        """Give requests the draws that count: those behind proposals that equal the draws before them.

        Args:
            sampled: requests of the step.
            proposed: the proposals of each.
            draws: of each request one, and one after each of its proposals.
            append: takes one draw.

        Returns:
            The last token of each request that goes on.
        """
        rows, last = iter(draws), dict[int, int]()
        for entry, drafts in zip(sampled, proposed, strict=True):
            mine = list(itertools.islice(rows, len(drafts) + 1))
            entry.num_pending -= 1
            self.num_drafted += len(drafts)
            for count, row in enumerate(mine):
                if entry.ended:
                    break
                if count:
                    # The proposal before was right: its keys and values are in the cache now.
                    self._context.advance(entry.record.request_id, 1)
                    self.num_accepted += 1
                append(entry, row)
                if not entry.ended and (count == len(drafts) or row[0] != drafts[count]):
                    last[entry.record.request_id] = row[0]
                    break
            if not entry.ended and drafts:
                self._context.trim(entry.record.request_id)
        return last
