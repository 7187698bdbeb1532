# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rollouts come to the ranks that train on them, and to no other: what they are there, and how many bytes that takes."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_rl import ContrastiveRollout, GRPOConfig, PackingConfig, Placement, TokenRollout
from mcore_rl._loop._loop import rollout_means
from mcore_rl._loop._update import mini_batches
from mcore_rl._packing._header import RolloutHeader
from mcore_rl._ranks import _placement as placement_module
from mcore_rl._ranks._placement import exchange_parcels
from mcore_rl._rollouts._collect import Collection, Drawn, delivered, exchange, flat, joined, share_of

CPU = torch.device("cpu")
CONFIG = GRPOConfig(num_groups=8, group_size=4, seq_len=40, num_mini_batches=2, micro_batch_size=2)
PACKED = dataclasses.replace(CONFIG, packing=PackingConfig(bin_size=64, share_prompts=True))


def rollout(generator: random.Random, prompt: Sequence[int], **fields: Any) -> TokenRollout:
    count = generator.randint(0, 20)
    mask = [False] * len(prompt) + [generator.random() < 0.8 for _ in range(count)]
    written = sum(mask)
    seeded = torch.Generator().manual_seed(generator.randrange(1 << 30))
    experts = torch.randint(-1, 9, (len(mask) - 1, 3, 2), dtype=torch.int16, generator=seeded)
    routed = experts if generator.random() < 0.7 else None
    versions = [generator.randint(0, 9) for _ in range(written)] if generator.random() < 0.7 else None
    return TokenRollout(
        **{
            "trajectory": [*prompt, *(generator.randrange(1 << 40) for _ in range(count))],
            "reward": generator.random(),
            "generation_mask": mask,
            "logprobs": [-generator.random() for _ in range(written)],
            "env_id": f"env {generator.randint(0, 1)}",
            "problem_id": "\u6771",
            "finish_reason": generator.choice(["stop", "length"]),
            "routed_experts": routed,
            "weight_versions": versions,
            **fields,
        }
    )


def drawn_by(rank: int, num_groups: int = 4) -> list[list[TokenRollout]]:
    """Groups of several sizes, some of them empty."""
    generator = random.Random(rank)
    prompts = [[generator.randrange(100) for _ in range(generator.randint(1, 12))] for _ in range(num_groups)]
    return [[rollout(generator, prompt) for _ in range(generator.randint(0, 4))] for prompt in prompts]


def same(one: TokenRollout, other: TokenRollout) -> bool:
    first, second = one.routed_experts, other.routed_experts
    routed = first is second is None or (first is not None and second is not None and torch.equal(first, second))
    return routed and one.to_json() == other.to_json()


def test_a_rollout_is_its_header_and_its_bytes() -> None:
    for one in flat(drawn_by(0, 40)):
        header = RolloutHeader.from_json(RolloutHeader.of(one).to_json())
        data = header.encode(one)
        assert len(data) == header.num_bytes() and same(header.rollout(data), one)
        bare = header.encode(one, routed=False)
        assert len(bare) == header.num_bytes(routed=False) and header.rollout(bare, routed=False).routed_experts is None
        assert all(type(written) is bool for written in header.rollout(data).generation_mask)


def test_turns_and_prompts_are_counted() -> None:
    fields = {"env_id": "e", "problem_id": "p", "reward": 0.0}
    one = TokenRollout(trajectory=[1, 2, 3, 4, 5], generation_mask=[True, False, True, True, False], logprobs=[0.0] * 3, **fields)
    header = RolloutHeader.of(one)
    assert (header.num_turns, header.num_prompt, header.num_generated, header.num_counted, header.prompt) == (2, 0, 3, 2, "")
    silent = RolloutHeader.of(TokenRollout(trajectory=[1, 2], generation_mask=[False] * 2, logprobs=[], **fields))
    assert (silent.num_turns, silent.num_prompt, silent.num_generated, silent.prompt) == (0, 2, 0, "")


