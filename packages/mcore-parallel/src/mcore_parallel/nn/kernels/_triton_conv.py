# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of the short causal convolution with SiLU; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# T tokens, G groups, W channels of a group, K taps.

_BLOCK_T, _BLOCK_W = 32, 128
_PARTS = 64
"""Programs that share the tokens of one block of channels in the backward; each holds a partial sum of the weight gradient."""


def conv_forward(x_TGW: Tensor, weight_GWK: Tensor, bias_GW: Tensor | None, positions_T: Tensor) -> Tensor:
    """``silu(conv(x))`` [T, G, W]; the last dim of x has stride 1."""
    tokens, groups, width = x_TGW.shape
    out = torch.empty((tokens, groups, width), dtype=x_TGW.dtype, device=x_TGW.device)
    if out.numel():
        grid = (triton.cdiv(tokens, _BLOCK_T), groups, triton.cdiv(width, _BLOCK_W))
        _forward_kernel[grid](
            x_TGW, weight_GWK, weight_GWK if bias_GW is None else bias_GW, positions_T, out, *x_TGW.stride()[:2], tokens, width,
            TAPS=weight_GWK.shape[-1], HAS_BIAS=bias_GW is not None, BLOCK_T=_BLOCK_T, BLOCK_W=_BLOCK_W, num_warps=4,
        )  # fmt: skip
    return out


