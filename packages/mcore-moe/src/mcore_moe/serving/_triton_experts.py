# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of experts without gradients, bound by reading the weights of those that are picked; imported only when they run.

Weights in e4m3 are widened as they are read, or multiplied by rows in e4m3; their scales, powers of two, multiply the sums of an expert.

Few tokens: a program multiplies all of them by columns of one expert, and one of the second launch by columns of all experts that were
picked, so that its sums are whole. More tokens: a program takes the rows of one expert, wherever their tokens lie, and the results of a
token's picks are added by a last launch, in order.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_moe.serving._triton_route import FewPicks
from mcore_parallel.backends import Scaled
from mcore_parallel.backends.kernels import widened, widens_by_bits
from mcore_parallel.nn import NormedStream, StreamNorm

# T tokens, D model, E experts, F width of an expert, K experts a token, P = T * K picks, R lines of a tile, S experts that were picked.


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """Block sizes of a launch."""

    lines: int
    cols: int
    depth: int
    warps: int = 4
    stages: int = 4
    turned: bool = False
    """Multiply weights by rows instead of rows by weights: what is widened goes to the tensor cores from registers."""


FEW_UP = Tiles(lines=16, cols=32, depth=128)
FEW_DOWN = Tiles(lines=16, cols=16, depth=256, stages=6)
# As many bytes on their way: an element has half of them.
FEW_UP_FP8 = Tiles(lines=16, cols=32, depth=256)
FEW_DOWN_FP8 = Tiles(lines=16, cols=16, depth=256, stages=10)


def many_tiles(rows: float, *, fp8: bool = False, narrow: bool = False) -> tuple[Tiles, Tiles]:
    """Of the two launches.

    Args:
        rows: of an expert, on average.
        fp8: weights are in fp8.
        narrow: rows are, too.
    """
    if narrow:
        if rows <= 24:
            few = Tiles(lines=32, cols=64, depth=128, stages=3, turned=True)
            return few, few
        return Tiles(lines=64, cols=64, depth=128), Tiles(lines=64, cols=128, depth=128)
    if fp8:
        if rows <= 10:
            return Tiles(lines=16, cols=64, depth=128, stages=3), Tiles(lines=16, cols=64, depth=128)
        if rows <= 20:
            return Tiles(lines=32, cols=64, depth=64), Tiles(lines=32, cols=64, depth=64, turned=True)
        return Tiles(lines=64, cols=128, depth=64), Tiles(lines=64, cols=64, depth=64, turned=True)
    if rows <= 6:
        return Tiles(lines=16, cols=64, depth=64, stages=5), Tiles(lines=16, cols=64, depth=128)
    if rows <= 20:
        return Tiles(lines=32, cols=64, depth=64, stages=4), Tiles(lines=32, cols=64, depth=128)
    return Tiles(lines=64, cols=64, depth=64, stages=4), Tiles(lines=64, cols=128, depth=64)


