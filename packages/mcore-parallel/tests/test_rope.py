# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rotary position embedding."""

import math

import pytest
import torch

from mcore_parallel.nn import apply_rotary, rotary_frequencies, rotary_tables, split_rotary


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


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_part_of_each_head_turns_and_the_rest_passes_through(interleaved: bool) -> None:
    x = torch.randn(4, 2, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    tables = rotary_tables(torch.tensor([0, 3, 50, 4]), rotary_frequencies(6), interleaved=interleaved)
    y = apply_rotary(x, tables, interleaved=interleaved)
    assert torch.equal(y[..., 6:], x[..., 6:])
    # Turning is a product of complex numbers, one for each pair of channels.
    first, second = (x[..., 0:6:2], x[..., 1:6:2]) if interleaved else (x[..., :3], x[..., 3:6])
    step = 2 if interleaved else 1
    wanted = torch.complex(first, second) * torch.complex(*(table[:, None, 0 : 3 * step : step].double() for table in tables))
    found = torch.complex(y[..., 0:6:2], y[..., 1:6:2]) if interleaved else torch.complex(y[..., :3], y[..., 3:6])
    torch.testing.assert_close(found, wanted)
    assert torch.autograd.gradcheck(lambda x: apply_rotary(x, tables, interleaved=interleaved), (x,))


def test_packed_heads_are_split_and_turned() -> None:
    qkv = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    tables = rotary_tables(torch.tensor([1, 5, 9]), rotary_frequencies(8))
    q, k, v = split_rotary(qkv, tables)
    assert torch.equal(q, apply_rotary(torch.stack([qkv[:, 0, 0], qkv[:, 0, 1], qkv[:, 1, 0], qkv[:, 1, 1]], dim=1), tables))
    assert torch.equal(k, apply_rotary(qkv[:, :, 2], tables))
    assert torch.equal(v, qkv[:, :, 3])


def test_an_odd_head_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"head_dim=5 must be even.*kv_channels"):
        rotary_frequencies(5)