def conv_backward(
    grad_TGW: Tensor, x_TGW: Tensor, weight_GWK: Tensor, bias_GW: Tensor | None, positions_T: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, weight and bias; the latter are summed in a fixed order. ``grad_TGW`` is contiguous."""
    tokens, groups, width = x_TGW.shape
    taps = weight_GWK.shape[-1]
    grad_x = torch.empty((tokens, groups, width), dtype=x_TGW.dtype, device=x_TGW.device)
    sums = torch.zeros((_PARTS, taps + 1, groups, width), dtype=torch.float32, device=x_TGW.device)
    if grad_x.numel():
        _backward_kernel[lambda constants: (_PARTS, groups, triton.cdiv(width, constants["BLOCK_W"]))](
            grad_TGW, x_TGW, weight_GWK, weight_GWK if bias_GW is None else bias_GW, positions_T, grad_x, sums, *x_TGW.stride()[:2],
            tokens, groups, width, TAPS=taps, SLOTS=triton.next_power_of_2(taps + 1), HAS_BIAS=bias_GW is not None,
        )  # fmt: skip
    total = sums.sum(0)
    grad_bias = None if bias_GW is None else total[taps].to(bias_GW.dtype)
    return grad_x, total[:taps].permute(1, 2, 0).to(weight_GWK.dtype).contiguous(), grad_bias


@triton.jit
def _before_silu(
    line_ptr, weight_ptr, bias_ptr, positions_ptr, rows, exists, inside_w, stride, channel, lanes,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The convolution at some rows [BLOCK_T, BLOCK_W], float32."""
    total = tl.zeros((BLOCK_T, BLOCK_W), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside_w, other=0.0).to(tl.float32)[None, :]
    position = tl.load(positions_ptr + rows, mask=exists, other=-1)
    for back in tl.static_range(TAPS):
        tap = tl.load(weight_ptr + channel * TAPS + (TAPS - 1 - back), mask=inside_w, other=0.0).to(tl.float32)
        seen = (position >= back)[:, None] & inside_w[None, :]
        total += tl.load(line_ptr + (rows - back)[:, None] * stride + lanes[None, :], mask=seen, other=0.0).to(tl.float32) * tap[None, :]
    return total


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, bias_ptr, positions_ptr, out_ptr, stride, group_stride, tokens, width,
    TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    lanes = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    exists, inside_w = rows < tokens, lanes < width
    total = _before_silu(
        x_ptr + group * group_stride, weight_ptr, bias_ptr, positions_ptr, rows, exists, inside_w, stride, group * width + lanes, lanes,
        TAPS, HAS_BIAS, BLOCK_T, BLOCK_W,
    )  # fmt: skip
    out = total * tl.sigmoid(total)
    at = (rows * tl.num_programs(1) + group)[:, None] * width + lanes[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=exists[:, None] & inside_w[None, :])


def _configs() -> list[triton.Config]:
    """Tiles to try; the interpreter has nothing to measure."""
    choices = [(32, 128, 8), (16, 128, 8), (16, 64, 4), (16, 64, 8)]
    tiles = [triton.Config({"BLOCK_T": t, "BLOCK_W": w}, num_warps=warps) for t, w, warps in choices]
    return tiles[:1] if knobs.runtime.interpret else tiles


def _search(configs: list[triton.Config], named: dict[str, Any], **constants: Any) -> list[triton.Config]:
    """The first one where every run must give the same bits."""
    return configs[:1] if torch.are_deterministic_algorithms_enabled() else configs


@triton.autotune(_configs(), key=["width", "TAPS", "HAS_BIAS"], prune_configs_by={"early_config_prune": _search})
@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, weight_ptr, bias_ptr, positions_ptr, grad_x_ptr, sums_ptr, stride, group_stride, tokens, groups, width,
    TAPS: tl.constexpr, SLOTS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    lanes = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside_w = lanes < width
    channel = group * width + lanes
    line_ptr = x_ptr + group * group_stride
    # Of each tap, then of the bias.
    slots = tl.arange(0, SLOTS)
    sums = tl.zeros((SLOTS, BLOCK_W), dtype=tl.float32)
    blocks = tl.cdiv(tokens, BLOCK_T)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        rows = tl.zeros((BLOCK_T,), dtype=tl.int64) + block * BLOCK_T + tl.arange(0, BLOCK_T)
        exists = rows < tokens
        position = tl.load(positions_ptr + rows, mask=exists, other=-1)
        grad_x = tl.zeros((BLOCK_T, BLOCK_W), dtype=tl.float32)
        for ahead in tl.static_range(TAPS):
            later = rows + ahead
            # The token so far ahead, if it belongs to the same sequence.
            reached = tl.load(positions_ptr + later, mask=later < tokens, other=-1) >= ahead
            total = _before_silu(
                line_ptr, weight_ptr, bias_ptr, positions_ptr, later, reached, inside_w, stride, channel, lanes,
                TAPS, HAS_BIAS, BLOCK_T, BLOCK_W,
            )  # fmt: skip
            share = tl.sigmoid(total)
            at = (later * groups + group)[:, None] * width + lanes[None, :]
            grad = tl.load(grad_ptr + at, mask=reached[:, None] & inside_w[None, :], other=0.0).to(tl.float32)
            grad = grad * share * (1.0 + total * (1.0 - share))
            tap = tl.load(weight_ptr + channel * TAPS + (TAPS - 1 - ahead), mask=inside_w, other=0.0).to(tl.float32)
            grad_x += grad * tap[None, :]
            if ahead == 0:
                for back in tl.static_range(TAPS):
                    seen = (position >= back)[:, None] & inside_w[None, :]
                    x = tl.load(line_ptr + (rows - back)[:, None] * stride + lanes[None, :], mask=seen, other=0.0).to(tl.float32)
                    sums += tl.where(slots[:, None] == TAPS - 1 - back, tl.sum(grad * x, 0)[None, :], 0.0)
                sums += tl.where(slots[:, None] == TAPS, tl.sum(grad, 0)[None, :], 0.0)
        at = (rows * groups + group)[:, None] * width + lanes[None, :]
        tl.store(grad_x_ptr + at, grad_x.to(grad_x_ptr.dtype.element_ty), mask=exists[:, None] & inside_w[None, :])
    at = ((part * (TAPS + 1) + slots) * groups + group)[:, None] * width + lanes[None, :]
    tl.store(sums_ptr + at, sums, mask=(slots <= TAPS)[:, None] & inside_w[None, :])
