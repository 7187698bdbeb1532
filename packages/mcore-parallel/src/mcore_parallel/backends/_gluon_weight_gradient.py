# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Hopper kernel of the weight gradients of grouped GEMMs; imported only when it runs.

A program takes tiles of ``_ROWS`` output and ``_COLUMNS`` input features of an expert one after another. One warp has the copy engine bring
rows to shared memory; two warpgroups multiply, each half of the output features, and add to what is in memory: while one does so, the other
one has the tensor cores, and rows of the next tile are on their way.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportIndexIssue=false, reportOperatorIssue=false, reportReturnType=false, reportUnknownMemberType=false

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# R rows, N experts, I input features, O output features; ends_N are the rows behind the last of each expert, int32 on the device.

_ROWS, _COLUMNS, _DEPTH, _STAGES = 128, 256, 64, 4
_REGISTERS = 168
"""Of a thread on average: the warp that brings rows gives its own to those that multiply."""
_BOUND = gl.constexpr(2**30)
"""Rows of a description, far more than there are."""
_WRAP = 2**34
"""Elements; times ``_BOUND`` a multiple of 2**64 bytes."""


def grouped_weight_gradient(grad_RO: Tensor, x_RI: Tensor, ends_N: Tensor, total_NOI: Tensor, *, add: bool) -> None:
    """``total_e (+)= grad_e^T x_e`` for each expert, summed in float32; ``total`` may be float32 or narrower.

    Args:
        grad_RO: bfloat16, as x; O and I are multiples of 8.
        x_RI: rows of both are in the order of the experts; those behind the last one hold anything.
        ends_N: rows of this expert and of all before it.
        total_NOI: its last dim is contiguous.
        add: to what is there, or instead of it.
    """
    num_experts, out, width = total_NOI.shape
    blocks = triton.cdiv(out, _ROWS) * triton.cdiv(width, _COLUMNS)
    even = out % _ROWS == 0 and width % _COLUMNS == 0
    programs = torch.cuda.get_device_properties(x_RI.device).multi_processor_count if x_RI.is_cuda else 1
    _weight_gradient_kernel[(programs,)](
        _described(grad_RO, _ROWS // 2), _described(x_RI, _COLUMNS), ends_N, total_NOI, num_experts * blocks,
        blocks, out, width, total_NOI.stride(0), total_NOI.stride(1), ADD=add, EVEN=even, ROWS=_ROWS,
        COLUMNS=_COLUMNS, DEPTH=_DEPTH, STAGES=_STAGES, num_warps=4, maxnreg=_REGISTERS,
    )  # fmt: skip


def _described(rows: Tensor, columns: int) -> TensorDescriptor:
    """Rows of which any one can be the last: what lies behind it is read as zeros.

    Element (a, b, c, d) lies at a (_WRAP - S) + b S + c S + d, where S is the distance of two rows. At a = _BOUND the first product is
    -_BOUND S, for addresses are modulo 2**64; so b = end and c = _BOUND - (end - row) is the row, and c ends where the expert does.
    """
    block, rows = [1, 1, _DEPTH, columns], rows.contiguous()
    rows = rows if rows.data_ptr() % 16 == 0 else rows.clone()
    stride, most = rows.stride(0), 2**31 - 1
    shape, strides = [most, most, _BOUND.value, rows.shape[1]], [_WRAP - stride, stride, stride, 1]
    return TensorDescriptor(rows, shape, strides, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


@gluon.jit
def _tile_of(number, blocks, ends_ptr):
    """The expert of a tile, which of its blocks it is, the expert's first row and the one behind its last."""
    expert = number // blocks
    return expert, number % blocks, gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0), gl.load(ends_ptr + expert)


@gluon.jit
def _copy_rows(
    grad_desc, x_desc, ends_ptr, tiles, blocks, out, buffers, ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    grad_buffers, x_buffers, filled, empty = buffers
    row_blocks = gl.cdiv(out, ROWS)
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        _expert, block, begin, end = _tile_of(number, blocks, ends_ptr)
        row, column = (block % row_blocks) * ROWS, (block // row_blocks) * COLUMNS
        for start in range(begin, end, DEPTH):
            stage = step % STAGES
            full = filled.index(stage)
            # The first turn finds all empty.
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full, 2 * grad_desc.block_type.nbytes + x_desc.block_type.nbytes)
            place = _BOUND - (end - start)
            tma.async_copy_global_to_shared(grad_desc, [_BOUND, end, place, row], full, grad_buffers.index(2 * stage))
            tma.async_copy_global_to_shared(grad_desc, [_BOUND, end, place, row + ROWS // 2], full, grad_buffers.index(2 * stage + 1))
            tma.async_copy_global_to_shared(x_desc, [_BOUND, end, place, column], full, x_buffers.index(stage))
            step += 1


@gluon.jit
def _multiply_rows(
    ends_ptr, total, tiles, blocks, out, width, buffers, ADD: gl.constexpr, EVEN: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr, STAGES: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """The first or second half of the output features of each tile."""
    total_ptr, expert_stride, stride = total
    grad_buffers, x_buffers, filled, empty = buffers
    product: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    # Rows of a warp stay with it; eight threads store 128 bytes of a row where the product's own layout has four store 32.
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 32], [0, 64], [0, 128], [4, 0], [8, 0]], lane_bases=[[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[ROWS // 2, COLUMNS],
    )  # fmt: skip
    row_blocks = gl.cdiv(out, ROWS)
    step = 0
    for number in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, block, begin, end = _tile_of(number, blocks, ends_ptr)
        acc = gl.zeros((ROWS // 2, COLUMNS), gl.float32, product)
        for start in range(begin, end, DEPTH):
            stage = step % STAGES
            mbarrier.wait(filled.index(stage), (step // STAGES) & 1)
            grad = grad_buffers.index(2 * stage + HALF).reshape([DEPTH, ROWS // 2]).permute((1, 0))
            acc = warpgroup_mma(grad, x_buffers.index(stage).reshape([DEPTH, COLUMNS]), acc, is_async=True)
            # The step before this one is over.
            acc = warpgroup_mma_wait(1, (acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=start > begin)
            step += 1
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=end > begin)
        # Nothing to add without rows.
        if (end > begin) | (not ADD):
            sums = gl.convert_layout(acc, layout)
            rows = (block % row_blocks) * ROWS + HALF * (ROWS // 2) + gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, layout))
            columns = (block // row_blocks) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
            total_ptrs = total_ptr + expert.to(gl.int64) * expert_stride + rows[:, None] * stride + columns[None, :]
            if EVEN:
                mask = None
            else:
                mask = (rows < out)[:, None] & (columns < width)[None, :]
            if ADD:
                sums += gl.load(total_ptrs, mask=mask).to(gl.float32)
            gl.store(total_ptrs, sums.to(total_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _weight_gradient_kernel(
    grad_desc, x_desc, ends_ptr, total_ptr, tiles, blocks, out, width, expert_stride, stride, ADD: gl.constexpr, EVEN: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    grad_block: gl.constexpr = [2 * STAGES] + grad_desc.block_type.shape  # noqa: RUF005
    x_block: gl.constexpr = [STAGES] + x_desc.block_type.shape  # noqa: RUF005
    grad_buffers = gl.allocate_shared_memory(grad_desc.dtype, grad_block, grad_desc.layout)
    x_buffers = gl.allocate_shared_memory(x_desc.dtype, x_block, x_desc.layout)
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        # The copy engine arrives; the two that multiply.
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    buffers = (grad_buffers, x_buffers, filled, empty)
    total = (total_ptr, expert_stride, stride)
    gl.warp_specialize(
        [
            (_multiply_rows, (ends_ptr, total, tiles, blocks, out, width, buffers, ADD, EVEN, ROWS, COLUMNS, DEPTH, STAGES, 0)),
            (_multiply_rows, (ends_ptr, total, tiles, blocks, out, width, buffers, ADD, EVEN, ROWS, COLUMNS, DEPTH, STAGES, 1)),
            (_copy_rows, (grad_desc, x_desc, ends_ptr, tiles, blocks, out, buffers, ROWS, COLUMNS, DEPTH, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
