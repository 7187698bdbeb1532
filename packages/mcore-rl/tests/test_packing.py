# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bins hold every sequence once, are nearly full, and give what rows give."""

import random
from typing import Any

import pytest
import torch

from mcore_parallel import Group, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_rl import BatchStyle, PackingConfig, PackingContext, TokenRollout, balance
from mcore_rl._objective._sequences import Sequences
from mcore_rl._reference import token_logprobs

ALGORITHMS = ("first_fit_decreasing", "best_fit_decreasing", "next_fit")
SIZES = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2, ffn_hidden_size=16, vocab_size=32, init_method_std=0.4)


def rollout(length: int, number: int = 0) -> TokenRollout:
    generator = torch.Generator().manual_seed(number)
    return TokenRollout(
        trajectory=torch.randint(32, (length,), generator=generator).tolist(),
        reward=0.0,
        generation_mask=[position > 0 for position in range(length)],
        logprobs=[-1.0] * (length - 1),
        env_id="env",
        problem_id=f"problem {number}",
    )


def log_normal(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [min(8192, max(1, int(generator.lognormvariate(6.5, 0.9)))) for _ in range(count)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_each_sequence_is_in_one_bin_that_holds_it(algorithm: str) -> None:
    generator = random.Random(0)
    for trial in range(200):
        size, most, alignment = generator.randint(1, 40) * 4, generator.randint(1, 6), generator.choice([1, 2, 4])
        packing = PackingConfig(bin_size=size, max_sequences_per_bin=most, algorithm=algorithm, alignment=alignment)
        lengths = [generator.randint(0, size) for _ in range(generator.randint(0, 40))]
        bins = packing.bins(lengths)
        assert sorted(number for members in bins for number in members) == list(range(len(lengths))), trial
        assert all(0 < len(members) <= most and sum(packing.room(lengths[i]) for i in members) <= size for members in bins)
        assert bins == packing.bins(lengths)


def test_first_fit_is_the_textbook_one() -> None:
    """Against a scan of all bins."""
    generator = random.Random(1)
    for _ in range(50):
        lengths = [generator.randint(1, 50) for _ in range(60)]
        plain: list[tuple[int, list[int]]] = []
        for number in sorted(range(60), key=lambda i: (-lengths[i], i)):
            for at, (free, members) in enumerate(plain):
                if free >= lengths[number] and len(members) < 5:
                    plain[at] = (free - lengths[number], [*members, number])
                    break
            else:
                plain.append((50 - lengths[number], [number]))
        assert PackingConfig(bin_size=50, max_sequences_per_bin=5).bins(lengths) == [members for _, members in plain]


@pytest.mark.parametrize("algorithm", ALGORITHMS[:2])
def test_bins_are_nearly_full_on_log_normal_lengths(algorithm: str) -> None:
    for seed in range(5):
        lengths = log_normal(2048, seed)
        bins = PackingConfig(bin_size=8192, algorithm=algorithm).bins(lengths)
        assert sum(lengths) / (len(bins) * 8192) > 0.97
        assert len(bins) <= len(PackingConfig(bin_size=8192, algorithm="next_fit").bins(lengths))


def test_ranks_get_equally_many_bins_of_nearly_equal_cost() -> None:
    lengths = log_normal(4096)
    bins = PackingConfig(bin_size=8192).bins(lengths)
    costs = [float(sum(lengths[i] ** 2 for i in members)) for members in bins]
    for num_ranks in (1, 2, 3, 8, 16):
        shares = balance(costs, num_ranks)
        assert sorted(number for share in shares for number in share) == list(range(len(bins)))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        if len(bins) % num_ranks == 0:
            sums = [sum(costs[i] for i in share) for share in shares]
            assert max(sums) < 1.02 * min(sums)
    assert balance([], 2) == [[], []] and balance([1.0], 3) == [[0], [], []]
    with pytest.raises(ValueError, match="num_ranks=0 must be at least 1"):
        balance([1.0], 0)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_ranks_share_all_rollouts_and_have_as_many_bins(num_ranks: int) -> None:
    rollouts = [rollout(length, number) for number, length in enumerate([9, 3, 5, 2, 7, 4, 4, 6])]
    contexts = [PackingContext.pack(rollouts, PackingConfig(bin_size=10), rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    assert sorted(number for context in contexts for number in context.rollouts) == list(range(8))
    assert len({len(context.batches) for context in contexts}) == 1
    assert sum(context.batches[i].loss_mask.sum() for context in contexts for i in range(len(context.bins))) == 32
    assert {context.efficiency for context in contexts} == {0.8}
    for context in contexts:
        for number, members in zip(context.rollouts, context.of_rollouts([batch.labels for batch in context.batches]), strict=True):
            assert members.tolist() == list(rollouts[number].trajectory)[1:]
        for members, batch in zip(context.bins, context.batches, strict=True):
            assert batch.sequence_lengths()[: len(members)] == tuple(len(rollouts[i].trajectory) - 1 for i in members)


@pytest.mark.parametrize("alignment", [1, 4])
def test_a_sequence_sees_nothing_of_its_neighbours(alignment: int) -> None:
    rollouts = [rollout(length, number) for number, length in enumerate([9, 3, 5, 2, 7])]
    context = PackingContext.pack(rollouts, PackingConfig(bin_size=16, alignment=alignment))
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    with torch.no_grad():
        packed = []
        for batch in context.batches:
            output, _ = model(batch.tokens.flatten(), batch.step())
            packed.append(output.log_probs(batch.labels.flatten()).view(1, -1))
        for number, values in zip(context.rollouts, context.of_rollouts(packed), strict=True):
            [alone] = PackingContext.pack([rollouts[number]], PackingConfig(bin_size=len(rollouts[number].trajectory) - 1)).batches
            assert alone.valid is None and alone.sequence_lengths() == (alone.tokens.numel(),)
            output, _ = model(alone.tokens.flatten(), alone.step())
            torch.testing.assert_close(values, output.log_probs(alone.labels.flatten()), rtol=1e-10, atol=1e-12)


def test_bounds_on_the_device_give_what_bounds_on_the_host_give() -> None:
    rollouts = [rollout(length, number) for number, length in enumerate([9, 3, 5, 2, 7])]
    model, found = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64), []
    for device_bounds in (False, True):
        packing = PackingConfig(bin_size=12, max_sequences_per_bin=4, device_bounds=device_bounds)
        context = PackingContext.pack(rollouts, packing, BatchStyle(dtype=torch.float64))
        if device_bounds:
            assert {(len(batch.cu_seqlens), batch.max_seqlen) for batch in context.batches if batch.cu_seqlens is not None} == {(6, 12)}
        ids = [Sequences.of(batch, Group.single()).ids for batch in context.batches]
        found.append((ids, token_logprobs(model, context.batches, model.groups, temperature=0.7)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_bins_move_to_a_device_with_all_that_their_layers_read_there() -> None:
    rollouts = [rollout(length, number) for number, length in enumerate([9, 3, 5, 2, 7])]
    for device_bounds in (False, True):
        packing = PackingConfig(bin_size=12, max_sequences_per_bin=4, device_bounds=device_bounds)
        for batch in PackingContext.pack(rollouts, packing).on("meta").batches:
            step, bounds = batch.step(), batch.cu_seqlens
            assert bounds is not None and bounds.is_meta == device_bounds
            assert all(value is None or value.is_meta for value in (step.tokens, step.valid, *batch.extras.values()))
            # Of bounds on the host positions are written when a step is made.
            assert step.positions.is_meta


def test_a_bin_that_is_shorter_than_a_trajectory_is_refused() -> None:
    with pytest.raises(ValueError, match="trajectory of problem 3 has 9 tokens, bin_size=7 admits 8; raise bin_size"):
        PackingContext.pack([rollout(4, 1), rollout(9, 3)], PackingConfig(bin_size=7))
    with pytest.raises(ValueError, match="sequence 1 needs 9 places, more than bin_size=8"):
        PackingConfig(bin_size=8).bins([8, 9])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bin_size": 0}, "bin_size=0 must be at least 1"),
        ({"bin_size": 8.0}, "bin_size=8.0 must be a whole number, at least 1"),
        ({"bin_size": 8, "max_sequences_per_bin": 0}, "max_sequences_per_bin=0 must be at least 1"),
        ({"bin_size": 10, "alignment": 4}, "bin_size=10 must be a multiple of alignment=4"),
        (
            {"bin_size": 8, "device_bounds": True, "share_prompts": True},
            "device_bounds=True needs whole sequences on one rank, found share_pr",
        ),
        ({"bin_size": 8, "device_bounds": True, "alignment": 4}, "and alignment=4; set False and 1, or device_bounds=False"),
        ({"bin_size": 8, "algorithm": "fifo"}, "algorithm='fifo' must be one of first_fit_decreasing"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackingConfig(**fields)
