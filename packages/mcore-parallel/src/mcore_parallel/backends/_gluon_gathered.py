# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hopper kernel of a grouped GEMM whose rows are gathered, with SwiGLU behind it; imported only when it runs.

A program takes tiles of ``TILE_ROWS`` rows and ``TILE_COLS`` gates with their values, one after another. Its warps have two roles. One
warpgroup brings tiles to shared memory: rows by their numbers, 16 bytes at a time, and weights by the copy engine. Two warpgroups multiply,
each half of the rows: while one stores its results, the other one has the tensor cores, and the next tile is on its way.
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

# T tokens, R rows, N experts, D model, F width of an expert; ends_N are the rows behind the last of each expert, int32 on the device.

TILE_ROWS, TILE_COLS, TILE_DEPTH = 128, 128, 64
"""Of a tile: rows, gates (and as many values), and elements of a step."""
_STAGES = 4
_COPYING_REGISTERS, _MULTIPLYING_REGISTERS, _REGISTERS = 56, 224, 168
"""Of a thread: of the warps that bring tiles, of those that multiply, and on average."""
_TABLE_LANES = 64


def gathered_swiglu(
    x_TD: Tensor, tokens_R: Tensor, weight_NGFD: Tensor, ends_N: Tensor, weights_R: Tensor, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """``silu(gate) * value * weight`` [R, F] of ``x[tokens] W_e^T``, whose gates and values are rounded to the dtype of x before.

    Args:
        x_TD: bfloat16; D is a multiple of ``TILE_DEPTH``.
        tokens_R: int32, the row of x that each row is.
        weight_NGFD: [N, 2, F, D], gates and values.
        ends_N: rows of this expert and of all before it; those behind the last one hold anything.
        weights_R: of the rows.
        keep: whether gates and values [R, 2 F] are wanted too.
    """
    rows, (num_experts, _, width, depth) = len(tokens_R), weight_NGFD.shape
    y_RF = torch.empty((rows, width), dtype=x_TD.dtype, device=x_TD.device)
    pre_RW = torch.empty((rows, 2 * width), dtype=x_TD.dtype, device=x_TD.device) if keep else None
    if not rows:
        return y_RF, pre_RW
    tiles = torch.empty((rows // TILE_ROWS + num_experts + 1, 3), dtype=torch.int32, device=x_TD.device)
    _tile_table_kernel[(num_experts,)](
        ends_N, tiles, num_experts, EXPERTS=triton.next_power_of_2(num_experts), ROWS=TILE_ROWS, LANES=_TABLE_LANES, num_warps=1
    )
    block = [1, 2, TILE_COLS, TILE_DEPTH]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    programs = torch.cuda.get_device_properties(x_TD.device).multi_processor_count if x_TD.is_cuda else 1
    _gathered_swiglu_kernel[(programs,)](
        x_TD, tokens_R, tiles, TensorDescriptor.from_tensor(weight_NGFD, block, layout), weights_R, pre_RW, y_RF,
        triton.cdiv(width, TILE_COLS), depth, width, ROWS=TILE_ROWS, COLS=TILE_COLS, DEPTH=TILE_DEPTH, STAGES=_STAGES,
        COPYING=_COPYING_REGISTERS, MULTIPLYING=_MULTIPLYING_REGISTERS,
        ROWS_LAYOUT=gl.NVMMASharedLayout.get_default_for([TILE_ROWS, TILE_DEPTH], gl.bfloat16), num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip
    return y_RF, pre_RW


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
    x_ptr, tokens_ptr, tiles_ptr, weight_desc, total, blocks, depth, buffers, ROWS: gl.constexpr, COLS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    x_buffers, weight_buffers, filled, empty = buffers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    lanes = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, layout))
    local = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    step = 0
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        line_ptr = tiles_ptr + 3 * (number // blocks + 1)
        expert = gl.load(line_ptr)
        # Rows behind the expert's last one repeat it.
        rows = gl.minimum(gl.load(line_ptr + 1) + local, gl.load(line_ptr + 2) - 1)
        token = gl.load(tokens_ptr + rows)
        x_ptrs = x_ptr + token.to(gl.int64)[:, None] * depth + lanes[None, :]
        for start in range(0, depth, DEPTH):
            stage = step % STAGES
            # The first turn finds all empty.
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(filled.index(stage), weight_desc.block_type.nbytes)
            column = (number % blocks) * COLS
            tma.async_copy_global_to_shared(weight_desc, [expert, 0, column, start], filled.index(stage), weight_buffers.index(stage))
            async_copy.async_copy_global_to_shared(x_buffers.index(stage), x_ptrs + start)
            async_copy.mbarrier_arrive(filled.index(stage), increment_count=False)
            step += 1


@gluon.jit
def _multiply_tiles(
    tiles_ptr, results, total, blocks, depth, width, buffers, ROWS: gl.constexpr, COLS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """Rows ``FIRST`` to ``FIRST + ROWS`` of each tile."""
    weights_ptr, pre_ptr, y_ptr = results
    x_buffers, weight_buffers, filled, empty = buffers
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 2 * COLS, 16])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    element: gl.constexpr = y_ptr.dtype.element_ty
    step = 0
    for number in range(gl.program_id(0), total, gl.num_programs(0)):
        acc = gl.zeros((ROWS, 2 * COLS), gl.float32, product)
        for start in range(0, depth, DEPTH):
            stage = step % STAGES
            mbarrier.wait(filled.index(stage), (step // STAGES) & 1)
            # Rows came by copies that the tensor cores do not wait for by themselves.
            fence_async_shared()
            x = x_buffers.index(stage).slice(FIRST, ROWS, dim=0)
            weight = weight_buffers.index(stage).reshape([2 * COLS, DEPTH]).permute((1, 0))
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
        cols = (number % blocks) * COLS + gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
        mask = inside[:, None] & (cols < width)[None, :]
        at = rows.to(gl.int64)[:, None] * width + cols[None, :]
        gate, value = acc.reshape([ROWS, 2, COLS]).permute([0, 2, 1]).split()
        gate = gl.convert_layout(gate.to(element), layout)
        value = gl.convert_layout(value.to(element), layout)
        if pre_ptr is not None:
            pre_ptrs = pre_ptr + rows.to(gl.int64)[:, None] * (2 * width) + cols[None, :]
            gl.store(pre_ptrs, gate, mask=mask)
            gl.store(pre_ptrs + width, value, mask=mask)
        gate = gate.to(gl.float32)
        y = gate * (1.0 / (1.0 + gl.exp(-gate))) * value.to(gl.float32)
        weights = gl.load(weights_ptr + rows, mask=inside, other=0.0).to(gl.float32)
        gl.store(y_ptr + at, (y * weights[:, None]).to(element), mask=mask)


@gluon.jit
def _gathered_swiglu_kernel(
    x_ptr, tokens_ptr, tiles_ptr, weight_desc, weights_ptr, pre_ptr, y_ptr, blocks, depth, width, ROWS: gl.constexpr, COLS: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, COPYING: gl.constexpr, MULTIPLYING: gl.constexpr, ROWS_LAYOUT: gl.constexpr,
):  # fmt: skip
    x_buffers = gl.allocate_shared_memory(y_ptr.dtype.element_ty, [STAGES, ROWS, DEPTH], ROWS_LAYOUT)
    weight_buffers = gl.allocate_shared_memory(weight_desc.dtype, [STAGES] + weight_desc.block_type.shape, weight_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The copy engine, and each of the 128 threads that bring rows.
        mbarrier.init(filled.index(stage), count=129)
        mbarrier.init(empty.index(stage), count=2)
    total = gl.load(tiles_ptr) * blocks
    HALF: gl.constexpr = ROWS // 2
    buffers = (x_buffers, weight_buffers, filled, empty)
    results = (weights_ptr, pre_ptr, y_ptr)
    gl.warp_specialize(
        [
            (_multiply_tiles, (tiles_ptr, results, total, blocks, depth, width, buffers, HALF, COLS, DEPTH, STAGES, 0)),
            (_multiply_tiles, (tiles_ptr, results, total, blocks, depth, width, buffers, HALF, COLS, DEPTH, STAGES, HALF)),
            (_copy_tiles, (x_ptr, tokens_ptr, tiles_ptr, weight_desc, total, blocks, depth, buffers, ROWS, COLS, DEPTH, STAGES)),
        ],
        [4, 4],
        [MULTIPLYING, COPYING],
    )
