# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of the row statistics and of their gradient, one program a row; imported only when they run."""

# pyright: reportCallIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_parallel.tensor_parallel._row_maths import RowMaths, lowest

_BLOCK = 4096
_NUM_WARPS = 8
_TILE_ROWS, _TILE_COLUMNS = 128, 64
"""Of the fp8 gradient: a transposed line of a tile is 128 bytes."""


def statistics(logits_Tv: Tensor, column_T: Tensor, valid: int, maths: RowMaths) -> Tensor:
    """As ``row_statistics``, for one pass over logits with unit column stride."""
    rows = logits_Tv.shape[0]
    out_KT = torch.empty((maths.num_statistics, rows), dtype=torch.float32, device=logits_Tv.device)
    if rows:
        _statistics_kernel[(rows,)](
            logits_Tv,
            column_T,
            out_KT,
            logits_Tv.stride(0),
            rows,
            valid,
            1.0 / maths.temperature,
            lowest(torch.float32),
            **_constants(valid, SMOOTHING=bool(maths.smoothing), ENTROPY=maths.entropy),
        )
    return out_KT


def to_gradient_(
    logits_Tv: Tensor,
    column_T: Tensor,
    valid: int,
    maths: RowMaths,
    log_norm_T: Tensor,
    grad_T: Tensor,
    entropy_T: Tensor | None,
    entropy_grad_T: Tensor | None,
) -> None:
    """As there, for logits with unit column stride."""
    rows, width = logits_Tv.shape
    if rows:
        with_entropy = entropy_T is not None and entropy_grad_T is not None
        _gradient_kernel[(rows,)](
            logits_Tv,
            column_T,
            log_norm_T,
            grad_T.contiguous(),
            entropy_T if with_entropy else log_norm_T,
            entropy_grad_T.contiguous() if entropy_grad_T is not None else log_norm_T,
            logits_Tv.stride(0),
            width,
            valid,
            1.0 / maths.temperature,
            1.0 - maths.smoothing,
            maths.smoothing / maths.vocab_size,
            **_constants(width, ENTROPY=with_entropy),
        )


def to_narrow_gradient(
    logits_Tv: Tensor,
    column_T: Tensor,
    valid: int,
    maths: RowMaths,
    log_norm_T: Tensor,
    grad_T: Tensor,
    inverse: Tensor,
    turned_vT: Tensor,
) -> Tensor:
    """As there, in one pass over the logits."""
    rows, width = logits_Tv.shape
    narrow_Tv = torch.empty((rows, width), dtype=turned_vT.dtype, device=logits_Tv.device)
    if rows:
        grid = (triton.cdiv(rows, _TILE_ROWS), triton.cdiv(width, _TILE_COLUMNS))
        _narrow_gradient_kernel[grid](
            logits_Tv,
            column_T,
            log_norm_T,
            grad_T.contiguous(),
            inverse,
            narrow_Tv,
            turned_vT,
            logits_Tv.stride(0),
            turned_vT.stride(0),
            rows,
            width,
            valid,
            1.0 / maths.temperature,
            1.0 - maths.smoothing,
            maths.smoothing / maths.vocab_size,
            LARGEST=torch.finfo(turned_vT.dtype).max,
            ROWS=_TILE_ROWS,
            COLUMNS=_TILE_COLUMNS,
            num_warps=_NUM_WARPS,
        )
    return narrow_Tv


def _constants(columns: int, **flags: bool) -> dict[str, Any]:
    """What a kernel is compiled for."""
    return {"BLOCK": min(_BLOCK, max(128, 1 << (columns - 1).bit_length())), "num_warps": _NUM_WARPS, **flags}


