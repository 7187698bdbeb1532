# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of normalisation and rotation; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, D width of a norm, K key-value heads, G query heads of each, A heads, d width of a head.

_NORM_PROGRAMS = 264
"""Programs of the norms' backward, each of which holds one partial sum of the weight gradient: two on a multiprocessor of Hopper."""
_TOTAL_ROWS, _TOTAL_COLUMNS = 64, 32
"""Tile of the sum over them."""
_NORM_TILE = 2048
"""Elements of narrow rows that one program takes together."""


def norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, epsilon: float, shift: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """RMS norm, or with a bias layer norm, with ``weight + shift``: the result [T, D], and float32 statistics [T]: the reciprocal
    root mean squares, and the means of a layer norm."""
    tokens, width = x_TD.shape
    y_TD = torch.empty((tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    scale_T = torch.empty(tokens, dtype=torch.float32, device=x_TD.device)
    mean_T = None if bias_D is None else torch.empty_like(scale_T)
    if tokens:
        constants = _row_constants(width)
        _norm_kernel[(triton.cdiv(tokens, constants["ROWS"]),)](
            x_TD, weight_D, bias_D, y_TD, scale_T, mean_T, x_TD.stride(0), tokens, width, epsilon, shift,
            LAYER=bias_D is not None, **constants,
        )  # fmt: skip
    return y_TD, scale_T, mean_T


def norm_backward(
    grad_TD: Tensor,
    residual_TD: Tensor | None,
    x_TD: Tensor,
    weight_D: Tensor,
    scale_T: Tensor,
    mean_T: Tensor | None,
    shift: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of x, to which ``residual`` is added, of the weight, and with means of the bias; the latter two are summed in a fixed
    order."""
    tokens, width = x_TD.shape
    grad_x_TD = torch.empty((tokens, width), dtype=x_TD.dtype, device=x_TD.device)
    constants, layer = _row_constants(width), mean_T is not None
    # Programs of fewer warps come in larger numbers.
    programs = min(_NORM_PROGRAMS * max(1, 8 // constants["num_warps"]), triton.cdiv(tokens, constants["ROWS"]))
    parts_2PD = torch.empty((1 + layer, programs, width), dtype=torch.float32, device=x_TD.device)
    if tokens:
        _norm_backward_kernel[(programs,)](
            grad_TD, residual_TD, x_TD, weight_D, scale_T, mean_T, grad_x_TD, parts_2PD,
            grad_TD.stride(0), 0 if residual_TD is None else residual_TD.stride(0), x_TD.stride(0), tokens, width, shift,
            LAYER=layer, **constants,
        )  # fmt: skip
    totals_2D = torch.empty((1 + layer, width), dtype=weight_D.dtype, device=x_TD.device)
    grid = (triton.cdiv(width, _TOTAL_COLUMNS), 1 + layer)
    _norm_total_kernel[grid](parts_2PD, totals_2D, programs, width, ROWS=_TOTAL_ROWS, BLOCK=_TOTAL_COLUMNS, num_warps=4)
    return grad_x_TD, totals_2D[0], totals_2D[1] if layer else None


def split_rotated(qkv_TKHd: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [T, K G, d] and keys [T, K, d], and values [T, K, d], of the packed projection [T, K, G + 2, d]."""
    tokens, kv_heads, blocks, width = qkv_TKHd.shape
    shapes = ((tokens, kv_heads * (blocks - 2), width), (tokens, kv_heads, width), (tokens, kv_heads, width))
    q, k, v = (torch.empty(shape, dtype=qkv_TKHd.dtype, device=qkv_TKHd.device) for shape in shapes)
    _rotate(qkv_TKHd, q, k, v, tables, interleaved, backward=False)
    return q, k, v


def split_rotated_backward(grads: tuple[Tensor, Tensor, Tensor], tables: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """Gradient [T, K, G + 2, d] of the packed projection."""
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
    tokens, kv_heads, width = grad_k.shape
    packed = torch.empty((tokens, kv_heads, grad_q.shape[1] // kv_heads + 2, width), dtype=grad_q.dtype, device=grad_q.device)
    _rotate(packed, grad_q, grad_k, grad_v, tables, interleaved, backward=True)
    return packed


def rotated(x_TAd: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool, *, backward: bool = False) -> Tensor:
    """Heads [T, A, d] turned forth, or back; the last stride of x is 1."""
    tokens, heads, width = x_TAd.shape
    y_TAd = torch.empty((tokens, heads, width), dtype=x_TAd.dtype, device=x_TAd.device)
    if y_TAd.numel():
        tile = _head_tile(heads, width)
        _turn_kernel[(tokens, triton.cdiv(heads, tile))](
            x_TAd, y_TAd, *tables, x_TAd.stride(0), x_TAd.stride(1), tables[0].stride(0), heads,
            BACKWARD=backward, ROWS=tile, **_pair_constants(width, tables, interleaved),
        )  # fmt: skip
    return y_TAd


def _rotate(packed: Tensor, q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor], interleaved: bool, *, backward: bool) -> None:
    tokens, kv_heads, blocks, width = packed.shape
    if not tokens:
        return
    tile = _head_tile(kv_heads * blocks, width)
    _rotate_kernel[(tokens, triton.cdiv(kv_heads * blocks, tile))](
        packed, q, k, v, *tables, packed.stride(0), tables[0].stride(0), kv_heads * blocks, blocks,
        BACKWARD=backward, ROWS=tile, **_pair_constants(width, tables, interleaved),
    )  # fmt: skip


def _row_constants(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    rows = max(1, _NORM_TILE // block)
    return {"ROWS": rows, "BLOCK": block, "num_warps": min(16, max(1, rows * block // 512))}


def _head_tile(rows: int, width: int) -> int:
    """Heads that a program takes: a power of two, whatever the width of a head."""
    return min(triton.next_power_of_2(rows), max(1, 4096 // triton.next_power_of_2(width)))


def _pair_constants(width: int, tables: tuple[Tensor, Tensor], interleaved: bool) -> dict[str, int]:
    """How many pairs of a head turn, how they lie, and how many channels behind them pass through."""
    turning = tables[0].shape[-1]
    half, rest = turning // 2, width - turning
    return {
        "WIDTH": width, "HALF": half, "HALF_BLOCK": triton.next_power_of_2(half), "INTERLEAVED": interleaved,
        "REST": rest, "REST_BLOCK": triton.next_power_of_2(max(1, rest)), "num_warps": 4,
    }  # fmt: skip


# The number of rows is not compiled in: it has no part in what becomes of a row.
@triton.jit(do_not_specialize=["tokens"])
def _norm_kernel(
    x_ptr, weight_ptr, bias_ptr, y_ptr, scale_ptr, mean_ptr, stride, tokens, width, epsilon, shift,
    LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, BLOCK)
    columns = lanes < width
    inside = (rows < tokens)[:, None] & columns[None, :]
    x = tl.load(x_ptr + rows[:, None] * stride + lanes[None, :], mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + lanes, mask=columns, other=0.0).to(tl.float32) + shift
    if LAYER:
        mean = tl.sum(x, 1) / width
        tl.store(mean_ptr + rows, mean, mask=rows < tokens)
        x = tl.where(columns[None, :], x - mean[:, None], 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / width + epsilon)
    y = x * scale[:, None] * weight[None, :]
    if LAYER:
        y += tl.load(bias_ptr + lanes, mask=columns, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + rows[:, None] * width + lanes[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + rows, scale, mask=rows < tokens)


@triton.jit
def _norm_backward_kernel(
    grad_ptr, residual_ptr, x_ptr, weight_ptr, scale_ptr, mean_ptr, grad_x_ptr, parts_ptr,
    grad_stride, residual_stride, x_stride, tokens, width, shift, LAYER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    columns = lanes < width
    weight = tl.load(weight_ptr + lanes, mask=columns, other=0.0).to(tl.float32)[None, :] + shift
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if LAYER:
        bias_total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    step = tl.num_programs(0) * ROWS
    # Offsets of 64 bits.
    rows = program * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = (rows < tokens)[:, None] & columns[None, :]
    next_grad = tl.load(grad_ptr + rows[:, None] * grad_stride + lanes[None, :], mask=inside, other=0.0)
    next_x = tl.load(x_ptr + rows[:, None] * x_stride + lanes[None, :], mask=inside, other=0.0)
    for _ in range(program * ROWS, tokens, step):
        grad, x, here, at = next_grad.to(tl.float32), next_x.to(tl.float32), inside, rows
        # The next rows are on their way while these are worked on: the sums over a row wait for all warps.
        rows += step
        inside = (rows < tokens)[:, None] & columns[None, :]
        next_grad = tl.load(grad_ptr + rows[:, None] * grad_stride + lanes[None, :], mask=inside, other=0.0)
        next_x = tl.load(x_ptr + rows[:, None] * x_stride + lanes[None, :], mask=inside, other=0.0)
        scale = tl.load(scale_ptr + at, mask=at < tokens, other=0.0)[:, None]
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + at[:, None] * residual_stride + lanes[None, :], mask=here, other=0.0)
        if LAYER:
            x -= tl.load(mean_ptr + at, mask=at < tokens, other=0.0)[:, None]
            bias_total += grad
        # Outside the row the gradient is 0.
        unit = x * scale
        inner = grad * weight
        grad_x = inner - unit * (tl.sum(inner * unit, 1) / width)[:, None]
        if LAYER:
            grad_x -= (tl.sum(inner, 1) / width)[:, None]
        grad_x *= scale
        if residual_ptr is not None:
            grad_x += residual.to(tl.float32)
        tl.store(grad_x_ptr + at[:, None] * width + lanes[None, :], grad_x.to(grad_x_ptr.dtype.element_ty), mask=here)
        total += grad * unit
    tl.store(parts_ptr + program * width + lanes, tl.sum(total, 0), mask=columns)
    if LAYER:
        tl.store(parts_ptr + (tl.num_programs(0) + program) * width + lanes, tl.sum(bias_total, 0), mask=columns)


@triton.jit
def _norm_total_kernel(parts_ptr, total_ptr, programs, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    which = tl.program_id(1)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < programs)[:, None] & (lanes < width)[None, :]
        total += tl.load(parts_ptr + (which * programs + rows)[:, None] * width + lanes[None, :], mask=inside, other=0.0)
    tl.store(total_ptr + which * width + lanes, tl.sum(total, 0).to(total_ptr.dtype.element_ty), mask=lanes < width)


@triton.jit
def _turn_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, token_stride, head_stride, table_stride, heads,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < heads
    x_rows = x_ptr + token * token_stride + rows.to(tl.int64) * head_stride
    y_rows = y_ptr + (token * heads + rows) * WIDTH
    table = token * table_stride
    _turn_rows(x_rows, y_rows, inside, inside, cos_ptr + table, sin_ptr + table, BACKWARD, HALF, HALF_BLOCK, INTERLEAVED, REST, REST_BLOCK)


@triton.jit
def _rotate_kernel(
    packed_ptr, q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, packed_stride, table_stride, num_rows, blocks,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    inside = rows < num_rows
    head = rows // blocks
    block = rows % blocks
    kv_heads = num_rows // blocks
    group = blocks - 2
    # Where each row lies in its own tensor.
    q_rows = q_ptr + (token * kv_heads * group + head * group + block) * WIDTH
    kv_row = (token * kv_heads + head) * WIDTH
    own_rows = tl.where(block < group, q_rows, tl.where(block == group, k_ptr + kv_row, v_ptr + kv_row))
    packed_rows = packed_ptr + token * packed_stride + rows * WIDTH
    x_rows = own_rows if BACKWARD else packed_rows
    y_rows = packed_rows if BACKWARD else own_rows
    table = token * table_stride
    _turn_rows(
        x_rows, y_rows, inside, block <= group, cos_ptr + table, sin_ptr + table, BACKWARD, HALF, HALF_BLOCK, INTERLEAVED, REST, REST_BLOCK
    )


@triton.jit
def _turn_rows(
    x_rows, y_rows, inside, turns, cos_ptr, sin_ptr,
    BACKWARD: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads at pointers x_rows [ROWS, 1] to y_rows; those that do not turn are copied."""
    lanes = tl.arange(0, HALF_BLOCK)[None, :]
    at = lanes * 2 if INTERLEAVED else lanes
    cos = tl.where(turns, tl.load(cos_ptr + at, mask=lanes < HALF, other=0.0), 1.0)
    sin = tl.where(turns, tl.load(sin_ptr + at, mask=lanes < HALF, other=0.0), 0.0)
    if BACKWARD:
        sin = -sin
    element = y_rows.dtype.element_ty
    if INTERLEAVED:
        # Whole lines, taken apart in registers.
        line = tl.arange(0, 2 * HALF_BLOCK)[None, :]
        x = tl.load(x_rows + line, mask=inside & (line < 2 * HALF), other=0.0).to(tl.float32)
        first, second = tl.split(tl.reshape(x, (x.shape[0], HALF_BLOCK, 2)))
        y = tl.reshape(tl.join(first * cos - second * sin, second * cos + first * sin), (x.shape[0], 2 * HALF_BLOCK))
        tl.store(y_rows + line, y.to(element), mask=inside & (line < 2 * HALF))
    else:
        half = inside & (lanes < HALF)
        first = tl.load(x_rows + lanes, mask=half, other=0.0).to(tl.float32)
        second = tl.load(x_rows + HALF + lanes, mask=half, other=0.0).to(tl.float32)
        tl.store(y_rows + lanes, (first * cos - second * sin).to(element), mask=half)
        tl.store(y_rows + HALF + lanes, (second * cos + first * sin).to(element), mask=half)
    if REST:
        behind = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        passing = inside & (behind < 2 * HALF + REST)
        tl.store(y_rows + behind, tl.load(x_rows + behind, mask=passing, other=0.0), mask=passing)
