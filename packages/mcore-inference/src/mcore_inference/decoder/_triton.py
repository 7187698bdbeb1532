# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of a decode step; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens (one a request), D input and N output width of a linear layer, K key-value heads, G query heads of each, d width of a head.

MAX_ROWS = 16
"""Tokens up to which a linear layer is bound by reading its weight: one side of a matrix instruction."""


def streamed_linear(x_TD: Tensor, weight_ND: Tensor, residual_TN: Tensor | None = None) -> Tensor:
    """``x @ weight.T`` (+ residual) of at most ``MAX_ROWS`` tokens, at the speed at which the weight can be read.

    Args:
        x_TD: [T, D], last stride 1.
        weight_ND: [N, D], contiguous.
        residual_TN: added to the result, contiguous; or None.

    Returns:
        [T, N] in the dtype of x.
    """
    tokens, depth = x_TD.shape
    width = weight_ND.shape[0]
    y_TN = torch.empty((tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    columns, block, stages = _tile(width)
    block = max(16, min(block, 1 << (depth - 1).bit_length()))
    _linear_kernel[(triton.cdiv(width, columns),)](
        x_TD, weight_ND, residual_TN, y_TN, tokens, width, depth, x_TD.stride(0),
        ROWS=MAX_ROWS, COLUMNS=columns, DEPTH=block, EVEN=depth % block == 0 and width % columns == 0, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return y_TN


def rotate_and_append(
    qkv_TKHd: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    norms: tuple[Tensor, Tensor, float, float] | None,
    keys_SKd: Tensor,
    values_SKd: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Queries [T, K G, d], normalised and turned; keys (likewise) and values go into their slots of the cache.

    Args:
        qkv_TKHd: [T, K, G + 2, d] contiguous, of the projection.
        tables: cos and sin [T, d], or None.
        norms: (query weight [d], key weight [d], epsilon, shift) of the heads' RMS norms, or None.
        keys_SKd: slots of one layer.
        values_SKd: likewise.
        slots_T: [T] int64.
    """
    tokens, kv_heads, blocks, width = qkv_TKHd.shape
    q = torch.empty((tokens, kv_heads * (blocks - 2), width), dtype=qkv_TKHd.dtype, device=qkv_TKHd.device)
    query_norm, key_norm, epsilon, shift = (None, None, 0.0, 0.0) if norms is None else norms
    cos, sin = (None, None) if tables is None else tables
    _rotate_kernel[(tokens, kv_heads)](
        qkv_TKHd, q, keys_SKd, values_SKd, slots_T, cos, sin, query_norm, key_norm, epsilon, shift,
        keys_SKd.stride(0), values_SKd.stride(0), 0 if cos is None else cos.stride(0), kv_heads, blocks,
        LINES=triton.next_power_of_2(blocks), HALF=width // 2, HALF_BLOCK=triton.next_power_of_2(width // 2),
        num_warps=4 if blocks > 8 else 2,
    )  # fmt: skip
    return q


def _tile(width: int) -> tuple[int, int, int]:
    """Columns, depth and stages, measured on an H200: narrow programs where there are few columns, so that all multiprocessors read."""
    if width <= 2048:
        return 16, 512, 3
    return (32, 256, 4) if width <= 65536 else (64, 128, 4)


@triton.jit
def _linear_kernel(
    x_ptr, weight_ptr, residual_ptr, y_ptr, tokens, width, depth, x_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row, lane = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    weight_rows = weight_ptr + column[None, :].to(tl.int64) * depth
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, depth, DEPTH):
        at = first + lane
        if EVEN:
            weight = tl.load(weight_rows + at[:, None])
            x = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=row[:, None] < tokens, other=0.0)
        else:
            weight = tl.load(weight_rows + at[:, None], mask=(at[:, None] < depth) & (column[None, :] < width), other=0.0)
            x = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=(row[:, None] < tokens) & (at[None, :] < depth), other=0.0)
        total = tl.dot(x, weight, total)
    places = row[:, None] * width + column[None, :]
    real = (row[:, None] < tokens) & (column[None, :] < width)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + places, mask=real, other=0.0).to(tl.float32)
    tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), mask=real)


@triton.jit
def _rotate_kernel(
    packed_ptr, q_ptr, keys_ptr, values_ptr, slots_ptr, cos_ptr, sin_ptr, query_norm_ptr, key_norm_ptr, epsilon, shift,
    keys_slot, values_slot, table_stride, kv_heads, blocks, LINES: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, lane = tl.arange(0, LINES)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    group = blocks - 2
    inside = (line < blocks) & (lane < HALF)
    rows = packed_ptr + (token * kv_heads + kv_head) * blocks * 2 * HALF + line * 2 * HALF
    first = tl.load(rows + lane, mask=inside, other=0.0)
    second = tl.load(rows + HALF + lane, mask=inside, other=0.0)
    is_value = line == group + 1
    a, b = first.to(tl.float32), second.to(tl.float32)
    if query_norm_ptr is not None:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + epsilon)[:, None]
        real = lane < HALF
        query_a = tl.load(query_norm_ptr + lane, mask=real, other=0.0).to(tl.float32)
        query_b = tl.load(query_norm_ptr + HALF + lane, mask=real, other=0.0).to(tl.float32)
        key_a = tl.load(key_norm_ptr + lane, mask=real, other=0.0).to(tl.float32)
        key_b = tl.load(key_norm_ptr + HALF + lane, mask=real, other=0.0).to(tl.float32)
        a = a * scale * (tl.where(line < group, query_a, key_a) + shift)
        b = b * scale * (tl.where(line < group, query_b, key_b) + shift)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + token * table_stride + lane, mask=lane < HALF, other=0.0)
        sin = tl.load(sin_ptr + token * table_stride + lane, mask=lane < HALF, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    kind = q_ptr.dtype.element_ty
    a, b = tl.where(is_value, first, a.to(kind)), tl.where(is_value, second, b.to(kind))
    slot = tl.load(slots_ptr + token)
    query_rows = q_ptr + (token * kv_heads * group + kv_head * group + line) * 2 * HALF
    tl.store(query_rows + lane, a, mask=inside & (line < group))
    tl.store(query_rows + HALF + lane, b, mask=inside & (line < group))
    place = kv_head * 2 * HALF + lane
    is_key = line == group
    cached = keys_ptr.dtype.element_ty
    tl.store(keys_ptr + slot * keys_slot + place + line * 0, a.to(cached), mask=inside & is_key)
    tl.store(keys_ptr + slot * keys_slot + place + HALF + line * 0, b.to(cached), mask=inside & is_key)
    tl.store(values_ptr + slot * values_slot + place + line * 0, a.to(cached), mask=inside & is_value)
    tl.store(values_ptr + slot * values_slot + place + HALF + line * 0, b.to(cached), mask=inside & is_value)
