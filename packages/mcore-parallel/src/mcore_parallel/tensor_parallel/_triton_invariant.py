# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of matmuls and softmax statistics whose bits for a row do not depend on the other rows; imported only when they run.

The sum over the input features has one order for all numbers of rows: slices of fixed length, each accumulated in float32 by steps of a
fixed depth, the slices added in their order. Tiles follow from the features alone. A launch of few rows gives each slice a program of its
own and adds the same numbers in the same order as a launch of many, whose programs take all slices. Tiles of 64 rows with four warps and
of 128 rows with eight run the same instruction on Hopper (wgmma of 64 rows, as wide as the tile) and on older GPUs (mma of 16 x 8), so a
row's bits are those of either. From Blackwell on the instruction depends on the rows of a tile, so that these never change there.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens (rows), I input and O output features, S slices of the input features, v columns of logits, K statistics a row; R rows in the
# order of N experts.

FEWEST_PROGRAMS = 96
"""A launch of fewer leaves multiprocessors idle: the input features are then cut into slices, which may be programs of their own."""
_WIDE_TILE, _TILE, _DEPTH = 256, 128, 64
_SLICE = 512
"""Input features below which a slice costs more than it gains."""
_MOST_SLICES = 8
_GROUPED_TILES = 8
"""Tiles of rows that run beside each other over the same weights, which then come from the cache."""
_LOGITS_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class LinearTiling:
    """How a weight [O, I] is cut; nothing of it depends on the rows that are multiplied."""

    columns: int
    """Output features of a tile."""
    depth: int
    """Input features of one step."""
    slices: int
    slice_depth: int
    """Input features of a slice, a multiple of ``depth``."""
    stages: int

    @classmethod
    def of(cls, out_features: int, in_features: int, dtype: torch.dtype) -> "LinearTiling":
        """Example:
        >>> LinearTiling.of(2048, 8192, torch.bfloat16).slices
        8
        """
        if dtype == torch.float32:
            # Sums of products by single instructions, which hold their factors in registers.
            columns, depth, stages = 32, 32, 2
        elif out_features >= FEWEST_PROGRAMS * _WIDE_TILE:
            columns, depth, stages = _WIDE_TILE, _DEPTH, 3
        else:
            columns, depth, stages = _TILE, _DEPTH, 4
        slices, tiles = 1, -(-out_features // columns)
        while slices < _MOST_SLICES and slices * tiles < FEWEST_PROGRAMS and in_features >= 2 * slices * _SLICE:
            slices *= 2
        slice_depth = -(-in_features // (slices * depth)) * depth
        return cls(columns=columns, depth=depth, slices=slices, slice_depth=slice_depth, stages=stages)


def linear(x_TI: Tensor, weight_OI: Tensor, finished: Tensor, *, split: bool | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x W^T [T, O].

    Args:
        x_TI: contiguous.
        weight_OI: contiguous, of the dtype of x.
        finished: [at least FEWEST_PROGRAMS, and one a tile of the result with split=True] int32 zeros, which the programs count in, and
            leave zero.
        split: give each slice a program of its own, where there are several; None where there are few programs. The bits are the same.
        dtype: of the result, to which float32 sums are rounded; None for that of x.
    """
    (rows, depth), columns = x_TI.shape, weight_OI.shape[0]
    y_TO = torch.empty((rows, columns), dtype=dtype or x_TI.dtype, device=x_TI.device)
    if not y_TO.numel():
        return y_TO
    tiling = LinearTiling.of(columns, depth, x_TI.dtype)
    block_rows, warps = _row_tile(rows, x_TI)
    programs = -(-rows // block_rows) * -(-columns // tiling.columns)
    split = tiling.slices > 1 and (programs < FEWEST_PROGRAMS if split is None else split)
    parts = torch.empty((tiling.slices, rows, columns), dtype=torch.float32, device=x_TI.device) if split else None
    _linear_kernel[(programs, tiling.slices if split else 1)](
        x_TI, weight_OI, y_TO, parts, finished if split else None, rows, columns, depth, tiling.slice_depth,
        ROWS=block_rows, COLUMNS=tiling.columns, DEPTH=tiling.depth, SLICES=tiling.slices, SPLIT=split,
        WHOLE_COLUMNS=columns % tiling.columns == 0, WHOLE_DEPTH=depth % tiling.depth == 0, GROUPED_TILES=_GROUPED_TILES,
        PRECISION="ieee" if x_TI.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=tiling.stages,
    )  # fmt: skip
    return y_TO


def grouped_linear(rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
    """x W_e^T [R, O] of rows in the order of their experts, in the dtype of x.

    Tiles of rows begin at the first row of each expert, and input features are added up in one order, from the first one on. The host
    knows how many tiles there are at most; each program finds its expert by itself.

    Args:
        rows_RI: contiguous; the results of those behind the last expert are not written.
        weight_NOI: contiguous, of the dtype of x.
        ends_N: int32, the rows of this expert and of all before it.
    """
    (rows, depth), (experts, columns) = rows_RI.shape, weight_NOI.shape[:2]
    y_RO = torch.empty((rows, columns), dtype=rows_RI.dtype, device=rows_RI.device)
    if not y_RO.numel():
        return y_RO
    tiling = LinearTiling.of(columns, depth, rows_RI.dtype)
    block_rows, warps = _row_tile(-(-rows // experts), rows_RI)
    # Every expert may leave its last tile unfilled.
    row_tiles = rows // block_rows + min(experts, rows)
    _grouped_kernel[(row_tiles, -(-columns // tiling.columns))](
        rows_RI, weight_NOI, ends_N, y_RO, columns, depth, experts,
        ROWS=block_rows, COLUMNS=tiling.columns, DEPTH=tiling.depth, EXPERTS=triton.next_power_of_2(max(16, experts)),
        WHOLE_COLUMNS=columns % tiling.columns == 0, WHOLE_DEPTH=depth % tiling.depth == 0,
        PRECISION="ieee" if rows_RI.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=tiling.stages,
    )  # fmt: skip
    return y_RO


def _row_tile(rows: int, x: Tensor) -> tuple[int, int]:
    """Rows of a tile, and warps."""
    if x.dtype == torch.float32:
        return 64, 4
    if x.is_cuda and torch.cuda.get_device_capability(x.device) >= (10, 0):
        return 128, 8
    return (64, 4) if rows <= 64 else (128, 8)


def row_statistics(logits_Tv: Tensor, inverse_T: Tensor, column_T: Tensor, valid: int, lowest: float) -> Tensor:
    """[K, T] as ``mcore_parallel.tensor_parallel.row_statistics`` with entropy, of logits times ``inverse`` [T] float32.

    Args:
        logits_Tv: unit column stride.
        inverse_T: one over the temperature of each row.
        column_T: int64, -1 for none.
        valid: leading columns that count, at least one.
        lowest: below every logit.
    """
    rows = logits_Tv.shape[0]
    out_KT = torch.empty((4, rows), dtype=torch.float32, device=logits_Tv.device)
    if rows:
        _statistics_kernel[(rows,)](
            logits_Tv, inverse_T, column_T, out_KT, logits_Tv.stride(0), rows, valid, lowest,
            BLOCK=_LOGITS_BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out_KT


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr, weight_ptr, y_ptr, parts_ptr, finished_ptr, rows, columns, depth, slice_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr, SPLIT: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr, WHOLE_DEPTH: tl.constexpr, GROUPED_TILES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    group = program // (GROUPED_TILES * column_tiles)
    inside_group = program % (GROUPED_TILES * column_tiles)
    group_rows = tl.minimum(row_tiles - group * GROUPED_TILES, GROUPED_TILES)
    row = (group * GROUPED_TILES + inside_group % group_rows) * ROWS + tl.arange(0, ROWS)
    column = inside_group // group_rows * COLUMNS + tl.arange(0, COLUMNS)
    lane = tl.arange(0, DEPTH)
    held_rows, held_columns = (row < rows)[:, None], (column < columns)[None, :]
    x_tile = x_ptr + row.to(tl.int64)[:, None] * depth + lane[None, :]
    weight_tile = weight_ptr + column.to(tl.int64)[None, :] * depth + lane[:, None]
    inside = held_rows & held_columns
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    if SPLIT:
        number = tl.program_id(1)
        part = _slice(
            x_tile, weight_tile, held_rows, held_columns, lane, number * slice_depth, slice_depth, depth,
            ROWS, COLUMNS, DEPTH, WHOLE_COLUMNS, WHOLE_DEPTH, PRECISION,
        )  # fmt: skip
        size = rows.to(tl.int64) * columns
        tl.store(parts_ptr + number * size + at, part, mask=inside)
        tl.debug_barrier()
        before = tl.atomic_add(finished_ptr + program, 1, sem="acq_rel")
        if before == SLICES - 1:
            total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for other in tl.static_range(SLICES):
                # Past the first-level cache, which may hold what stood there before.
                total += tl.load(parts_ptr + other * size + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)
            tl.store(finished_ptr + program, 0)
    else:
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for number in range(SLICES):
            total += _slice(
                x_tile, weight_tile, held_rows, held_columns, lane, number * slice_depth, slice_depth, depth,
                ROWS, COLUMNS, DEPTH, WHOLE_COLUMNS, WHOLE_DEPTH, PRECISION,
            )  # fmt: skip
        tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _grouped_kernel(
    x_ptr, weight_ptr, ends_ptr, y_ptr, columns, depth, experts,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr,
    WHOLE_COLUMNS: tl.constexpr, WHOLE_DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert_lane = tl.arange(0, EXPERTS)
    real = expert_lane < experts
    ends = tl.load(ends_ptr + expert_lane, mask=real, other=0)
    starts = tl.load(ends_ptr + expert_lane - 1, mask=real & (expert_lane > 0), other=0)
    last_tiles = tl.cumsum(tl.where(real, (ends - starts + ROWS - 1) // ROWS, 0), 0)
    # Experts whose tiles all lie before this one.
    expert = tl.sum((real & (last_tiles <= tile)).to(tl.int32), 0)
    if expert < experts:
        before = tl.max(tl.where(expert_lane < expert, last_tiles, 0), 0)
        end = tl.load(ends_ptr + expert)
        start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
        row = start + (tile - before) * ROWS + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        lane = tl.arange(0, DEPTH)
        held_rows, held_columns = (row < end)[:, None], (column < columns)[None, :]
        x_tile = x_ptr + row.to(tl.int64)[:, None] * depth + lane[None, :]
        line = expert.to(tl.int64) * columns + column
        weight_tile = weight_ptr + line[None, :] * depth + lane[:, None]
        total = _slice(
            x_tile, weight_tile, held_rows, held_columns, lane, 0, depth, depth,
            ROWS, COLUMNS, DEPTH, WHOLE_COLUMNS, WHOLE_DEPTH, PRECISION,
        )  # fmt: skip
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=held_rows & held_columns)


@triton.jit
def _slice(
    x_tile, weight_tile, held_rows, held_columns, lane, first, slice_depth, depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE_COLUMNS: tl.constexpr, WHOLE_DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of a tile that one slice of the input features gives."""
    part = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, tl.minimum(first + slice_depth, depth), DEPTH):
        x_mask, weight_mask = held_rows, held_columns
        if not WHOLE_DEPTH:
            x_mask, weight_mask = held_rows & (start + lane < depth)[None, :], held_columns & (start + lane < depth)[:, None]
        x = tl.load(x_tile + start, mask=x_mask, other=0.0)
        if WHOLE_COLUMNS and WHOLE_DEPTH:
            weight = tl.load(weight_tile + start)
        else:
            weight = tl.load(weight_tile + start, mask=weight_mask, other=0.0)
        part = tl.dot(x, weight, part, input_precision=PRECISION)
    return part


# Neither strides nor addresses are compiled in: the order of the sums follows from how a program's threads share a block, and that from
# how wide they load.
_NAMES = ["logits_ptr", "inverse_ptr", "column_ptr", "out_ptr", "stride", "rows", "valid"]


@triton.jit(do_not_specialize=_NAMES, do_not_specialize_on_alignment=_NAMES)
def _statistics_kernel(logits_ptr, inverse_ptr, column_ptr, out_ptr, stride, rows, valid, lowest, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    line_ptr = logits_ptr + row * stride
    lanes = tl.arange(0, BLOCK)
    inverse = tl.load(inverse_ptr + row)
    largest = lowest * 1.0
    exp_sum = largest * 0.0
    weighted = largest * 0.0
    for start in range(0, valid, BLOCK):
        z = tl.load(line_ptr + start + lanes, mask=start + lanes < valid, other=float("-inf")).to(tl.float32) * inverse
        above = tl.maximum(largest, tl.max(z, 0))
        shrink = tl.exp(largest - above)
        below = z - above
        exp = tl.exp(below)
        weighted = shrink * (weighted + exp_sum * (largest - above)) + tl.sum(tl.where(exp > 0, exp * below, 0.0), 0)
        exp_sum = exp_sum * shrink + tl.sum(exp, 0)
        largest = above
    column = tl.load(column_ptr + row)
    picked = tl.load(line_ptr + tl.maximum(column, 0)).to(tl.float32) * inverse
    tl.store(out_ptr + row, largest)
    tl.store(out_ptr + rows + row, exp_sum)
    tl.store(out_ptr + 2 * rows + row, tl.where(column >= 0, picked, 0.0))
    tl.store(out_ptr + 3 * rows + row, weighted)
