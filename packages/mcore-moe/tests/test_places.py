# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The choice of experts, and rows in their order: the arithmetic, and the kernels against it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_moe.dispatch import _places
from tests.support.interpreter import run_interpreted
from tests.support.mixtures import random_picks


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 40), local=st.integers(1, 5), ranks=st.integers(1, 4), topk=st.integers(1, 5), seed=st.integers(0, 999),
    skewed=st.booleans(),
)  # fmt: skip
def test_rows_are_sorted_by_expert_and_place(tokens: int, local: int, ranks: int, topk: int, seed: int, skewed: bool) -> None:
    topk = min(topk, local * ranks)
    experts = random_picks(tokens, local * ranks, topk, torch.Generator().manual_seed(seed), skewed=skewed)
    for rank in range(ranks):
        places, ends = _places.place_rows(experts, rank * local, local)
        wanted = [
            sorted((token, pick) for token, picks in enumerate(experts.tolist()) for pick, number in enumerate(picks) if number == expert)
            for expert in range(rank * local, (rank + 1) * local)
        ]
        assert ends.tolist() == [sum(map(len, wanted[: number + 1])) for number in range(local)] and ends.dtype == torch.int32
        rows = [pick for picks in wanted for pick in picks]
        expected = torch.full_like(experts, -1)
        for row, (token, pick) in enumerate(rows):
            expected[token, pick] = row
        assert torch.equal(places, expected)
        assert len(rows) <= tokens * min(topk, local)


def check_rows(tokens: int, topk: int, local: int, device: str, dtype: torch.dtype, width: int = 40) -> None:
    """Kernels give places, rows and sums of the reference, over several chunks, to experts between others' and to none."""
    from mcore_moe.dispatch import _triton

    generator = torch.Generator().manual_seed(tokens)
    experts = random_picks(tokens, 3 * local, topk, generator)
    x = torch.randn(tokens, width, generator=generator).to(dtype)
    weights = torch.rand(tokens, topk, generator=generator)
    for first in (0, local):
        places, ends = _places.place_rows(experts, first, local)
        on_device = [values.to(device) for values in (experts, x, weights, places)]
        for ours, reference in zip(_triton.place_rows(on_device[0], first, local), (places, ends), strict=True):
            assert torch.equal(ours.cpu(), reference)
        for padded in (False, True):
            # Rows at other places than the first ones, as where experts are filled up to their capacity.
            shift = torch.where(places >= 0, places + 3 * padded, -1).to(torch.int32)
            num_rows = places.numel() + 7 * padded
            rows, row_weights = _triton.spread_rows(on_device[1], on_device[2], shift.to(device), num_rows, padded=padded)
            wanted, wanted_weights = _places.spread_rows(x, weights, shift, num_rows)
            filled = slice(None) if padded else shift[shift >= 0].long()
            assert wanted_weights is not None and row_weights is not None and rows.shape == wanted.shape
            assert torch.equal(rows.cpu()[filled], wanted[filled]) and torch.equal(row_weights.cpu()[filled], wanted_weights[filled])
            ours = _triton.place_tokens(on_device[2], shift.to(device), num_rows)
            picked = shift[shift >= 0].long()
            for values, reference in zip(ours, _places.place_tokens(weights, shift, num_rows), strict=True):
                assert values.dtype == reference.dtype and torch.equal(values.cpu()[picked], reference[picked])
            sums = _triton.gather_sum(torch.where(torch.isfinite(rows), rows, 0), shift.to(device)).cpu()
            torch.testing.assert_close(sums, _places.gather_sum(wanted, shift), rtol=0, atol=0 if dtype == torch.float32 else 0.05)


PLACED = ((1, 1, 1), (150, 3, 17), (300, 2, 600), (100, 18, 8))
# Several chunks of tokens, and of many experts several turns over the chunks.
INTERPRETED = ((1, 1, 1), (140, 3, 17), (70, 2, 600), (20, 18, 8))


def test_no_token_makes_no_row() -> None:
    places, ends = _places.place_rows(torch.zeros(0, 2, dtype=torch.int32), 0, 3)
    rows, weights = _places.spread_rows(torch.zeros(0, 4), torch.zeros(0, 2), places, 5)
    assert places.shape == (0, 2) and ends.tolist() == [0, 0, 0] and rows.shape == (5, 4) and weights is not None and weights.shape == (5,)
    assert _places.gather_sum(rows, places).shape == (0, 4)


def test_kernels_equal_the_reference_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sizes", [*PLACED, (16384, 8, 64), (70000, 8, 128)])
def test_kernels_give_rows_as_the_reference_on_a_gpu(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    check_rows(*sizes, "cuda", dtype)


def test_kernels_compile_for_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mcore_moe.dispatch import _triton
    from tests.support.hopper import CompiledLaunches

    launches = {}
    for name in ("count_picks", "scan_picks", "place_picks", "place_tokens", "gather_sum"):
        launches[name] = CompiledLaunches(getattr(_triton, f"_{name}_kernel"))
        monkeypatch.setattr(_triton, f"_{name}_kernel", launches[name])
    # Many picks take a loop: written out, each kernel would take minutes.
    _triton.place_rows(torch.zeros(20, 64, dtype=torch.int32), 0, 64)
    for launch in launches.values():
        launch.ptx.clear()
    picks = torch.zeros(20, 8, dtype=torch.int32)
    for num_experts in (64, 500):
        _triton.place_rows(picks, 0, num_experts)
        _triton.place_tokens(torch.zeros(20, 8), picks, 30)
        _triton.gather_sum(torch.zeros(30, 2048, dtype=torch.bfloat16), picks)
    assert all(len(launch.ptx) == 2 for launch in launches.values())


if __name__ == "__main__":
    for each in INTERPRETED:
        check_rows(*each, "cpu", torch.float32)
    print("same")
