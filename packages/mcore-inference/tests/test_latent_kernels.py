# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernel of attention to paged latents against each query's attention to its row's entries, in float64."""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_inference.attention import PageFormat, TableRows, has_attention_kernel, prefill_tiles, reads_tables
from mcore_inference.cache import LayerSlots
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


def make_slots(count: int, case: Case, dtype: torch.dtype, device: str, *, fp8: bool) -> LayerSlots:
    """Slots in which nothing may be read: NaN, or scales of NaN."""
    if not fp8:
        entries = torch.full((count, 1, case.rank + case.rope), torch.nan, dtype=dtype, device=device)
        return LayerSlots(keys=entries, values=entries)
    latents = torch.ones((count, 1, case.rank), device=device).to(torch.float8_e4m3fn)
    scales = torch.full((1, count), torch.nan, device=device).T
    rotary = torch.full((count, case.rope), torch.nan, dtype=dtype, device=device)
    return LayerSlots(keys=latents, values=latents, scales=(scales, scales), rotary=rotary)


def check(case: Case, device: str, dtype: torch.dtype, tolerance: float, *, fp8: bool = False) -> None:
    """Blocks lie in any order in a cache whose other slots are NaN."""
    from mcore_inference.attention._latent import append_scaled, attend_latents

    torch.manual_seed(0)
    lengths, width, size = [before + new for before, new in case.rows], case.rank + case.rope, case.block_size
    blocks = [-(-length // size) for length in lengths]
    end = case.blocks_before + sum(blocks)
    order = random.Random(0).sample(range(case.blocks_before, end), sum(blocks))
    tables = torch.full((len(lengths) + case.padding, max(blocks) + 1), -1, dtype=torch.int32)
    cached = make_slots((end + 1) * size, case, dtype, device, fp8=fp8)
    entries = [torch.randn(length, width).to(dtype) for length in lengths]
    for row, (count, length) in enumerate(zip(blocks, lengths, strict=True)):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
        slots = (tables[row][torch.arange(length) // size].long() * size + torch.arange(length) % size).to(device)
        wide, before = entries[row].to(device), case.rows[row][0] if fp8 else length
        cached.write(slots[:before], wide[:before, None], wide[:before, None])
        if fp8:
            append_scaled(wide[before:], cached, slots[before:])
            entries[row] = cached.read(slots, torch.float32)[0][:, 0].cpu()
            torch.testing.assert_close(entries[row], wide.cpu().float(), rtol=0.08, atol=0.02)
            assert torch.equal(entries[row][:, case.rank :], wide[:, case.rank :].cpu().float())
    tokens, scale = sum(new for _, new in case.rows), 0.7 * width**-0.5
    # A view of wider lines, as a projection leaves them.
    queries = torch.randn(tokens + case.padding, case.heads, width + 16).to(dtype)[..., 16:]
    out = torch.full((tokens + case.padding, case.heads, case.rank), torch.nan, dtype=dtype, device=device)
    attend_latents(queries.to(device), cached, out, table_rows(case, tables, device), scale=scale, splits=case.splits)
    wanted = reference(case, queries, entries, scale)
    torch.testing.assert_close(out.cpu()[:tokens].double(), wanted, rtol=tolerance, atol=tolerance)
    assert (out[tokens:] == 0).all(), "rows of padding must stay finite"


def check_not_finite(device: str, dtype: torch.dtype) -> None:
    """A latent in fp8 with a channel that is not finite is NaN as a whole, as that of torch's cast, and its rotary key is as it was."""
    from mcore_inference.attention._latent import append_scaled

    slots, entries = torch.tensor([2, 0, 1], device=device), torch.randn(3, 16 + 8, device=device).to(dtype)
    entries[1, 3], entries[2, 20] = float("inf"), float("nan")
    cached = make_slots(4, Case(rows=(), rope=8), dtype, device, fp8=True)
    append_scaled(entries, cached, slots)
    stored = cached.read(slots, torch.float32)[0][:, 0].isnan()
    assert not stored[0].any() and stored[1].sum() == stored[1, :16].sum() == 16 and stored[2].sum() == stored[2, 20] == 1


@pytest.mark.journey
@pytest.mark.parametrize("stored", ["wide", "fp8"])
def test_the_kernel_equals_plain_attention_in_the_interpreter(stored: str) -> None:
    run_interpreted(__file__, stored)


@pytest.mark.journey
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("dtype", "case"),
    [
        (torch.bfloat16, Case(rows=((40, 1), (0, 20)), heads=128, rank=512, rope=64, block_size=64, splits=32)),
        (torch.bfloat16, Case(rows=((40, 1), (5, 20)), heads=3, rank=24, rope=6)),
        (torch.float32, Case(rows=((40, 1), (0, 20)), heads=16, rank=128, rope=64, block_size=64, splits=2)),
    ],
)
def test_kernels_compile_for_hopper(dtype: torch.dtype, case: Case, fp8: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from mcore_inference.attention import _latent, _triton
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    attention, sums = CompiledLaunches(_latent._latent_kernel), CompiledLaunches(_triton._combine_kernel)
    appended = CompiledLaunches(_latent._append_kernel)
    monkeypatch.setattr(_latent, "_latent_kernel", attention)
    monkeypatch.setattr(_latent, "_append_kernel", appended)
    monkeypatch.setattr(_triton, "_combine_kernel", sums)
    tokens, width = sum(new for _, new in case.rows), case.rank + case.rope
    queries, cached = torch.zeros(tokens, case.heads, width, dtype=dtype), make_slots(4 * case.block_size, case, dtype, "cpu", fp8=fp8)
    rows = table_rows(case, torch.zeros(len(case.rows), 4, dtype=torch.int32), "cpu")
    if fp8:
        _latent.append_scaled(queries[:, 0], cached, torch.zeros(tokens, dtype=torch.int64))
    _latent.attend_latents(queries, cached, queries.new_empty(tokens, case.heads, case.rank), rows, scale=1.0, splits=case.splits)
    assert len(attention.shared_bytes) == 2 and len(sums.shared_bytes) == (case.splits > 1) and len(appended.shared_bytes) == fp8


def test_latents_that_the_kernel_cannot_hold_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_inference.attention import _backends

    monkeypatch.setattr(_backends, "has_kernels", lambda *_: True)
    place = torch.device("cpu")
    assert has_attention_kernel(place, torch.bfloat16, 64, (512, 576)) and has_attention_kernel(place, torch.float32, 16, (128, 192))
    assert not has_attention_kernel(place, torch.bfloat16, 64, (1024, 1088))
    assert not has_attention_kernel(place, torch.float32, 64, (512, 576))
    assert not has_attention_kernel(place, torch.bfloat16, 8, (512, 576))
    assert not has_attention_kernel(place, torch.bfloat16, 64, (0, 576)), "a cache that does not say which channels are values"
    for dtype, rank, reads in ((torch.bfloat16, 15, True), (torch.float8_e4m3fn, 16, True), (torch.float8_e4m3fn, 15, False)):
        pages = PageFormat(dtype=dtype, device=place, block_size=64, latent=(rank, rank + 8))
        assert reads_tables(None, pages, torch.bfloat16) == reads, "latents in fp8 are read by pairs of channels"


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
@pytest.mark.parametrize(
    ("case", "dtype", "tolerance"),
    [
        *((case, torch.float32, 2e-5) for case in (CASES[1], CASES[3])),
        (CASES[4], torch.float16, 4e-3),
        *((case, torch.bfloat16, 3e-2) for case in (CASES[1], CASES[3], CASES[6], *LARGE)),
    ],
)
def test_the_kernel_over_latents_in_fp8_equals_plain_attention_on_a_gpu(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    check(case, "cuda", dtype, tolerance, fp8=True)


@pytest.mark.gpu
def test_what_is_not_finite_stays_so_on_a_gpu() -> None:
    check_not_finite("cuda", torch.bfloat16)


@pytest.mark.gpu
def test_the_kernel_reaches_the_end_of_a_cache_of_more_numbers_than_31_bits_count_on_a_gpu() -> None:
    free, numbers = torch.cuda.mem_get_info()[0], FAR.blocks_before * FAR.block_size * (FAR.rank + FAR.rope)
    assert numbers >= 2**31
    if free < 2.5 * numbers:
        pytest.skip(f"{free / 2**30:.0f} GiB of the GPU are free, and latents of {numbers:,} numbers take more")
    check(FAR, "cuda", torch.bfloat16, 3e-2)


if __name__ == "__main__":
    in_fp8 = sys.argv[1:] == ["fp8"]
    for each in CASES:
        check(each, "cpu", torch.float32, 2e-5, fp8=in_fp8)
    # The interpreter's products of bfloat16 are wrong, those of float16 are not.
    for each in (CASES[1], CASES[6]):
        check(each, "cpu", torch.float16, 4e-3, fp8=in_fp8)
    check_not_finite("cpu", torch.float32)
    print("same")
