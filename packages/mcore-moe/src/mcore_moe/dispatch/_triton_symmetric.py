# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of an exchange: they store tokens and sums in the memory of other GPUs; imported only when they run.

Each does what the function of its name in ``_peer_slots`` does; a program handles one token, and a part of its width.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import triton
import triton.language as tl
from torch import Tensor

from mcore_moe.dispatch._peer_slots import Slot, SlotLayout
from mcore_moe.dispatch._triton import blocks_of
from mcore_parallel.backends.kernels import peer_pointer


def push_tokens(
    layout: SlotLayout, addresses: Tensor, begin: int, rank: int, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor | None
) -> None:
    """``addresses`` int64 of the ranks' memory, ``begin`` the byte of the slot in it."""
    block, blocks = blocks_of(layout.width)
    routed = weights_TK is not None
    # Behind the last token of this rank the others must see that there is none.
    tokens = layout.room if routed else len(x_TD)
    if not tokens:
        return
    _push_tokens_kernel[(tokens * blocks,)](
        addresses, x_TD, experts_TK, x_TD if weights_TK is None else weights_TK, begin, layout.weights_at, layout.experts_at, len(x_TD),
        layout.width, layout.room, rank, blocks, layout.num_local_experts, RANKS=layout.num_ranks, TOPK=layout.topk,
        PICKS=triton.next_power_of_2(layout.topk), ROUTED=routed, BLOCK=block, num_warps=4,
    )  # fmt: skip


def push_sums(
    layout: SlotLayout, addresses: Tensor, begin: int, rank: int, rows_RD: Tensor, places_AK: Tensor, grad_R: Tensor | None
) -> None:
    """As ``push_tokens``, the other way."""
    block, blocks = blocks_of(layout.width)
    _push_sums_kernel[(len(places_AK) * blocks,)](
        addresses, rows_RD, rows_RD if grad_R is None else grad_R, places_AK, begin, layout.weights_at, layout.width, layout.room, rank,
        blocks, TOPK=layout.topk, PICKS=triton.next_power_of_2(layout.topk), WEIGHTED=grad_R is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip


def add_sums(layout: SlotLayout, slot: Slot, experts_TK: Tensor, *, weighted: bool) -> tuple[Tensor, Tensor | None]:
    """The sums over the ranks are in float32, in rank order."""
    tokens = len(experts_TK)
    y_TD = slot.x_AD.new_empty(tokens, layout.width)
    grad_TK = slot.weights_AK.new_empty(tokens, layout.topk) if weighted else None
    block, blocks = blocks_of(layout.width)
    if tokens:
        _add_sums_kernel[(tokens * blocks,)](
            slot.x_AD, slot.weights_AK, experts_TK, y_TD, slot.weights_AK if grad_TK is None else grad_TK, layout.width, layout.room,
            blocks, layout.num_local_experts, RANKS=layout.num_ranks, TOPK=layout.topk, PICKS=triton.next_power_of_2(layout.topk),
            WEIGHTED=weighted, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return y_TD, grad_TK


@triton.jit
def _push_tokens_kernel(
    addresses_ptr, x_ptr, experts_ptr, weights_ptr, begin, weights_at, experts_at, tokens, width, room, rank, blocks, local_experts,
    RANKS: tl.constexpr, TOPK: tl.constexpr, PICKS: tl.constexpr, ROUTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    picks = tl.arange(0, PICKS)
    is_token = token < tokens
    inside = (lanes < width) & is_token
    picked = (picks < TOPK) & is_token
    experts = tl.load(experts_ptr + token * TOPK + picks, mask=picked, other=-1)
    x = tl.load(x_ptr + token * width + lanes, mask=inside)
    place = token + rank * room
    for peer in tl.static_range(RANKS):
        address = tl.load(addresses_ptr + peer) + begin
        first = peer * local_experts
        wanted = tl.sum(((experts >= first) & (experts < first + local_experts)).to(tl.int32), 0) > 0
        row_ptr = peer_pointer(address, 0, x_ptr.dtype.element_ty) + place * width
        tl.store(row_ptr + lanes, x, mask=inside & wanted)
        if ROUTED:
            here = (picks < TOPK) & (block == 0)
            tl.store(peer_pointer(address, experts_at, tl.int32) + place * TOPK + picks, experts, mask=here)
            weights = tl.load(weights_ptr + token * TOPK + picks, mask=picked & here, other=0.0)
            tl.store(peer_pointer(address, weights_at, weights_ptr.dtype.element_ty) + place * TOPK + picks, weights, mask=here)


@triton.jit
def _push_sums_kernel(
    addresses_ptr, rows_ptr, grad_ptr, places_ptr, begin, weights_at, width, room, rank, blocks,
    TOPK: tl.constexpr, PICKS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    received = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    picks = tl.arange(0, PICKS)
    places = tl.load(places_ptr + received * TOPK + picks, mask=picks < TOPK, other=-1)
    if tl.max(places, 0) >= 0:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for pick in tl.static_range(TOPK):
            place = tl.load(places_ptr + received * TOPK + pick).to(tl.int64)
            row = tl.load(rows_ptr + place * width + lanes, mask=inside & (place >= 0), other=0.0)
            total += row.to(tl.float32)
        address = tl.load(addresses_ptr + received // room) + begin
        home = received % room + rank * room
        element = rows_ptr.dtype.element_ty
        tl.store(peer_pointer(address, 0, element) + home * width + lanes, total.to(element), mask=inside)
        if WEIGHTED:
            here = (places >= 0) & (block == 0)
            grad = tl.load(grad_ptr + places, mask=here)
            tl.store(peer_pointer(address, weights_at, grad_ptr.dtype.element_ty) + home * TOPK + picks, grad, mask=here)


@triton.jit
def _add_sums_kernel(
    x_ptr, weights_ptr, experts_ptr, y_ptr, grad_ptr, width, room, blocks, local_experts,
    RANKS: tl.constexpr, TOPK: tl.constexpr, PICKS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    lanes = block * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    picks = tl.arange(0, PICKS)
    experts = tl.load(experts_ptr + token * TOPK + picks, mask=picks < TOPK, other=-1)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for peer in tl.static_range(RANKS):
        first = peer * local_experts
        wanted = tl.sum(((experts >= first) & (experts < first + local_experts)).to(tl.int32), 0) > 0
        part = tl.load(x_ptr + (peer * room + token) * width + lanes, mask=inside & wanted, other=0.0)
        total += part.to(tl.float32)
    tl.store(y_ptr + token * width + lanes, total.to(y_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        here = (picks < TOPK) & (block == 0)
        came = here & (experts >= 0)
        home = (experts // local_experts).to(tl.int64) * room + token
        grad = tl.load(weights_ptr + home * TOPK + picks, mask=came, other=0.0)
        tl.store(grad_ptr + token * TOPK + picks, grad, mask=here)
