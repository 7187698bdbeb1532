# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernel of attention to paged latents against each query's attention to its row's entries, in float64."""

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_inference.attention import TableRows, has_attention_kernel, prefill_tiles
from tests.support.interpreter import run_interpreted


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of (tokens in the cache before, new tokens), those with one new token first."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    rank: int = 16
    rope: int = 16
    block_size: int = 16
    padding: int = 0
    """Decode rows of padding behind the others; only in a step without prefills."""
    splits: int = 1
    blocks_before: int = 0
    """Blocks of the cache in front of those in use."""


CASES = (
    Case(rows=((0, 1), (5, 1), (16, 1), (70, 1), (31, 1)), splits=4),
    Case(rows=((0, 1), (200, 1)), padding=2, splits=3, heads=3, rank=24, rope=6, block_size=32),
    Case(rows=((63, 1), (64, 1), (65, 1)), heads=20, rank=32, rope=8, block_size=64, padding=1),
    Case(rows=((9, 1), (0, 17), (33, 40), (0, 1 + 130)), splits=2),
    Case(rows=((100, 1), (90, 30), (0, 80)), heads=1, rank=20, rope=4, block_size=48, splits=5),
    Case(rows=((200, 1), (3, 1)), splits=32),
    Case(rows=((15, 16),), heads=20, rank=8, rope=4),
)
LARGE = (
    Case(rows=((0, 1), (1000, 1), (63, 1)), heads=16, rank=512, rope=64, block_size=64, splits=32, padding=5),
    Case(rows=((3000, 1), (0, 300), (1000, 257)), heads=128, rank=512, rope=64, block_size=128),
    Case(rows=((77, 1), (128, 33)), heads=20, rank=256, rope=32, block_size=256, splits=3),
)

FAR = Case(rows=((1000, 1), (63, 1), (0, 70), (100, 57)), heads=16, rank=512, rope=64, block_size=64, splits=8, blocks_before=58256)
"""Latents behind the 2**31st number of a cache."""


def reference(case: Case, queries: Tensor, entries: list[Tensor], scale: float) -> Tensor:
    out, first = [], 0
    for (before, new), row in zip(case.rows, entries, strict=True):
        scores = torch.einsum("taw,sw->ats", queries[first : first + new].double(), row.double()) * scale
        scores = scores.masked_fill(torch.arange(before + new)[None, :] > before + torch.arange(new)[:, None], -torch.inf)
        out.append(torch.einsum("ats,sc->tac", scores.softmax(dim=-1), row[:, : case.rank].double()))
        first += new
    return torch.cat(out)


def table_rows(case: Case, tables: Tensor, device: str) -> TableRows:
    new = [n for _, n in case.rows]
    decode, contexts = sum(n == 1 for n in new), [before + n for before, n in case.rows]
    starts = np.cumsum([0, *new, *[1] * case.padding])
    lengths, others = np.array(new[decode:], dtype=np.int64), np.arange(decode, len(new))
    cached = np.array([before > 0 for before, _ in case.rows[decode:]], dtype=bool)
    tiles = []
    for chosen in (cached, ~cached):
        pair = [torch.tensor(part, dtype=torch.int32, device=device) for part in prefill_tiles(lengths[chosen], others[chosen], 1)]
        tiles.append((pair[0], pair[1]) if chosen.any() else None)
    return TableRows(
        tables_RB=tables.to(device),
        starts_R=torch.tensor(starts, dtype=torch.int32, device=device),
        contexts_R=torch.tensor([*contexts, *[0] * case.padding], dtype=torch.int32, device=device),
        num_decode=decode + case.padding,
        tiles=tiles[0],
        whole_tiles=tiles[1],
        block_size=case.block_size,
        longest=max(contexts),
        longest_query=max(new),
    )


