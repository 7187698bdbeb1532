# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of what lies between a layer's products: normalisation, rotation, gating; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, D model, F feed-forward, K key-value heads, G query heads of each, d width of a head.

_NORM_PROGRAMS = 512
"""Programs of the norm's backward: each holds one partial sum of the weight gradient."""
_GLU_BLOCK = 1024


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm [T, D] and the reciprocal root mean squares [T] float32."""
    tokens, width = x_TD.shape
    y_TD = torch.empty_like(x_TD)
    scale_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    if tokens:
        _norm_kernel[(tokens,)](x_TD, weight_D, y_TD, scale_T, x_TD.stride(0), width, epsilon, **_row_constants(width))
    return y_TD, scale_T


def rms_norm_backward(grad_TD: Tensor, x_TD: Tensor, weight_D: Tensor, scale_T: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight; the latter is summed in a fixed order."""
    tokens, width = x_TD.shape
    grad_x_TD = torch.empty_like(x_TD, memory_format=torch.contiguous_format)
    programs = max(1, min(_NORM_PROGRAMS, tokens))
    parts_PD = torch.zeros((programs, width), dtype=torch.float32, device=x_TD.device)
    if tokens:
        _norm_backward_kernel[(programs,)](
            grad_TD, x_TD, weight_D, scale_T, grad_x_TD, parts_PD,
            grad_TD.stride(0), x_TD.stride(0), tokens, width, **_row_constants(width),
        )  # fmt: skip
    return grad_x_TD, parts_PD.sum(0).to(weight_D.dtype)


def swiglu(up_TF: Tensor) -> Tensor:
    """``silu(gate) * value`` of [T, 2 F], gates first."""
    tokens, width = up_TF.shape[0], up_TF.shape[1] // 2
    out_TF = torch.empty((tokens, width), dtype=up_TF.dtype, device=up_TF.device)
    if out_TF.numel():
        grid = (tokens, triton.cdiv(width, _GLU_BLOCK))
        _glu_kernel[grid](up_TF, out_TF, up_TF.stride(0), width, BLOCK=_GLU_BLOCK, num_warps=4)
    return out_TF


def swiglu_backward(grad_TF: Tensor, up_TF: Tensor) -> Tensor:
    """Gradient [T, 2 F]."""
    tokens, width = grad_TF.shape
    grad_up_TF = torch.empty((tokens, 2 * width), dtype=up_TF.dtype, device=up_TF.device)
    if grad_TF.numel():
        grid = (tokens, triton.cdiv(width, _GLU_BLOCK))
        _glu_backward_kernel[grid](grad_TF, up_TF, grad_up_TF, grad_TF.stride(0), up_TF.stride(0), width, BLOCK=_GLU_BLOCK, num_warps=4)
    return grad_up_TF


