# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hopper kernel of grouped GEMMs, whose rows may be gathered and have SwiGLU behind them; imported only when it runs.

A program takes tiles of ``_ROWS`` rows and ``_COLUMNS`` columns one after another; with SwiGLU half of the columns are gates and half their
values. Its warps have two roles. Some bring tiles to shared memory: weights and rows by the copy engine, gathered rows 16 bytes at a time.
Two warpgroups multiply, each half of the rows: while one stores its results, the other one has the tensor cores, and the next tile is on
its way.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false, reportUnknownMemberType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# T tokens, R rows, N experts, I input and O output features, D model, F width of an expert; ends_N are the rows behind the last of each
# expert, int32 on the device.

GATHERED_DEPTH = 64
"""Of which D is a multiple where rows are gathered: the elements of a step."""
_ROWS, _COLUMNS, _DEPTH, _STAGES = 128, 256, GATHERED_DEPTH, 4
_REGISTERS = 168
"""Of a thread on average: warps that bring tiles give theirs to those that multiply."""
_TABLE_LANES = 64


def grouped_product(rows_RI: Tensor, weight: Tensor, ends_N: Tensor, *, turned: bool) -> Tensor:
    """``x W_e^T`` [R, O] in bfloat16; rows behind the last expert hold anything.

    Args:
        rows_RI: contiguous, I a multiple of 8.
        weight: [N, O, I], or with ``turned`` [N, I, O]; contiguous, O a multiple of 8.
        ends_N: rows of this expert and of all before it.
        turned: how the weight lies.
    """
    y_RO = torch.empty((len(rows_RI), weight.shape[2 if turned else 1]), dtype=rows_RI.dtype, device=rows_RI.device)
    if len(rows_RI):
        _launch(rows_RI, None, weight.unsqueeze(1), ends_N, None, None, y_RO, turned=turned)
    return y_RO


