# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of the casts to fp8; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T rows, K columns, P partial maxima

_PROGRAMS = 512
"""Partial maxima of a tensor: enough to fill a GPU, few enough that every program of the cast reads them all."""
_STRETCH = 8192
_ROWS, _COLUMNS = 128, 64
"""Tile of the cast: a transposed line of it is 128 bytes."""
_ROW_BLOCK = 4096


def partial_amax(x_TK: Tensor) -> Tensor:
    """[P] float32 whose maximum is the largest magnitude of ``x``; NaN is passed over, for the cast keeps it."""
    x_TK = x_TK.contiguous()
    programs = max(1, min(_PROGRAMS, triton.cdiv(x_TK.numel(), _STRETCH)))
    amax_P = torch.empty(programs, dtype=torch.float32, device=x_TK.device)
    _amax_kernel[(programs,)](x_TK, amax_P, x_TK.numel(), BLOCK=_STRETCH, num_warps=8)
    return amax_P


def cast(
    x_TK: Tensor, amax_P: Tensor, dtype: torch.dtype, *, rows: bool, columns: bool, least_amax: float
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """[T, K] and [K, T] in ``dtype`` with one scale, as far as they are wanted, and its reciprocal []."""
    x_TK = x_TK.contiguous()
    tokens, width = x_TK.shape
    data_TK = torch.empty((tokens, width), dtype=dtype, device=x_TK.device) if rows else None
    turned_KT = torch.empty((width, tokens), dtype=dtype, device=x_TK.device) if columns else None
    inverse = torch.empty((), dtype=torch.float32, device=x_TK.device)
    # A program at least: it writes the scale.
    grid = (max(1, triton.cdiv(tokens, _ROWS)), triton.cdiv(width, _COLUMNS))
    _cast_kernel[grid](
        x_TK, amax_P, data_TK if rows else x_TK, turned_KT if columns else x_TK, inverse, tokens, width, len(amax_P),
        LARGEST=torch.finfo(dtype).max, LEAST=least_amax, PARTS=triton.next_power_of_2(len(amax_P)),
        TO_ROWS=rows, TO_COLUMNS=columns, CAST=True, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
    )  # fmt: skip
    return data_TK, turned_KT, inverse


def transpose(data_TK: Tensor) -> Tensor:
    """[K, T] of fp8 values."""
    tokens, width = data_TK.shape
    bytes_TK = data_TK.contiguous().view(torch.uint8)
    turned_KT = torch.empty((width, tokens), dtype=torch.uint8, device=data_TK.device)
    if turned_KT.numel():
        grid = (triton.cdiv(tokens, _ROWS), triton.cdiv(width, _COLUMNS))
        _cast_kernel[grid](
            bytes_TK, bytes_TK, bytes_TK, turned_KT, bytes_TK, tokens, width, 1,
            LARGEST=0.0, LEAST=0.0, PARTS=1, TO_ROWS=False, TO_COLUMNS=True, CAST=False, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=8,
        )  # fmt: skip
    return turned_KT.view(data_TK.dtype)


def cast_rows(x_TK: Tensor, dtype: torch.dtype, *, least_amax: float) -> tuple[Tensor, Tensor]:
    """[T, K] in ``dtype`` with a scale a row, and their reciprocals [T, 1]."""
    x_TK = x_TK.contiguous()
    tokens, width = x_TK.shape
    data_TK = torch.empty((tokens, width), dtype=dtype, device=x_TK.device)
    inverse_T1 = torch.empty((tokens, 1), dtype=torch.float32, device=x_TK.device)
    if tokens:
        block = min(_ROW_BLOCK, triton.next_power_of_2(width))
        _cast_rows_kernel[(tokens,)](
            x_TK, data_TK, inverse_T1, width, LARGEST=torch.finfo(dtype).max, LEAST=least_amax, BLOCK=block, num_warps=4
        )
    return data_TK, inverse_T1


def cast_columns(x_NTK: Tensor, dtype: torch.dtype, *, least_amax: float) -> tuple[Tensor, Tensor]:
    """Of each matrix its transpose [N, K, T] in ``dtype`` with a scale for each of the K columns, and their reciprocals [N, K, 1]."""
    x_NTK = x_NTK.contiguous()
    matrices, tokens, width = x_NTK.shape
    turned_NKT = torch.empty((matrices, width, tokens), dtype=dtype, device=x_NTK.device)
    inverse_NK1 = torch.empty((matrices, width, 1), dtype=torch.float32, device=x_NTK.device)
    if turned_NKT.numel():
        _cast_columns_kernel[(matrices, triton.cdiv(width, _COLUMNS))](
            x_NTK, turned_NKT, inverse_NK1, tokens, width, LARGEST=torch.finfo(dtype).max, LEAST=least_amax, ROWS=_ROWS, COLUMNS=_COLUMNS,
            num_warps=8,
        )  # fmt: skip
    return turned_NKT, inverse_NK1


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, numel, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    amax = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(program * BLOCK, numel, tl.num_programs(0) * BLOCK):
        amax = tl.maximum(amax, tl.abs(tl.load(x_ptr + start + lanes, mask=lanes < numel - start, other=0.0).to(tl.float32)))
    tl.store(amax_ptr + program, tl.max(amax, 0))


@triton.jit
def _cast_kernel(
    x_ptr, amax_ptr, data_ptr, turned_ptr, inverse_ptr, tokens, width, parts, LARGEST: tl.constexpr, LEAST: tl.constexpr,
    PARTS: tl.constexpr, TO_ROWS: tl.constexpr, TO_COLUMNS: tl.constexpr, CAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # Offsets inside a tile fit 32 bits, those of a tile need not.
    row, column = tl.program_id(0).to(tl.int64) * ROWS, tl.program_id(1).to(tl.int64) * COLUMNS
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (rows < tokens - row)[:, None] & (columns < width - column)[None, :]
    first = row * width + column
    at = rows[:, None] * width + columns[None, :]
    if CAST:
        lanes = tl.arange(0, PARTS)
        amax = tl.max(tl.load(amax_ptr + lanes, mask=lanes < parts, other=0.0), 0)
        inverse = tl.div_rn(tl.maximum(amax, LEAST), LARGEST)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(inverse_ptr, inverse)
        x = tl.load(x_ptr + first + at, mask=inside, other=0.0).to(tl.float32) * tl.div_rn(1.0, inverse)
        # The comparison leaves NaN as it is.
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        if TO_ROWS:
            y = x.to(data_ptr.dtype.element_ty)
        else:
            y = x.to(turned_ptr.dtype.element_ty)
    else:
        y = tl.load(x_ptr + first + at, mask=inside, other=0)
    if TO_ROWS:
        tl.store(data_ptr + first + at, y, mask=inside)
    if TO_COLUMNS:
        turned_at = columns[:, None] * tokens + rows[None, :]
        tl.store(turned_ptr + column * tokens + row + turned_at, tl.trans(y), mask=tl.trans(inside))


@triton.jit
def _cast_rows_kernel(x_ptr, data_ptr, inverse_ptr, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    amax = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + lanes
        amax = tl.maximum(amax, tl.abs(tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)))
    inverse = tl.div_rn(tl.maximum(tl.max(amax, 0), LEAST), LARGEST)
    tl.store(inverse_ptr + row, inverse)
    scale = tl.div_rn(1.0, inverse)
    for start in range(0, width, BLOCK):
        at = start + lanes
        x = tl.load(x_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32) * scale
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        tl.store(data_ptr + row * width + at, x.to(data_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def _cast_columns_kernel(
    x_ptr, turned_ptr, inverse_ptr, tokens, width, LARGEST: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    rows, columns = tl.arange(0, ROWS), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = columns < width
    x_ptr += matrix * tokens * width
    amax = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, tokens, ROWS):
        mask = (start + rows < tokens)[:, None] & within[None, :]
        x = tl.load(x_ptr + (start + rows).to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0)
        amax = tl.maximum(amax, tl.abs(x.to(tl.float32)))
    inverse = tl.div_rn(tl.maximum(tl.max(amax, 0), LEAST), LARGEST)
    tl.store(inverse_ptr + matrix * width + columns, inverse, mask=within)
    scale = tl.div_rn(1.0, inverse)
    lines = turned_ptr + (matrix * width + columns)[:, None] * tokens
    # The second reading comes from the cache.
    for start in range(0, tokens, ROWS):
        mask = (start + rows < tokens)[:, None] & within[None, :]
        x = tl.load(x_ptr + (start + rows).to(tl.int64)[:, None] * width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        x *= scale[None, :]
        # The comparison leaves NaN as it is.
        x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        tl.store(lines + (start + rows)[None, :], tl.trans(x.to(turned_ptr.dtype.element_ty)), mask=tl.trans(mask))
