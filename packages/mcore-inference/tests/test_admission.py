# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests that share blocks in random worlds without a device: what a table names holds the request's tokens."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    InferenceConfig,
    MambaInferenceStateConfig,
    SamplingParams,
)
from mcore_inference.cache import PrefixChain
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._admission import Admission
from mcore_parallel.models import TransformerConfig

MODEL = TransformerConfig(num_layers=1, hidden_size=2, num_attention_heads=1, vocab_size=8)


class World:
    """Requests over a cache whose blocks hold token ids instead of keys and values, and whose states a number of all tokens before."""

    def __init__(self, states: MambaInferenceStateConfig | None = None, **sizes: Any) -> None:
        self.context = DynamicInferenceContext(MODEL, InferenceConfig(**sizes), mamba_inference_state_config=states)
        self.admission = Admission(self.context)
        self.entries: dict[int, ActiveRequest] = {}
        self.pages: dict[int, int] = {}
        """Slot to the token that was written there last."""
        self.num_computed = self.num_steps = 0

    def add(self, number: int, prompt: list[int], budget: int, priority: int = 0) -> ActiveRequest:
        request = DynamicInferenceRequest(
            request_id=number, prompt_tokens=prompt, sampling_params=SamplingParams(), num_tokens_to_generate=budget, priority=priority
        )
        entry = ActiveRequest(
            record=DynamicInferenceRequestRecord.from_request(request), params=SamplingParams(), order=number, seed=0,
            stop_ids=frozenset(), bad_words=(), text=None, tokenizer=None, started=0.0, chain=PrefixChain(self.context.block_size),
        )  # fmt: skip
        entry.grow_keys()
        self.entries[number] = entry
        self.admission.add(entry)
        return entry

    def step(self, rng: random.Random) -> list[int]:
        """Plan and run one step; the requests that end."""
        plan, context = self.admission.plan(), self.context
        assert plan.work, "some request always advances"
        self.check_joins(bool(plan.admitted))
        self.num_steps += 1
        assert sum(item.num_tokens for item in plan.work) <= context.max_tokens
        running = [entry.record.request_id for entry in self.admission.running]
        first = min(self.admission.running or self.admission.waiting, key=lambda entry: entry.rank)
        assert any(item.request_id == first.record.request_id for item in plan.work), "the first one always advances"
        assert list(plan.preempted) == running[: -len(plan.preempted) - 1 : -1], "the last ones give way"
        for number in plan.preempted:
            self.admission.preempt(self.entries[number])
        assert [entry.rank for entry in self.admission.waiting] == sorted(entry.rank for entry in self.admission.waiting)
        for number in plan.admitted:
            self.admission.admit(self.entries[number], 0)
        assert [entry.rank for entry in self.admission.running] == sorted(entry.rank for entry in self.admission.running)
        for item in plan.work:
            # Raises where the plan promised blocks that are not there.
            context.extend(item.request_id, item.num_tokens)
        for item in plan.work:
            entry, start = self.entries[item.request_id], context.num_cached(item.request_id)
            assert start % context.block_size == 0 or start > 0
            for position, token in enumerate(entry.tokens(start, item.num_tokens), start):
                self.pages[self.slot(item.request_id, position)] = token
            self.num_computed += item.num_tokens
            if context.states is not None:
                self.advance_states(entry, start, start + item.num_tokens)
        self.check()
        ended = []
        for item in plan.work:
            entry = self.entries[item.request_id]
            context.advance(item.request_id, item.num_tokens)
            context.register(item.request_id, entry.keys)
            if context.num_cached(item.request_id) in entry.snapshot_ends:
                context.keep_states(item.request_id)
            if item.is_last:
                entry.segment.generated_tokens.append(rng.randrange(2))
                if not entry.num_left:
                    self.end(item.request_id)
                    ended.append(item.request_id)
        self.check()
        return ended

    def check_joins(self, admits: bool) -> None:
        """Where all decode, whether somebody joins is known without a plan."""
        going_on = self.admission.going_on()
        if going_on and all(self.admission.decodes(entry) for entry in going_on):
            lines_R = np.array([self.context.line(entry.record.request_id) for entry in going_on])
            inputs = (len(going_on), self.context.num_lacking(lines_R))
            assert self.admission.joins_decoding(*inputs) == admits
            self.admission.holds_queue = True
            assert self.admission.joins_decoding(*inputs) == bool(self.admission.plan().admitted)
            self.admission.holds_queue = False

    def advance_states(self, entry: ActiveRequest, start: int, end: int) -> None:
        """Of all layers, from the tokens before ``start`` to those before ``end``."""
        assert self.context.states is not None
        line, known = self.context.line(entry.record.request_id), entry.segment.prompt_tokens + entry.segment.generated_tokens
        for layer, state in self.context.states.layers.items():
            for part in (state.conv, state.memory):
                assert start == 0 or (part[line] == _number(known[:start], layer)).all()
                part[line] = _number(known[:end], layer)

    def end(self, number: int) -> None:
        entry = self.entries.pop(number)
        if entry in self.admission.running:
            self.admission.release(entry)
        else:
            self.admission.remove(entry)

    def slot(self, number: int, position: int) -> int:
        size = self.context.block_size
        return self.context.block_table(number)[position // size] * size + position % size

    def check(self) -> None:
        """Every cached token of every running request is where its table says; blocks are counted exactly."""
        holders = Counter[int]()
        for entry in self.admission.running:
            number = entry.record.request_id
            known = entry.segment.prompt_tokens + entry.segment.generated_tokens
            for position in range(self.context.num_cached(number)):
                assert self.pages[self.slot(number, position)] == known[position]
            holders.update(self.context.block_table(number))
        snapshots = self.context.allocator.snapshots
        assert all(block in self.context.allocator._prefixes for block in snapshots._places), "a snapshot goes with its block"
        assert sorted([*snapshots._free, *snapshots._places.values()]) == list(range(snapshots.total_count))
        assert len(holders) == self.context.allocator.total_used
        assert all(self.context.allocator.num_holders(block) == count for block, count in holders.items())


def _number(tokens: list[int], layer: int) -> float:
    """Exact in float64; other tokens, or other places of them, have another."""
    number = layer + 1
    for token in tokens:
        number = (number * 131 + token + 1) % (2**31 - 1)
    return float(number)


@pytest.mark.parametrize("seed", range(25))
def test_tables_name_blocks_with_the_requests_own_tokens(seed: int) -> None:
    assert check_world(seed)


@pytest.mark.parametrize("num_snapshots", [1, 3, 40])
@pytest.mark.parametrize("seed", range(12))
def test_states_that_a_request_goes_on_from_are_those_of_its_own_tokens(seed: int, num_snapshots: int) -> None:
    dtypes = {"mamba_conv_states_dtype": torch.float64, "mamba_ssm_states_dtype": torch.float64}
    states = MambaInferenceStateConfig("M*M", (1, 1, 2), (1, 1, 1), **dtypes)
    num_found = check_world(
        seed, states, enable_prefix_caching=True, enable_chunked_prefill=True,
        prefix_caching_mamba_gb=num_snapshots * states.bytes_per_request / 2**30,
    )  # fmt: skip
    # One place may be taken again and again before anybody goes on from it.
    assert num_found or num_snapshots == 1


def check_world(seed: int, states: MambaInferenceStateConfig | None = None, **settings: Any) -> int:
    """Tokens that were found in the cache."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 3, 4])
    usable = rng.randint(4, 14)
    sizes = {"max_sequence_length": usable * size, "num_blocks": usable, "block_size_tokens": size, "max_requests": rng.randint(1, 5)}
    sizes |= {"max_tokens": rng.randint(5, 20), "watermark": rng.choice([0.0, 0.2]), "enable_chunked_prefill": rng.random() < 0.8}
    world = World(states, **sizes | settings)
    arrivals = list(range(30))
    longest = usable * size if world.context.config.enable_chunked_prefill else min(usable * size, world.context.max_tokens)
    while arrivals or world.entries:
        while arrivals and rng.random() < 0.5:
            # Few different beginnings, so that much is shared.
            prompt = [[0, 1] * 30, [0, 0, 1] * 20, [1] * 60][rng.randrange(3)][: rng.randint(1, longest)]
            room = world.context.room(len(prompt))
            world.add(arrivals.pop(0), prompt, rng.randint(1, max(1, room)), rng.choice([-1, 0, 0, 3]) if seed % 2 else 0)
        if rng.random() < 0.08 and world.entries:
            world.end(rng.choice(sorted(world.entries)))
        if rng.random() < 0.02:
            world.admission.drop_cache()
            world.pages.clear()
        if world.entries:
            world.step(rng)
    assert world.context.allocator.total_used == 0 and not world.admission.running and not world.admission.waiting
    return world.admission.num_found


def test_requests_of_one_prompt_wait_for_the_first_and_compute_only_its_last_tokens() -> None:
    world = World(max_sequence_length=32, num_blocks=30, block_size_tokens=4, max_requests=8, max_tokens=64, watermark=0.0)
    prompt = [0, 1, 1, 0] * 4 + [1]
    for number in range(6):
        world.add(number, prompt, 1)
    world.add(6, [1] * 9, 1)
    rng = random.Random(0)
    # The stranger behind them is not held up.
    assert sorted(world.step(rng)) == [0, 6]
    assert sorted(world.step(rng)) == [1, 2, 3, 4, 5]
    assert world.num_computed == 17 + 9 + 5
    assert (world.admission.num_looked_up, world.admission.num_found) == (6 * 17 + 9, 5 * 16)


def test_a_prompt_of_whole_blocks_keeps_its_last_block_to_compute_and_gives_the_copy_up() -> None:
    world = World(max_sequence_length=32, num_blocks=30, block_size_tokens=4, max_requests=8, max_tokens=64, watermark=0.0)
    first, second = (world.add(number, [0, 1, 1, 0] * 2, 9) for number in range(2))
    rng = random.Random(0)
    world.step(rng)
    world.step(rng)
    assert world.num_computed == 8 + 1 + 4
    tables = [world.context.block_table(entry.record.request_id) for entry in (first, second)]
    assert tables[0][:2] == tables[1][:2] and first.segment.cached_prompt_tokens == 0 and second.segment.cached_prompt_tokens == 4
    assert world.context.allocator.total_used == 3


def test_blocks_of_an_ended_request_serve_its_next_turn_until_others_need_them() -> None:
    world = World(max_sequence_length=40, num_blocks=10, block_size_tokens=4, max_requests=2, max_tokens=64, watermark=0.0)
    rng = random.Random(0)
    turn = world.add(0, [0, 1, 1], 6)
    while world.entries:
        world.step(rng)
    history = turn.record.prompt_tokens + turn.record.generated_tokens
    assert world.context.allocator.num_idle == 2, "the last token drawn was never computed"
    again = world.add(1, [*history, 1, 1], 1)
    world.step(rng)
    assert again.segment.cached_prompt_tokens == 8
    world.add(2, [7] * 40, 1)
    world.step(rng)
    assert world.context.allocator.num_evicted == 2
    late = world.add(3, [*history, 1, 1], 1)
    world.step(rng)
    assert late.segment.cached_prompt_tokens == 0


def test_lower_priorities_are_admitted_first_and_preempted_last() -> None:
    sizes = {"num_blocks": 8, "block_size_tokens": 2, "max_requests": 4, "max_tokens": 64, "watermark": 0.0}
    world, rng = World(max_sequence_length=16, **sizes), random.Random(0)
    for number, priority in enumerate([5, 0, 0, -3, 5]):
        world.add(number, [number + 1] * 3, 8, priority)
    world.step(rng)
    assert [entry.record.request_id for entry in world.admission.running] == [3, 1, 2, 0]
    # One that is more urgent than all that run waits for room, but before the others.
    world.add(5, [6] * 3, 2, -9)
    gone: list[int] = []
    ended: list[int] = []
    while world.entries:
        before = [entry.record.request_id for entry in world.admission.running]
        ended += world.step(rng)
        waiting = {entry.record.request_id for entry in world.admission.waiting}
        gone += [number for number in reversed(before) if number in waiting]
    assert gone[:2] == [0, 2], "the highest number, then the latest arrival among equals"
    # Request 5 needs two steps only, the others eight.
    assert ended == [5, 3, 1, 2, 0, 4]
