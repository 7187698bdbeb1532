# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel of the choice of experts; imported only when it runs."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_EXPERTS = 1024
_TILE = 2048
"""Keys of a program."""


def top(keys_TE: Tensor, topk: int) -> Tensor:
    """As ``_routing.top``, of float32 keys of at most ``MOST_EXPERTS`` experts, in one pass over them."""
    tokens, experts = keys_TE.shape
    top_TK = torch.empty((tokens, topk), dtype=torch.int64, device=keys_TE.device)
    lanes = triton.next_power_of_2(experts)
    chunk = max(1, _TILE // lanes)
    if top_TK.numel():
        sizes = {"TOPK": topk, "EXPERTS": lanes, "TOKENS": chunk}
        _top_kernel[(triton.cdiv(tokens, chunk),)](keys_TE.contiguous(), top_TK, tokens, experts, **sizes, num_warps=4)
    return top_TK


@triton.jit
def _top_kernel(keys_ptr, top_ptr, tokens, experts, TOPK: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    lane = tl.arange(0, EXPERTS)
    inside = (token < tokens)[:, None] & (lane < experts)[None, :]
    keys = tl.load(keys_ptr + token[:, None] * experts + lane[None, :], mask=inside, other=0.0)
    # Integers in the order of the keys: both zeros are one, and what is no number comes first, as a sort has it.
    bits = tl.where(keys == 0.0, 0.0, keys).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(keys != keys, 0x7FFFFFFF, bits)
    # Below them the number, so that of equal keys the lowest wins; nothing is below what is out.
    out = tl.full((TOKENS, EXPERTS), -0x8000000000000000, tl.int64)
    ranked = tl.where(inside, (bits.to(tl.int64) << 32) + (EXPERTS - 1 - lane)[None, :], out)
    for pick in tl.static_range(TOPK):
        best = tl.max(ranked, 1)
        number = EXPERTS - 1 - (best & 0xFFFFFFFF)
        tl.store(top_ptr + token * TOPK + pick, number, mask=token < tokens)
        ranked = tl.where(number[:, None] == lane[None, :], out, ranked)
