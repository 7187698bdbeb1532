# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tokens that are proposed for running requests, and which of them count."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._admission import Admission
from mcore_inference.scheduling import StepPlan, plan_drafts

Draw = tuple[int, float, dict[int, float]]
"""A token, its log-probability, and the best tokens."""


class Verification:
    """Proposals of one engine: asked for before a step, granted by its plan, judged by its draws.

    Args:
        context: of the engine.
        admission: its running requests.
    """

    def __init__(self, context: DynamicInferenceContext, admission: Admission) -> None:
        self._context, self._admission = context, admission
        self.num_drafted = self.num_accepted = 0
        """Proposed tokens that were verified, and those that were drawn as well."""

    def propose(self) -> dict[int, int]:
        """Proposals for the running requests; of each that has some, how many."""
        for entry in self._admission.running:
            if entry.drafter is not None:
                # The last token of a budget is drawn in any case.
                entry.drafts = entry.drafter.propose(entry.num_left - 1) if self._admission.decodes(entry) else []
        return {entry.record.request_id: len(entry.drafts) for entry in self._admission.running if entry.drafts}

    def grant(self, plan: StepPlan, drafts: Mapping[int, int]) -> StepPlan:
        """The plan with as many of the proposals as it has room for; the others are dropped."""
        running = self._admission.running
        granted = plan_drafts(plan, [self._admission.view(entry) for entry in running], drafts, self._context.limits())
        for entry in running:
            entry.drafts = entry.drafts[: granted.get(entry.record.request_id, 0)]
        ordered = sorted(plan.work, key=lambda item: item.num_tokens + granted.get(item.request_id, 0) > 1)
        return dataclasses.replace(plan, work=tuple(ordered))

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
