# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trajectories become rows in which each token's numbers sit where it is predicted."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl import PackingConfig, PackingContext, TokenRollout, rollout_batches
from mcore_rl._trajectories import BatchStyle, on_device, place_rows, write_batches


def rollout(prompt: int, written: int, start: int = 10) -> TokenRollout:
    return TokenRollout(
        trajectory=range(start, start + prompt + written),
        reward=1.0,
        generation_mask=[False] * prompt + [True] * written,
        logprobs=[-float(i) for i in range(1, written + 1)],
        env_id="env",
        problem_id="p",
    )


def test_numbers_sit_one_place_left_of_their_token() -> None:
    [batch] = rollout_batches([rollout(2, 3)], [0.5], seq_len=6, micro_batch_size=1)
    assert batch.tokens.tolist() == [[10, 11, 12, 13, 14, 0]]
    assert batch.labels.tolist() == [[11, 12, 13, 14, 0, 0]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 0, 0]]
    assert batch.extras["advantages"].tolist() == [[0, 0.5, 0.5, 0.5, 0, 0]]
    assert batch.extras["inference_logprobs"].tolist() == [[0, -1, -2, -3, 0, 0]]
    assert batch.valid.tolist() == [[True, True, True, True, False, False]]


def test_a_trajectory_without_prompt_keeps_its_alignment() -> None:
    [batch] = rollout_batches([rollout(0, 3)], [1.0], seq_len=4, micro_batch_size=1)
    assert batch.extras["inference_logprobs"].tolist() == [[-2, -3, 0, 0]]


def test_a_trajectory_without_answer_counts_nothing() -> None:
    [batch] = rollout_batches([rollout(3, 0)], [1.0], seq_len=4, micro_batch_size=1)
    assert batch.loss_mask.sum() == 0


def test_rows_fill_up_with_empty_ones() -> None:
    batches = rollout_batches([rollout(1, 2)] * 3, [1.0, 2.0, 3.0], seq_len=4, micro_batch_size=2)
    assert len(batches) == 2
    assert batches[1].loss_mask[1].sum() == 0
    assert sum(batch.loss_mask.sum() for batch in batches) == torch.tensor(6.0)


def test_too_long_a_trajectory_is_named() -> None:
    with pytest.raises(ValueError, match="trajectory of p has 8 tokens, seq_len=6 admits 7"):
        rollout_batches([rollout(4, 4)], [1.0], seq_len=6, micro_batch_size=1)


def test_inconsistent_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="generation_mask has 1 entries for 2 tokens"):
        TokenRollout(trajectory=[1, 2], reward=0, generation_mask=[True], logprobs=[0.0], env_id="e", problem_id="p")
    with pytest.raises(ValueError, match="logprobs has 1 entries for 2 generated tokens"):
        TokenRollout(trajectory=[1, 2], reward=0, generation_mask=[True, True], logprobs=[0.0], env_id="e", problem_id="p")


class Copies(TorchDispatchMode):
    """Copies from one device to another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._to_copy.default and "device" in (kwargs or {})
        return func(*args, **(kwargs or {}))


def test_all_micro_batches_go_to_the_device_in_one_copy_a_field() -> None:
    rollouts = [rollout(2, n) for n in (3, 5, 2, 4)]
    places, shape = place_rows(rollouts, 8, 1)
    counts = []
    for write in (
        lambda: write_batches(rollouts, places, shape, BatchStyle(device="meta")),
        lambda: on_device(write_batches(rollouts, places, shape, BatchStyle()), "meta"),
    ):
        with Copies() as copies:
            batches = write()
        assert len(batches) == 4 and all(batch.tokens.is_meta and batch.tokens.shape == (1, 8) for batch in batches)
        counts.append(copies.count)
    # tokens, labels, mask, valid and three extras
    assert counts == [7, 7]


def test_batches_that_changed_place_are_the_same() -> None:
    rollouts = [rollout(2, n) for n in (3, 5, 2, 4)]
    host = PackingContext.pack(rollouts, PackingConfig(bin_size=8)).with_advantages([0.5, -1.0, 2.0, 0.25])
    there = host.on("meta")
    assert there.places == host.places and there.bins == host.bins
    for one, other in zip(host.batches, there.batches, strict=True):
        assert one.cu_seqlens is other.cu_seqlens and one.extras.keys() == other.extras.keys()
        names = [field.name for field in dataclasses.fields(one) if isinstance(getattr(one, field.name), torch.Tensor)]
        pairs = [(getattr(one, name), getattr(other, name)) for name in names if name != "cu_seqlens"]
        pairs += [(one.extras[name], other.extras[name]) for name in one.extras]
        assert all(a.shape == b.shape and a.dtype == b.dtype and b.is_meta for a, b in pairs)
    for one, other in zip(host.batches, host.on("cpu").batches, strict=True):
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("tokens", "labels", "loss_mask"))
        assert all(torch.equal(one.extras[name], other.extras[name]) for name in one.extras)
