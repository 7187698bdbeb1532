# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rotary position embedding."""

import math

import pytest
import torch

from mcore_parallel.nn import apply_rotary, rotary_frequencies, rotary_tables


def turned(x: torch.Tensor, positions: list[int], base: float = 10_000.0) -> torch.Tensor:
    return apply_rotary(x, rotary_tables(torch.tensor(positions), rotary_frequencies(x.shape[-1], base)))


def test_rotary_turns_pairs_of_channels_by_the_position_times_the_frequency() -> None:
    x = torch.tensor([1.0, 0.0, 0.0, 1.0])[None, None]
    # d = 4, base 100: frequencies 1 and 0.1; channel i pairs with i + 2.
    expected = [math.cos(3.0), -math.sin(0.3), math.sin(3.0), math.cos(0.3)]
    torch.testing.assert_close(turned(x, [3], base=100.0).flatten(), torch.tensor(expected))


def test_position_zero_changes_nothing_and_lengths_are_kept() -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(turned(x, [0, 0, 0]), x)
    torch.testing.assert_close(turned(x, [1, 50, 4000]).norm(dim=-1), x.norm(dim=-1))


def test_scores_depend_on_the_distance_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 16, dtype=torch.float64, generator=generator) for _ in range(2))
    scores = [(turned(q, [p + 5]) * turned(k, [p])).sum() for p in (0, 1, 77)]
    torch.testing.assert_close(scores[1:], scores[:1] * 2, rtol=1e-4, atol=1e-5)
    assert not torch.isclose((turned(q, [6]) * turned(k, [0])).sum(), scores[0])


def test_rotary_keeps_the_dtype_and_computes_wider() -> None:
    x = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(turned(x, [5, 900]), turned(x.float(), [5, 900]).bfloat16())


def test_an_odd_head_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"head_dim=5 must be even.*kv_channels"):
        rotary_frequencies(5)
