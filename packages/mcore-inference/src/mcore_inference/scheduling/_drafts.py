# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How many proposed tokens the next step verifies: a pure function, like the plan of the step itself."""

from collections.abc import Mapping, Sequence

from mcore_inference._stability import experimental_api
from mcore_inference.scheduling._scheduler import Limits, RequestView, StepPlan

__all__ = ["plan_drafts"]


@experimental_api
def plan_drafts(plan: StepPlan, running: Sequence[RequestView], wanted: Mapping[int, int], limits: Limits) -> dict[int, int]:
    """Proposed tokens to verify beside the step's own tokens.

    They take only the room that the plan leaves: no token of the step's budget and no block that a request of the plan needs. A step that
    admits or preempts verifies none, since blocks are short or will be.

    Args:
        plan: of the step.
        running: the views that it was made from.
        wanted: request to the number of tokens proposed for it.
        limits: as for the plan.

    Returns:
        Request to the number of tokens, above 0, oldest requests first served.

    Example:
        >>> view = RequestView(request_id=0, num_tokens=10, num_cached=9, num_blocks=3)
        >>> limits = Limits(max_requests=1, max_tokens=8, block_size=4, free_blocks=0)
        >>> plan_drafts(plan_step([view], [], limits), [view], {0: 5}, limits)
        {0: 2}
    """
    if plan.admitted or plan.preempted:
        return {}
    views = {view.request_id: view for view in running}
    ends = {item.request_id: views[item.request_id].num_cached + item.num_tokens for item in plan.work}
    held = {number: max(views[number].num_blocks, limits.blocks(end)) for number, end in ends.items()}
    tokens = limits.max_tokens - sum(item.num_tokens for item in plan.work)
    free = limits.free_blocks - sum(held[number] - views[number].num_blocks for number in ends)
    granted: dict[int, int] = {}
    for view in running:
        number = view.request_id
        if number not in ends or view.num_missing != 1:
            continue
        room = (held[number] + free) * limits.block_size - ends[number]
        count = min(wanted.get(number, 0), tokens, room)
        if count > 0:
            granted[number] = count
            tokens -= count
            free -= max(0, limits.blocks(ends[number] + count) - held[number])
    return granted
