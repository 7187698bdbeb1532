# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel of the weight gradients of grouped GEMMs; imported only when it runs."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# R rows, N experts, I input features, O output features; ends_N are the rows behind the last of each expert, int32 on the device.


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes of a launch."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    turned: bool = False
    """Multiply weights by rows instead of rows by weights: weights that are widened go to the tensor cores from registers."""


WEIGHT_GRADIENT = Tiles(rows=128, cols=128, depth=64, warps=4, stages=3)
"""Two programs a multiprocessor: one adds to memory while the other multiplies."""


def grouped_weight_gradient(
    grad_RO: Tensor, x_RI: Tensor, ends_N: Tensor, total_NOI: Tensor, *, add: bool, tiles: Tiles = WEIGHT_GRADIENT
) -> None:
    """``total_e (+)= grad_e^T x_e`` for each expert, summed in float32; ``total`` may be float32 or narrower."""
    num_experts, out, width = total_NOI.shape
    blocks = triton.cdiv(out, tiles.rows) * triton.cdiv(width, tiles.cols)
    _weight_gradient_kernel[(num_experts * blocks,)](
        grad_RO, x_RI, ends_N, total_NOI, out, width, blocks, grad_RO.stride(0), x_RI.stride(0), total_NOI.stride(0), total_NOI.stride(1),
        ADD=add, ROWS=tiles.rows, COLS=tiles.cols, DEPTH=tiles.depth, EVEN=out % tiles.rows == 0 and width % tiles.cols == 0,
        PRECISION="ieee" if x_RI.dtype == torch.float32 else "tf32", num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit
def _weight_gradient_kernel(
    grad_ptr, x_ptr, ends_ptr, total_ptr, out, width, blocks, grad_stride, x_stride, total_expert_stride, total_stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    row_blocks = tl.cdiv(out, ROWS)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    # Nothing to add without rows.
    if (end > begin) | (not ADD):
        rows = (block % row_blocks) * ROWS + tl.arange(0, ROWS)
        cols = (block // row_blocks) * COLS + tl.arange(0, COLS)
        depth = tl.arange(0, DEPTH)
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for start in range(begin, end, DEPTH):
            token = start + depth
            inside = (token < end)[:, None]
            grad_mask, x_mask = inside, inside
            if not EVEN:
                grad_mask = inside & (rows < out)[None, :]
                x_mask = inside & (cols < width)[None, :]
            grad = tl.load(grad_ptr + token.to(tl.int64)[:, None] * grad_stride + rows[None, :], mask=grad_mask, other=0.0)
            x = tl.load(x_ptr + token.to(tl.int64)[:, None] * x_stride + cols[None, :], mask=x_mask, other=0.0)
            acc = tl.dot(tl.trans(grad), x, acc, input_precision=PRECISION)
        total_ptrs = total_ptr + expert.to(tl.int64) * total_expert_stride + rows[:, None] * total_stride + cols[None, :]
        mask = (rows < out)[:, None] & (cols < width)[None, :]
        if ADD:
            acc += tl.load(total_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(total_ptrs, acc.to(total_ptr.dtype.element_ty), mask=mask)
