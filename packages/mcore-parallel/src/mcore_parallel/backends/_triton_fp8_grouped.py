# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of grouped GEMMs in fp8: scales an expert, casts, products and weight gradients; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_parallel.backends._triton_grouped import Tiles

# R rows, N experts, K columns of rows, I input features, O output features, C padded rows; ends_N are the rows behind the last of
# each expert, int32 on the device.

FAST_PRODUCT = Tiles(rows=128, cols=128, depth=128, warps=8, stages=3)
PRODUCT = Tiles(rows=128, cols=128, depth=128, warps=4, stages=3)
WEIGHT_GRADIENT = Tiles(rows=128, cols=128, depth=128, warps=8, stages=3)
_AMAX_ROWS, _AMAX_BLOCK = 8, 1024
_CAST_COLUMNS = 64


def amax_of_experts(x_RK: Tensor, ends_N: Tensor) -> Tensor:
    """[N] float32, the largest magnitude of each expert's rows; NaN is passed over."""
    rows, width = x_RK.shape
    # Bits of magnitudes are ordered as integers, whose largest does not depend on the order.
    bits_N = torch.zeros(len(ends_N), dtype=torch.int32, device=x_RK.device)
    if rows:
        _amax_kernel[(triton.cdiv(rows, _AMAX_ROWS),)](
            x_RK, ends_N, bits_N, len(ends_N), width, x_RK.stride(0),
            EXPERTS=triton.next_power_of_2(len(ends_N)), ROWS=_AMAX_ROWS, BLOCK=_AMAX_BLOCK, num_warps=8,
        )  # fmt: skip
    return bits_N.view(torch.float32)


