# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which engine gets a prompt: beginnings that were seen, loads, what is remembered, and many conversations behind one system prompt."""

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable

import pytest

pytest.importorskip("zmq")

from mcore_inference.coordinator._messages import SubmitRequest
from mcore_inference.coordinator._routing import EngineLoad, PrefixRouter, _blocks
from tests.support.coordinator_core import Group, acknowledge, bucket, register, submit
from tests.support.coordinator_core import load as weights

A, B, C = b"a", b"b", b"c"


def common(first: list[int], second: list[int]) -> int:
    """Whole blocks of 16 tokens that two prompts begin with."""
    length = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(len(first), len(second)))
    return length // 16


def load(share: float, tokens: int = 0) -> EngineLoad:
    return EngineLoad(share=share, tokens=tokens)


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_weighs_the_beginning_against_the_load(seed: int) -> None:
    draw, router = random.Random(seed), PrefixRouter()
    had: dict[bytes, list[list[int]]] = {A: [], B: [], C: []}
    texts: list[list[int]] = [[]]
    for _ in range(400):
        # Of few tokens, so that beginnings meet by chance too.
        prompt = draw.choice(texts)[: draw.randrange(200)] + [draw.randrange(2) for _ in range(draw.randrange(60))]
        texts.append(prompt)
        loads = {engine: load(draw.randrange(8) / 8, draw.randrange(3)) for engine in had}
        chosen = router.choose(prompt, loads)
        best = {engine: max((common(prompt, each) for each in had[engine]), default=0) for engine in had}
        costs = {engine: (loads[engine].share - best[engine] / max(1, len(prompt) // 16) / 8, loads[engine].tokens) for engine in had}
        assert costs[chosen] == min(costs.values()), (best, loads)
        had[chosen].append(prompt)


def test_equal_engines_take_turns_and_without_a_beginning_the_load_alone_decides() -> None:
    router = PrefixRouter()
    assert Counter(router.choose([1] * 10, {A: load(0.5), B: load(0.5), C: load(0.5)}) for _ in range(300)) == {A: 100, B: 100, C: 100}
    assert {router.choose([1] * 10, {A: load(0.5), B: load(0.4, 9), C: load(0.5)}) for _ in range(10)} == {B}
    assert {router.choose([1] * 10, {A: load(0.5, 9), B: load(0.5, 8), C: load(0.5, 9)}) for _ in range(10)} == {B}


def test_an_idle_engine_gets_what_would_wait_at_one_that_had_the_whole_prompt() -> None:
    router = PrefixRouter()
    home = router.choose([1] * 64, {A: load(0), B: load(0)})
    other = B if home == A else A
    assert router.choose([1] * 64, {home: load(0.1), other: load(0)}) == home
    for share in (1.0, 1.5, 10.0):
        router.forget(other)
        assert router.choose([1] * 64, {home: load(share), other: load(0)}) == other


def spread(conversation: Callable[[random.Random], list[int]], *, engines: int, places: int, open_at_once: int) -> tuple[list[int], int]:
    """Requests of each of these engines, and the most that one had open, of 2,000 that end in turn; so many are open."""
    router, draw = PrefixRouter(), random.Random(0)
    open_requests, counts, queue, most = Counter[bytes](), Counter[bytes](), deque[bytes](), 0
    names = [bytes([index]) for index in range(engines)]
    for _ in range(2000):
        if len(queue) == open_at_once:
            open_requests[queue.popleft()] -= 1
        loads = {name: load(open_requests[name] / places, open_requests[name] * 100) for name in names}
        chosen = router.choose(conversation(draw), loads)
        open_requests[chosen] += 1
        counts[chosen] += 1
        queue.append(chosen)
        most = max(most, open_requests[chosen])
    return [counts[name] for name in names], most


@pytest.mark.parametrize(
    ("shared", "own"),
    [(30, 2), (100, 20), pytest.param(0, 120, marks=pytest.mark.journey), pytest.param(2000, 10, marks=pytest.mark.journey)],
)
@pytest.mark.parametrize("places", [64, 256])
@pytest.mark.parametrize("engines", [2, 8])
def test_a_system_prompt_keeps_no_engine_idle(shared: int, own: int, places: int, engines: int) -> None:
    system = [random.Random(1).randrange(1000) for _ in range(shared)]

    def conversation(draw: random.Random) -> list[int]:
        return system + [draw.randrange(2**30) for _ in range(own)]

    # As much as all compute at a time, and half of it: each has its part, and none more than it computes at a time.
    for open_at_once in (engines * places, engines * places // 2):
        counts, most = spread(conversation, engines=engines, places=places, open_at_once=open_at_once)
        assert max(counts) <= 1.3 * min(counts) and most <= places, (open_at_once, counts, most)
    # Few requests may stay together, but leave the engine seven eighths of its places.
    counts, most = spread(conversation, engines=engines, places=places, open_at_once=places // 4)
    assert most <= places // 8 + 1, (counts, most)


@pytest.mark.parametrize("prompt", [[3] * 15, "x" * 63, [], ""])
def test_prompts_without_a_whole_block_go_by_load(prompt: str | list[int]) -> None:
    router = PrefixRouter()
    assert {router.choose(prompt, {A: load(0.1), B: load(0)}) for _ in range(5)} == {B} and not router._known


def test_texts_have_beginnings_too() -> None:
    router = PrefixRouter()
    home = router.choose("a system prompt " * 10, {A: load(0), B: load(0)})
    loads = {A: load(0), B: load(0)} | {home: load(0.1)}
    assert {router.choose("a system prompt " * 10 + f"and {number}", loads) for number in range(5)} == {home}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_remembered_is_bounded_and_whole_to_its_beginning(seed: int) -> None:
    draw, router = random.Random(seed), PrefixRouter(max_blocks=50)
    prompts: list[list[int]] = [[]]
    for _ in range(300):
        prompts.append(draw.choice(prompts[-20:])[: draw.randrange(400)] + [draw.randrange(9) for _ in range(draw.randrange(1, 300))])
        router.choose(prompts[-1], {A: load(0), B: load(0)})
    for known in router._known.values():
        assert len(known) <= 50
        for prompt in prompts:
            there = [block in known for block in _blocks(prompt)]
            assert there == sorted(there, reverse=True), "no block is remembered without those before it"
    # Of a long prompt the first part.
    assert len(_blocks([1] * 100_000)) == 1024 and len(_blocks("x" * 1_000_000)) == 1024


def test_lost_engines_and_new_weights_are_forgotten() -> None:
    router = PrefixRouter()
    home = router.choose([1] * 64, {A: load(0), B: load(0)})
    other = B if home == A else A
    loads = {home: load(0.1), other: load(0)}
    assert router.choose([1] * 64, loads) == home
    router.forget(home)
    assert router.choose([1] * 64, loads) == other
    router.forget_all()
    assert router.choose([1] * 64, {home: load(0), other: load(0.1)}) == home

    group = Group(clients=1)
    for index in range(2):
        group.send(b"e%d" % index, register(f"dp-{index}", max_requests=64))

    def homes(first: int) -> Counter[bytes]:
        before = {peer: len(group.got(peer, SubmitRequest)) for peer in (b"e0", b"e1")}
        for number in range(first, first + 4):
            group.send(b"c0", submit(number, [7] * 64))
        return Counter({peer: len(group.got(peer, SubmitRequest)) - before[peer] for peer in before})

    (home, count), *_ = homes(0).most_common()
    assert count == 4
    group.send(b"c0", weights())
    acknowledge(group, b"e0", b"e1")
    group.send(b"c0", bucket(1, "whole"))
    acknowledge(group, b"e0", b"e1")
    # The load decides, then the first one that had it.
    (after, count), *_ = homes(4).most_common()
    assert after != home and count == 4
    group.lose(after)
    group.send(after, register("dp-9", weight_version=1))
    assert not any(peer == after for peer in group.core._requests._router._known)


def test_turns_behind_one_system_prompt_meet_the_engine_that_has_their_past() -> None:
    """60 conversations of six turns, two engines; an engine computes its open requests side by side."""
    draw, router = random.Random(3), PrefixRouter()
    system = [draw.randrange(50_000) for _ in range(800)]
    tokens, places = {A: 0, B: 0}, 64
    num_answers, found = Counter({A: 0, B: 0}), Counter[bool]()
    cached: dict[bytes, set[int]] = {A: set(), B: set()}
    past: dict[int, list[int]] = {number: [*system] for number in range(60)}
    home: dict[int, bytes] = {}
    # When a turn of a conversation is asked, or answered by an engine.
    events: list[tuple[float, int, bytes, int]] = [(draw.random() * 5, number, b"", 0) for number in past]
    heapq.heapify(events)
    left, met, widest = Counter(dict.fromkeys(past, 6)), Counter[bool](), 0
    turns = Counter[bytes]()
    while events:
        now, number, engine, size = heapq.heappop(events)
        if engine:
            tokens[engine] -= size
            num_answers[engine] += 1
            past[number] += [draw.randrange(50_000) for _ in range(150)]
            cached[engine].update(_blocks(past[number]))
            if left[number]:
                heapq.heappush(events, (now + draw.expovariate(0.5), number, b"", 0))
            continue
        left[number] -= 1
        past[number] += [draw.randrange(50_000) for _ in range(draw.randrange(16, 60))]
        shares = {name: (turns[name] - num_answers[name]) / places for name in tokens}
        engine = router.choose(past[number], {name: load(shares[name], tokens[name]) for name in tokens})
        found.update(block in cached[engine] for block in _blocks(past[number]))
        if number in home:
            met[home[number] == engine] += 1
        home[number], size = engine, len(past[number]) + 256
        tokens[engine] += size
        turns[engine] += 1
        widest = max(widest, abs(turns[A] - num_answers[A] - turns[B] + num_answers[B]))
        heapq.heappush(events, (now + 1 + draw.random() * 2, number, engine, size))
    assert met.total() == 300 and met[True] >= 0.7 * 300 and found[True] >= 0.88 * found.total(), (met, found)
    assert widest <= places // 8 + 1 and 0.35 <= turns[A] / turns.total() <= 0.65, (widest, turns)
