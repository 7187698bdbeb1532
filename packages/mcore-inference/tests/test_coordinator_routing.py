# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which engine gets a prompt: beginnings that were seen, loads, what is remembered, and many conversations behind one system prompt."""

import heapq
import random
from collections import Counter

import pytest

pytest.importorskip("zmq")

from mcore_inference.coordinator import CoordinatorConfig
from mcore_inference.coordinator._messages import SubmitRequest
from mcore_inference.coordinator._routing import PrefixRouter, _blocks
from tests.support.coordinator_core import Group, acknowledge, bucket, load, register, submit

A, B, C = b"a", b"b", b"c"
SLACK = 16_384


def common(first: list[int], second: list[int]) -> int:
    """Whole blocks of 16 tokens that two prompts begin with."""
    length = next((at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other), min(len(first), len(second)))
    return length // 16


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_the_longest_beginning_among_engines_that_are_not_too_busy(seed: int) -> None:
    draw, router = random.Random(seed), PrefixRouter(1000)
    had: dict[bytes, list[list[int]]] = {A: [], B: [], C: []}
    texts: list[list[int]] = [[]]
    for _ in range(400):
        # Of few tokens, so that beginnings meet by chance too.
        prompt = draw.choice(texts)[: draw.randrange(200)] + [draw.randrange(2) for _ in range(draw.randrange(60))]
        texts.append(prompt)
        loads = {engine: draw.randrange(2000) for engine in had}
        chosen = router.choose(prompt, loads)
        least = min(loads.values())
        allowed = [engine for engine in had if loads[engine] <= least + 1000]
        best = {engine: max((common(prompt, each) for each in had[engine]), default=0) for engine in allowed}
        assert chosen in allowed and best[chosen] == max(best.values()), (best, loads)
        assert loads[chosen] == min(loads[engine] for engine in allowed if best[engine] == best[chosen])
        had[chosen].append(prompt)


def test_equal_engines_take_turns_and_without_slack_the_load_alone_decides() -> None:
    router = PrefixRouter(0)
    assert Counter(router.choose([1] * 100, {A: 5, B: 5, C: 5}) for _ in range(300)) == {A: 100, B: 100, C: 100}
    assert {router.choose([1] * 100, {A: 5, B: 4, C: 5}) for _ in range(10)} == {B}


@pytest.mark.parametrize("prompt", [[3] * 15, "x" * 63, [], ""])
def test_prompts_without_a_whole_block_go_by_load(prompt: str | list[int]) -> None:
    router = PrefixRouter(SLACK)
    assert {router.choose(prompt, {A: 1, B: 0}) for _ in range(5)} == {B} and not router._known


def test_texts_have_beginnings_too() -> None:
    router = PrefixRouter(SLACK)
    home = router.choose("a system prompt " * 10, {A: 0, B: 0})
    loads = {A: 0, B: 0} | {home: 100}
    assert {router.choose("a system prompt " * 10 + f"and {number}", loads) for number in range(5)} == {home}


@pytest.mark.parametrize("seed", range(5))
def test_what_is_remembered_is_bounded_and_whole_to_its_beginning(seed: int) -> None:
    draw, router = random.Random(seed), PrefixRouter(SLACK, max_blocks=50)
    prompts: list[list[int]] = [[]]
    for _ in range(300):
        prompts.append(draw.choice(prompts[-20:])[: draw.randrange(400)] + [draw.randrange(9) for _ in range(draw.randrange(1, 300))])
        router.choose(prompts[-1], {A: 0, B: 0})
    for known in router._known.values():
        assert len(known) <= 50
        for prompt in prompts:
            there = [block in known for block in _blocks(prompt)]
            assert there == sorted(there, reverse=True), "no block is remembered without those before it"
    # Of a long prompt the first part.
    assert len(_blocks([1] * 100_000)) == 1024 and len(_blocks("x" * 1_000_000)) == 1024


def test_lost_engines_and_new_weights_are_forgotten() -> None:
    router = PrefixRouter(SLACK)
    home = router.choose([1] * 64, {A: 0, B: 0})
    other = B if home == A else A
    loads = {home: 1, other: 0}
    assert router.choose([1] * 64, loads) == home
    router.forget(home)
    assert router.choose([1] * 64, loads) == other
    router.forget_all()
    assert router.choose([1] * 64, {home: 0, other: 1}) == home

    group = Group(CoordinatorConfig(prefix_slack_tokens=SLACK), engines=2, clients=1)

    def homes(first: int) -> Counter[bytes]:
        before = {peer: len(group.got(peer, SubmitRequest)) for peer in (b"e0", b"e1")}
        for number in range(first, first + 4):
            group.send(b"c0", submit(number, [7] * 64))
        return Counter({peer: len(group.got(peer, SubmitRequest)) - before[peer] for peer in before})

    (home, count), *_ = homes(0).most_common()
    assert count == 4
    group.send(b"c0", load())
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
    draw, router = random.Random(3), PrefixRouter(SLACK)
    system = [draw.randrange(50_000) for _ in range(800)]
    tokens = {A: 0, B: 0}
    past: dict[int, list[int]] = {number: [*system] for number in range(60)}
    home: dict[int, bytes] = {}
    # When a turn of a conversation is asked, or answered by an engine.
    events: list[tuple[float, int, bytes, int]] = [(draw.random() * 5, number, b"", 0) for number in past]
    heapq.heapify(events)
    left, met, widest, most = Counter(dict.fromkeys(past, 6)), Counter[bool](), 0, 0
    turns = Counter[bytes]()
    while events:
        now, number, engine, size = heapq.heappop(events)
        if engine:
            tokens[engine] -= size
            past[number] += [draw.randrange(50_000) for _ in range(150)]
            if left[number]:
                heapq.heappush(events, (now + draw.expovariate(0.5), number, b"", 0))
            continue
        left[number] -= 1
        past[number] += [draw.randrange(50_000) for _ in range(draw.randrange(16, 60))]
        engine = router.choose(past[number], tokens)
        if number in home:
            met[home[number] == engine] += 1
        home[number], size = engine, len(past[number]) + 256
        assert tokens[engine] <= min(tokens.values()) + SLACK
        tokens[engine] += size
        turns[engine] += 1
        widest, most = max(widest, abs(tokens[A] - tokens[B])), max(most, size)
        heapq.heappush(events, (now + 1 + draw.random() * 2, number, engine, size))
    assert met.total() == 300 and met[True] >= 0.95 * 300, met
    assert widest <= SLACK + most and 0.35 <= turns[A] / turns.total() <= 0.65, (widest, turns)
