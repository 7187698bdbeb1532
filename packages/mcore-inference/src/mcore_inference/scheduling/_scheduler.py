# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which requests take part in the next step: a pure function of what is known on every rank."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from mcore_inference._stability import experimental_api, internal_api

__all__ = ["Limits", "RequestView", "StepPlan", "Work", "first_chunk", "plan_step"]


@experimental_api
@dataclass(frozen=True, kw_only=True)
class RequestView:
    """What the scheduler sees of a request.

    Example:
        A prompt of 10 tokens of which 4 are computed:

        >>> RequestView(request_id=0, num_tokens=10, num_cached=4, num_blocks=1).num_missing
        6
    """

    request_id: int
    num_tokens: int
    """Tokens known: prompt and generated."""
    num_cached: int = 0
    """Tokens whose keys and values are in the cache; of a waiting request, those that it will share."""
    num_blocks: int = 0
    """Cache blocks held; of a waiting request, blocks of those tokens that are held by others, and so are not among the free ones."""
    keys: Sequence[Hashable] = ()
    """What its full blocks will hold, without those that are cached; equal keys stand for equal blocks. Empty where none is shared."""
    num_matched: int = 0
    """Of a waiting request, the first of these blocks that others have in the cache, though without the states to go on behind them."""
    chunk_ends: Sequence[int] = ()
    """Lengths of it at which a chunk ends, rising, so that its states can be kept."""

    @property
    def num_missing(self) -> int:
        return self.num_tokens - self.num_cached

    @property
    def max_chunk(self) -> int:
        """Tokens of its next chunk at most."""
        return min(next((end for end in self.chunk_ends if end > self.num_cached), self.num_tokens), self.num_tokens) - self.num_cached


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a step may use."""

    max_requests: int
    max_tokens: int
    """At least ``max_requests``, so that every running request can always decode."""
    block_size: int
    free_blocks: int
    chunked_prefill: bool = True
    """Whether a prompt may be computed in parts, over several steps."""
    reserve_blocks: int = 0
    """Blocks that an admission leaves free for running requests to grow into; ignored when none runs."""
    max_step_requests: int | None = None
    """Requests of one step, where others are to be in another one at the same time; None for as many as run."""
    max_step_running: int | None = None
    """Of these, such as run already; None for all."""

    def blocks(self, num_tokens: int) -> int:
        """Blocks that this many tokens take."""
        return -(-num_tokens // self.block_size)


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Work:
    """The next tokens of one request."""

    request_id: int
    num_tokens: int
    is_last: bool
    """Whether all known tokens are computed after it, so that a new one can be sampled."""


@experimental_api
@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step."""

    work: tuple[Work, ...]
    """Requests with one token first, then the others."""
    admitted: tuple[int, ...]
    """Waiting requests that start running; all are in ``work``."""
    preempted: tuple[int, ...]
    """Running requests that give up their blocks and go back to the queue, the last one first."""


