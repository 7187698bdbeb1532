# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels that leave their result in e4m3 with a scale a token, for the fp8 GEMM behind them; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_inference._triton_cast import inverse_of, rounded, shrunk
from mcore_parallel.backends import Scaled
from mcore_parallel.nn import StreamNorm

# T tokens, D model, F width of a feed-forward

MAX_WIDTH = 16384
"""Of a row, which one program holds."""
_E4M3 = torch.float8_e4m3fn


def add_and_norm(x_TD: Tensor, y_TD: Tensor | None, norm: StreamNorm) -> Scaled:
    """Add y to x in place, and the norm of the sum [T, D].

    Args:
        x_TD: contiguous.
        y_TD: contiguous; None for zero.
        norm: of the sum.
    """
    data_TD, inverse_T1 = _outputs(x_TD, x_TD.shape[1])
    width = triton.next_power_of_2(x_TD.shape[1])
    _norm_kernel[(len(x_TD),)](
        x_TD, y_TD, norm.weight, data_TD, inverse_T1, x_TD.shape[1], norm.epsilon, norm.shift, WIDTH=width, num_warps=_warps(width)
    )
    return Scaled(data_TD, inverse_T1)


def swiglu(x_T2F: Tensor) -> Scaled:
    """``silu(gate) * value`` [T, F] of gates, then values, contiguous."""
    size = x_T2F.shape[1] // 2
    data_TF, inverse_T1 = _outputs(x_T2F, size)
    width = triton.next_power_of_2(size)
    _swiglu_kernel[(len(x_T2F),)](x_T2F, data_TF, inverse_T1, size, WIDTH=width, num_warps=_warps(width))
    return Scaled(data_TF, inverse_T1)


def _outputs(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    data = torch.empty((len(x), width), dtype=_E4M3, device=x.device)
    return data, torch.empty((len(x), 1), dtype=torch.float32, device=x.device)


def _warps(width: int) -> int:
    return 4 if width <= 4096 else 8 if width <= 8192 else 16


@triton.jit
def _norm_kernel(x_ptr, y_ptr, norm_ptr, data_ptr, inverse_ptr, depth, epsilon, shift, WIDTH: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = lane < depth
    x = tl.load(x_ptr + row * depth + lane, mask=inside, other=0.0)
    if y_ptr is not None:
        x = (x.to(tl.float32) + tl.load(y_ptr + row * depth + lane, mask=inside, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(x_ptr + row * depth + lane, x, mask=inside)
    wide = x.to(tl.float32)
    factor = tl.load(norm_ptr + lane, mask=inside, other=0.0).to(tl.float32) + shift
    root = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / depth + epsilon)
    _store_row((wide * root * factor).to(x.dtype), data_ptr, inverse_ptr, row, lane, depth)


@triton.jit
def _swiglu_kernel(x_ptr, data_ptr, inverse_ptr, size, WIDTH: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = lane < size
    gate = tl.load(x_ptr + row * 2 * size + lane, mask=inside, other=0.0)
    value = tl.load(x_ptr + row * 2 * size + size + lane, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    _store_row((wide / (1.0 + tl.exp(-wide)) * value).to(gate.dtype), data_ptr, inverse_ptr, row, lane, size)


@triton.jit
def _store_row(x, data_ptr, inverse_ptr, row, lane, width):
    inside = lane < width
    # In the model's dtype before, as by two kernels.
    wide = tl.where(inside, x.to(tl.float32), 0.0)
    inverse = inverse_of(tl.max(tl.abs(wide), 0), tl.sum(wide, 0))
    tl.store(inverse_ptr + row, inverse)
    tl.store(data_ptr + row * width + lane, rounded(shrunk(wide, inverse)).to(data_ptr.dtype.element_ty), mask=inside)
