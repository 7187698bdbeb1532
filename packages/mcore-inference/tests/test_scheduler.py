# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The scheduler as a pure function: limits hold, order holds, everything ends."""

import random
from dataclasses import dataclass, replace

import pytest

from mcore_inference import Limits, RequestView, plan_step

LIMITS = Limits(max_requests=4, max_tokens=16, block_size=4, free_blocks=100)


def view(request_id: int, tokens: int, cached: int = 0, blocks: int | None = None) -> RequestView:
    return RequestView(
        request_id=request_id, num_tokens=tokens, num_cached=cached, num_blocks=-(-cached // 4) if blocks is None else blocks
    )


def work(plan) -> list[tuple[int, int, bool]]:
    return [(item.request_id, item.num_tokens, item.is_last) for item in plan.work]


def test_decodes_come_first_and_prompts_share_what_is_left() -> None:
    plan = plan_step([view(0, 40, 8), view(1, 9, 8)], [view(2, 5), view(3, 5)], LIMITS)
    assert work(plan) == [(1, 1, True), (0, 15, False)]
    assert plan.admitted == ()


def test_waiting_requests_enter_in_order_and_the_last_one_in_part() -> None:
    plan = plan_step([], [view(0, 10), view(1, 10), view(2, 1)], LIMITS)
    assert work(plan) == [(0, 10, True), (1, 6, False)]
    assert plan.admitted == (0, 1)


def test_without_chunks_a_prompt_waits_for_a_whole_budget() -> None:
    limits = replace(LIMITS, chunked_prefill=False)
    assert work(plan_step([], [view(0, 10), view(1, 10)], limits)) == [(0, 10, True)]


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    limits = replace(LIMITS, free_blocks=2)
    plan = plan_step([view(0, 9, 8, 3)], [view(1, 12), view(2, 1)], limits)
    assert plan.admitted == ()


def test_the_youngest_is_preempted_for_the_oldest() -> None:
    limits = replace(LIMITS, free_blocks=0)
    plan = plan_step([view(0, 9, 8), view(1, 9, 8), view(2, 9, 8)], [view(3, 1)], limits)
    assert plan.preempted == (2,)
    assert [item.request_id for item in plan.work] == [0, 1]
    assert plan.admitted == ()


def test_a_request_that_cannot_grow_gives_way_itself_when_it_is_the_youngest() -> None:
    limits = replace(LIMITS, free_blocks=0)
    plan = plan_step([view(0, 8, 7), view(1, 9, 8)], [], limits)
    assert plan.preempted == (1,)
    assert work(plan) == [(0, 1, True)]


def test_an_admission_leaves_the_reserve_unless_nothing_runs() -> None:
    limits = replace(LIMITS, free_blocks=2, reserve_blocks=1)
    assert plan_step([], [view(0, 8)], limits).admitted == (0,)
    assert plan_step([view(9, 7, 6, 2)], [view(0, 8)], limits).admitted == ()


@dataclass
class Simulated:
    request_id: int
    tokens: int
    left: int
    cached: int = 0
    blocks: int = 0
    ends: tuple[int, ...] = ()


@pytest.mark.parametrize("seed", range(40))
def test_every_request_ends_in_random_worlds(seed: int) -> None:
    check_world(random.Random(seed), num_requests=20)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_request_ends_in_random_worlds_of_a_hundred_thousand_operations() -> None:
    rng, operations = random.Random(40), 0
    while operations < 100_000:
        operations += check_world(rng, num_requests=60)


def check_world(rng: random.Random, num_requests: int) -> int:
    """Requests arrive, are admitted, preempted, computed and end; the number of these events."""
    max_requests = rng.randint(1, 6)
    size = rng.choice([1, 2, 4, 8])
    usable = rng.randint(4, 12)
    limits = Limits(
        max_requests=max_requests,
        max_tokens=max_requests + rng.randint(0, 20),
        block_size=size,
        free_blocks=usable,
        chunked_prefill=rng.random() < 0.7,
        reserve_blocks=rng.randint(0, 2),
    )
    longest = usable * size
    arrivals = []
    for number in range(num_requests):
        prompt = rng.randint(1, longest if limits.chunked_prefill else min(longest, limits.max_tokens))
        ends = tuple(sorted(rng.sample(range(1, longest + 1), rng.choice([0, 0, 1, 3]))))
        arrivals.append(Simulated(number, prompt, rng.randint(1, longest - prompt + 1), ends=ends))
    waiting: list[Simulated] = []
    running: list[Simulated] = []
    admitted_order: list[int] = []
    operations = 2 * num_requests
    for _ in range(1_000 * num_requests):
        while arrivals and rng.random() < 0.3:
            waiting.append(arrivals.pop(0))
        if not (arrivals or waiting or running):
            break
        now = replace(limits, free_blocks=usable - sum(item.blocks for item in running))
        views = [
            [replace(view(item.request_id, item.tokens, item.cached, item.blocks), chunk_ends=item.ends) for item in queue]
            for queue in (running, waiting)
        ]
        plan = plan_step(views[0], views[1], now)
        assert plan == plan_step(views[0], views[1], now)
        operations += len(plan.preempted) + len(plan.admitted) + len(plan.work)
        oldest = (running or waiting or [None])[0]
        assert oldest is None or any(item.request_id == oldest.request_id for item in plan.work), "the oldest always advances"
        for number in plan.preempted:
            victim = running.pop()
            assert victim.request_id == number, "the youngest goes first"
            victim.cached = victim.blocks = 0
            waiting.insert(0, victim)
        for number in plan.admitted:
            assert waiting[0].request_id == number
            running.append(waiting.pop(0))
            if number not in admitted_order:
                admitted_order.append(number)
        assert len(running) <= limits.max_requests
        assert sum(item.num_tokens for item in plan.work) <= limits.max_tokens
        assert [item.request_id for item in running] == sorted(item.request_id for item in running)
        by_id = {item.request_id: item for item in running}
        for item in plan.work:
            request = by_id[item.request_id]
            assert not any(request.cached < end < request.cached + item.num_tokens for end in request.ends)
            request.cached += item.num_tokens
            request.blocks = max(request.blocks, -(-request.cached // size))
            assert item.is_last == (request.cached == request.tokens)
            if item.is_last:
                request.left -= 1
                request.tokens += 1
                if request.left == 0:
                    running.remove(request)
        assert sum(item.blocks for item in running) <= usable
    assert not (arrivals or waiting or running)
    assert admitted_order == sorted(admitted_order)
    return operations


def test_a_request_whose_next_block_is_in_work_is_passed_over_and_others_are_not() -> None:
    def shared(request_id: int, tokens: int, cached: int, *keys: str) -> RequestView:
        return RequestView(request_id=request_id, num_tokens=tokens, num_cached=cached, num_blocks=cached // 4, keys=keys)

    waiting = [shared(1, 9, 4, "b"), shared(2, 9, 4, "x"), shared(3, 8, 0, "x", "y"), shared(4, 6, 4, "b")]
    limits = replace(LIMITS, max_tokens=40)
    plan = plan_step([shared(0, 12, 4, "b", "c")], waiting, limits)
    # Request 4 computes its block in any case, since its last token is there.
    assert work(plan) == [(0, 8, True), (2, 5, True), (4, 2, True)]
    assert plan_step([], waiting, limits).admitted == (1, 2, 4)
    assert plan_step([], [replace(item, keys=()) for item in waiting], limits).admitted == (1, 2, 3, 4)


def test_a_chunk_ends_where_states_are_kept_and_leaves_its_budget_to_others() -> None:
    prompt = replace(view(0, 14), chunk_ends=(4, 12))
    assert work(plan_step([], [prompt, view(1, 20)], LIMITS)) == [(0, 4, False), (1, 12, False)]
    assert work(plan_step([replace(prompt, num_cached=4, num_blocks=1)], [], LIMITS)) == [(0, 8, False)]
    assert work(plan_step([replace(prompt, num_cached=12, num_blocks=3)], [], LIMITS)) == [(0, 2, True)]
    # One token of a chunk is no decoded one.
    assert work(plan_step([replace(prompt, num_cached=11, num_blocks=3)], [], LIMITS)) == [(0, 1, False)]


def test_a_request_waits_for_states_that_another_computes_behind_blocks_that_it_knows() -> None:
    running = RequestView(request_id=0, num_tokens=13, num_cached=0, num_blocks=0, keys=("a", "b", "c"), chunk_ends=(8, 12))
    # Its first two blocks are known, without states; the third nobody computes.
    waiting = RequestView(request_id=1, num_tokens=14, keys=("a", "b", "x"), num_matched=2, chunk_ends=(8, 12))
    assert plan_step([running], [waiting], LIMITS).admitted == ()
    assert plan_step([replace(running, num_cached=8, num_blocks=2, keys=("c",))], [waiting], LIMITS).admitted == (1,)
    # One that computes them again and keeps nothing behind them is none to wait for.
    for ends in ((), (12,)):
        assert plan_step([replace(running, chunk_ends=ends, num_blocks=4)], [waiting], replace(LIMITS, max_tokens=40)).admitted == (1,)
    # What it computes it keeps for the next.
    assert plan_step([], [waiting, replace(waiting, request_id=2)], replace(LIMITS, max_tokens=40)).admitted == (1,)


def test_a_shared_beginning_takes_only_the_blocks_that_nobody_holds() -> None:
    limits = replace(LIMITS, free_blocks=2)
    # 12 tokens are cached in three blocks, of which two are held by others: one and a new one are taken.
    fits = RequestView(request_id=1, num_tokens=14, num_cached=12, num_blocks=2)
    assert work(plan_step([], [fits], limits)) == [(1, 2, True)]
    assert plan_step([], [replace(fits, num_blocks=1)], limits).admitted == ()


def test_victims_are_taken_until_their_blocks_are_really_free() -> None:
    limits = replace(LIMITS, free_blocks=0)
    running = [view(0, 9, 8), view(1, 9, 8, 3), view(2, 9, 8, 3)]
    tables = {1: {1, 2, 3}, 2: {1, 2, 3}}

    def freed_by(victims) -> int:
        kept = [tables[number] for number in tables if number not in victims]
        return len(set().union(*(tables[number] for number in victims)) - set().union(*kept))

    assert plan_step(running, [], limits, freed_by).preempted == (2, 1)
    assert plan_step(running, [], limits).preempted == (2,)


def test_a_step_takes_its_share_and_leaves_the_rest_to_the_next() -> None:
    limits = replace(LIMITS, max_step_requests=2)
    # Requests 0 and 1 are in flight: nothing of them is missing, and they keep their places.
    running = [view(0, 8, 8), view(1, 12, 12), view(2, 9, 8), view(3, 9, 8)]
    assert work(plan_step(running, [], limits)) == [(2, 1, True), (3, 1, True)]
    assert work(plan_step(running[:3], [view(4, 5), view(5, 5)], limits)) == [(2, 1, True), (4, 5, True)]
    assert plan_step(running, [view(4, 5)], replace(limits, max_step_requests=3)).admitted == ()
    assert work(plan_step([], [view(number, 1) for number in range(4)], limits)) == [(0, 1, True), (1, 1, True)]
    plan = plan_step(running[:2], [], limits)
    assert (plan.work, plan.preempted) == ((), ())
    # Of those that run a step has its share, though others that wait are counted, who may find no block.
    halved = replace(limits, max_step_requests=3, max_step_running=1)
    assert work(plan_step(running[2:], [view(4, 5), view(5, 5), view(6, 5)], halved)) == [(2, 1, True), (4, 5, True), (5, 5, True)]
    assert work(plan_step(running[2:], [view(4, 5)], replace(halved, free_blocks=0))) == [(2, 1, True)]
    # Blocks of one in flight are there for who is older.
    assert plan_step([view(0, 9, 8), view(1, 12, 12)], [], replace(limits, free_blocks=0)).preempted == (1,)


@pytest.mark.parametrize("num_batches", [2, 3, 4])
@pytest.mark.parametrize("num_requests", [1, 2, 5, 8, 13])
def test_batches_in_flight_have_their_share_and_nobody_is_left_out(num_batches: int, num_requests: int) -> None:
    share = -(-num_requests // num_batches)
    limits = Limits(max_requests=16, max_tokens=16, block_size=4, free_blocks=10_000, max_step_requests=share)
    tokens, in_flight, sizes = dict.fromkeys(range(num_requests), 1), list[tuple[int, ...]](), list[int]()
    for _ in range(40 * num_batches):
        if len(in_flight) == num_batches or (in_flight and sum(map(len, in_flight)) == num_requests):
            for number in in_flight.pop(0):
                tokens[number] += 1
        busy = {number for step in in_flight for number in step}
        plan = plan_step([view(number, count, count - (number not in busy)) for number, count in tokens.items()], [], limits)
        in_flight.append(tuple(item.request_id for item in plan.work))
        sizes.append(len(plan.work))
    assert max(tokens.values()) - min(tokens.values()) <= 1 and min(tokens.values()) > 30
    assert max(sizes) == share
