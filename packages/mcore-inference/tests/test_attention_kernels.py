# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels of paged attention against plain attention over each request's tokens."""

import dataclasses
import itertools
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mcore_inference.attention import prefill_tiles
from mcore_inference.cache import LayerSlots
from mcore_parallel.nn import HeadNorms, PackedHeads, RMSNorm, apply_rotary, rotary_frequencies, rotary_tables
from tests.support.interpreter import run_interpreted


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of (tokens in the cache before, new tokens), those with one new token first."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    block_size: int = 16
    window: int = -1
    sink: bool = False
    softcap: float | None = None
    padding: int = 0
    """Decode rows of padding behind the others; only in a step without prefills."""
    splits: int = 1
    blocks_before: int = 0
    """Blocks of the cache in front of those in use."""


CASES = (
    Case(rows=((0, 1), (5, 1), (16, 1), (70, 1), (31, 1)), splits=4),
    Case(rows=((0, 1), (200, 1)), padding=2, splits=3, heads=3, kv_heads=1, width=24, block_size=32),
    Case(rows=((9, 1), (0, 17), (33, 40), (0, 1 + 64)), sink=True, splits=2),
    Case(rows=((100, 1), (90, 30), (0, 80)), window=20, block_size=48, splits=5),
    Case(rows=((100, 1), (15, 70)), window=0, sink=True, heads=6, kv_heads=6),
    Case(rows=((0, 5), (64, 130)), heads=8, kv_heads=1),
    Case(rows=((3, 1), (0, 5), (30, 33)), width=256, block_size=64),
    Case(rows=((40, 1), (0, 1), (0, 17), (33, 40)), softcap=0.7, window=30, sink=True, splits=2),
    Case(rows=((66, 1), (0, 33), (32, 34)), softcap=1.5),
)
# As models have them; slow in the interpreter, and no other code there.
WIDE = Case(rows=((66, 1), (0, 9), (30, 13)), width=128, heads=8, block_size=64, splits=2)
WIDER = Case(rows=((66, 1), (0, 9), (30, 40)), width=272, heads=8, block_size=64, splits=2)
"""Channels beyond 256 in 16 bits, and no power of two."""


DECODE_CASES = (
    Case(rows=((0, 1), (5, 1), (16, 1), (70, 1), (31, 1)), splits=4),
    Case(rows=((0, 1), (200, 1)), padding=2, splits=3, heads=3, kv_heads=1, width=24, block_size=32),
    Case(rows=((300, 1), (64, 1), (128, 1), (9, 1)), sink=True, splits=2, block_size=64, padding=1),
    Case(rows=((100, 1), (90, 1), (0, 1)), window=20, block_size=48, splits=5, sink=True),
    Case(rows=((100, 1), (15, 1)), window=0, heads=6, kv_heads=6, padding=3),
    Case(rows=((100, 1), (66, 1), (0, 1)), softcap=0.7, splits=2),
)
WIDE_DECODE = Case(rows=((70, 1), (0, 1)), width=128, heads=8, block_size=64, splits=2)
FAR = Case(rows=((70, 1), (5, 1), (0, 17), (33, 40)), width=128, heads=8, kv_heads=8, block_size=64, splits=2, blocks_before=2**15)
"""Keys behind the 2**31st number of a cache."""
FAR_DECODE = dataclasses.replace(FAR, rows=FAR.rows[:2])


def reference(case: Case, q: Tensor, k: list[Tensor], v: list[Tensor], sink: Tensor | None) -> Tensor:
    """One row, head and query after the other, in float64; k and v are each row's whole context."""
    out, first = [], 0
    for (before, new), keys, values in zip(case.rows, k, v, strict=True):
        group = case.heads // case.kv_heads
        keys, values = (x.double().repeat_interleave(group, dim=1) for x in (keys, values))
        scores = torch.einsum("tad,sad->ats", q[first : first + new].double(), keys) * case.width**-0.5
        scores = scores if case.softcap is None else case.softcap * (scores / case.softcap).tanh()
        at, key = before + torch.arange(new)[:, None], torch.arange(before + new)[None, :]
        seen = key <= at
        if case.window >= 0:
            seen &= key >= at - case.window
        scores = scores.masked_fill(~seen, -torch.inf)
        if sink is not None:
            scores = torch.cat((scores, sink.double()[:, None, None].expand(-1, new, 1)), dim=-1)
        shares = scores.softmax(dim=-1)[..., : before + new]
        out.append(torch.einsum("ats,sad->tad", shares, values))
        first += new
    return torch.cat(out)


