# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of the adapters of a step of few tokens; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, I and O input and output features, S slots, r greatest rank, P = S r, K parts of a sum over I

_INPUTS, _OUTPUTS, _MAX_PARTS = 128, 64, 8


def add_few(y_TO: Tensor, x_TI: Tensor, A_PI: Tensor, B_OP: Tensor, slots_T: Tensor, rank: int) -> Tensor:
    """Add to each token what its own adapter gives, in place, in two launches; slots that no token has cost nothing.

    Args:
        y_TO: its rows are contiguous.
        x_TI: contiguous; a tile holds all tokens.
        A_PI: contiguous.
        B_OP: contiguous, of all slots side by side.
        slots_T: int32, -1 for none.
        rank: r; ranks of all slots, each rounded up to a power of two, are at most 256.
    """
    (num_tokens, inputs), (outputs, ranks) = x_TI.shape, B_OP.shape
    size = triton.cdiv(triton.cdiv(inputs, _MAX_PARTS), _INPUTS) * _INPUTS
    parts = triton.cdiv(inputs, size)
    # What is not written is not read: each token's own ranks alone.
    sums_KTP = torch.empty((parts, num_tokens, ranks), dtype=torch.float32, device=x_TI.device)
    # Of ranks that fill shared memory one tile at a time.
    stages = {"num_stages": 1 if rank > 64 else 3}
    tiles = {"RANK": rank, "TOKENS": max(16, triton.next_power_of_2(num_tokens)), "RANKS": max(16, triton.next_power_of_2(rank))}
    _shrink_kernel[(ranks // rank, parts)](
        x_TI, A_PI, slots_T, sums_KTP, num_tokens, inputs, size, ranks, INPUTS=_INPUTS, num_warps=4, **tiles, **stages
    )
    _expand_kernel[(triton.cdiv(outputs, _OUTPUTS),)](
        y_TO, sums_KTP, B_OP, slots_T, num_tokens, outputs, y_TO.stride(0), ranks,
        OUTPUTS=_OUTPUTS, PARTS=parts, SLOTS=triton.next_power_of_2(ranks // rank), num_warps=4, **tiles,
    )  # fmt: skip
    return y_TO


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _shrink_kernel(
    x_ptr, a_ptr, slots_ptr, sums_ptr, num_tokens, inputs, size, ranks,
    INPUTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """A part of A x for one slot, if any token has it."""
    slot, part = tl.program_id(0), tl.program_id(1)
    token, lane, column = tl.arange(0, TOKENS), tl.arange(0, RANKS), tl.arange(0, INPUTS)
    own = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) == 0:
        return
    total = tl.zeros((TOKENS, RANKS), tl.float32)
    for begin in range(part * size, tl.minimum(part * size + size, inputs), INPUTS):
        inside = begin + column < inputs
        x = tl.load(x_ptr + token[:, None] * inputs + begin + column[None, :], mask=own[:, None] & inside[None, :], other=0.0)
        a = tl.load(
            a_ptr + (slot * RANK + lane[None, :]) * inputs + begin + column[:, None],
            mask=(lane < RANK)[None, :] & inside[:, None],
            other=0.0,
        )
        total = tl.dot(x, a, total, out_dtype=tl.float32)
    place = (part * num_tokens + token[:, None]) * ranks + slot * RANK + lane[None, :]
    tl.store(sums_ptr + place, total, mask=own[:, None] & (lane < RANK)[None, :])


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots_ptr"])
def _expand_kernel(
    y_ptr, sums_ptr, b_ptr, slots_ptr, num_tokens, outputs, stride, ranks,
    OUTPUTS: tl.constexpr, PARTS: tl.constexpr, SLOTS: tl.constexpr, RANK: tl.constexpr, TOKENS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """B (A x) of some outputs, added to y."""
    token, lane, slot = tl.arange(0, TOKENS), tl.arange(0, RANKS), tl.arange(0, SLOTS)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    slots = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1)
    mine = (slots >= 0)[:, None] & (lane < RANK)[None, :]
    product = tl.zeros((TOKENS, RANKS), tl.float32)
    for part in tl.static_range(PARTS):
        place = (part * num_tokens + token[:, None]) * ranks + slots[:, None] * RANK + lane[None, :]
        product += tl.load(sums_ptr + place, mask=mine, other=0.0)
    # Each token's ranks among those of all slots, for one product.
    own = slots[:, None] == slot[None, :]
    spread = tl.reshape(tl.where(own[:, :, None], product[:, None, :], 0.0), (TOKENS, SLOTS * RANKS))
    used = (tl.max(own.to(tl.int32), 0) > 0)[:, None] & (lane < RANK)[None, :]
    rank = tl.reshape(slot[:, None] * RANK + lane[None, :], (SLOTS * RANKS,))
    b = tl.load(
        b_ptr + output[None, :] * ranks + rank[:, None],
        mask=tl.reshape(used, (SLOTS * RANKS,))[:, None] & (output < outputs)[None, :],
        other=0.0,
    )
    total = tl.dot(spread.to(b.dtype), b, out_dtype=tl.float32)
    adapted = (slots >= 0)[:, None] & (output < outputs)[None, :]
    place = y_ptr + token[:, None] * stride + output[None, :]
    y = tl.load(place, mask=adapted, other=0.0).to(tl.float32)
    tl.store(place, (y + total).to(y_ptr.dtype.element_ty), mask=adapted)
