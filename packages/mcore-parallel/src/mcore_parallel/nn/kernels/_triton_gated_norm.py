# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of the gated root-mean-square norm; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, R rows of a token, W width of a row, G groups of gates.

_TILE = 1024
_PROGRAMS = 1056
"""Of the backward; each holds a partial sum of the weight gradient."""


def gated_norm_forward(y_TRW: Tensor, z_TGI: Tensor, weight: Tensor, epsilon: float, gate_first: bool) -> Tensor:
    """[T, R, W]; y is contiguous, the last dim of z has stride 1 and holds R / G rows."""
    out = torch.empty_like(y_TRW)
    tokens, rows, width = y_TRW.shape
    constants = _constants(y_TRW, z_TGI, weight, gate_first)
    if out.numel():
        grid = (triton.cdiv(tokens, constants["BLOCK_T"]), rows)
        _forward_kernel[grid](y_TRW, z_TGI, weight, out, *z_TGI.stride()[:2], tokens, rows, width, epsilon, **constants)
    return out


def gated_norm_backward(
    grad_TRW: Tensor, y_TRW: Tensor, z_TGI: Tensor, weight: Tensor, epsilon: float, gate_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of y, z and the weight; the latter is summed in a fixed order. ``grad_TRW`` is contiguous."""
    tokens, rows, width = y_TRW.shape
    constants = _constants(y_TRW, z_TGI, weight, gate_first)
    grad_y, grad_z = torch.empty_like(y_TRW), torch.empty(z_TGI.shape, dtype=z_TGI.dtype, device=z_TGI.device)
    parts = max(1, min(triton.cdiv(_PROGRAMS, rows), triton.cdiv(tokens, constants["BLOCK_T"])))
    sums = torch.zeros((parts, rows, width), dtype=torch.float32, device=y_TRW.device)
    if grad_y.numel():
        _backward_kernel[(parts, rows)](
            grad_TRW, y_TRW, z_TGI, weight, grad_y, grad_z, sums, *z_TGI.stride()[:2], tokens, rows, width, epsilon, **constants
        )
    return grad_y, grad_z, sums.sum(0).flatten().view(-1, weight.numel()).sum(0).to(weight.dtype)


def _constants(y_TRW: Tensor, z_TGI: Tensor, weight: Tensor, gate_first: bool) -> dict[str, int | bool]:
    width = y_TRW.shape[-1]
    block = triton.next_power_of_2(width)
    return {
        "GROUP_ROWS": z_TGI.shape[2] // width, "WEIGHT_STEP": 0 if weight.numel() == width else width, "GATE_FIRST": gate_first,
        "BLOCK_T": max(1, _TILE // block), "BLOCK_W": block, "num_warps": 8 if block > _TILE else 4,
    }  # fmt: skip


# The number of tokens is not compiled in: it has no part in what becomes of a row.
@triton.jit(do_not_specialize=["tokens"])
def _forward_kernel(
    y_ptr, z_ptr, weight_ptr, out_ptr, z_stride, z_group_stride, tokens, num_rows, width, epsilon,
    GROUP_ROWS: tl.constexpr, WEIGHT_STEP: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lanes = tl.arange(0, BLOCK_W)
    inside = (token < tokens)[:, None] & (lanes < width)[None, :]
    at = (token * num_rows + row)[:, None] * width + lanes[None, :]
    z_at = token[:, None] * z_stride + (row // GROUP_ROWS) * z_group_stride + (row % GROUP_ROWS) * width + lanes[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + z_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + row * WEIGHT_STEP + lanes, mask=lanes < width, other=0.0).to(tl.float32)[None, :]
    gate = z * tl.sigmoid(z)
    if GATE_FIRST:
        y = y * gate
    out = y * (1.0 / tl.sqrt(tl.sum(y * y, 1) / width + epsilon))[:, None] * weight
    if not GATE_FIRST:
        out = out * gate
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad_ptr, y_ptr, z_ptr, weight_ptr, grad_y_ptr, grad_z_ptr, sums_ptr, z_stride, z_group_stride, tokens, num_rows, width, epsilon,
    GROUP_ROWS: tl.constexpr, WEIGHT_STEP: tl.constexpr, GATE_FIRST: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    lanes = tl.arange(0, BLOCK_W)
    weight = tl.load(weight_ptr + row * WEIGHT_STEP + lanes, mask=lanes < width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((BLOCK_W,), dtype=tl.float32)
    for block in range(tl.program_id(0), tl.cdiv(tokens, BLOCK_T), tl.num_programs(0)):
        token = tl.zeros((BLOCK_T,), dtype=tl.int64) + block * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = (token < tokens)[:, None] & (lanes < width)[None, :]
        at = (token * num_rows + row)[:, None] * width + lanes[None, :]
        z_at = token[:, None] * z_stride + (row // GROUP_ROWS) * z_group_stride + (row % GROUP_ROWS) * width + lanes[None, :]
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(z_ptr + z_at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        share = tl.sigmoid(z)
        gate = z * share
        value = y
        if GATE_FIRST:
            value = y * gate
        scale = (1.0 / tl.sqrt(tl.sum(value * value, 1) / width + epsilon))[:, None]
        unit = value * scale
        outer = grad
        if not GATE_FIRST:
            outer = grad * gate
        total += tl.sum(outer * unit, 0)
        inner = outer * weight
        grad_value = (inner - unit * (tl.sum(inner * unit, 1) / width)[:, None]) * scale
        if GATE_FIRST:
            grad_y = grad_value * gate
            grad_gate = grad_value * y
        else:
            grad_y = grad_value
            grad_gate = grad * unit * weight
        tl.store(grad_y_ptr + at, grad_y.to(grad_y_ptr.dtype.element_ty), mask=inside)
        # Gradients of the gates lie as dense as y.
        tl.store(grad_z_ptr + at, (grad_gate * share * (1.0 + z * (1.0 - share))).to(grad_z_ptr.dtype.element_ty), mask=inside)
    tl.store(sums_ptr + (tl.program_id(0) * num_rows + row) * width + lanes, total, mask=lanes < width)