def make_slots(count: int, case: Case, dtype: torch.dtype, device: str, *, fp8: bool) -> LayerSlots:
    """Slots in which nothing may be read: NaN, or scales of NaN."""
    shape = count, case.kv_heads, case.width
    if not fp8:
        keys, values = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
        return LayerSlots(keys=keys, values=values)
    scales = torch.full((2, case.kv_heads, count), torch.nan, device=device).transpose(1, 2)
    keys, values = (torch.ones(shape, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    return LayerSlots(keys=keys, values=values, scales=(scales[0], scales[1]))


def check_stored(stored: tuple[Tensor, Tensor], wide: tuple[Tensor, Tensor]) -> None:
    """What is in the cache is off by a sixteenth."""
    for narrow, x in zip(stored, wide, strict=True):
        torch.testing.assert_close(narrow.cpu().float(), x.float(), rtol=0.08, atol=0.02)


def check(case: Case, device: str, dtype: torch.dtype, tolerance: float, *, fp8: bool = False) -> None:
    """Fill a cache whose other slots are NaN, run the kernels, compare."""
    from mcore_inference.attention._triton import append, attend

    torch.manual_seed(0)
    rng = random.Random(0)
    lengths = [before + new for before, new in case.rows]
    rows, size = len(case.rows), case.block_size
    blocks = [-(-length // size) for length in lengths]
    end = case.blocks_before + sum(blocks)
    order = rng.sample(range(case.blocks_before, end), sum(blocks))
    tables = torch.full((rows + case.padding, max(blocks) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    slots = [tables[row][torch.arange(length) // size].long() * size + torch.arange(length) % size for row, length in enumerate(lengths)]
    k, v = ([torch.randn(length, case.kv_heads, case.width).to(dtype) for length in lengths] for _ in range(2))
    cached = make_slots((end + 1) * size, case, dtype, device, fp8=fp8)
    for row, (before, _) in enumerate(case.rows):
        cached.write(slots[row][:before].to(device), k[row][:before].to(device), v[row][:before].to(device))
    tables = tables.to(device)

    new = [n for _, n in case.rows]
    tokens = sum(new) + case.padding
    sink_block = torch.full((case.padding,), end * size)
    slots_T = torch.cat([slots[row][before:] for row, (before, _) in enumerate(case.rows)] + [sink_block]).to(device)
    q = torch.randn(tokens, case.heads, case.width).to(dtype)
    filler = torch.zeros(case.padding, case.kv_heads, case.width, dtype=dtype)
    step_k, step_v = (torch.cat([x[row][before:] for row, (before, _) in enumerate(case.rows)] + [filler]).to(device) for x in (k, v))
    sink = torch.randn(case.heads).to(dtype) if case.sink else None
    append(step_k, step_v, cached, slots_T)
    if fp8:
        read = [cached.read(row_slots.to(device), torch.float32) for row_slots in slots]
        for stored, wide in zip(read, zip(k, v, strict=True), strict=True):
            check_stored(stored, wide)
        k, v = [keys.cpu() for keys, _ in read], [values.cpu() for _, values in read]

    decode = sum(n == 1 for n in new) + case.padding
    packed = {
        "starts_R": [*np.cumsum([0, *new]).tolist(), *range(sum(new) + 1, tokens + 1)],
        "contexts_R": [*lengths, *[0] * case.padding],
    }
    shared = {name: torch.tensor(value, dtype=torch.int32, device=device) for name, value in packed.items()}
    out = torch.full((tokens, case.heads, case.width), torch.nan, dtype=dtype, device=device)
    options = {
        "tables_RB": tables, **shared, "block_size": size, "scale": case.width**-0.5, "window": case.window,
        "sink_A": None if sink is None else sink.to(device), "softcap": case.softcap,
    }  # fmt: skip
    attend(q.to(device), cached, out, **options, tiles=None, num_rows=decode, splits=case.splits)
    if decode < rows + case.padding:
        lengths_P, rows_P, group = np.array(new[decode:]), np.arange(decode, rows), case.heads // case.kv_heads
        tiles = [torch.tensor(part, dtype=torch.int32, device=device) for part in prefill_tiles(lengths_P, rows_P, group)]
        attend(q.to(device), cached, out, **options, tiles=(tiles[0], tiles[1]), num_rows=0, splits=1)
        # Rows that had nothing in the cache, once more, from views of a packed projection whose other parts are NaN.
        whole = np.array([before == 0 for before, _ in case.rows[decode:]])
        if whole.any():
            packed_kv = torch.full((tokens, case.kv_heads, 3, case.width), torch.nan, dtype=dtype, device=device)
            packed_kv[:, :, 1], packed_kv[:, :, 2] = step_k, step_v
            first = sum(new[:decode])
            for length, alone in zip(lengths_P, whole, strict=True):
                out[first : first + length] = torch.nan if alone else out[first : first + length]
                packed_kv[first : first + length] = packed_kv[first : first + length] if alone else torch.nan
                first += length
            tiles = [torch.tensor(part, dtype=torch.int32, device=device) for part in prefill_tiles(lengths_P[whole], rows_P[whole], group)]
            step = {"tiles": (tiles[0], tiles[1]), "num_rows": 0, "splits": 1, "in_step": True}
            attend(q.to(device), LayerSlots(keys=packed_kv[:, :, 1], values=packed_kv[:, :, 2]), out, **options, **step)
    wanted = reference(case, q, k, v, sink)
    torch.testing.assert_close(out.cpu()[: sum(new)].double(), wanted, rtol=tolerance, atol=tolerance)
    assert (out[sum(new) :] == 0).all(), "rows of padding must stay finite"


def check_packed(case: Case, device: str, dtype: torch.dtype, tolerance: float, *, fp8: bool = False) -> None:
    """The kernel of decode steps, twice: it takes the projection's result, and leaves its counters as they were."""
    from mcore_inference.attention._decode import attend_packed

    torch.manual_seed(0)
    size, rows = case.block_size, len(case.rows)
    lengths = [before + 1 for before, _ in case.rows]
    blocks = [-(-length // size) for length in lengths]
    end = case.blocks_before + sum(blocks)
    order = random.Random(0).sample(range(case.blocks_before, end), sum(blocks))
    tables = torch.full((rows + case.padding, max(blocks) + 1), -1, dtype=torch.int32)
    for row, count in enumerate(blocks):
        tables[row, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    slots = [tables[row][torch.arange(length) // size].long() * size + torch.arange(length) % size for row, length in enumerate(lengths)]
    k, v = ([torch.randn(length, case.kv_heads, case.width).to(dtype) for length in lengths] for _ in range(2))
    cached = make_slots((end + 1) * size, case, dtype, device, fp8=fp8)
    for row, (before, _) in enumerate(case.rows):
        cached.write(slots[row][:before].to(device), k[row][:before].to(device), v[row][:before].to(device))
    group = case.heads // case.kv_heads
    qkv = torch.randn(rows + case.padding, case.kv_heads, group + 2, case.width).to(dtype)
    norms = [RMSNorm(case.width, epsilon=1e-3, dtype=dtype) for _ in range(2)]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    weights = [norm.weight.detach() for norm in norms]
    angles = rotary_tables(torch.tensor([*(length - 1 for length in lengths), *[0] * case.padding]), rotary_frequencies(case.width))
    with torch.no_grad():
        q, new_k = (norm(x) for norm, x in zip(norms, (qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2]), strict=True))
        q, new_k = apply_rotary(q, angles), apply_rotary(new_k, angles)
    for row in range(rows):
        k[row][-1], v[row][-1] = new_k[row], qkv[row, :, -1]
    sink = torch.randn(case.heads).to(dtype) if case.sink else None

    scaling = HeadNorms(query=weights[0].to(device), key=weights[1].to(device), epsilon=1e-3, shift=0.0)
    heads = PackedHeads(qkv=qkv.to(device), tables=(angles[0].to(device), angles[1].to(device)), norms=scaling)
    last = torch.tensor([int(row_slots[-1]) for row_slots in slots] + [end * size] * case.padding, device=device)
    finished = torch.zeros((rows + case.padding) * case.kv_heads, dtype=torch.int32, device=device)
    contexts = torch.tensor([*lengths, *[0] * case.padding], dtype=torch.int32, device=device)
    options = {
        "tables_RB": tables.to(device), "contexts_R": contexts, "block_size": size, "scale": case.width**-0.5, "window": case.window,
        "sink_A": None if sink is None else sink.to(device), "splits": case.splits, "finished": finished, "softcap": case.softcap,
    }  # fmt: skip
    for _ in range(2):
        out = attend_packed(heads, cached, last, **options)
        if fp8:
            read = [cached.read(row_slots.to(device), torch.float32) for row_slots in slots]
            k, v = [keys.cpu() for keys, _ in read], [values.cpu() for _, values in read]
        wanted = reference(case, q[:rows], k, v, sink)
        torch.testing.assert_close(out.cpu()[:rows].double(), wanted, rtol=tolerance, atol=tolerance)
        assert (out[rows:] == 0).all() and not finished.any()
    written_k, written_v = (x.cpu() for x in cached.read(last[:rows], dtype))
    if fp8:
        check_stored((written_k, written_v), (new_k[:rows], qkv[:rows, :, -1]))
    else:
        torch.testing.assert_close(written_k, new_k[:rows], rtol=tolerance, atol=tolerance)
        assert torch.equal(written_v, qkv[:rows, :, -1])
    num_slots = len(cached.keys)
    assert cached.read(torch.arange(num_slots - size, num_slots, device=device), dtype)[0].isnan().all()


def check_not_finite(device: str, dtype: torch.dtype) -> None:
    """Heads in fp8 with a value that is not finite are NaN as a whole, as those of torch's cast."""
    from mcore_inference.attention._triton import append

    case = dataclasses.replace(CASES[0], kv_heads=2, width=16)
    cached = make_slots(4, case, dtype, device, fp8=True)
    k, v = (torch.randn(3, 2, 16, device=device).to(dtype) for _ in range(2))
    k[0, 1, 3], v[1, 0, 15] = float("inf"), float("nan")
    append(k, v, cached, torch.tensor([2, 0, 1], device=device))
    keys, values = (x.isnan() for x in cached.read(torch.tensor([2, 0, 1], device=device), torch.float32))
    assert keys.sum() == keys[0, 1].sum() == 16 and values.sum() == values[1, 0].sum() == 16


def check_append(device: str, dtype: torch.dtype) -> None:
    """Keys and values lie where slots say, whatever the width of values."""
    from mcore_inference.attention._triton import append

    slots = torch.tensor([4, 0, 3], device=device)
    for value_width in (24, 10):
        k, v = (torch.randn(3, 3, width, device=device).to(dtype) for width in (24, value_width))
        cached = make_slots(5, dataclasses.replace(CASES[0], kv_heads=3, width=24), dtype, device, fp8=False)
        narrow = cached.of_value_width(value_width)
        append(k, v, narrow, slots)
        keys, values = narrow.read(slots, dtype)
        assert torch.equal(keys, k) and torch.equal(values, v)
        assert narrow.keys[[1, 2]].isnan().all() and narrow.values[[1, 2]].isnan().all()


@pytest.mark.journey
@pytest.mark.timeout(200)
def test_keys_and_values_of_one_width_are_divided_into_heads_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from mcore_inference.attention import _triton
    from tests.support.hopper import CompiledLaunches

    class Launches(CompiledLaunches):
        warps: list[int]

        def _compile(self, *args: Any, num_warps: int = 4, **options: Any) -> None:
            self.warps = [*getattr(self, "warps", []), num_warps]
            super()._compile(*args, num_warps=num_warps, **options)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = Launches(_triton._append_kernel)
    monkeypatch.setattr(_triton, "_append_kernel", launches)
    # 64 heads without grouped queries.
    for width, value_width in ((128, 128), (128, 96)):
        k, v, slots = torch.zeros(3, 64, width), torch.zeros(3, 64, value_width), torch.zeros(3, dtype=torch.int64)
        cached = LayerSlots(keys=torch.zeros(5, 64, width), values=torch.zeros(5, 64, width)).of_value_width(value_width)
        _triton.append(k, v, cached, slots)
    assert launches.warps == [4, 8]
    one, two = (len(re.findall(r"\bdiv\.[su]\d+", ptx)) * warps for ptx, warps in zip(launches.ptx, launches.warps, strict=True))
    assert two == 2 * one > 0


@pytest.mark.journey
def test_kernels_equal_plain_attention_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.slow
def test_kernels_over_fp8_equal_plain_attention_in_every_case_in_the_interpreter() -> None:
    run_interpreted(__file__, "fp8")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("case", (*DECODE_CASES, WIDE_DECODE))
def test_the_kernel_of_decode_steps_equals_plain_attention_on_a_gpu(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    for fp8 in (False, True):
        check_packed(case, "cuda", dtype, tolerance, fp8=fp8)


# In float32 at 128 channels and more the kernel takes a minute and more to compile.
@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("case", (*CASES, WIDE))
def test_kernels_equal_plain_attention_on_a_gpu(case: Case, dtype: torch.dtype, tolerance: float) -> None:
    for fp8 in (False, True):
        check(case, "cuda", dtype, tolerance, fp8=fp8)


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
def test_kernels_of_wider_heads_equal_plain_attention_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check(WIDER, "cuda", dtype, tolerance)
    check(WIDER, "cuda", dtype, tolerance, fp8=True)


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_kernels_reach_the_end_of_a_cache_of_more_numbers_than_31_bits_count_on_a_gpu() -> None:
    free, numbers = torch.cuda.mem_get_info()[0], FAR.blocks_before * FAR.block_size * FAR.kv_heads * FAR.width
    assert numbers >= 2**31
    if free < 2.5 * 2 * numbers:
        pytest.skip(f"{free / 2**30:.0f} GiB of the GPU are free, and keys and values of {2 * numbers:,} numbers take more")
    check(FAR, "cuda", torch.bfloat16, 3e-2)
    check_packed(FAR_DECODE, "cuda", torch.bfloat16, 3e-2)


@pytest.mark.gpu
def test_what_is_not_finite_stays_so_on_a_gpu() -> None:
    check_not_finite("cuda", torch.bfloat16)


def test_tiles_of_every_width_that_has_a_kernel_fit_into_shared_memory() -> None:
    pytest.importorskip("triton")
    from mcore_inference.attention import _tiles, _triton

    for width, itemsize, block in itertools.product(range(1, 1100), (2, 4), (16, 48, 64, 256)):
        for decode, lines in ((True, 16), (True, 64), (False, 128)):
            most = _triton.largest_power(block)
            keys, _, stages = _triton._tile(decode, lines, most, width, itemsize, described=False)
            padded = 1 << (width - 1).bit_length()
            fits = (lines + 2 * keys * stages) * padded * itemsize <= 200 * 1024
            assert fits or not _tiles.fits_tiles(width, itemsize), (width, itemsize, decode, lines, keys, stages)
        # Those that are refused have no tile at all.
        smallest = (128 + 2 * 16) * (1 << (width - 1).bit_length()) * itemsize
        assert _tiles.fits_tiles(width, itemsize) == (smallest <= 200 * 1024)
    assert [_tiles.fits_tiles(width, 2) for width in (512, 513)] == [_tiles.fits_tiles(width, 4) for width in (256, 257)] == [True, False]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("width", "dtype"),
    [*((width, torch.bfloat16) for width in (80, 96, 192, 256, 258, 320)), (80, torch.float32), (96, torch.float32)],
    ids=str,
)
def test_kernels_of_prompts_compile_for_hopper(width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from mcore_inference.attention import _triton
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = CompiledLaunches(_triton._attend_kernel)
    monkeypatch.setattr(_triton, "_attend_kernel", launches)
    q, keys = torch.zeros(20, 4, width, dtype=dtype), torch.zeros(256, 1, width, dtype=dtype)
    numbers = {name: torch.zeros(size, dtype=torch.int32) for name, size in (("tables_RB", (2, 4)), ("starts_R", 3), ("contexts_R", 2))}
    tiles = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    _triton.attend(
        q, LayerSlots(keys=keys, values=keys), torch.empty_like(q), **numbers, block_size=64, scale=1.0, window=-1, sink_A=None,
        tiles=tiles, num_rows=0, splits=1,
    )  # fmt: skip
    assert len(launches.shared_bytes) == 1


def test_tiles_cover_every_token_once() -> None:
    lengths = np.array([1, 31, 32, 33, 200])
    for group in (1, 3, 4, 128, 200):
        rows, firsts = prefill_tiles(lengths, np.arange(5, 10), group)
        size = max(1, 128 // group)
        covered = [
            (row, token) for row, first in zip(rows, firsts, strict=True) for token in range(first, min(first + size, lengths[row - 5]))
        ]
        assert covered == [(row + 5, token) for row, length in enumerate(lengths) for token in range(length)]


if __name__ == "__main__":
    # A cache in fp8 changes what is loaded and stored: one case of each kind of row, of a sink and of a window.
    every_in_fp8 = sys.argv[1:] == ["fp8"]
    for number, each in enumerate(CASES):
        for stored in (False, True):
            if every_in_fp8 == stored or number in (1, 6, 7):
                check(each, "cpu", torch.float32, 2e-5, fp8=stored)
    for number, each in enumerate(DECODE_CASES):
        for stored in (False, True):
            if every_in_fp8 == stored or number in (1, 3, 5):
                check_packed(each, "cpu", torch.float32, 2e-5, fp8=stored)
    near = {"blocks_before": 5, "width": 16}
    check(dataclasses.replace(FAR, **near), "cpu", torch.float32, 2e-5)
    check_packed(dataclasses.replace(FAR_DECODE, **near), "cpu", torch.float32, 2e-5)
    check_not_finite("cpu", torch.float32)
    check_append("cpu", torch.float32)
    print("same")