def gathered_swiglu(
    x_TD: Tensor, tokens_R: Tensor, weight_NGFD: Tensor, ends_N: Tensor, weights_R: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """``silu(gate) * value * weight`` [R, F] of ``x[tokens] W_e^T``, whose gates and values are rounded to the dtype of x before.

    Args:
        x_TD: bfloat16, contiguous; D is a multiple of ``GATHERED_DEPTH``.
        tokens_R: int32, the row of x that each row is.
        weight_NGFD: [N, 2, F, D], gates and values; contiguous, F a multiple of 8.
        ends_N: rows of this expert and of all before it; those behind the last one hold anything.
        weights_R: of the rows.
        keep: whether gates and values [R, 2 F] are wanted too.
    """
    rows, width = len(tokens_R), weight_NGFD.shape[2]
    y_RF = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    pre_RW = torch.empty((rows, 2 * width), dtype=x_TD.dtype, device=x_TD.device) if keep else None
    if rows:
        _launch(x_TD, tokens_R, weight_NGFD, ends_N, weights_R, pre_RW, y_RF, turned=False)
    return y_RF, pre_RW


def _launch(
    x: Tensor, tokens_R: Tensor | None, weight: Tensor, ends_N: Tensor, weights_R: Tensor | None, pre_RW: Tensor | None, y_RO: Tensor, *,
    turned: bool,
) -> None:  # fmt: skip
    """``weight`` [N, 1 or 2, O, I], or with ``turned`` [N, 1, I, O]."""
    (rows, width), (num_experts, parts, _, _), depth = y_RO.shape, weight.shape, x.shape[1]
    tiles = torch.empty((rows // _ROWS + num_experts + 1, 3), dtype=torch.int32, device=x.device)
    _tile_table_kernel[(num_experts,)](
        ends_N, tiles, num_experts, EXPERTS=triton.next_power_of_2(num_experts), ROWS=_ROWS, LANES=_TABLE_LANES, num_warps=1
    )
    columns, gathers = _COLUMNS // parts, tokens_R is not None
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    rows_layout = gl.NVMMASharedLayout.get_default_for([_ROWS, _DEPTH], gl.bfloat16)
    _grouped_kernel[(programs,)](
        x if gathers else TensorDescriptor.from_tensor(x, [_ROWS, _DEPTH], rows_layout), tokens_R, tiles,
        _described(weight, [1, parts, _DEPTH, columns] if turned else [1, parts, columns, _DEPTH]), weights_R, pre_RW, y_RO,
        triton.cdiv(width, columns), depth, width, PARTS=parts, ROWS=_ROWS, COLUMNS=columns, DEPTH=_DEPTH, STAGES=_STAGES, TURNED=turned,
        COPIERS=4 if gathers else 1, COPYING=56 if gathers else 24, MULTIPLYING=224 if gathers else 240, ROWS_LAYOUT=rows_layout,
        num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip


def _described(weight: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(weight, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


@triton.jit
def _tile_table_kernel(ends_ptr, tiles_ptr, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """A line for each tile: its expert, its first row, and the row behind the last of the expert; before them, how many there are."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + experts, mask=experts < num_experts, other=0)
    begins = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    first = tl.sum(tl.where(experts < expert, tiles, 0), 0) + 1
    begin = tl.sum(tl.where(experts == expert, begins, 0), 0)
    end = tl.sum(tl.where(experts == expert, ends, 0), 0)
    for start in range(0, tl.cdiv(end - begin, ROWS), LANES):
        tile = start + tl.arange(0, LANES)
        row = begin + tile * ROWS
        line_ptr = tiles_ptr + (first + tile) * 3
        tl.store(line_ptr, tl.zeros_like(row) + expert, mask=row < end)
        tl.store(line_ptr + 1, row, mask=row < end)
        tl.store(line_ptr + 2, tl.zeros_like(row) + end, mask=row < end)
    if expert == 0:
        tl.store(tiles_ptr, tl.sum(tiles, 0))


@gluon.jit
def _copy_tiles(
    x, tokens_ptr, tiles_ptr, weight_desc, total, blocks, depth, buffers, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    x_buffers, weight_buffers, filled, empty = buffers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    step = 0
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        line_ptr = tiles_ptr + 3 * (number // blocks + 1)
        expert = gl.load(line_ptr)
        first = gl.load(line_ptr + 1)
        column = (number % blocks) * COLUMNS
        if tokens_ptr is not None:
            # Rows behind the expert's last one repeat it.
            rows = gl.minimum(first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)), gl.load(line_ptr + 2) - 1)
            token = gl.load(tokens_ptr + rows)
            x_ptrs = x + token.to(gl.int64)[:, None] * depth + gl.arange(0, DEPTH, layout=gl.SliceLayout(0, layout))[None, :]
        for start in range(0, depth, DEPTH):
            stage = step % STAGES
            full = filled.index(stage)
            # The first turn finds all empty.
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            if tokens_ptr is not None:
                mbarrier.expect(full, weight_desc.block_type.nbytes)
            else:
                mbarrier.expect(full, weight_desc.block_type.nbytes + x.block_type.nbytes)
                tma.async_copy_global_to_shared(x, [first, start], full, x_buffers.index(stage))
            if TURNED:
                tma.async_copy_global_to_shared(weight_desc, [expert, 0, start, column], full, weight_buffers.index(stage))
            else:
                tma.async_copy_global_to_shared(weight_desc, [expert, 0, column, start], full, weight_buffers.index(stage))
            if tokens_ptr is not None:
                async_copy.async_copy_global_to_shared(x_buffers.index(stage), x_ptrs + start)
                async_copy.mbarrier_arrive(full, increment_count=False)
            step += 1


@gluon.jit
def _multiply_tiles(
    tiles_ptr, results, total, blocks, depth, width, buffers, PARTS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, TURNED: gl.constexpr, GATHERED: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Rows ``FIRST`` to ``FIRST + ROWS`` of each tile."""
    weights_ptr, pre_ptr, y_ptr = results
    x_buffers, weight_buffers, filled, empty = buffers
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PARTS * COLUMNS, 16])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    element: gl.constexpr = y_ptr.dtype.element_ty
    step = 0
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        acc = gl.zeros((ROWS, PARTS * COLUMNS), gl.float32, product)
        for start in range(0, depth, DEPTH):
            stage = step % STAGES
            mbarrier.wait(filled.index(stage), (step // STAGES) & 1)
            if GATHERED:
                # Such rows came by copies that the tensor cores do not wait for by themselves.
                fence_async_shared()
            x = x_buffers.index(stage).slice(FIRST, ROWS, dim=0)
            if TURNED:
                weight = weight_buffers.index(stage).reshape([DEPTH, PARTS * COLUMNS])
            else:
                weight = weight_buffers.index(stage).reshape([PARTS * COLUMNS, DEPTH]).permute((1, 0))
            acc = warpgroup_mma(x, weight, acc, is_async=True)
            # The step before this one is over.
            acc = warpgroup_mma_wait(1, (acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=start > 0)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
        line_ptr = tiles_ptr + 3 * (number // blocks + 1)
        rows = gl.load(line_ptr + 1) + FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        inside = rows < gl.load(line_ptr + 2)
        columns = (number % blocks) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        mask = inside[:, None] & (columns < width)[None, :]
        y_ptrs = y_ptr + rows.to(gl.int64)[:, None] * width + columns[None, :]
        if PARTS == 1:
            gl.store(y_ptrs, gl.convert_layout(acc.to(element), layout), mask=mask)
        else:
            gate, value = acc.reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]).split()
            gate = gl.convert_layout(gate.to(element), layout)
            value = gl.convert_layout(value.to(element), layout)
            if pre_ptr is not None:
                pre_ptrs = pre_ptr + rows.to(gl.int64)[:, None] * (2 * width) + columns[None, :]
                gl.store(pre_ptrs, gate, mask=mask)
                gl.store(pre_ptrs + width, value, mask=mask)
            gate = gate.to(gl.float32)
            y = gate * (1.0 / (1.0 + gl.exp(-gate))) * value.to(gl.float32)
            weights = gl.load(weights_ptr + rows, mask=inside, other=0.0).to(gl.float32)
            gl.store(y_ptrs, (y * weights[:, None]).to(element), mask=mask)


@gluon.jit
def _grouped_kernel(
    x, tokens_ptr, tiles_ptr, weight_desc, weights_ptr, pre_ptr, y_ptr, blocks, depth, width, PARTS: gl.constexpr, ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, TURNED: gl.constexpr, COPIERS: gl.constexpr, COPYING: gl.constexpr,
    MULTIPLYING: gl.constexpr, ROWS_LAYOUT: gl.constexpr,
):  # fmt: skip
    GATHERED: gl.constexpr = tokens_ptr is not None
    x_buffers = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [STAGES, ROWS, DEPTH], ROWS_LAYOUT)
    block: gl.constexpr = [STAGES] + weight_desc.block_type.shape  # noqa: RUF005
    weight_buffers = gl.allocate_shared_memory(weight_desc.dtype, block, weight_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The copy engine arrives, and each thread that brings rows; the two that multiply.
        mbarrier.init(filled.index(stage), count=1 + 32 * COPIERS if GATHERED else 1)
        mbarrier.init(empty.index(stage), count=2)
    total = gl.load(tiles_ptr) * blocks
    HALF: gl.constexpr = ROWS // 2
    buffers = (x_buffers, weight_buffers, filled, empty)
    results = (weights_ptr, pre_ptr, y_ptr)
    gl.warp_specialize(
        [
            (_multiply_tiles, (tiles_ptr, results, total, blocks, depth, width, buffers, PARTS, HALF, COLUMNS, DEPTH, STAGES, TURNED,
                               GATHERED, 0)),
            (_multiply_tiles, (tiles_ptr, results, total, blocks, depth, width, buffers, PARTS, HALF, COLUMNS, DEPTH, STAGES, TURNED,
                               GATHERED, HALF)),
            (_copy_tiles, (x, tokens_ptr, tiles_ptr, weight_desc, total, blocks, depth, buffers, ROWS, COLUMNS, DEPTH, STAGES, TURNED)),
        ],
        [4, COPIERS],
        [MULTIPLYING, COPYING],
    )  # fmt: skip