def check(case: Case, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Blocks lie in any order in a cache whose other slots are NaN."""
    from mcore_inference.attention._latent import attend_latents

    torch.manual_seed(0)
    lengths, width, size = [before + new for before, new in case.rows], case.rank + case.rope, case.block_size
    blocks = [-(-length // size) for length in lengths]
    end = case.blocks_before + sum(blocks)
    order = random.Random(0).sample(range(case.blocks_before, end), sum(blocks))
    tables = torch.full((len(lengths) + case.padding, max(blocks) + 1), -1, dtype=torch.int32)
    cached = torch.full(((end + 1) * size, width), torch.nan, dtype=dtype, device=device)
    entries = [torch.randn(length, width).to(dtype) for length in lengths]
    for row, (count, length) in enumerate(zip(blocks, lengths, strict=True)):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        slots = tables[row][torch.arange(length) // size].long() * size + torch.arange(length) % size
        cached.index_copy_(0, slots.to(device), entries[row].to(device))
    tokens, scale = sum(new for _, new in case.rows), 0.7 * width**-0.5
    # A view of wider lines, as a projection leaves them.
    queries = torch.randn(tokens + case.padding, case.heads, width + 16).to(dtype)[..., 16:]
    out = torch.full((tokens + case.padding, case.heads, case.rank), torch.nan, dtype=dtype, device=device)
    attend_latents(queries.to(device), cached, out, table_rows(case, tables, device), scale=scale, splits=case.splits)
    wanted = reference(case, queries, entries, scale)
    torch.testing.assert_close(out.cpu()[:tokens].double(), wanted, rtol=tolerance, atol=tolerance)
    assert (out[tokens:] == 0).all(), "rows of padding must stay finite"


@pytest.mark.journey
def test_the_kernel_equals_plain_attention_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        (torch.bfloat16, Case(rows=((40, 1), (0, 20)), heads=128, rank=512, rope=64, block_size=64, splits=32)),
        (torch.bfloat16, Case(rows=((40, 1), (5, 20)), heads=3, rank=24, rope=6)),
        (torch.float32, Case(rows=((40, 1), (0, 20)), heads=16, rank=128, rope=64, block_size=64, splits=2)),
    ],
)
def test_kernels_compile_for_hopper(dtype: torch.dtype, case: Case, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from mcore_inference.attention import _latent, _triton
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    attention, sums = CompiledLaunches(_latent._latent_kernel), CompiledLaunches(_triton._combine_kernel)
    monkeypatch.setattr(_latent, "_latent_kernel", attention)
    monkeypatch.setattr(_triton, "_combine_kernel", sums)
    tokens, width = sum(new for _, new in case.rows), case.rank + case.rope
    queries, entries = torch.zeros(tokens, case.heads, width, dtype=dtype), torch.zeros(4 * case.block_size, width, dtype=dtype)
    rows = table_rows(case, torch.zeros(len(case.rows), 4, dtype=torch.int32), "cpu")
    _latent.attend_latents(queries, entries, queries.new_empty(tokens, case.heads, case.rank), rows, scale=1.0, splits=case.splits)
    assert len(attention.shared_bytes) == 2 and len(sums.shared_bytes) == (case.splits > 1)


def test_latents_that_the_kernel_cannot_hold_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_inference.attention import _backends

    monkeypatch.setattr(_backends, "has_kernels", lambda *_: True)
    place = torch.device("cpu")
    assert has_attention_kernel(place, torch.bfloat16, 64, (512, 576)) and has_attention_kernel(place, torch.float32, 16, (128, 192))
    assert not has_attention_kernel(place, torch.bfloat16, 64, (1024, 1088))
    assert not has_attention_kernel(place, torch.float32, 64, (512, 576))
    assert not has_attention_kernel(place, torch.bfloat16, 8, (512, 576))
    assert not has_attention_kernel(place, torch.bfloat16, 64, (0, 576)), "a cache that does not say which channels are values"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_equals_plain_attention_on_a_gpu(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    check(case, "cuda", dtype, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("case", LARGE)
def test_the_kernel_equals_plain_attention_at_real_sizes(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    check(case, "cuda", dtype, tolerance)


@pytest.mark.gpu
def test_the_kernel_reaches_the_end_of_a_cache_of_more_numbers_than_31_bits_count_on_a_gpu() -> None:
    free, numbers = torch.cuda.mem_get_info()[0], FAR.blocks_before * FAR.block_size * (FAR.rank + FAR.rope)
    assert numbers >= 2**31
    if free < 2.5 * numbers:
        pytest.skip(f"{free / 2**30:.0f} GiB of the GPU are free, and latents of {numbers:,} numbers take more")
    check(FAR, "cuda", torch.bfloat16, 3e-2)


if __name__ == "__main__":
    for each in CASES:
        check(each, "cpu", torch.float32, 2e-5)
    # The interpreter's products of bfloat16 are wrong, those of float16 are not.
    for each in (CASES[1], CASES[6]):
        check(each, "cpu", torch.float16, 4e-3)
    print("same")