def cast_experts(
    x_RK: Tensor,
    ends_N: Tensor,
    tiled_N: Tensor,
    inverse_N: Tensor,
    dtype: torch.dtype,
    *,
    tile: int,
    columns: int | None,
    size: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The rows in ``dtype`` by the scale of their expert, their scales, and the rows transposed.

    Args:
        x_RK: rows.
        ends_N: rows of this expert and of all before it.
        tiled_N: the same with each expert's rows rounded up to ``tile``.
        inverse_N: reciprocal scales.
        dtype: the format.
        tile: rows of a program.
        columns: C of a transposed copy [K, C] with each expert's rows at its place in ``tiled_N``, zeros behind them.
        size: rows of every expert, for a transposed copy [N, K, size].
    """
    rows, width = x_RK.shape
    data_RK = torch.empty((rows, width), dtype=dtype, device=x_RK.device)
    inverse_R = torch.empty(rows, dtype=torch.float32, device=x_RK.device)
    turned = None
    if columns is not None:
        turned = torch.empty((width, columns), dtype=dtype, device=x_RK.device)
    elif size is not None:
        turned = torch.empty((len(ends_N), width, size), dtype=dtype, device=x_RK.device)
    if rows:
        grid = (rows // tile + min(rows, len(ends_N)), triton.cdiv(width, _CAST_COLUMNS))
        _cast_kernel[grid](
            x_RK, ends_N, tiled_N, inverse_N, data_RK, inverse_R, data_RK if turned is None else turned, len(ends_N), width,
            columns or size or 0, x_RK.stride(0), LARGEST=torch.finfo(dtype).max, EXPERTS=triton.next_power_of_2(len(ends_N)),
            TO_COLUMNS=columns is not None, TO_EACH=columns is None and size is not None, ROWS=tile, COLUMNS=_CAST_COLUMNS, num_warps=8,
        )  # fmt: skip
    return data_RK, inverse_R, turned


def grouped_scaled_product(
    x_RK: Tensor, x_inverse_R: Tensor, weight_NOK: Tensor, weight_inverse_NO: Tensor, ends_N: Tensor, dtype: torch.dtype, *,
    fast: bool, tiles: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """``x W_e^T`` [R, O] in ``dtype`` of factors in fp8, whose formats may differ; rows behind the last expert hold anything.

    With ``fast`` sums stay in the unit's own accumulators, otherwise they are added up in float32 each ``tiles.depth``.
    """
    (rows, depth), (num_experts, out, _) = x_RK.shape, weight_NOK.shape
    tiles = tiles or (FAST_PRODUCT if fast else PRODUCT)
    y_RO = torch.empty((rows, out), dtype=dtype, device=x_RK.device)
    if rows:
        blocks = triton.cdiv(out, tiles.cols)
        _product_kernel[((rows // tiles.rows + min(rows, num_experts)) * blocks,)](
            x_RK, x_inverse_R, weight_NOK, weight_inverse_NO, ends_N, y_RO, num_experts, out, depth, blocks,
            EXPERTS=triton.next_power_of_2(num_experts), ROWS=tiles.rows, COLS=tiles.cols, DEPTH=tiles.depth,
            EVEN=depth % tiles.depth == 0, IMPRECISE=None if fast else tiles.depth, TURNED=tiles.turned, num_warps=tiles.warps,
            num_stages=tiles.stages,
        )  # fmt: skip
    return y_RO


def widening_tiles(rows: float) -> Tiles:
    """Block sizes of ``grouped_widened_product``, by the mean rows of an expert."""
    if rows <= 16:
        return Tiles(rows=16, cols=64, depth=128, warps=4, stages=4)
    if rows <= 64:
        return Tiles(rows=64, cols=64, depth=128, warps=4, stages=4)
    return Tiles(rows=128, cols=128, depth=64, warps=8, stages=3)


def grouped_widened_product(
    x_RK: Tensor, weight_NOK: Tensor, weight_inverse_NO: Tensor, ends_N: Tensor, *, tiles: Tiles | None = None
) -> Tensor:
    """``x W_e^T`` [R, O] in the dtype of x of a weight in fp8, which is widened as it is read; sums are in float32, and rows behind the
    last expert hold anything."""
    (rows, depth), (num_experts, out, _) = x_RK.shape, weight_NOK.shape
    y_RO = torch.empty((rows, out), dtype=x_RK.dtype, device=x_RK.device)
    if rows:
        tiles = widening_tiles(rows / num_experts) if tiles is None else tiles
        block, blocks = max(16, min(tiles.depth, 1 << (depth - 1).bit_length())), triton.cdiv(out, tiles.cols)
        _product_kernel[((rows // tiles.rows + min(rows, num_experts)) * blocks,)](
            x_RK, None, weight_NOK, weight_inverse_NO, ends_N, y_RO, num_experts, out, depth, blocks,
            EXPERTS=triton.next_power_of_2(num_experts), ROWS=tiles.rows, COLS=tiles.cols, DEPTH=block,
            EVEN=depth % block == 0, IMPRECISE=None, TURNED=tiles.turned, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return y_RO


def grouped_scaled_weight_gradient(
    grad_OC: Tensor, x_IC: Tensor, tiled_N: Tensor, inverse_N: Tensor, total_NOI: Tensor, *, add: bool, tiles: Tiles = WEIGHT_GRADIENT
) -> None:
    """``total_e (+)= inverse_e grad_e x_e^T`` of transposed rows as ``cast_experts`` gives them, with tiles of ``tiles.depth`` rows."""
    num_experts, out, width = total_NOI.shape
    blocks = triton.cdiv(out, tiles.rows) * triton.cdiv(width, tiles.cols)
    _weight_gradient_kernel[(num_experts * blocks,)](
        grad_OC, x_IC, tiled_N, inverse_N, total_NOI, out, width, blocks, grad_OC.stride(0), x_IC.stride(0), total_NOI.stride(0),
        total_NOI.stride(1), ADD=add, ROWS=tiles.rows, COLS=tiles.cols, DEPTH=tiles.depth,
        EVEN=out % tiles.rows == 0 and width % tiles.cols == 0, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit
def _amax_kernel(
    x_ptr, ends_ptr, bits_ptr, num_experts, width, stride, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    end = tl.load(ends_ptr + num_experts - 1)
    if tl.program_id(0) * ROWS < end:
        inside = rows < end
        amax = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = inside[:, None] & (at < width)[None, :]
            x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + at[None, :], mask=mask, other=0.0)
            amax = tl.maximum(amax, tl.abs(x.to(tl.float32)))
        experts = tl.arange(0, EXPERTS)
        # Lanes behind the last expert end nowhere.
        ends = tl.load(ends_ptr + experts, mask=experts < num_experts, other=2147483647)
        expert = tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
        bits = tl.max(amax, 1).to(tl.int32, bitcast=True)
        tl.atomic_max(bits_ptr + expert, bits, mask=inside)


@triton.jit
def _cast_kernel(
    x_ptr, ends_ptr, tiled_ptr, scale_ptr, data_ptr, inverse_ptr, turned_ptr, num_experts, width, pitch, stride, LARGEST: tl.constexpr,
    EXPERTS: tl.constexpr, TO_COLUMNS: tl.constexpr, TO_EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * ROWS
    experts = tl.arange(0, EXPERTS)
    tiled = tl.load(tiled_ptr + experts, mask=experts < num_experts, other=2147483647)
    expert = tl.sum((tiled <= first).to(tl.int32), 0)
    if expert < num_experts:
        begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
        local = first - tl.load(tiled_ptr + expert - 1, mask=expert > 0, other=0) + tl.arange(0, ROWS)
        rows = (begin + local).to(tl.int64)
        inside = rows < end
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (columns < width)[None, :]
        inverse = tl.load(scale_ptr + expert)
        x = tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0).to(tl.float32) * tl.div_rn(1.0, inverse)
        # The comparison leaves NaN as it is.
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        y = x.to(data_ptr.dtype.element_ty)
        tl.store(data_ptr + rows[:, None] * width + columns[None, :], y, mask=mask)
        if tl.program_id(1) == 0:
            tl.store(inverse_ptr + rows, tl.zeros((ROWS,), dtype=tl.float32) + inverse, mask=inside)
        if TO_COLUMNS:
            at = columns.to(tl.int64)[:, None] * pitch + (first + tl.arange(0, ROWS))[None, :]
            # Rows that fill a tile up are zeros.
            tl.store(turned_ptr + at, tl.trans(y), mask=(columns < width)[:, None])
        if TO_EACH:
            at = (expert.to(tl.int64) * width + columns)[:, None] * pitch + local[None, :]
            tl.store(turned_ptr + at, tl.trans(y), mask=tl.trans(mask))


@triton.jit
def _product_kernel(
    x_ptr, x_inverse_ptr, weight_ptr, weight_inverse_ptr, ends_ptr, y_ptr, num_experts, out, depth, blocks, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, IMPRECISE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + experts, mask=experts < num_experts, other=0)
    begins = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < num_experts), other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    if expert < num_experts:
        first = tl.sum(tl.where(experts < expert, tiles, 0), 0)
        begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        end = tl.load(ends_ptr + expert)
        rows = (begin + (tile - first) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        cols = block * COLS + tl.arange(0, COLS)
        inside, within = rows < end, cols < out
        lanes = tl.arange(0, DEPTH)
        features = expert.to(tl.int64) * out + cols
        x_ptrs = x_ptr + rows[:, None] * depth + lanes[None, :]
        weight_ptrs = weight_ptr + features[:, None] * depth + lanes[None, :]
        if TURNED:
            acc = tl.zeros((COLS, ROWS), dtype=tl.float32)
        else:
            acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for start in range(0, depth, DEPTH):
            x_mask, weight_mask = inside[:, None], within[:, None]
            if not EVEN:
                x_mask = x_mask & (start + lanes < depth)[None, :]
                weight_mask = weight_mask & (start + lanes < depth)[None, :]
            x = tl.load(x_ptrs + start, mask=x_mask, other=0.0)
            weight = tl.load(weight_ptrs + start, mask=weight_mask, other=0.0)
            if x_inverse_ptr is None:
                # Only the weight is in fp8.
                weight = weight.to(x.dtype)
            if TURNED:
                acc = tl.dot(weight, tl.trans(x), acc, max_num_imprecise_acc=IMPRECISE)
            else:
                acc = tl.dot(x, tl.trans(weight), acc, max_num_imprecise_acc=IMPRECISE)
        if TURNED:
            acc = tl.trans(acc)
        if x_inverse_ptr is not None:
            acc = acc * tl.load(x_inverse_ptr + rows, mask=inside, other=0.0)[:, None]
        acc = acc * tl.load(weight_inverse_ptr + features, mask=within, other=0.0)[None, :]
        tl.store(y_ptr + rows[:, None] * out + cols[None, :], acc.to(y_ptr.dtype.element_ty), mask=inside[:, None] & within[None, :])


@triton.jit
def _weight_gradient_kernel(
    grad_ptr, x_ptr, tiled_ptr, inverse_ptr, total_ptr, out, width, blocks, grad_stride, x_stride, total_expert_stride, total_stride,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    row_blocks = tl.cdiv(out, ROWS)
    begin = tl.load(tiled_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(tiled_ptr + expert)
    # Nothing to add without rows.
    if (end > begin) | (not ADD):
        rows = (block % row_blocks) * ROWS + tl.arange(0, ROWS)
        cols = (block // row_blocks) * COLS + tl.arange(0, COLS)
        lanes = tl.arange(0, DEPTH)
        grad_ptrs = grad_ptr + rows.to(tl.int64)[:, None] * grad_stride + lanes[None, :]
        x_ptrs = x_ptr + cols.to(tl.int64)[:, None] * x_stride + lanes[None, :]
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
        for start in range(begin, end, DEPTH):
            # Experts begin at whole tiles.
            start = tl.multiple_of(start, DEPTH)
            if EVEN:
                grad = tl.load(grad_ptrs + start)
                x = tl.load(x_ptrs + start)
            else:
                grad = tl.load(grad_ptrs + start, mask=(rows < out)[:, None], other=0.0)
                x = tl.load(x_ptrs + start, mask=(cols < width)[:, None], other=0.0)
            acc = tl.dot(grad, tl.trans(x), acc, max_num_imprecise_acc=DEPTH)
        acc *= tl.load(inverse_ptr + expert)
        total_ptrs = total_ptr + expert.to(tl.int64) * total_expert_stride + rows[:, None] * total_stride + cols[None, :]
        mask = (rows < out)[:, None] & (cols < width)[None, :]
        if ADD:
            acc += tl.load(total_ptrs, mask=mask, other=0.0).to(tl.float32)
        tl.store(total_ptrs, acc.to(total_ptr.dtype.element_ty), mask=mask)
