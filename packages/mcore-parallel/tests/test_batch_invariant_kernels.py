# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The kernels of a batch-invariant backend: right, and with the same bits for a row in any company."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import AttentionSpec, Step
from mcore_parallel.nn.attention import reference_attention
from mcore_parallel.nn.attention._batch_invariant import BatchInvariantAttention
from mcore_parallel.tensor_parallel import RowMaths, row_statistics
from tests.support.interpreter import run_interpreted


def close(result: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(result.double().cpu(), wanted.double().cpu(), rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def check_linear(device: str, dtype: torch.dtype, tolerance: float, shapes: tuple[tuple[int, int], ...], most_rows: int) -> None:
    """Against float64; every number of rows, every beginning and both ways to launch give a row the same bits."""
    from mcore_parallel.tensor_parallel._triton_invariant import LinearTiling, linear

    for columns, depth in shapes:
        torch.manual_seed(columns)
        x, weight = (torch.randn(rows, depth, device=device).to(dtype) for rows in (most_rows, columns))
        finished = torch.zeros(4096, dtype=torch.int32, device=device)
        whole = linear(x, weight, finished, split=False)
        close(whole, x.double() @ weight.double().T, tolerance)
        assert torch.equal(linear(x, weight, finished), whole)
        assert torch.equal(linear(x, weight, finished, split=True), whole)
        # What a router asks for: the sums as they are before they are rounded.
        wide = linear(x, weight, finished, dtype=torch.float32)
        assert wide.dtype == torch.float32 and torch.equal(wide.to(dtype), whole)
        close(wide, x.double() @ weight.double().T, 1e-5)
        ranges = [(5, 6), (3, 3 + most_rows // 2)]
        if device != "cpu":
            ranges += [(0, 1), (most_rows - 1, most_rows), (1, most_rows), *((7, 7 + rows) for rows in (2, 17, 64, 65, 128, 129, 300))]
        for first, last in ranges:
            # Many times: programs end in another order each time.
            for _ in range(1 if device == "cpu" else 5):
                assert torch.equal(linear(x[first:last].clone(), weight, finished), whole[first:last]), (columns, depth, first, last)
        assert not finished.any()
        assert LinearTiling.of(columns, depth, dtype).slices > 1 or depth < 1024 or columns > 4000


def check_grouped_linear(device: str, dtype: torch.dtype, tolerance: float, shapes: tuple[tuple[int, int], ...], experts: int) -> None:
    """Against float64; a row has the same bits alone with its expert, and among any rows of that expert and of others."""
    from mcore_parallel.tensor_parallel._triton_invariant import grouped_linear

    def ends_of(counts: list[int]) -> Tensor:
        return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)

    def only(expert: int, number: int) -> Tensor:
        return ends_of([number if other == expert else 0 for other in range(experts)])

    numbers = (1, 2, 63, 64, 65, 128, 129, 257) if device != "cpu" else (1, 65)
    for columns, depth in shapes:
        torch.manual_seed(columns)
        weight = torch.randn(experts, columns, depth, device=device).to(dtype)
        x = torch.randn(257, depth, device=device).to(dtype)
        # Each expert's results of all rows, 257 of them to an expert.
        whole = [grouped_linear(x, weight, only(expert, len(x))) for expert in range(experts)]
        for expert in range(experts):
            close(whole[expert], x.double() @ weight[expert].double().T, tolerance)
        for number in numbers:
            first = 257 - number
            # Rows behind the last expert belong to none.
            rows = torch.cat((x[first:], x[:3]))
            for expert in range(experts):
                part = grouped_linear(rows, weight, only(expert, number))[:number]
                assert torch.equal(part, whole[expert][first:]), (columns, depth, number)
            spread = [(number + 3 * e) % (number + 1) for e in range(experts)]
            rows = torch.cat([x[:count] for count in spread]) if sum(spread) else x[:0]
            parts = grouped_linear(rows, weight, ends_of(spread)).split(spread)
            assert all(torch.equal(part, whole[e][:count]) for e, (part, count) in enumerate(zip(parts, spread, strict=True)))


def check_statistics(device: str, dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    from mcore_parallel.tensor_parallel._triton_invariant import row_statistics as by_kernel

    for width in widths:
        logits = (4 * torch.randn(5, width, device=device)).to(dtype)
        columns, valid = torch.tensor([0, width - 2, -1, 3, 5], device=device), width - 1
        ones = torch.ones(5, device=device)
        inverse = torch.tensor([1.0, 0.5, 2.0, 0.7, 1.3], device=device)
        stats = by_kernel(logits, inverse, columns, valid, -1e30)
        maths = RowMaths(vocab_size=valid, entropy=True)
        wanted = row_statistics(logits.double().cpu() * inverse.double().cpu()[:, None], columns.cpu(), valid, maths)
        close(stats, wanted, 1e-5)
        # A row alone, in wider rows, and in the dtype that a neighbour's penalties bring.
        padded = torch.nn.functional.pad(logits, (3, 8))[:, 3 : 3 + width]
        for source in (padded, logits.float()):
            assert torch.equal(by_kernel(source, inverse, columns, valid, -1e30), stats)
        for row in range(5):
            one = slice(row, row + 1)
            assert torch.equal(by_kernel(logits[one], inverse[one], columns[one], valid, -1e30), stats[:, one])
        assert torch.equal(by_kernel(logits, ones, columns, valid, -1e30)[:, 0], stats[:, 0])


def core_of(device: str, dtype: torch.dtype, **fields: Any) -> BatchInvariantAttention:
    return BatchInvariantAttention(AttentionSpec(device=device, dtype=dtype, batch_invariant=True, **fields), ProcessGroups.single())


def check_attention(device: str, dtype: torch.dtype, tolerance: float, lengths: tuple[int, ...], **fields: Any) -> None:
    """Packed, alone, and over blocks in any order: all at once, in pieces, and token by token."""
    torch.manual_seed(0)
    core, heads, kv_heads, width = core_of(device, dtype, **fields), fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
    bounds = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
    shapes = (heads, width), (kv_heads, width), (kv_heads, fields.get("value_dim", width))
    q, k, v = (torch.randn(bounds[-1], *shape, device=device).to(dtype) for shape in shapes)
    sink = torch.randn(heads, device=device).to(dtype) if fields.get("softmax_type") == "learnable" else None
    extra = q.new_zeros(heads) if fields.get("softmax_type") == "off-by-one" else sink
    packed = core._attend_tiles(q, k, v, bounds, sink)
    window = core.spec.bounds
    wide = (x.double().cpu() for x in (q, k, v))
    cpu_sink = None if extra is None else extra.double().cpu()
    close(packed, reference_attention(*wide, causal=False, window=window, sink=cpu_sink, cu_seqlens=bounds), tolerance)
    for start, end in itertools.pairwise(bounds):
        own = slice(start, end)
        assert torch.equal(core._attend_tiles(q[own].clone(), k[own].clone(), v[own].clone(), (0, end - start), sink), packed[own])
        for size, block_size in ((1, 16), (33, 48)) if device == "cpu" else itertools.product((1, 5, 16, 70), (16, 48)):
            if size < end - start:
                assert torch.equal(in_pieces(core, q[own], k[own], v[own], sink, size, block_size), packed[own]), (start, size, block_size)


def in_pieces(core: BatchInvariantAttention, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, size: int, block_size: int) -> Tensor:
    """Pieces of ``size`` tokens as an engine computes them, beside a row of padding; slots that hold no key are NaN."""
    from mcore_parallel.nn.kernels._triton_fixed_attention import fixed_tile_tokens

    length, device = len(q), q.device
    blocks = -(-length // block_size)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(size)).int()
    slots = table[torch.arange(length) // block_size].long() * block_size + torch.arange(length) % block_size
    keys, values = (torch.full((blocks * block_size, *x.shape[1:]), torch.nan, dtype=x.dtype, device=device) for x in (k, v))
    keys[slots.to(device)], values[slots.to(device)] = k, v
    results, group = [], q.shape[1] // k.shape[1]
    firsts = range(0, length, size) if size > 1 else range(max(0, length - 6), length)
    for first in firsts:
        part = q[first : first + size].clone()
        out = torch.full((len(part) + 1, q.shape[1], v.shape[2]), torch.nan, dtype=q.dtype, device=device)
        tokens = fixed_tile_tokens(group, q.dtype) * 2 - 1
        tiles = [(0, at) for at in range(0, len(part), tokens)] + [(1, 0)]
        numbers = torch.tensor(tiles, dtype=torch.int32, device=device).T.contiguous()
        where = {
            "tables_RB": torch.stack((table, torch.full_like(table, -1))).to(device),
            "starts_R": torch.tensor([0, len(part), len(part) + 1], dtype=torch.int32, device=device),
            "contexts_R": torch.tensor([first + len(part), 0], dtype=torch.int32, device=device),
            "tiles": (numbers[0], numbers[1]), "tile_tokens": tokens, "block_size": block_size, "in_step": False,
        }  # fmt: skip
        core.attend_blocks(torch.cat((part, part[:1])), keys, values, out, sink=sink, **where)
        assert (out[-1] == 0).all(), "rows of padding must stay finite"
        results.append(out[:-1])
    whole = torch.cat(results)
    if size > 1:
        return whole
    # Single tokens at the end only; the others come with the rest.
    return torch.cat((in_pieces(core, q, k, v, sink, length, block_size)[: length - len(whole)], whole))


def check_gradients(device: str, dtype: torch.dtype, tolerance: float, lengths: tuple[int, ...], **fields: Any) -> None:
    """By kernels, against the definition in float64, and twice the same bits."""
    torch.manual_seed(1)
    core, heads, kv_heads, width = core_of(device, dtype, **fields), fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
    bounds = tuple(sum(lengths[:n]) for n in range(len(lengths) + 1))
    shapes = (heads, width), (kv_heads, width), (kv_heads, fields.get("value_dim", width)), (heads, fields.get("value_dim", width))
    *inputs, grad = (torch.randn(bounds[-1], *shape, device=device).to(dtype) for shape in shapes)
    # Of every second number: gradients must not read the ones between.
    sink = torch.randn(2 * heads, device=device).to(dtype)[::2] if fields.get("softmax_type") == "learnable" else None
    wide = [x.double().cpu().requires_grad_() for x in (*inputs, *(() if sink is None else (sink,)))]
    extra = wide[3] if sink is not None else torch.zeros(heads).double() if fields.get("softmax_type") == "off-by-one" else None
    out = reference_attention(*wide[:3], causal=False, window=core.spec.bounds, sink=extra, cu_seqlens=bounds)
    wanted = torch.autograd.grad(out, wide, grad.double().cpu())
    ours = core._attend_tiles(*inputs, bounds, sink)
    first, again = (core.gradients([*inputs, sink], ours, bounds, grad, (True, True, True, sink is not None)) for _ in range(2))
    assert (first[3] is None) == (sink is None)
    for gradient, same, other in zip(first, again, wanted, strict=False):
        assert gradient is not None and same is not None and gradient.dtype == dtype and torch.equal(gradient, same)
        close(gradient, other, tolerance)


HEADS: tuple[dict[str, Any], ...] = (
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
    {"num_heads": 3, "num_kv_heads": 1, "head_dim": 24, "window": (20, 0), "softmax_type": "learnable"},
    {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "value_dim": 8, "window": (0, 0), "softmax_type": "off-by-one"},
)


@pytest.mark.journey
def test_kernels_are_right_and_invariant_in_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.mark.parametrize("fields", HEADS, ids=str)
def test_the_backward_in_blocks_of_queries_is_that_of_the_definition(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_parallel.nn.attention import _batch_invariant

    monkeypatch.setattr(_batch_invariant, "_MOST_SCORES", 1)
    core = core_of("cpu", torch.float64, **fields)
    heads, kv_heads, width = fields["num_heads"], fields["num_kv_heads"], fields["head_dim"]
    shapes = (heads, width), (kv_heads, width), (kv_heads, fields.get("value_dim", width))
    inputs = [torch.randn(55, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sink = torch.randn(fields["num_heads"], dtype=torch.float64, requires_grad=True)
    learnt = [sink] if fields.get("softmax_type") == "learnable" else []
    step = Step(batch_size=1, seq_len=55, positions=torch.arange(55), cu_seqlens=torch.tensor([0, 17, 17, 55]))
    extra = sink.detach() * 0 if fields.get("softmax_type") == "off-by-one" else learnt[0] if learnt else None
    wanted = reference_attention(*inputs, causal=False, window=core.spec.bounds, sink=extra, cu_seqlens=[0, 17, 17, 55])
    out = core(*inputs, 0, step, sink=learnt[0] if learnt else None)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-10)
    grad = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(out, [*inputs, *learnt], grad), torch.autograd.grad(wanted, [*inputs, *learnt], grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def instructions(assembly: str) -> list[str]:
    """The matrix instructions of a kernel."""
    return re.findall(r"(?:wgmma\.mma_async|mma)\.sync\.aligned\.\S+", assembly)


@pytest.mark.journey
@pytest.mark.parametrize(("columns", "depth", "slices"), [(256, 2048, 4), (24576, 256, 1)])
def test_few_rows_and_many_run_the_same_instructions_of_hopper(
    columns: int, depth: int, slices: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.tensor_parallel import _triton_invariant as kernels
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = CompiledLaunches(kernels._linear_kernel)
    monkeypatch.setattr(kernels, "_linear_kernel", launches)
    weight, finished = torch.zeros(columns, depth, dtype=torch.bfloat16), torch.zeros(96, dtype=torch.int32)
    assert kernels.LinearTiling.of(columns, depth, torch.bfloat16).slices == slices
    for rows, split in ((1, None), (65, None), (65, False)):
        kernels.linear(torch.zeros(rows, depth, dtype=torch.bfloat16), weight, finished, split=split)
    few, *many = map(instructions, launches.ptx)
    assert len(few) == 4 and all(name.startswith("wgmma.mma_async.sync.aligned.m64") for name in few)
    assert all(other == few for other in many)


@pytest.mark.journey
@pytest.mark.parametrize(("columns", "depth"), [(1536, 2048), (24576, 256), (40, 100)])
def test_few_rows_of_an_expert_and_many_run_the_same_instructions_of_hopper(
    columns: int, depth: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.tensor_parallel import _triton_invariant as kernels
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = CompiledLaunches(kernels._grouped_kernel)
    monkeypatch.setattr(kernels, "_grouped_kernel", launches)
    weight, ends = torch.zeros(2, columns, depth, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
    for rows in (1, 129, 700):
        kernels.grouped_linear(torch.zeros(rows, depth, dtype=torch.bfloat16), weight, ends)
    few, *many = map(instructions, launches.ptx)
    assert len(few) == 4 and all(name.startswith("wgmma.mma_async.sync.aligned.m64") for name in few)
    assert all(other == few for other in many)


@pytest.mark.journey
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_and_statistics_compile_for_hopper(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from mcore_parallel.nn.kernels import _triton_attention_gradients as gradients
    from mcore_parallel.nn.kernels import _triton_fixed_attention as attention
    from mcore_parallel.tensor_parallel import _triton_invariant as rows
    from tests.support.hopper import CompiledLaunches

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    attend, statistics = CompiledLaunches(attention._attend_kernel), CompiledLaunches(rows._statistics_kernel)
    monkeypatch.setattr(attention, "_attend_kernel", attend)
    by_queries, by_keys = CompiledLaunches(gradients._query_kernel), CompiledLaunches(gradients._key_kernel)
    monkeypatch.setattr(gradients, "_query_kernel", by_queries)
    monkeypatch.setattr(gradients, "_key_kernel", by_keys)
    monkeypatch.setattr(rows, "_statistics_kernel", statistics)
    for width in (128, 256) if dtype == torch.bfloat16 else (128,):
        core = core_of("cpu", dtype, num_heads=8, num_kv_heads=2, head_dim=width, window=(100, 0), softmax_type="off-by-one")
        q, k = (torch.zeros(70, heads, width, dtype=dtype) for heads in (8, 2))
        core._attend_tiles(q, k, k, (0, 30, 70), None)
    # Of latent attention, values are narrower.
    core = core_of("cpu", dtype, num_heads=8, num_kv_heads=8, head_dim=192, value_dim=128)
    q, v = (torch.zeros(70, 8, width, dtype=dtype) for width in (192, 128))
    core._attend_tiles(q, q, v, (0, 30, 70), None)
    core.gradients([q, q, v, None], v, (0, 30, 70), v, (True, True, True, False))
    assert len(by_queries.ptx) == len(by_keys.ptx) == 1
    logits = torch.zeros(3, 5000, dtype=dtype)
    rows.row_statistics(logits, torch.ones(3), torch.zeros(3, dtype=torch.int64), 4990, -1e30)
    assert len(attend.ptx) == (3 if dtype == torch.bfloat16 else 2) and len(statistics.ptx) == 1
    if dtype == torch.bfloat16:
        assert all(name.startswith("wgmma.mma_async.sync.aligned.m64") for text in attend.ptx for name in instructions(text))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)], ids=str)
def test_matmuls_have_the_same_bits_for_any_rows_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    shapes = ((2048, 2048), (2048, 8192), (100, 1100), (3072, 1096)) if dtype != torch.float32 else ((256, 2048), (100, 1100))
    check_linear("cuda", dtype, tolerance, shapes, 700)
    if dtype == torch.bfloat16:
        check_linear("cuda", dtype, tolerance, ((32064, 2048), (16384, 2048)), 700)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 1e-5)], ids=str)
def test_matmuls_of_experts_have_the_same_bits_for_any_rows_on_a_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check_grouped_linear("cuda", dtype, tolerance, ((1536, 2048), (2048, 768), (104, 1096), (40, 104)), 5)
    check_grouped_linear("cuda", dtype, tolerance, ((256, 128),), 130)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_statistics_have_the_same_bits_for_any_rows_on_a_gpu(dtype: torch.dtype) -> None:
    check_statistics("cuda", dtype, (99, 5000, 128256))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("fields", [*HEADS, {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128}], ids=str)
def test_attention_has_the_same_bits_in_any_pieces_on_a_gpu(fields: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    check_attention("cuda", dtype, tolerance, (1, 200, 67, 300), **fields)


WIDE: tuple[dict[str, Any], ...] = (
    {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128},
    {"num_heads": 8, "num_kv_heads": 8, "head_dim": 192, "value_dim": 128},
    {"num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "window": (100, 0), "softmax_type": "learnable"},
)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("fields", [*HEADS, *WIDE], ids=str)
def test_gradients_of_attention_on_a_gpu_are_those_of_the_definition(fields: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    check_gradients("cuda", dtype, tolerance, (1, 0, 200, 67, 300), **fields)


if __name__ == "__main__":
    from tests.support.interpreter import round_dots_once

    round_dots_once()
    check_linear("cpu", torch.float32, 1e-5, ((33, 70),), 70)
    check_linear("cpu", torch.float16, 3e-3, ((40, 1030),), 70)
    check_grouped_linear("cpu", torch.float32, 1e-5, ((33, 70),), 3)
    check_grouped_linear("cpu", torch.float16, 3e-3, ((130, 40),), 2)
    check_statistics("cpu", torch.float32, (5000,))
    check_attention("cpu", torch.float32, 2e-5, (50,), **HEADS[1])
    check_attention("cpu", torch.float32, 2e-5, (40,), **HEADS[2])
    check_attention("cpu", torch.float16, 4e-3, (1, 70), **HEADS[0])
    check_gradients("cpu", torch.float32, 2e-5, (1, 0, 70), **HEADS[0])
    check_gradients("cpu", torch.float32, 2e-5, (50,), **HEADS[1])
    check_gradients("cpu", torch.float32, 2e-5, (5,), **{**HEADS[1], "window": (2**31 - 1, 0)})
    check_gradients("cpu", torch.float16, 4e-3, (40, 3), **HEADS[2])
    print("same")
