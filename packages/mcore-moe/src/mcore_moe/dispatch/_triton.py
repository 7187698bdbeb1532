# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of rows in the order of the experts; imported only when they run.

Each does what the function of its name in ``_places`` does. A program that moves handles one token, and a part of its width; one that finds
places handles a chunk of tokens, and every expert.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_moe._triton_router import unrolled

_MOST_LANES, _SUM_LANES = 2048, 1024
_LEAST_EXPERTS, _MOST_CHUNK = 16, 128
_TILE, _SCAN_TILE = 4096, 16384
"""Tokens of a chunk times experts, and chunks of a turn times experts: what a program has in registers."""


def place_rows(experts_TK: Tensor, first_expert: int, num_experts: int) -> tuple[Tensor, Tensor]:
    """Three launches: picks of each expert in each chunk, what lies before each chunk, and the places."""
    tokens, topk = experts_TK.shape
    experts = max(_LEAST_EXPERTS, triton.next_power_of_2(num_experts))
    chunk = min(_MOST_CHUNK, max(1, _TILE // experts))
    chunks = triton.cdiv(tokens, chunk)
    picks_CN = experts_TK.new_empty(chunks, num_experts)
    before_CN, ends_N = torch.empty_like(picks_CN), experts_TK.new_empty(num_experts)
    places_TK = torch.empty_like(experts_TK)
    sizes = {"TOPK": topk, "CHUNK": chunk, "EXPERTS": experts}
    if chunks:
        _count_picks_kernel[(chunks,)](experts_TK, picks_CN, tokens, first_expert, num_experts, **sizes, num_warps=4)
    lines = max(1, _SCAN_TILE // experts)
    _scan_picks_kernel[(1,)](picks_CN, before_CN, ends_N, chunks, num_experts, LINES=lines, EXPERTS=experts, num_warps=16)
    if chunks:
        _place_picks_kernel[(chunks,)](experts_TK, before_CN, places_TK, tokens, first_expert, num_experts, **sizes, num_warps=4)
    return places_TK, ends_N


def spread_rows(x_TD: Tensor, weights_TK: Tensor | None, places_TK: Tensor, num_rows: int, *, padded: bool) -> tuple[Tensor, Tensor | None]:
    """A token is read once, whatever the number of its rows."""
    x_TD, weights_TK = x_TD.contiguous(), None if weights_TK is None else weights_TK.contiguous()
    (tokens, topk), width = places_TK.shape, x_TD.shape[1]
    new = torch.zeros if padded else torch.empty
    rows_RD = new((num_rows, width), dtype=x_TD.dtype, device=x_TD.device)
    weights_R = None if weights_TK is None else new(num_rows, dtype=weights_TK.dtype, device=x_TD.device)
    block, blocks = blocks_of(width)
    if tokens:
        _spread_rows_kernel[(tokens * blocks,)](
            x_TD, x_TD if weights_TK is None else weights_TK, places_TK, rows_RD, x_TD if weights_R is None else weights_R, width, blocks,
            TOPK=topk, PICKS=triton.next_power_of_2(topk), WEIGHTED=weights_R is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return rows_RD, weights_R


def place_tokens(weights_TK: Tensor, places_TK: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """A program handles some picks."""
    tokens_R = torch.empty(num_rows, dtype=torch.int32, device=places_TK.device)
    weights_R = torch.empty(num_rows, dtype=weights_TK.dtype, device=places_TK.device)
    if places_TK.numel():
        _place_tokens_kernel[(triton.cdiv(places_TK.numel(), _SUM_LANES),)](
            weights_TK, places_TK, tokens_R, weights_R, places_TK.numel(), TOPK=places_TK.shape[1], BLOCK=_SUM_LANES, num_warps=4
        )  # fmt: skip
    return tokens_R, weights_R


def gather_sum(rows_RD: Tensor, places_TK: Tensor) -> Tensor:
    """[T, D]: rows at the places of each token, added in order in float32; places below 0 add nothing."""
    tokens, topk = places_TK.shape
    width = rows_RD.shape[1]
    y_TD = torch.empty((tokens, width), dtype=rows_RD.dtype, device=rows_RD.device)
    if y_TD.numel():
        blocks = triton.cdiv(width, _SUM_LANES)
        _gather_sum_kernel[(tokens * blocks,)](
            rows_RD, places_TK, y_TD, rows_RD.stride(0), width, blocks, TOPK=topk, BLOCK=_SUM_LANES, num_warps=4
        )  # fmt: skip
    return y_TD


def blocks_of(width: int) -> tuple[int, int]:
    """Elements of a program, and programs of a token."""
    block = min(_MOST_LANES, triton.next_power_of_2(width))
    return block, triton.cdiv(width, block)


@triton.jit
def _picked(experts_ptr, token, tokens, first, TOPK: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """int32 [CHUNK, EXPERTS], 1 where a token picked an expert of this rank."""
    lane = tl.arange(0, EXPERTS)
    picked = tl.zeros((CHUNK, EXPERTS), dtype=tl.int32)
    for block in range(0, TOPK, unrolled(TOPK)):
        for step in tl.static_range(unrolled(TOPK)):
            pick = block + step
            expert = tl.load(experts_ptr + token * TOPK + pick, mask=token < tokens, other=-1) - first
            picked += (expert[:, None] == lane[None, :]).to(tl.int32)
    return picked


@triton.jit
def _count_picks_kernel(
    experts_ptr, picks_ptr, tokens, first, experts, TOPK: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    lane = tl.arange(0, EXPERTS)
    picked = _picked(experts_ptr, token, tokens, first, TOPK, CHUNK, EXPERTS)
    tl.store(picks_ptr + chunk * experts + lane, tl.sum(picked, 0), mask=lane < experts)


@triton.jit
def _scan_picks_kernel(picks_ptr, before_ptr, ends_ptr, chunks, experts, LINES: tl.constexpr, EXPERTS: tl.constexpr):
    lane = tl.arange(0, EXPERTS)
    line = tl.arange(0, LINES)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for begin in range(0, chunks, LINES):
        inside = (begin + line < chunks)[:, None] & (lane < experts)[None, :]
        total += tl.sum(tl.load(picks_ptr + (begin + line)[:, None] * experts + lane[None, :], mask=inside, other=0), 0)
    ends = tl.cumsum(total, 0)
    tl.store(ends_ptr + lane, ends, mask=lane < experts)
    before = ends - total
    for begin in range(0, chunks, LINES):
        inside = (begin + line < chunks)[:, None] & (lane < experts)[None, :]
        at = (begin + line)[:, None] * experts + lane[None, :]
        picks = tl.load(picks_ptr + at, mask=inside, other=0)
        tl.store(before_ptr + at, before[None, :] + tl.cumsum(picks, 0) - picks, mask=inside)
        before += tl.sum(picks, 0)


@triton.jit
def _place_picks_kernel(
    experts_ptr, before_ptr, places_ptr, tokens, first, experts, TOPK: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    lane = tl.arange(0, EXPERTS)
    before = tl.load(before_ptr + chunk * experts + lane, mask=lane < experts, other=0)
    rows = before[None, :] + tl.cumsum(_picked(experts_ptr, token, tokens, first, TOPK, CHUNK, EXPERTS), 0) - 1
    for block in range(0, TOPK, unrolled(TOPK)):
        for step in tl.static_range(unrolled(TOPK)):
            pick = block + step
            expert = tl.load(experts_ptr + token * TOPK + pick, mask=token < tokens, other=-1) - first
            row = tl.sum(tl.where(expert[:, None] == lane[None, :], rows, 0), 1)
            mine = (expert >= 0) & (expert < experts)
            tl.store(places_ptr + token * TOPK + pick, tl.where(mine, row, -1), mask=token < tokens)


@triton.jit
def _spread_rows_kernel(
    x_ptr, weights_ptr, places_ptr, rows_ptr, row_weights_ptr, width, blocks,
    TOPK: tl.constexpr, PICKS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    picks = tl.arange(0, PICKS)
    places = tl.load(places_ptr + token * TOPK + picks, mask=picks < TOPK, other=-1)
    if tl.max(places, 0) >= 0:
        x = tl.load(x_ptr + token * width + lanes, mask=inside)
        for pick in tl.static_range(TOPK):
            place = tl.load(places_ptr + token * TOPK + pick).to(tl.int64)
            tl.store(rows_ptr + place * width + lanes, x, mask=inside & (place >= 0))
        if WEIGHTED:
            here = (places >= 0) & (block == 0)
            weights = tl.load(weights_ptr + token * TOPK + picks, mask=here)
            tl.store(row_weights_ptr + places, weights, mask=here)


@triton.jit
def _place_tokens_kernel(weights_ptr, places_ptr, tokens_ptr, row_weights_ptr, picks, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    pick = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + pick, mask=pick < picks, other=-1)
    weight = tl.load(weights_ptr + pick, mask=pick < picks)
    tl.store(tokens_ptr + place, pick // TOPK, mask=place >= 0)
    tl.store(row_weights_ptr + place, weight, mask=place >= 0)


@triton.jit
def _gather_sum_kernel(rows_ptr, places_ptr, y_ptr, stride, width, blocks, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = (tl.program_id(0) // blocks).to(tl.int64)
    lanes = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(TOPK):
        place = tl.load(places_ptr + token * TOPK + choice).to(tl.int64)
        row = tl.load(rows_ptr + place * stride + lanes, mask=inside & (place >= 0), other=0.0)
        total += row.to(tl.float32)
    tl.store(y_ptr + token * width + lanes, total.to(y_ptr.dtype.element_ty), mask=inside)