def split_rotated(qkv_TKHd: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [T, K G, d] and keys [T, K, d], and values [T, K, d], of the packed projection [T, K, G + 2, d]."""
    tokens, kv_heads, blocks, width = qkv_TKHd.shape
    shapes = ((tokens, kv_heads * (blocks - 2), width), (tokens, kv_heads, width), (tokens, kv_heads, width))
    q, k, v = (torch.empty(shape, dtype=qkv_TKHd.dtype, device=qkv_TKHd.device) for shape in shapes)
    _rotate(qkv_TKHd, q, k, v, tables, backward=False)
    return q, k, v


def split_rotated_backward(grads: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor]) -> Tensor:
    """Gradient [T, K, G + 2, d] of the packed projection."""
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
    tokens, kv_heads, width = grad_k.shape
    packed = torch.empty((tokens, kv_heads, grad_q.shape[1] // kv_heads + 2, width), dtype=grad_q.dtype, device=grad_q.device)
    _rotate(packed, grad_q, grad_k, grad_v, tables, backward=True)
    return packed


def _rotate(packed: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor], *, backward: bool) -> None:
    tokens, kv_heads, blocks, width = packed.shape
    if not tokens:
        return
    cos_Td, sin_Td = tables
    rows = triton.next_power_of_2(kv_heads * blocks)
    # A block of rows is a power of two, whatever the width of a head.
    tile = min(rows, max(1, 4096 // triton.next_power_of_2(width)))
    grid = (tokens, triton.cdiv(kv_heads * blocks, tile))
    _rotate_kernel[grid](
        packed, q, k, v, cos_Td, sin_Td, packed.stride(0), cos_Td.stride(0), kv_heads * blocks, blocks,
        WIDTH=width, HALF=width // 2, HALF_BLOCK=triton.next_power_of_2(width // 2), ROWS=tile, BACKWARD=backward, num_warps=4,
    )  # fmt: skip


def _row_constants(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, y_ptr, scale_ptr, stride, width, epsilon, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    x = tl.load(x_ptr + row * stride + lanes, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + epsilon)
    tl.store(y_ptr + row * width + lanes, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _norm_backward_kernel(
    grad_ptr, x_ptr, weight_ptr, scale_ptr, grad_x_ptr, parts_ptr, grad_stride, x_stride, tokens, width, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    weight = tl.load(weight_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # Offsets of 64 bits, also where a row number is a plain integer.
    wide = tl.zeros((), dtype=tl.int64)
    grad_stride, x_stride, line = wide + grad_stride, wide + x_stride, wide + width
    for row in range(program, tokens, tl.num_programs(0)):
        grad = tl.load(grad_ptr + row * grad_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + lanes, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + row)
        unit = x * scale
        inner = grad * weight
        mean = tl.sum(inner * unit, 0) / width
        tl.store(grad_x_ptr + row * line + lanes, ((inner - unit * mean) * scale).to(grad_x_ptr.dtype.element_ty), mask=inside)
        total += grad * unit
    tl.store(parts_ptr + program * width + lanes, total, mask=inside)


@triton.jit
def _glu_kernel(up_ptr, out_ptr, stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    gate = tl.load(up_ptr + row * stride + lanes, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up_ptr + row * stride + width + lanes, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * value
    tl.store(out_ptr + row * width + lanes, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _glu_backward_kernel(grad_ptr, up_ptr, grad_up_ptr, grad_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    grad = tl.load(grad_ptr + row * grad_stride + lanes, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(up_ptr + row * up_stride + lanes, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up_ptr + row * up_stride + width + lanes, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    line_ptr = grad_up_ptr + row * 2 * width
    tl.store(line_ptr + lanes, (grad * value * share * (1.0 + gate * (1.0 - share))).to(grad_up_ptr.dtype.element_ty), mask=inside)
    tl.store(line_ptr + width + lanes, (grad * gate * share).to(grad_up_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_kernel(
    packed_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, packed_stride, table_stride, num_rows, blocks,
    WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, HALF_BLOCK)
    inside = (rows < num_rows)[:, None] & (lanes < HALF)[None, :]
    head = rows // blocks
    block = rows % blocks
    kv_heads = num_rows // blocks
    group = blocks - 2
    # Where each row lies in its own tensor.
    q_at = (token * kv_heads * group + head * group + block)[:, None] * WIDTH + lanes[None, :]
    kv_at = (token * kv_heads + head)[:, None] * WIDTH + lanes[None, :]
    at = token * packed_stride + rows[:, None] * WIDTH + lanes[None, :]
    is_q = inside & (block < group)[:, None]
    is_k = inside & (block == group)[:, None]
    is_v = inside & (block > group)[:, None]
    turns = (block <= group)[:, None]
    cos = tl.load(cos_ptr + token * table_stride + lanes, mask=lanes < HALF, other=0.0)[None, :]
    sin = tl.load(sin_ptr + token * table_stride + lanes, mask=lanes < HALF, other=0.0)[None, :]
    cos = tl.where(turns, cos, 1.0)
    sin = tl.where(turns, sin, 0.0)
    if BACKWARD:
        first = (
            tl.load(q_ptr + q_at, mask=is_q, other=0.0).to(tl.float32)
            + tl.load(k_ptr + kv_at, mask=is_k, other=0.0).to(tl.float32)
            + tl.load(v_ptr + kv_at, mask=is_v, other=0.0).to(tl.float32)
        )
        second = (
            tl.load(q_ptr + q_at + HALF, mask=is_q, other=0.0).to(tl.float32)
            + tl.load(k_ptr + kv_at + HALF, mask=is_k, other=0.0).to(tl.float32)
            + tl.load(v_ptr + kv_at + HALF, mask=is_v, other=0.0).to(tl.float32)
        )
        element = packed_ptr.dtype.element_ty
        tl.store(packed_ptr + at, (first * cos + second * sin).to(element), mask=inside)
        tl.store(packed_ptr + at + HALF, (second * cos - first * sin).to(element), mask=inside)
    else:
        first = tl.load(packed_ptr + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(packed_ptr + at + HALF, mask=inside, other=0.0).to(tl.float32)
        element = q_ptr.dtype.element_ty
        low = (first * cos - second * sin).to(element)
        high = (second * cos + first * sin).to(element)
        tl.store(q_ptr + q_at, low, mask=is_q)
        tl.store(q_ptr + q_at + HALF, high, mask=is_q)
        tl.store(k_ptr + kv_at, low, mask=is_k)
        tl.store(k_ptr + kv_at + HALF, high, mask=is_k)
        tl.store(v_ptr + kv_at, low, mask=is_v)
        tl.store(v_ptr + kv_at + HALF, high, mask=is_v)