@experimental_api
def plan_step(
    running: Sequence[RequestView],
    waiting: Iterable[RequestView],
    limits: Limits,
    freed_by: Callable[[Sequence[int]], int] | None = None,
) -> StepPlan:
    """Plan one step.

    Running requests come first: those that decode get one token each, the token budget left goes to prompts in progress, in order. One
    without missing tokens, whose next one is being drawn, keeps its place and its blocks.
    When blocks run out the last running request is preempted, so the first one always advances. Then waiting
    requests are admitted strictly in order; the first that does not fit ends the admission, and a step that
    preempts admits nobody. A waiting request whose next block is being computed for another one is passed over until it can share
    that block, and where blocks are known without the states behind them, while another one is to keep some of these. So each wait leaves
    more of it in the cache; every request is finite and the queue is overtaken in no other way, so none starves but by higher priorities.
    Chunks end at ``chunk_ends``.

    Args:
        running: by priority, the oldest first among equals.
        waiting: in the same order. Read as far as requests are admitted.
        limits: sizes and free blocks.
        freed_by: blocks that are free once these running requests give up theirs; None where no block is shared.
    """
    budget, most = limits.max_tokens, limits.max_step_requests or limits.max_requests
    going_on = [view for view in running if view.num_missing][: min(most, limits.max_step_running or most)]
    wanted = {view.request_id: 1 for view in going_on if view.num_missing == 1}
    budget -= len(wanted)
    for view in going_on:
        if view.request_id not in wanted:
            # A prompt that is being recomputed, or grew by recomputation, may exceed the budget: chunks are the only way then.
            wanted[view.request_id] = min(view.max_chunk, budget)
            budget -= wanted[view.request_id]

    work, preempted, free = _give_blocks(running, wanted, limits, freed_by)
    admitted: list[int] = []
    num_running = len(running)
    if not preempted and num_running < limits.max_requests and len(work) < most:
        in_work = {key for view in running for key in view.keys}
        to_keep = {key for view in running for key in _kept_keys(view, limits.block_size)}
        for view in waiting:
            # What is known may be computed again by others that keep no states, for whom nobody waits.
            known, unknown = view.keys[: view.num_matched], view.keys[view.num_matched : view.num_matched + 1]
            is_coming = not to_keep.isdisjoint(known) or not in_work.isdisjoint(unknown)
            # A block with the last token would be computed in any case.
            if view.num_missing > limits.block_size and is_coming:
                continue
            num_tokens, needed = first_chunk(view, limits, budget=budget, free=free, num_running=num_running)
            if not num_tokens:
                break
            work[view.request_id] = Work(request_id=view.request_id, num_tokens=num_tokens, is_last=num_tokens == view.num_missing)
            admitted.append(view.request_id)
            in_work.update(view.keys)
            to_keep.update(_kept_keys(view, limits.block_size))
            budget -= num_tokens
            free -= needed
            num_running += 1
            if num_running >= limits.max_requests or len(work) >= most:
                break
    # Python's sort is stable: age decides inside each kind.
    ordered = sorted(work.values(), key=lambda item: item.num_tokens > 1)
    return StepPlan(work=tuple(ordered), admitted=tuple(admitted), preempted=tuple(preempted))


@internal_api
def first_chunk(view: RequestView, limits: Limits, *, budget: int, free: int, num_running: int) -> tuple[int, int]:
    """Tokens with which a waiting request joins a step, and the blocks that they take; 0 tokens where it does not fit.

    Args:
        view: of the request.
        limits: of the step.
        budget: tokens of the step that are left.
        free: blocks that are left.
        num_running: requests that run beside it.
    """
    num_tokens = min(view.max_chunk, budget)
    needed = limits.blocks(view.num_cached + num_tokens) - view.num_blocks
    reserve = limits.reserve_blocks if num_running else 0
    no_parts = num_tokens < view.max_chunk and not limits.chunked_prefill and view.num_missing <= limits.max_tokens
    fits = num_tokens >= 1 and needed + reserve <= free and not no_parts
    return (num_tokens, needed) if fits else (0, 0)


def _kept_keys(view: RequestView, block_size: int) -> list[Hashable]:
    """What the blocks hold behind which the states of a request will be kept."""
    places = [end // block_size - view.num_cached // block_size - 1 for end in view.chunk_ends if end > view.num_cached]
    return [view.keys[place] for place in places if 0 <= place < len(view.keys)]


def _give_blocks(
    running: Sequence[RequestView], wanted: dict[int, int], limits: Limits, freed_by: Callable[[Sequence[int]], int] | None
) -> tuple[dict[int, Work], list[int], int]:
    """Work of the running requests that keep their blocks, the preempted ones, and the blocks left."""
    work: dict[int, Work] = {}
    preempted: list[int] = []
    free, survivors = limits.free_blocks, list(running)
    index = 0
    while index < len(survivors):
        view = survivors[index]
        num_tokens = wanted.get(view.request_id, 0)
        needed = limits.blocks(view.num_cached + num_tokens) - view.num_blocks
        while needed > free and len(survivors) > index:
            victim = survivors.pop()
            before = 0 if freed_by is None else freed_by(preempted)
            preempted.append(victim.request_id)
            free += victim.num_blocks if freed_by is None else freed_by(preempted) - before
        if len(survivors) <= index:
            break
        free -= max(0, needed)
        if num_tokens:
            work[view.request_id] = Work(request_id=view.request_id, num_tokens=num_tokens, is_last=num_tokens == view.num_missing)
        index += 1
    return work, preempted, free
