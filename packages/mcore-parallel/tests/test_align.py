# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows of zeros between those of experts, and grouped GEMMs that read the rows of each expert on the host."""

from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor

from mcore_parallel.backends import RECIPES, AlignedRows, Fp8Config, grouped_matmul
from mcore_parallel.backends._align import matmul_by_sizes
from tests.support.expert_rows import ends_of

F64 = torch.float64
COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, behind=st.integers(0, 5), multiple=st.sampled_from([1, 2, 16, 128]))
def test_rows_are_aligned_as_a_loop_aligns_them(counts: list[int], behind: int, multiple: int) -> None:
    num_rows = sum(counts) + behind
    rows = torch.arange(1, num_rows + 1, dtype=F64).unsqueeze(-1).requires_grad_()
    ends = ends_of(counts)
    aligned = AlignedRows.of(rows, ends, rows[:, 0].detach(), multiple)
    expected: list[float] = []
    values = iter(rows.flatten().tolist())
    for count in counts:
        expected += [next(values) for _ in range(count)] + [0.0] * (-count % multiple)
    assert aligned.rows_SD.flatten()[: len(expected)].tolist() == expected
    assert aligned.weights_S is not None and aligned.weights_S[: len(expected)].tolist() == expected
    assert [int(end) for end in aligned.ends_N.diff(prepend=ends.new_zeros(1))] == [count + -count % multiple for count in counts]
    assert aligned.ends_N.dtype == torch.int32
    back = aligned.take(aligned.rows_SD)
    assert torch.equal(back, rows)
    back.sum().backward()
    assert rows.grad is not None and bool((rows.grad == 1).all())


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, behind=st.integers(0, 5), multiple=st.sampled_from([1, 16, 32]))
def test_products_by_sizes_see_multiples_and_give_what_grouped_ones_give(counts: list[int], behind: int, multiple: int) -> None:
    calls: list[list[int]] = []

    def product(rows: Tensor, weight: Tensor, sizes: list[int], main_grad: Any) -> Tensor:
        assert len(rows) == sum(sizes) and all(size % multiple == 0 for size in sizes)
        calls.append(sizes)
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(rows.split(sizes), weight, strict=True)])

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts) + behind, 3, generator=generator, dtype=F64).requires_grad_()
    weight = torch.randn(len(counts), 4, 3, generator=generator, dtype=F64).requires_grad_()
    results = []
    for y in (matmul_by_sizes(product, x, weight, ends_of(counts), None, multiple=multiple), grouped_matmul(x, weight, ends_of(counts))):
        assert y.shape == (len(x), 4)
        results.append([y.detach()[: sum(counts)], *torch.autograd.grad(y[: sum(counts)].square().sum(), (x, weight))])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    assert len(calls) == bool(sum(counts))


def test_recipes_say_of_what_the_rows_of_an_expert_are_multiples() -> None:
    sizes = {"tensorwise": 16, "rowwise": 16, "delayed": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": 128}
    assert {recipe: Fp8Config(recipe=recipe).row_multiple for recipe in RECIPES} == sizes
