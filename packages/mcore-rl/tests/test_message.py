# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Boxes as bytes arrive as they were, whole or in parts."""

import math
import random

import pytest
import torch

from mcore_ckpt.chunks import Box
from mcore_rl import WeightCopy
from mcore_rl._refit._message import WeightMessage

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)


def weights(generator: random.Random) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [
        (f"w{number}", tuple(generator.randint(1, 9) for _ in range(generator.randint(0, 3))), generator.choice(DTYPES))
        for number in range(generator.randint(1, 6))
    ]


@pytest.mark.parametrize("limit", [8, 16, 40, 100, 1000, 100_000])
def test_parts_of_a_message_hold_each_element_once_within_the_limit(limit: int) -> None:
    for seed in range(30):
        generator = random.Random(f"{limit} {seed}")
        listed = weights(generator)
        held = {(name, Box.whole(shape)): torch.randint(-100, 100, shape).to(dtype) for name, shape, dtype in listed}
        copies = []
        for name, shape, dtype in listed:
            # A box inside the shard that is read.
            begin = tuple(generator.randrange(size) for size in shape)
            box = Box(begin, tuple(generator.randint(1, size - first) for size, first in zip(shape, begin, strict=True)))
            copies.append((WeightCopy(name, 1, Box.whole(shape), box, 0, Box.whole(shape)), dtype))
        message = WeightMessage.of(copies)
        parts = message.split(limit)
        assert all(part.num_bytes <= limit for part in parts)
        assert (len(parts) == 1) == (message.num_bytes <= limit)
        assert sum(copy.box.num_elements for part in parts for copy, *_ in part.places) == sum(c.box.num_elements for c, _ in copies)
        slot = torch.empty(min(limit, message.num_bytes), dtype=torch.uint8)
        taken = {name: torch.full(shape, 101).to(dtype) for name, shape, dtype in listed}
        for part in parts:
            part.pack(held, slot)
            for name, box, tensor in part.unpack(slot):
                taken[name][box.slices()] = tensor
        for copy, _ in copies:
            value, box = held[copy.name, copy.source], copy.box
            assert torch.equal(taken[copy.name][box.slices()], value[box.slices()])
            rest = taken[copy.name] == 101
            assert int(rest.sum()) == math.prod(value.shape) - box.num_elements


def test_boxes_that_fill_the_limit_share_a_part() -> None:
    whole = Box.whole((4,))
    message = WeightMessage.of([(WeightCopy(f"w{number}", 1, whole, whole, 0, whole), torch.float32) for number in range(8)])
    assert [len(part.places) for part in message.split(64)] == [4, 4]
