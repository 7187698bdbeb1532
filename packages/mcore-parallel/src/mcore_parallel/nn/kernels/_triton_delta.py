# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel of the states of the gated delta rule from chunk to chunk; imported only when it runs."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_parallel.nn.kernels._chunks import ChunkPlan

# B sequences, C chunks, Q places of a chunk, H heads, K width of keys, V width of values.

_WIDEST_TILE = 64
"""Channels of values of a program: what a matrix instruction of Hopper takes, and about what its registers hold of 128 channels of keys."""


def delta_sweep(
    own_CHQV: Tensor, read_CHQK: Tensor, writers_CHKQ: Tensor, decay_CH: Tensor, plan: ChunkPlan, initial_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """States before each chunk [C, H, K, V] and behind each sequence [B, H, K, V]: a chunk makes ``decay S + writers (own - read S)`` of S.

    Args:
        own_CHQV: float32, as all others.
        read_CHQK: what a chunk's tokens see of the state before it.
        writers_CHKQ: what they add to it.
        decay_CH: over the whole chunk.
        plan: the sequences.
        initial_BHKV: states before them.
    """
    (heads, places, v), k = own_CHQV.shape[1:], read_CHQK.shape[-1]
    # Chunks of no sequence stay as they are.
    before = own_CHQV.new_zeros(plan.num_chunks, heads, k, v)
    behind = torch.empty((plan.num_sequences, heads, k, v), dtype=torch.float32, device=before.device)
    block_k, block_q = (max(16, triton.next_power_of_2(size)) for size in (k, places))
    block_v = min(_WIDEST_TILE, max(16, triton.next_power_of_2(v)))
    if plan.num_sequences:
        _sweep_kernel[(plan.num_sequences, heads, triton.cdiv(v, block_v))](
            own_CHQV.contiguous(), read_CHQK.contiguous(), writers_CHKQ.contiguous(), decay_CH.contiguous(), initial_BHKV.contiguous(),
            before, behind, plan.first_chunk, heads, K=k, V=v, Q=places, BLOCK_K=block_k, BLOCK_V=block_v, BLOCK_Q=block_q,
            num_warps=4, num_stages=1,
        )  # fmt: skip
    return before, behind


@triton.jit
def _sweep_kernel(
    own_ptr, read_ptr, writers_ptr, decay_ptr, initial_ptr, before_ptr, behind_ptr, first_chunk_ptr, heads,
    K: tl.constexpr, V: tl.constexpr, Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    k, v, q = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_Q)
    in_k, in_v, in_q = k < K, v < V, q < Q
    # Transposed: a state is the factor that lies in registers, and the others' sums go along their rows.
    in_state, state_at = in_v[:, None] & in_k[None, :], k[None, :] * V + v[:, None]
    own_at = (sequence * heads + head).to(tl.int64) * K * V
    state = tl.load(initial_ptr + own_at + state_at, mask=in_state, other=0.0)
    first = tl.load(first_chunk_ptr + sequence)
    for number in range(tl.load(first_chunk_ptr + sequence + 1) - first):
        at = (first + number).to(tl.int64) * heads + head
        tl.store(before_ptr + at * K * V + state_at, state, mask=in_state)
        read = tl.load(read_ptr + at * Q * K + q[None, :] * K + k[:, None], mask=in_k[:, None] & in_q[None, :], other=0.0)
        own = tl.load(own_ptr + at * Q * V + q[None, :] * V + v[:, None], mask=in_v[:, None] & in_q[None, :], other=0.0)
        change = own - tl.dot(state, read, input_precision="tf32x3")
        writers = tl.load(writers_ptr + at * K * Q + k[None, :] * Q + q[:, None], mask=in_q[:, None] & in_k[None, :], other=0.0)
        state = state * tl.load(decay_ptr + at) + tl.dot(change, writers, input_precision="tf32x3")
    tl.store(behind_ptr + own_at + state_at, state, mask=in_state)
