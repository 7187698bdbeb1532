# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of activations, one family for all of them; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# N rows, F width of the result, W width of the input: 2 F with a gate, gates first, else F.

_BLOCK = 1024
_STORE_BLOCK = 2048


def activate(
    x_NW: Tensor,
    bias_W: Tensor | None,
    weights_N: Tensor | None,
    *,
    curve: str,
    gated: bool,
    offset: float,
    clamp: float | None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """``curve(gate) * (value + offset)`` or ``curve(x)``, after the bias and the cuts, times a weight a row; [N, F].

    Rows from ``num_rows`` on, one int32 on the device, are neither read nor written.
    """
    rows, width = x_NW.shape[0], x_NW.shape[1] // (1 + gated)
    out_NF = torch.empty((rows, width), dtype=x_NW.dtype, device=x_NW.device)
    if out_NF.numel():
        blocks = triton.cdiv(width, _BLOCK)
        _activation_kernel[(rows * blocks,)](
            x_NW, bias_W, weights_N, num_rows, out_NF, x_NW.stride(0), width, blocks, offset, clamp or 0.0,
            CURVE=curve, GATED=gated, CUTS=clamp is not None, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return out_NF


def activate_backward(
    grad_NF: Tensor,
    x_NW: Tensor,
    scale_N: Tensor | None,
    bias_W: Tensor | None,
    weights_N: Tensor | None,
    *,
    curve: str,
    gated: bool,
    offset: float,
    clamp: float | None,
    again: bool = False,
    num_rows: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the input [N, W], in the dtype of ``grad``, and of the weights [N] float32; ``scale`` is the one of a narrow input.

    With ``again`` the result without weights overwrites ``grad``. ``num_rows`` as of ``activate``.
    """
    rows, width = grad_NF.shape
    grad_x_NW = torch.empty((rows, (1 + gated) * width), dtype=grad_NF.dtype, device=grad_NF.device)
    blocks = triton.cdiv(width, _BLOCK)
    parts_NB = None if weights_N is None else torch.empty((rows, blocks), dtype=torch.float32, device=grad_NF.device)
    if grad_NF.numel():
        _activation_backward_kernel[(rows * blocks,)](
            grad_NF, x_NW, scale_N, bias_W, weights_N, num_rows, grad_x_NW, parts_NB, grad_NF.stride(0), x_NW.stride(0), width, blocks,
            offset, clamp or 0.0, CURVE=curve, GATED=gated, CUTS=clamp is not None, AGAIN=again, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return grad_x_NW, None if parts_NB is None else parts_NB.sum(1)


def activate_and_store(
    x_NW: Tensor,
    bias_W: Tensor | None,
    weights_N: Tensor | None,
    largest: float,
    *,
    curve: str,
    gated: bool,
    offset: float,
    clamp: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``activate``, and the input in e4m3 [N, W] with a float32 factor a row [N] that maps ``largest`` to its largest magnitude."""
    rows, whole = x_NW.shape
    width = whole // (1 + gated)
    out_NF = torch.empty((rows, width), dtype=x_NW.dtype, device=x_NW.device)
    narrow_NW = torch.empty((rows, whole), dtype=torch.float8_e4m3fn, device=x_NW.device)
    scale_N = torch.empty(rows, dtype=torch.float32, device=x_NW.device)
    if narrow_NW.numel():
        _activation_store_kernel[(rows,)](
            x_NW, bias_W, weights_N, out_NF, narrow_NW, scale_N, x_NW.stride(0), width, offset, clamp or 0.0, largest,
            CURVE=curve, GATED=gated, CUTS=clamp is not None, BLOCK=_STORE_BLOCK, num_warps=8,
        )  # fmt: skip
    return out_NF, narrow_NW, scale_N


@triton.jit
def _curve(x, CURVE: tl.constexpr):
    """Value and slope."""
    tl.static_assert(
        CURVE == "silu" or CURVE == "gelu" or CURVE == "gelu_tanh" or CURVE == "quick_gelu" or CURVE == "relu" or CURVE == "squared_relu"
    )
    if CURVE == "silu":
        share = tl.sigmoid(x)
        value = x * share
        slope = share * (1.0 + x * (1.0 - share))
    elif CURVE == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif CURVE == "gelu_tanh":
        # 1 + tanh(u) is 2 sigmoid(2 u).
        share = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        value = x * share
        slope = share + value * (1.0 - share) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif CURVE == "quick_gelu":
        share = tl.sigmoid(1.702 * x)
        value = x * share
        slope = share * (1.0 + 1.702 * x * (1.0 - share))
    elif CURVE == "relu":
        value = tl.where(x < 0.0, 0.0, x)
        slope = tl.where(x > 0.0, 1.0, 0.0)
    else:
        root = tl.where(x < 0.0, 0.0, x)
        value = root * root
        slope = 2.0 * root
    return value, slope


@triton.jit
def _activated(
    line_ptr, bias_ptr, lanes, inside, width, offset, clamp, CURVE: tl.constexpr, GATED: tl.constexpr, CUTS: tl.constexpr
):  # fmt: skip
    """Results of a piece of a row, and at each lane the largest magnitude of what it was made of."""
    gate = tl.load(line_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    top = tl.abs(gate)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    if CUTS:
        gate = tl.where(gate > clamp, clamp, gate)
    out, _ = _curve(gate, CURVE)
    if GATED:
        value = tl.load(line_ptr + width + lanes, mask=inside, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.abs(value))
        if bias_ptr is not None:
            value += tl.load(bias_ptr + width + lanes, mask=inside, other=0.0).to(tl.float32)
        if CUTS:
            value = tl.where(value > clamp, clamp, tl.where(value < -clamp, -clamp, value))
        out *= value + offset
    return out, top


@triton.jit
def _activation_kernel(
    x_ptr, bias_ptr, weights_ptr, num_rows_ptr, out_ptr, stride, width, blocks, offset, clamp,
    CURVE: tl.constexpr, GATED: tl.constexpr, CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    lanes = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    if num_rows_ptr is not None:
        inside &= row < tl.load(num_rows_ptr)
    out, _ = _activated(x_ptr + row * stride, bias_ptr, lanes, inside, width, offset, clamp, CURVE, GATED, CUTS)
    if weights_ptr is not None:
        out *= tl.load(weights_ptr + row).to(tl.float32)
    tl.store(out_ptr + row * width + lanes, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activation_store_kernel(
    x_ptr, bias_ptr, weights_ptr, out_ptr, narrow_ptr, scale_ptr, stride, width, offset, clamp, largest,
    CURVE: tl.constexpr, GATED: tl.constexpr, CUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A whole row: the second reading, with the scale of the first, comes from a cache."""
    row = tl.program_id(0).to(tl.int64)
    line_ptr = x_ptr + row * stride
    top = tl.zeros((BLOCK,), dtype=tl.float32)
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + row).to(tl.float32)
    for start in range(0, width, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        inside = lanes < width
        out, here = _activated(line_ptr, bias_ptr, lanes, inside, width, offset, clamp, CURVE, GATED, CUTS)
        top = tl.maximum(top, here)
        tl.store(out_ptr + row * width + lanes, (out * weight).to(out_ptr.dtype.element_ty), mask=inside)
    scale = tl.max(top, 0) / largest
    # A row of zeros, or of numbers too small for a factor.
    scale = tl.where(scale > 1e-30, scale, 1.0)
    tl.store(scale_ptr + row, scale)
    whole = 2 * width if GATED else width
    for start in range(0, whole, BLOCK):
        lanes = start + tl.arange(0, BLOCK)
        x = tl.load(line_ptr + lanes, mask=lanes < whole, other=0.0).to(tl.float32)
        tl.store(narrow_ptr + row * whole + lanes, (x / scale).to(narrow_ptr.dtype.element_ty), mask=lanes < whole)


@triton.jit
def _activation_backward_kernel(
    grad_ptr, x_ptr, scale_ptr, bias_ptr, weights_ptr, num_rows_ptr, grad_x_ptr, parts_ptr, grad_stride, x_stride, width, blocks, offset,
    clamp,
    CURVE: tl.constexpr, GATED: tl.constexpr, CUTS: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    if num_rows_ptr is not None:
        inside &= row < tl.load(num_rows_ptr)
    grad = tl.load(grad_ptr + row * grad_stride + lanes, mask=inside, other=0.0).to(tl.float32)
    line_ptr = x_ptr + row * x_stride
    gate = tl.load(line_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + row)
        gate *= scale
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    if CUTS:
        cut = gate > clamp
        gate = tl.where(cut, clamp, gate)
    out, slope = _curve(gate, CURVE)
    factor = grad
    if weights_ptr is not None:
        factor *= tl.load(weights_ptr + row).to(tl.float32)
    element = grad_x_ptr.dtype.element_ty
    if GATED:
        value = tl.load(line_ptr + width + lanes, mask=inside, other=0.0).to(tl.float32)
        if scale_ptr is not None:
            value *= scale
        if bias_ptr is not None:
            value += tl.load(bias_ptr + width + lanes, mask=inside, other=0.0).to(tl.float32)
        grad_value = factor * out
        if CUTS:
            grad_value = tl.where((value > clamp) | (value < -clamp), 0.0, grad_value)
            value = tl.where(value > clamp, clamp, tl.where(value < -clamp, -clamp, value))
        value += offset
        out *= value
        slope *= value
        tl.store(grad_x_ptr + row * 2 * width + width + lanes, grad_value.to(element), mask=inside)
        line_out_ptr = grad_x_ptr + row * 2 * width
    else:
        line_out_ptr = grad_x_ptr + row * width
    grad_gate = factor * slope
    if CUTS:
        grad_gate = tl.where(cut, 0.0, grad_gate)
    tl.store(line_out_ptr + lanes, grad_gate.to(element), mask=inside)
    if AGAIN:
        tl.store(grad_ptr + row * grad_stride + lanes, out.to(grad_ptr.dtype.element_ty), mask=inside)
    if parts_ptr is not None:
        tl.store(parts_ptr + row * blocks + block, tl.sum(tl.where(inside, grad * out, 0.0), 0))