@pytest.mark.parametrize("config", [CONFIG, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("tp", [1, 4])
def test_what_a_rank_receives_grows_with_its_share_and_not_with_the_world(config: GRPOConfig, tp: int) -> None:
    """Each data rank trains on as many rollouts in every world; what each gets of them is one share, and not one of every rank's."""
    for dp in (2, 4, 16):
        one = TokenRollout(
            trajectory=[7] * 21, reward=0.0, generation_mask=[False] + [True] * 20, logprobs=[0.0] * 20, env_id="e", problem_id="p"
        )
        shares = [share_of([[one] * 12], 0, None, replica=rank // tp) for rank in range(tp * dp)]
        collected, delivery = joined(config, shares)
        assert all(len(update.shares[rank]) == 6 * tp for update in collected.updates for rank in range(dp))
        size, examples = RolloutHeader.of(one).num_bytes(), len(delivery.examples)
        received_bytes = [sum(delivery.size(source, rank) for source in range(tp * dp)) for rank in range(tp * dp)]
        assert max(received_bytes) <= (12 * tp + examples) * size


def whole(config: GRPOConfig, num_drawing: int, first: int, num_ranks: int) -> Collection:
    """As if all rollouts were on every rank."""
    groups = [group for rank in range(num_drawing) for group in drawn_by(first + rank)]
    return Collection.of(config, groups, num_ranks=num_ranks, num_filtered=num_drawing)


def compare(config: GRPOConfig, collected: Collection, expected: Collection, groups: ProcessGroups | None) -> None:
    one, other = (rollout_means(config, some, 99) for some in (collected, expected))
    examples = one.pop("examples"), other.pop("examples")
    assert one == other and all(same(first, second) for first, second in zip(*examples, strict=True))
    assert collected.token_versions == expected.token_versions
    if groups is None:
        assert not collected.rollouts
        return
    assert all(same(mine, expected.rollouts[number]) for number, mine in collected.rollouts.items())
    for mine, theirs in zip(mini_batches(config, collected, groups), mini_batches(config, expected, groups), strict=True):
        assert mine.numbers == theirs.numbers and mine.written.places == theirs.written.places
        for batch, wanted in zip(mine.written.batches, theirs.written.batches, strict=True):
            for name in ("tokens", "labels", "loss_mask", "valid", "cu_seqlens", "prefixes"):
                value, right = getattr(batch, name), getattr(wanted, name)
                assert value is right is None or torch.equal(value, right), name
            assert batch.extras.keys() == wanted.extras.keys()
            assert all(torch.equal(value, wanted.extras[name]) for name, value in batch.extras.items())


def check_beside(plan: ParallelPlan, config: GRPOConfig) -> None:
    groups = ProcessGroups.build(plan)
    drawn = Drawn(groups=drawn_by(groups.world.rank), num_filtered=1)
    collected = exchange(config, drawn, groups, CPU)
    compare(config, collected, whole(config, groups.world.size, 0, groups.dp.size), groups)
    assert len(collected.rollouts) > 0 and (groups.dp.size == 1 or len(collected.rollouts) < len(collected.headers))


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("config", [CONFIG, PACKED], ids=["rows", "packed"])
@pytest.mark.parametrize("plan", [ParallelPlan(dp=4), ParallelPlan(tp=2, dp=2), ParallelPlan(pp=2, cp=2)], ids=str)
def test_micro_batches_are_those_of_rollouts_that_all_ranks_have(world: Any, plan: ParallelPlan, config: GRPOConfig) -> None:
    world(check_beside, plan=plan, config=config)


def check_apart(config: GRPOConfig) -> int:
    placement, bytes_received = Placement.split(ParallelPlan(dp=2)), 0
    rank, num_trainers = placement.world.rank, placement.num_trainers
    layout = placement.groups
    groups = [] if placement.trains else drawn_by(rank)
    real = placement_module.dist.irecv

    def irecv(tensor: Any, **options: Any) -> Any:
        nonlocal bytes_received
        bytes_received += tensor.nbytes
        return real(tensor, **options)

    share = share_of(groups, 0 if placement.trains else 1, None, replica=None if layout is None else layout.dp.rank)
    shares, num_bytes = placement.gather(share, 30.0, "rollouts"), 0

    def swap(parcels: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
        nonlocal num_bytes
        num_bytes = sum(sizes)
        return exchange_parcels(placement, parcels, sizes, 30.0, "rollouts")

    placement_module.dist.irecv = irecv
    collected = delivered(config, shares, rank, groups, swap)
    placement_module.dist.irecv = real
    compare(config, collected, whole(config, 2, num_trainers, 2), layout)
    assert bytes_received == num_bytes
    return bytes_received


@pytest.mark.world(4)
@pytest.mark.parametrize("config", [CONFIG, PACKED], ids=["rows", "packed"])
def test_ranks_that_serve_receive_examples_alone(world: Any, config: GRPOConfig) -> None:
    examples = [header.num_bytes(routed=False) for header in map(RolloutHeader.of, whole(config, 2, 2, 2).examples)]
    first, second, drawing, serving = world(check_apart, config=config)
    assert (drawing, serving) == (0, sum(examples)) and min(first, second) > serving


def check_pairs_apart() -> list[int]:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    generator = random.Random(groups.world.rank)
    pairs = []
    for _ in range(3 - groups.world.rank):
        prompt = [generator.randrange(9), 1]
        better, worse = (rollout(generator, prompt, reward=reward, env_id="e") for reward in (1.0, 0.0))
        mask = [True] * (len(better.trajectory) - 2)
        better = dataclasses.replace(better, generation_mask=[False, False, *mask], logprobs=[0.0] * len(mask), weight_versions=None)
        pairs.append([better, dataclasses.replace(better, reward=worse.reward)])
    collected = exchange(dataclasses.replace(CONFIG, num_groups=6), Drawn(groups=pairs), groups, CPU, pairs=True)
    for planned in collected.updates:
        own = [collected.rollouts[number] for number in planned.shares[groups.dp.rank]]
        for chosen, rejected in zip(own[::2], own[1::2], strict=True):
            ContrastiveRollout(chosen=chosen, rejected=rejected)
        assert len(own) <= planned.num_rows
    return [number for planned in collected.updates for number in planned.shares[groups.dp.rank]]


@pytest.mark.world(2)
def test_pairs_stay_together(world: Any) -> None:
    one, other = world(check_pairs_apart)
    assert sorted([*one, *other]) == list(range(10)) and all(share[::2] == [n - 1 for n in share[1::2]] for share in (one, other))