def up_few(x: NormedStream, up: Tensor | Scaled, picks: FewPicks, tiles: Tiles | None = None) -> Tensor:
    """[S, R, F]: ``silu(gate) * value * weight`` of every token and expert that was picked; zeros where not by this token.

    Args:
        x: in front of the norm.
        up: [E, 2 F, D], gates first; or in e4m3 with a scale for each row.
        picks: of the tokens.
        tiles: of the launch.
    """
    up_EWD, inverse = _parts(up)
    tiles = tiles or (FEW_UP if inverse is None else FEW_UP_FP8)
    (tokens, depth), width = x.x.shape, up_EWD.shape[1] // 2
    most, lines = picks.weights_SR.shape
    h_SRF = torch.empty((most, lines, width), dtype=x.x.dtype, device=x.x.device)
    block = _depth(tiles.depth, depth)
    _up_few_kernel[(most * triton.cdiv(width, tiles.cols),)](
        x.scaled, picks.scales_R, up_EWD, inverse, picks.count, picks.experts_S, picks.weights_SR, h_SRF,
        tokens, depth, width, x.scaled.stride(0),
        LINES=lines, COLS=tiles.cols, DEPTH=block, EVEN=depth % block == 0 and width % tiles.cols == 0, BY_BITS=widens_by_bits(x.scaled),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return h_SRF


def down_few(
    h_SRF: Tensor, down: Tensor | Scaled, picks: FewPicks, residual_TD: Tensor, norm: StreamNorm, tiles: Tiles | None = None
) -> NormedStream:
    """The residual stream plus the sums over the experts, ready for the norm behind it; ``down`` [E, D, F] as of ``up_few``."""
    down_EDF, inverse = _parts(down)
    tiles = tiles or (FEW_DOWN if inverse is None else FEW_DOWN_FP8)
    (tokens, out), (_, lines, width) = residual_TD.shape, h_SRF.shape
    block, programs = _depth(tiles.depth, width), triton.cdiv(out, tiles.cols)
    y_TD, scaled_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
    squares = torch.empty((programs, lines), dtype=torch.float32, device=h_SRF.device)
    _down_few_kernel[(programs,)](
        h_SRF, down_EDF, inverse, picks.count, picks.experts_S, residual_TD, norm.weight, y_TD, scaled_TD, squares,
        tokens, width, out, norm.shift,
        LINES=lines, COLS=tiles.cols, DEPTH=block, EVEN=width % block == 0 and out % tiles.cols == 0, BY_BITS=widens_by_bits(h_SRF),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return NormedStream(x=y_TD, scaled=scaled_TD, squares=squares, epsilon=norm.epsilon)


def _parts(factor: Tensor | Scaled) -> tuple[Tensor, Tensor | None]:
    """The values, and where they are in e4m3 the scales of their rows."""
    return (factor, None) if isinstance(factor, Tensor) else (factor.data, factor.inverse)


def _depth(most: int, size: int, *, least: int = 16) -> int:
    """Block of a sum over ``size`` elements."""
    return max(least, min(most, triton.next_power_of_2(size)))


def _least_depth(x: Tensor) -> int:
    """Of a block: a matrix instruction takes twice as many elements of one byte."""
    return 32 if x.dtype.itemsize == 1 else 16


@triton.jit
def _up_few_kernel(
    x_ptr, scales_ptr, up_ptr, inverse_ptr, count_ptr, experts_ptr, weights_ptr, h_ptr, tokens, depth, width, x_stride,
    LINES: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLS)
    slot = tl.program_id(0) // blocks
    if slot < tl.load(count_ptr):
        expert = tl.load(experts_ptr + slot).to(tl.int64)
        row, lane = tl.arange(0, LINES), tl.arange(0, DEPTH)
        column = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
        weight = tl.load(weights_ptr + slot * LINES + row)
        scale = tl.load(scales_ptr + row)
        gate_rows = up_ptr + (expert * 2 * width + column)[None, :] * depth
        value_rows = gate_rows + tl.cast(width, tl.int64) * depth
        x_rows = x_ptr + row[:, None] * x_stride
        if inverse_ptr is not None:
            # Here, so that they arrive while the weights stream.
            gate_inverse = tl.load(inverse_ptr + expert * 2 * width + column, mask=column < width, other=0.0)
            value_inverse = tl.load(inverse_ptr + (expert * 2 + 1) * width + column, mask=column < width, other=0.0)
        gate = tl.zeros((LINES, COLS), dtype=tl.float32)
        value = tl.zeros((LINES, COLS), dtype=tl.float32)
        for first in range(0, depth, DEPTH):
            at = first + lane
            if EVEN:
                x = tl.load(x_rows + at[None, :], mask=row[:, None] < tokens, other=0.0)
                gates = tl.load(gate_rows + at[:, None])
                values = tl.load(value_rows + at[:, None])
            else:
                inside = (at[:, None] < depth) & (column[None, :] < width)
                x = tl.load(x_rows + at[None, :], mask=(row[:, None] < tokens) & (at[None, :] < depth), other=0.0)
                gates = tl.load(gate_rows + at[:, None], mask=inside, other=0.0)
                values = tl.load(value_rows + at[:, None], mask=inside, other=0.0)
            gate = tl.dot(x, widened(gates, x.dtype, BY_BITS), gate)
            value = tl.dot(x, widened(values, x.dtype, BY_BITS), value)
        if inverse_ptr is not None:
            gate *= gate_inverse[None, :]
            value *= value_inverse[None, :]
        gate *= scale[:, None]
        y = gate / (1.0 + tl.exp(-gate)) * (value * scale[:, None]) * weight[:, None]
        y = tl.where(weight[:, None] != 0.0, y, 0.0)
        places = (slot * LINES + row)[:, None] * width + column[None, :]
        tl.store(h_ptr + places, y.to(h_ptr.dtype.element_ty), mask=(row[:, None] < tokens) & (column[None, :] < width))


@triton.jit
def _down_few_kernel(
    h_ptr, down_ptr, inverse_ptr, count_ptr, experts_ptr, residual_ptr, norm_ptr, y_ptr, scaled_ptr, squares_ptr, tokens, width, out, shift,
    LINES: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, BY_BITS: tl.constexpr,
):  # fmt: skip
    row, lane = tl.arange(0, LINES), tl.arange(0, DEPTH)
    column = tl.program_id(0) * COLS + tl.arange(0, COLS)
    blocks = tl.cdiv(width, DEPTH)
    total = tl.zeros((LINES, COLS), dtype=tl.float32)
    places = row[:, None] * out + column[None, :]
    real = (row[:, None] < tokens) & (column[None, :] < out)
    residual = tl.load(residual_ptr + places, mask=real, other=0.0)
    for number in range(tl.load(count_ptr) * blocks):
        slot, at = number // blocks, number % blocks * DEPTH + lane
        expert = tl.load(experts_ptr + slot).to(tl.int64)
        rows = down_ptr + expert * width * out + column[None, :] * width
        if EVEN:
            weight = tl.load(rows + at[:, None])
            h = tl.load(h_ptr + (slot * LINES + row)[:, None] * width + at[None, :], mask=row[:, None] < tokens, other=0.0)
        else:
            weight = tl.load(rows + at[:, None], mask=(at[:, None] < width) & (column[None, :] < out), other=0.0)
            inside = (row[:, None] < tokens) & (at[None, :] < width)
            h = tl.load(h_ptr + (slot * LINES + row)[:, None] * width + at[None, :], mask=inside, other=0.0)
        weight = widened(weight, h.dtype, BY_BITS)
        if inverse_ptr is not None:
            # The sum is over experts, each with scales of its own. In the product they are prefetched, and powers of two are exact there.
            weight *= tl.load(inverse_ptr + expert * out + column, mask=column < out, other=0.0).to(h.dtype)[None, :]
        total = tl.dot(h, weight, total)
    result = (total + residual.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + places, result, mask=real)
    seen = tl.where(real, result.to(tl.float32), 0.0)
    factor = tl.load(norm_ptr + column, mask=column < out, other=0.0).to(tl.float32) + shift
    tl.store(scaled_ptr + places, (seen * factor[None, :]).to(scaled_ptr.dtype.element_ty), mask=real)
    tl.store(squares_ptr + tl.program_id(0) * LINES + row, tl.sum(seen * seen, 1))


def up_many(
    x_TD: Tensor | Scaled, up: Tensor | Scaled, order_P: Tensor, ends_E: Tensor, weights_TK: Tensor, tiles: Tiles, *, dtype: torch.dtype
) -> Tensor:
    """[P, F] in ``dtype`` and the order of the experts: ``silu(gate) * value * weight`` of each pick.

    Args:
        x_TD: in the dtype of the model; or beside weights in e4m3, in that with a scale a token.
        up: as of ``up_few``.
        order_P: int32, the picks in the order of their experts.
        ends_E: int32, the rows of an expert and of all before it.
        weights_TK: of the picks.
        tiles: of the launch.
        dtype: of the result.
    """
    (x, x_inverse), (up_EWD, inverse) = _parts(x_TD), _parts(up)
    (experts, both, depth), picks = up_EWD.shape, order_P.shape[0]
    width = both // 2
    h_PF = torch.empty((picks, width), dtype=dtype, device=x.device)
    block = _depth(tiles.depth, depth, least=_least_depth(x))
    _up_many_kernel[(experts * triton.cdiv(width, tiles.cols),)](
        x, x_inverse, up_EWD, inverse, order_P, ends_E, weights_TK, h_PF, depth, width, x.stride(0),
        TOPK=weights_TK.shape[1], LINES=tiles.lines, COLS=tiles.cols, DEPTH=block, EVEN=depth % block == 0 and width % tiles.cols == 0,
        TURNED=tiles.turned, BY_BITS=widens_by_bits(x), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return h_PF


def down_many(h_PF: Tensor | Scaled, down: Tensor | Scaled, order_P: Tensor, ends_E: Tensor, tiles: Tiles, *, dtype: torch.dtype) -> Tensor:
    """[P, D] by pick in ``dtype``, from rows in the order of the experts, which may be in e4m3 as tokens of ``up_many``."""
    (h, h_inverse), (down_EDF, inverse) = _parts(h_PF), _parts(down)
    (experts, out, width), picks = down_EDF.shape, order_P.shape[0]
    y_PD = torch.empty((picks, out), dtype=dtype, device=h.device)
    block = _depth(tiles.depth, width, least=_least_depth(h))
    _down_many_kernel[(experts * triton.cdiv(out, tiles.cols),)](
        h, h_inverse, down_EDF, inverse, order_P, ends_E, y_PD, width, out,
        LINES=tiles.lines, COLS=tiles.cols, DEPTH=block, EVEN=width % block == 0 and out % tiles.cols == 0, TURNED=tiles.turned,
        BY_BITS=widens_by_bits(h), num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return y_PD


def add_rows(rows_PD: Tensor, places_P: Tensor | None, x_TD: Tensor, norm: StreamNorm) -> Tensor:
    """``x += `` the sum of each token's rows, in place; returns its RMS norm.

    Args:
        rows_PD: by pick, or where ``places`` says.
        places_P: int32 row of each pick.
        x_TD: the residual stream, contiguous.
        norm: behind it.
    """
    tokens, width = x_TD.shape
    normed_TD = torch.empty_like(x_TD)
    _add_rows_kernel[(tokens,)](
        rows_PD, places_P, x_TD, norm.weight, normed_TD, width, norm.epsilon, norm.shift,
        TOPK=rows_PD.shape[0] // tokens, WIDTH=triton.next_power_of_2(width), num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return normed_TD


@triton.jit
def _up_many_kernel(
    x_ptr, x_inverse_ptr, up_ptr, inverse_ptr, order_ptr, ends_ptr, weights_ptr, h_ptr, depth, width, x_stride,
    TOPK: tl.constexpr, LINES: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr,
    BY_BITS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(width, COLS)
    expert = tl.program_id(0) // blocks
    end = tl.load(ends_ptr + expert)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    row, lane = tl.arange(0, LINES), tl.arange(0, DEPTH)
    column = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    gate_rows = up_ptr + (expert.to(tl.int64) * 2 * width + column)[:, None] * depth
    value_rows = gate_rows + tl.cast(width, tl.int64) * depth
    if inverse_ptr is not None:
        gate_inverse = tl.load(inverse_ptr + expert.to(tl.int64) * 2 * width + column, mask=column < width, other=0.0)
        value_inverse = tl.load(inverse_ptr + (expert.to(tl.int64) * 2 + 1) * width + column, mask=column < width, other=0.0)
    for start in range(begin, end, LINES):
        real = start + row < end
        pick = tl.load(order_ptr + start + row, mask=real, other=0)
        x_rows = x_ptr + (pick // TOPK)[:, None].to(tl.int64) * x_stride
        gate = _sums(LINES, COLS, TURNED)
        value = _sums(LINES, COLS, TURNED)
        for first in range(0, depth, DEPTH):
            at = first + lane
            if EVEN:
                x = tl.load(x_rows + at[None, :], mask=real[:, None], other=0.0)
                gates = tl.load(gate_rows + at[None, :])
                values = tl.load(value_rows + at[None, :])
            else:
                inside = (at[None, :] < depth) & (column[:, None] < width)
                x = tl.load(x_rows + at[None, :], mask=real[:, None] & (at[None, :] < depth), other=0.0)
                gates = tl.load(gate_rows + at[None, :], mask=inside, other=0.0)
                values = tl.load(value_rows + at[None, :], mask=inside, other=0.0)
            gate = _add_product(x, gates, gate, TURNED, BY_BITS)
            value = _add_product(x, values, value, TURNED, BY_BITS)
        if TURNED:
            gate, value = tl.trans(gate), tl.trans(value)
        if inverse_ptr is not None:
            gate *= gate_inverse[None, :]
            value *= value_inverse[None, :]
        if x_inverse_ptr is not None:
            x_inverse = tl.load(x_inverse_ptr + pick // TOPK, mask=real, other=0.0)
            gate *= x_inverse[:, None]
            value *= x_inverse[:, None]
        weight = tl.load(weights_ptr + pick, mask=real, other=0.0)
        y = gate / (1.0 + tl.exp(-gate)) * value * weight[:, None]
        places = (start + row)[:, None].to(tl.int64) * width + column[None, :]
        tl.store(h_ptr + places, y.to(h_ptr.dtype.element_ty), mask=real[:, None] & (column[None, :] < width))


@triton.jit
def _down_many_kernel(
    h_ptr, h_inverse_ptr, down_ptr, inverse_ptr, order_ptr, ends_ptr, y_ptr, width, out,
    LINES: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, TURNED: tl.constexpr,
    BY_BITS: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(out, COLS)
    expert = tl.program_id(0) // blocks
    end = tl.load(ends_ptr + expert)
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    row, lane = tl.arange(0, LINES), tl.arange(0, DEPTH)
    column = tl.program_id(0) % blocks * COLS + tl.arange(0, COLS)
    rows = down_ptr + (expert.to(tl.int64) * out + column)[:, None] * width
    if inverse_ptr is not None:
        inverse = tl.load(inverse_ptr + expert.to(tl.int64) * out + column, mask=column < out, other=0.0)
    for start in range(begin, end, LINES):
        real = start + row < end
        h_rows = h_ptr + (start + row)[:, None].to(tl.int64) * width
        total = _sums(LINES, COLS, TURNED)
        for first in range(0, width, DEPTH):
            at = first + lane
            if EVEN:
                h = tl.load(h_rows + at[None, :], mask=real[:, None], other=0.0)
                weight = tl.load(rows + at[None, :])
            else:
                h = tl.load(h_rows + at[None, :], mask=real[:, None] & (at[None, :] < width), other=0.0)
                weight = tl.load(rows + at[None, :], mask=(at[None, :] < width) & (column[:, None] < out), other=0.0)
            total = _add_product(h, weight, total, TURNED, BY_BITS)
        if TURNED:
            total = tl.trans(total)
        if inverse_ptr is not None:
            total *= inverse[None, :]
        if h_inverse_ptr is not None:
            total *= tl.load(h_inverse_ptr + start + row, mask=real, other=0.0)[:, None]
        pick = tl.load(order_ptr + start + row, mask=real, other=0)
        places = pick[:, None].to(tl.int64) * out + column[None, :]
        tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), mask=real[:, None] & (column[None, :] < out))


@triton.jit
def _sums(LINES: tl.constexpr, COLS: tl.constexpr, TURNED: tl.constexpr):
    return tl.zeros((COLS, LINES), dtype=tl.float32) if TURNED else tl.zeros((LINES, COLS), dtype=tl.float32)


@triton.jit
def _add_product(x, weight, total, TURNED: tl.constexpr, BY_BITS: tl.constexpr):
    """``total + x weight^T``, or its transpose; only weights in fp8 beside wider rows are cast."""
    if TURNED:
        total = tl.dot(widened(weight, x.dtype, BY_BITS), tl.trans(x), total)
    else:
        total = tl.dot(x, tl.trans(widened(weight, x.dtype, BY_BITS)), total)
    return total


@triton.jit
def _add_rows_kernel(
    rows_ptr, places_ptr, x_ptr, norm_ptr, normed_ptr, width, epsilon, shift, TOPK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = lane < width
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for number in tl.static_range(TOPK):
        row = token * TOPK + number
        if places_ptr is not None:
            row = tl.load(places_ptr + row).to(tl.int64)
        total += tl.load(rows_ptr + row * width + lane, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(x_ptr + token * width + lane, mask=inside, other=0.0).to(tl.float32)
    result = total.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + token * width + lane, result, mask=inside)
    seen = result.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(seen * seen, 0) / width + epsilon)
    factor = tl.load(norm_ptr + lane, mask=inside, other=0.0).to(tl.float32) + shift
    tl.store(normed_ptr + token * width + lane, (seen * scale * factor).to(normed_ptr.dtype.element_ty), mask=inside)
