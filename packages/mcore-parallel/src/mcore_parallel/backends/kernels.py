# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton functions that kernels of several wheels call; imported only where such a kernel is."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_parallel._stability import internal_api

__all__ = ["arrive", "peer_memories", "peer_pointer", "sum_of_peers", "wait_for_all", "widened", "widens_by_bits"]


@internal_api
def widens_by_bits(x: Tensor) -> bool:
    """Whether ``widened`` may compute with bits beside these values: bfloat16 on an NVIDIA GPU."""
    return x.dtype == torch.bfloat16 and x.is_cuda and torch.version.hip is None


@internal_api
@triton.jit
def widened(weight, kind: tl.constexpr, BY_BITS: tl.constexpr):
    """Weights in the dtype of what they are multiplied by; those in e4m3 exactly, by bits where ``widens_by_bits`` says so.

    Hopper converts e4m3 to float16 and on over float32, a quarter as fast as it moves bits. The bits of e4m3 under the exponent of
    bfloat16 are the number over 2^120, also of those below the smallest normal one; so four are spread, shifted and multiplied at once.
    NaN becomes 480: whoever stores weights keeps it in their scales.
    """
    if BY_BITS and weight.dtype == tl.float8e4nv:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 low, high, low_bits, high_bits, factor, nothing;
            prmt.b32 low, 0, $2, 0x5040;
            prmt.b32 high, 0, $2, 0x7060;
            shr.u32 low_bits, low, 4;
            shr.u32 high_bits, high, 4;
            and.b32 low_bits, low_bits, 0x07F007F0;
            and.b32 high_bits, high_bits, 0x07F007F0;
            lop3.b32 low_bits, low, 0x80008000, low_bits, 0xEA;
            lop3.b32 high_bits, high, 0x80008000, high_bits, 0xEA;
            mov.b32 factor, 0x7B807B80;
            mov.b32 nothing, 0x80008000;
            fma.rn.bf16x2 $0, low_bits, factor, nothing;
            fma.rn.bf16x2 $1, high_bits, factor, nothing;
            }
            """,
            "=r,=r,r",
            [weight],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        return weight.to(kind)


@internal_api
@triton.jit
def peer_pointer(address, offset, element: tl.constexpr):
    """A pointer into a rank's ``SymmetricBuffer``: address and offset, in bytes, are multiples of 16, so that a thread moves 16 at once."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(element)), 16)


@internal_api
@triton.jit
def peer_memories(addresses_ptr, element: tl.constexpr, RANKS: tl.constexpr):
    """A tuple of pointers to elements, where the memory of each rank begins; their addresses are int64 [RANKS]."""
    memories = ()
    for peer in tl.static_range(RANKS):
        memories = memories + (peer_pointer(tl.load(addresses_ptr + peer), 0, element),)  # noqa: RUF005, Triton has no other way
    return memories


@internal_api
@triton.jit
def arrive(addresses, counter_at):
    """Count this program in at every rank, its own among them; what it and the kernels before it did comes first.

    Addresses are int64, where the memory of each rank begins; the counter is an int32 so many bytes behind, zero before the first arrives.
    """
    # One thread counts for all of them.
    tl.debug_barrier()
    tl.atomic_add((addresses + counter_at).to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")


@internal_api
@triton.jit
def wait_for_all(counter_ptr, RANKS: tl.constexpr):
    """Wait until the same program of every rank has arrived at this counter, and leave it zero, so that a graph may replay it.

    A rank arrives at a counter once more only when all have left it. A kernel that meets at two counters, one after the other, keeps to
    that: who has arrived at one of them has left the other.
    """
    while tl.atomic_cas(counter_ptr, RANKS, 0, sem="acquire", scope="sys") != RANKS:
        pass


@internal_api
@triton.jit
def sum_of_peers(memories, place, inside, RANKS: tl.constexpr):
    """Elements at ``place`` of all memories, added in rank order and rounded to their dtype each time, as torch's one-shot all-reduce.

    Memories are those of ``peer_memories``, as many as ranks; elements that are not ``inside`` are 0.
    """
    # Past the first-level cache, which may hold what stood there before.
    total = tl.load(memories[0] + place, mask=inside, other=0.0, cache_modifier=".cg")
    for peer in tl.static_range(1, RANKS):
        part = tl.load(memories[peer] + place, mask=inside, other=0.0, cache_modifier=".cg")
        total = (total.to(tl.float32) + part.to(tl.float32)).to(part.dtype)
    return total
