# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Trajectories become rows in which each token's numbers sit where it is predicted."""

import dataclasses
import random
import re
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_rl import Aggregation, PackingConfig, PackingContext, TokenRollout, rollout_batches
from mcore_rl._packing._trajectories import BatchStyle, on_device, place_rows, write_batches
from mcore_rl._types import as_array


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_are_rounded_to_their_dtype_once(dtype: torch.dtype) -> None:
    generator = random.Random(0)
    rollouts = [
        dataclasses.replace(rollout(2, written), logprobs=[-generator.random() for _ in range(written)]) for written in (3, 7, 1, 0, 5)
    ]
    style = BatchStyle(aggregation=Aggregation(mode="constant", length=11), dtype=dtype)
    batches = rollout_batches(rollouts, [1.0] * 5, seq_len=9, micro_batch_size=2, style=style)
    for row, one in enumerate(rollouts):
        batch, written = batches[row // 2], len(one.logprobs)
        weight, factor = style.aggregation.weights(written)
        expected = {"inference_logprobs": one.logprobs, "loss_factors": [factor] * written}
        for values, numbers in [(batch.loss_mask, [weight] * written), *((batch.extras[name], some) for name, some in expected.items())]:
            assert values.dtype == dtype
            wanted = torch.tensor([0.0, *numbers, *[0.0] * (8 - written)], dtype=torch.float64).to(dtype)
            assert torch.equal(values[row % 2], wanted)


@pytest.mark.parametrize("kind", [tuple, list, lambda mask: array("l", mask), lambda mask: np.array(mask, dtype=np.int64)])
def test_masks_are_read_whatever_holds_them(kind: Callable[[list[bool]], Any]) -> None:
    mask = [False, True, True, False, True]
    assert as_array(kind(mask), "b").tolist() == [0, 1, 1, 0, 1]


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


def test_advantages_of_packed_rollouts_come_in_the_order_of_rollouts() -> None:
    lengths, advantages = (3, 5, 2, 4), [0.5, -1.0, 2.0, 0.25]
    context = PackingContext.pack([rollout(2, n) for n in lengths], PackingConfig(bin_size=8))
    assert context.rollouts != (0, 1, 2, 3)
    [example] = re.findall(r"batches = (context.*)", PackingContext.__doc__ or "")
    batches = eval(example, {"context": context, "advantages": advantages})
    values = context.of_rollouts([batch.extras["advantages"] for batch in batches])
    packed = {number: value[value != 0].tolist() for number, value in zip(context.rollouts, values, strict=True)}
    assert packed == {number: [advantage] * length for number, (advantage, length) in enumerate(zip(advantages, lengths, strict=True))}


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