@triton.jit
def _statistics_kernel(
    logits_ptr, column_ptr, out_ptr, stride, rows, valid, inverse_temperature, lowest,
    SMOOTHING: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line_ptr = logits_ptr + row * stride
    lanes = tl.arange(0, BLOCK)
    largest = lowest * 1.0
    exp_sum = largest * 0.0
    z_sum = largest * 0.0
    weighted = largest * 0.0
    for start in range(0, valid, BLOCK):
        inside = start + lanes < valid
        z = tl.load(line_ptr + start + lanes, mask=inside, other=float("-inf")).to(tl.float32) * inverse_temperature
        above = tl.maximum(largest, tl.max(z, 0))
        shrink = tl.exp(largest - above)
        below = z - above
        exp = tl.exp(below)
        if ENTROPY:
            weighted = shrink * (weighted + exp_sum * (largest - above)) + tl.sum(tl.where(exp > 0, exp * below, 0.0), 0)
        exp_sum = exp_sum * shrink + tl.sum(exp, 0)
        if SMOOTHING:
            z_sum += start * (largest - above) + tl.sum(tl.where(inside, below, 0.0), 0)
        largest = above
    column = tl.load(column_ptr + row)
    picked = tl.load(line_ptr + tl.maximum(column, 0)).to(tl.float32) * inverse_temperature
    tl.store(out_ptr + row, largest)
    tl.store(out_ptr + rows + row, exp_sum)
    tl.store(out_ptr + 2 * rows + row, tl.where(column >= 0, picked, 0.0))
    if SMOOTHING:
        tl.store(out_ptr + 3 * rows + row, z_sum)
    if ENTROPY:
        tl.store(out_ptr + (4 if SMOOTHING else 3) * rows + row, weighted)


@triton.jit
def _gradient_kernel(
    logits_ptr, column_ptr, log_norm_ptr, grad_ptr, entropy_ptr, entropy_grad_ptr, stride, width, valid,
    inverse_temperature, label_share, even_share, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    line_ptr = logits_ptr + row * stride
    lanes = tl.arange(0, BLOCK)
    column = tl.load(column_ptr + row)
    log_norm = tl.load(log_norm_ptr + row)
    grad = tl.load(grad_ptr + row)
    if ENTROPY:
        entropy = tl.load(entropy_ptr + row)
        entropy_grad = tl.load(entropy_grad_ptr + row)
    for start in range(0, width, BLOCK):
        at = start + lanes
        z = tl.load(line_ptr + at, mask=at < valid, other=float("-inf")).to(tl.float32) * inverse_temperature
        log_p = z - log_norm
        p = tl.exp(log_p)
        result = p * grad
        if ENTROPY:
            result += p * entropy_grad * (tl.where(p > 0, -log_p, 0.0) - entropy)
        result -= grad * even_share
        result -= tl.where(at == column, grad * label_share, 0.0)
        result = tl.where(at < valid, result * inverse_temperature, 0.0)
        tl.store(line_ptr + at, result.to(logits_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def _narrow_gradient_kernel(
    logits_ptr, column_ptr, log_norm_ptr, grad_ptr, inverse_ptr, narrow_ptr, turned_ptr, stride, turned_stride, tokens, width, valid,
    inverse_temperature, label_share, even_share, LARGEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Offsets inside a tile fit 32 bits, those of a tile need not.
    row, first = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there, at = rows < tokens - row, first + columns
    inside = there[:, None] & (at < width)[None, :]
    column = tl.load(column_ptr + row + rows, mask=there, other=-1)
    log_norm = tl.load(log_norm_ptr + row + rows, mask=there, other=0.0)
    grad = tl.load(grad_ptr + row + rows, mask=there, other=0.0)
    scale = tl.div_rn(inverse_temperature, tl.load(inverse_ptr))
    counts = there[:, None] & (at < valid)[None, :]
    line = row * stride + first
    z = tl.load(logits_ptr + line + rows[:, None] * stride + columns[None, :], mask=counts, other=float("-inf")).to(tl.float32)
    result = tl.exp(z * inverse_temperature - log_norm[:, None]) - even_share
    result -= tl.where(at[None, :] == column[:, None], label_share, 0.0)
    result = tl.where(counts, result * (grad * scale)[:, None], 0.0)
    # The comparison leaves NaN as it is.
    result = tl.where(result > LARGEST, LARGEST, tl.where(result < -LARGEST, -LARGEST, result))
    narrow = result.to(narrow_ptr.dtype.element_ty)
    tl.store(narrow_ptr + row * width + first + rows[:, None] * width + columns[None, :], narrow, mask=inside)
    turned_at = columns[:, None] * turned_stride + rows[None, :]
    tl.store(turned_ptr + first * turned_stride + row + turned_at, tl.trans(narrow), mask=tl.trans(inside))
