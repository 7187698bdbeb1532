# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of a router without gradients: logits and choice in one launch, the order by expert in another; imported when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_moe._triton_router import own_scores, unrolled
from mcore_parallel.nn import NormedStream

# T tokens, D model, E experts, K experts a token, P = T * K picks, R lines of a block of tokens, S experts that were picked.

FEW = 16
"""Tokens up to which a layer is bound by reading the experts that they pick: one side of a matrix instruction."""


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What a router computes with."""

    weight: Tensor
    """[E, D]."""
    bias: Tensor | None
    """[E] of the logits."""
    expert_bias: Tensor | None
    """[E] float32, of the selection."""
    topk: int
    score: int
    """As in ``SCORES`` of the router that learns."""
    pre_softmax: bool
    scaling: float


@dataclass(frozen=True, kw_only=True)
class FewPicks:
    """The picks of at most ``FEW`` tokens, by expert."""

    count: Tensor
    """[1] int32, S."""
    experts_S: Tensor
    """[at least S] int32, rising."""
    weights_SR: Tensor
    """[at least S, R] float32 weights of the tokens; 0 where a token did not pick the expert."""
    scales_R: Tensor
    """[R] float32, what the norm in front of the router multiplies a token by."""


@dataclass(frozen=True, kw_only=True)
class ManyPicks:
    """The picks of any number of tokens."""

    experts_TK: Tensor
    """int32; slot 0 holds the highest score."""
    weights_TK: Tensor
    """float32."""


@dataclass(frozen=True, kw_only=True)
class RouteTiles:
    """How a launch of the router is divided."""

    lines: int
    """Tokens of a program."""
    cols: int
    """Experts of a program."""
    depth: int
    splits: int = 1
    """Parts of D."""
    warps: int = 4
    stages: int = 3


FEW_TILES = RouteTiles(lines=FEW, cols=16, depth=256, splits=4)
MANY_TILES = RouteTiles(lines=16, cols=16, depth=256, splits=2)
MOST_TILES = RouteTiles(lines=64, cols=1024, depth=64, warps=8)
"""Where the tokens fill the device: all experts in one program."""
_WIDE_TILES = RouteTiles(lines=16, cols=1024, depth=32, warps=8, stages=2)
"""The same for more experts, whose keys take the memory of a multiprocessor."""
_WIDE = 256


def route_few(x: NormedStream, gate: Gate, arrived: Tensor, tiles: RouteTiles = FEW_TILES) -> FewPicks:
    """Route at most ``FEW`` tokens.

    Args:
        x: in front of the norm.
        gate: the router.
        arrived: int32 zeros, which the programs count in, and leave zero.
        tiles: of the launch.
    """
    tokens, experts, device = x.x.shape[0], gate.weight.shape[0], x.x.device
    most = min(experts, tokens * gate.topk)
    count, experts_S = (torch.empty(size, dtype=torch.int32, device=device) for size in (1, most))
    weights_SR = torch.empty((most, tiles.lines), dtype=torch.float32, device=device)
    scales_R = torch.empty(tiles.lines, dtype=torch.float32, device=device)
    _launch(x.scaled, (x.squares, x.epsilon), gate, arrived, tiles, (count, experts_S, weights_SR, scales_R, None, None))
    return FewPicks(count=count, experts_S=experts_S, weights_SR=weights_SR, scales_R=scales_R)


def route_many(x_TD: Tensor, gate: Gate, arrived: Tensor, tiles: RouteTiles | None = None) -> ManyPicks:
    """Route normed tokens; arguments as of ``route_few``."""
    tokens = len(x_TD)
    most = MOST_TILES if gate.weight.shape[0] <= _WIDE else _WIDE_TILES
    chosen = tiles or (MANY_TILES if triton.cdiv(tokens, MANY_TILES.lines) <= len(arrived) else most)
    ids = torch.empty((tokens, gate.topk), dtype=torch.int32, device=x_TD.device)
    weights = torch.empty((tokens, gate.topk), dtype=torch.float32, device=x_TD.device)
    _launch(x_TD, (None, 0.0), gate, arrived, chosen, (None, None, None, None, ids, weights))
    return ManyPicks(experts_TK=ids, weights_TK=weights)


def _launch(
    x_TD: Tensor,
    norm: tuple[Tensor | None, float],
    gate: Gate,
    arrived: Tensor,
    tiles: RouteTiles,
    results: tuple[Tensor | None, ...],
) -> None:
    (tokens, depth), experts = x_TD.shape, gate.weight.shape[0]
    width = max(16, triton.next_power_of_2(experts))
    cols, block = min(tiles.cols, width), max(16, min(tiles.depth, triton.next_power_of_2(depth)))
    splits = tiles.splits if depth % (tiles.splits * block) == 0 else 1
    blocks, programs = triton.cdiv(tokens, tiles.lines), triton.cdiv(experts, cols) * splits
    squares, epsilon = norm
    # One program a block counts nothing.
    logits = None if programs == 1 else torch.empty((blocks, splits, tiles.lines, width), dtype=torch.float32, device=x_TD.device)
    parts = 0 if squares is None else len(squares)
    _route_kernel[(blocks, programs)](
        x_TD, squares, gate.weight, gate.bias, gate.expert_bias, logits, arrived, *results,
        tokens, depth, experts, x_TD.stride(0), parts, epsilon, gate.scaling,
        LINES=tiles.lines, COLS=cols, DEPTH=block, SPLITS=splits, WIDTH=width, TOPK=gate.topk, SCORE=gate.score, PRE=gate.pre_softmax,
        PARTS=triton.next_power_of_2(max(parts, 16)), EVEN=depth % (block * splits) == 0 and experts % cols == 0,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


@triton.jit
def _route_kernel(
    x_ptr, squares_ptr, gate_ptr, bias_ptr, expert_bias_ptr, logits_ptr, arrived_ptr,
    count_ptr, experts_ptr, few_weights_ptr, scales_ptr, ids_ptr, weights_ptr,
    tokens, depth, experts, x_stride, parts, epsilon, scaling,
    LINES: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr, WIDTH: tl.constexpr, TOPK: tl.constexpr,
    SCORE: tl.constexpr, PRE: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1) % SPLITS
    line, lane = tl.arange(0, LINES), tl.arange(0, DEPTH)
    token = block * LINES + line
    column = tl.program_id(1) // SPLITS * COLS + tl.arange(0, COLS)
    x_rows = x_ptr + token[:, None].to(tl.int64) * x_stride
    gate_rows = gate_ptr + column[None, :] * depth
    total = tl.zeros((LINES, COLS), dtype=tl.float32)
    share = depth // SPLITS
    for first in range(part * share, (part + 1) * share, DEPTH):
        at = first + lane
        if EVEN:
            gate = tl.load(gate_rows + at[:, None])
            x = tl.load(x_rows + at[None, :], mask=token[:, None] < tokens, other=0.0)
        else:
            gate = tl.load(gate_rows + at[:, None], mask=(at[:, None] < depth) & (column[None, :] < experts), other=0.0)
            x = tl.load(x_rows + at[None, :], mask=(token[:, None] < tokens) & (at[None, :] < depth), other=0.0)
        total = tl.dot(x, gate, total)
    expert = tl.arange(0, WIDTH)
    last = tl.num_programs(1) - 1
    if COLS == WIDTH and SPLITS == 1:
        logits, before = total, last
    else:
        places = block * (SPLITS * LINES * WIDTH) + line[:, None] * WIDTH
        tl.store(logits_ptr + part * (LINES * WIDTH) + places + column[None, :], total)
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel")
        logits = tl.zeros((LINES, WIDTH), dtype=tl.float32)
    if before == last:
        if not (COLS == WIDTH and SPLITS == 1):
            # Past the first-level cache, which may hold what stood there before.
            for number in tl.static_range(SPLITS):
                written = places + number * (LINES * WIDTH) + expert[None, :]
                logits += tl.load(logits_ptr + written, mask=expert[None, :] < experts, other=0.0, cache_modifier=".cg")
            tl.store(arrived_ptr + block, 0)
        if squares_ptr is not None:
            number = tl.arange(0, PARTS)
            squares = tl.load(squares_ptr + number[:, None] * LINES + line[None, :], mask=number[:, None] < parts, other=0.0)
            scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / depth + epsilon)
            logits *= scale[:, None]
            tl.store(scales_ptr + line, scale)
        if bias_ptr is not None:
            logits += tl.load(bias_ptr + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
        rank, weight = _choose(logits, expert_bias_ptr, experts, scaling, LINES, WIDTH, TOPK, SCORE, PRE)
        if count_ptr is None:
            place = token[:, None].to(tl.int64) * TOPK + rank
            picked = (rank < TOPK) & (token[:, None] < tokens)
            tl.store(ids_ptr + place, tl.broadcast_to(expert[None, :], (LINES, WIDTH)), mask=picked)
            tl.store(weights_ptr + place, weight, mask=picked)
        else:
            picked = (rank < TOPK) & (token[:, None] < tokens)
            active = tl.max(picked.to(tl.int32), 0)
            slot = tl.cumsum(active, 0) - active
            tl.store(count_ptr, tl.sum(active, 0))
            tl.store(experts_ptr + slot, expert, mask=active > 0)
            into = few_weights_ptr + slot[None, :] * LINES + line[:, None]
            tl.store(into, tl.where(picked, weight, 0.0), mask=active[None, :] > 0)


@triton.jit
def _choose(
    logits, expert_bias_ptr, experts, scaling,
    LINES: tl.constexpr, WIDTH: tl.constexpr, TOPK: tl.constexpr, SCORE: tl.constexpr, PRE: tl.constexpr,
):  # fmt: skip
    """Rank of each expert among those of its token (TOPK where it is not chosen) and its weight, [LINES, WIDTH] both."""
    expert = tl.arange(0, WIDTH)
    exists = expert[None, :] < experts
    if SCORE == 0 and PRE:
        shifted = tl.where(exists, logits, -float("inf"))
        powers = tl.exp(shifted - tl.max(shifted, 1)[:, None])
        scores = powers / tl.sum(powers, 1)[:, None]
    else:
        scores = own_scores(logits, exists, SCORE)
    keys = scores
    if expert_bias_ptr is not None:
        keys += tl.load(expert_bias_ptr + expert, mask=expert < experts, other=0.0)[None, :]
    # Integers in the order of the keys, of equal ones the lowest number last; -0.0 is 0.0.
    bits = (keys + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = (bits.to(tl.int64) << 32) | (WIDTH - 1 - expert)[None, :].to(tl.int64)
    lowest = -0x7FFFFFFFFFFFFFFF
    places = tl.where(exists, places, lowest)
    rank = tl.full((LINES, WIDTH), TOPK, dtype=tl.int32)
    for block in range(0, TOPK, unrolled(TOPK)):
        for step in tl.static_range(unrolled(TOPK)):
            number = block + step
            hit = places == tl.max(places, 1)[:, None]
            rank = tl.where(hit, number, rank)
            places = tl.where(hit, lowest, places)
    chosen = rank < TOPK
    if SCORE != 0:
        weight = tl.where(chosen, scores, 0.0)
        if TOPK > 1:
            weight = weight / (tl.sum(weight, 1) + 1e-20)[:, None]
    elif PRE:
        weight = tl.where(chosen, scores, 0.0)
    else:
        best = tl.max(tl.where(chosen, logits, -float("inf")), 1)
        weight = tl.where(chosen, tl.exp(logits - best[:, None]), 0.0)
        weight = weight / tl.sum(weight, 1)[:, None]
    return rank, weight * scaling


def order(experts_TK: Tensor, num_experts: int, *, places: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """Picks in the order of their experts, and of their tokens within one.

    Returns:
        order [P] int32, ends [E] int32 (picks of an expert and of all before it), and with ``places`` the row [P] int32 of each pick.
    """
    picks, device = experts_TK.numel(), experts_TK.device
    order_P = torch.empty(picks, dtype=torch.int32, device=device)
    ends_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    places_P = torch.empty_like(order_P) if places else None
    block = max(128, min(4096, triton.next_power_of_2(picks)))
    _order_kernel[(num_experts,)](experts_TK, order_P, ends_E, places_P, picks, BLOCK=block, num_warps=4 if block <= 1024 else 8)
    return order_P, ends_E, places_P


@triton.jit
def _order_kernel(ids_ptr, order_ptr, ends_ptr, places_ptr, picks, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    below = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, picks, BLOCK):
        ids = tl.load(ids_ptr + first + lane, mask=first + lane < picks, other=0x7FFFFFFF)
        below += (ids < expert).to(tl.int32)
    row = tl.sum(below, 0)
    for first in range(0, picks, BLOCK):
        pick = first + lane
        mine = tl.load(ids_ptr + pick, mask=pick < picks, other=0x7FFFFFFF) == expert
        ones = mine.to(tl.int32)
        place = row + tl.cumsum(ones, 0) - ones
        tl.store(order_ptr + place, pick, mask=mine)
        if places_ptr is not None:
            tl.store(places_ptr + pick, place, mask=mine)
        row += tl.sum(ones, 0)
    tl.store(ends_ptr + expert, row)
