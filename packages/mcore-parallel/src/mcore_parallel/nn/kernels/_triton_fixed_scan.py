# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of linear mixers whose bits for a token depend on its own sequence only; imported only when they run.

A sequence goes on from its state token after token. One compilation serves training, prompts, parts of prompts and single tokens, so all
of them round alike, and wherever a sequence is cut, its state is the one it would have had there. Multiplications and additions are not
contracted: a loop that the compiler unrolls rounds as one that it does not.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, B sequences, M slots of states, G groups, W channels of a group, K taps, H heads, h of a group; of Mamba-2 P channels of a head
# and N of a state, of a delta net D channels of a key and V of a value.

_BLOCK_T, _BLOCK_W = 16, 64
_STATE = 1024
"""Elements of a head's state that a warp holds: 32 registers of each thread, and sums that wait for no other warp."""
_MOST_WARPS = 4


def conv_fixed(
    channels_TGW: Tensor, conv: tuple[Tensor, Tensor | None], state_MKGW: Tensor, spans: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """``silu(conv(x))`` [T, G, W], 0 for tokens of no sequence; the states in the slots go on.

    Args:
        channels_TGW: contiguous.
        conv: weight [G, W, K] and bias [G, W], contiguous.
        state_MKGW: [M, K - 1, G, W] contiguous, of the dtype of the channels.
        spans: of B sequences first tokens and ends [B] int32, and slots [B] int64; one without tokens or in slot -1 is left out.
    """
    weight, bias = conv
    (groups, width, taps), out = weight.shape, torch.zeros_like(channels_TGW)
    if len(spans[0]) and out.numel():
        _conv_kernel[(len(spans[0]), groups, triton.cdiv(width, _BLOCK_W))](
            channels_TGW, weight, bias, state_MKGW, out, *spans, GROUPS=groups, CHANNELS=width, TAPS=taps,
            TAP_BLOCK=triton.next_power_of_2(max(1, taps - 1)), BLOCK_T=_BLOCK_T, BLOCK_W=_BLOCK_W, num_warps=4,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


def ssd_fixed(
    mixed_TGW: Tensor, numbers_TGh: Tensor, heads: tuple[Tensor, Tensor, Tensor], memory_MHPN: Tensor,
    spans: tuple[Tensor, Tensor, Tensor], limits: tuple[float, float],
) -> Tensor:  # fmt: skip
    """y [T, H, P] of Mamba-2, 0 for tokens of no sequence; the states in the slots go on.

    Args:
        mixed_TGW: of each group values [h P], b [N] and c [N], contiguous.
        numbers_TGh: step sizes before bias and softplus, contiguous.
        heads: A_log, D and the bias of the step sizes, [H].
        memory_MHPN: float32, contiguous.
        spans: as of ``conv_fixed``.
        limits: of the step sizes.
    """
    heads_H, p, n = memory_MHPN.shape[1:]
    block_n = triton.next_power_of_2(n)
    block_p = max(1, min(triton.next_power_of_2(p), _STATE // block_n))
    y_THP = torch.zeros((len(mixed_TGW), heads_H, p), dtype=mixed_TGW.dtype, device=mixed_TGW.device)
    if len(spans[0]):
        _ssd_kernel[(len(spans[0]), heads_H, triton.cdiv(p, block_p))](
            mixed_TGW, numbers_TGh, *heads, memory_MHPN, y_THP, *spans, *limits, GROUPS=mixed_TGW.shape[1],
            GROUP_HEADS=numbers_TGh.shape[2], CHANNELS=mixed_TGW.shape[2], P=p, N=n, BLOCK_P=block_p, BLOCK_N=block_n,
            num_warps=_warps(block_p * block_n), enable_fp_fusion=False,
        )  # fmt: skip
    return y_THP


def delta_fixed(
    mixed_TGW: Tensor, numbers_TGn: Tensor, heads: tuple[Tensor, Tensor], memory_MHDV: Tensor,
    spans: tuple[Tensor, Tensor, Tensor], epsilon: float,
) -> Tensor:  # fmt: skip
    """o [T, H, V] of a gated delta net, as ``ssd_fixed``.

    Args:
        mixed_TGW: of each key head values [h V], the key [D] and the query [D], contiguous.
        numbers_TGn: of each key head a [h] and b [h], for decay and strength, contiguous.
        heads: A_log and the bias of a, [H].
        memory_MHDV: float32, contiguous.
        spans: as of ``conv_fixed``.
        epsilon: added to the squared length of a query or key.
    """
    heads_H, d, v = memory_MHDV.shape[1:]
    block_d = triton.next_power_of_2(d)
    block_v = max(1, min(triton.next_power_of_2(v), _STATE // block_d))
    o_THV = torch.zeros((len(mixed_TGW), heads_H, v), dtype=mixed_TGW.dtype, device=mixed_TGW.device)
    if len(spans[0]):
        _delta_kernel[(len(spans[0]), heads_H, triton.cdiv(v, block_v))](
            mixed_TGW, numbers_TGn, *heads, memory_MHDV, o_THV, *spans, epsilon, d**-0.5, GROUPS=mixed_TGW.shape[1],
            GROUP_HEADS=numbers_TGn.shape[2] // 2, CHANNELS=mixed_TGW.shape[2], D=d, V=v, BLOCK_D=block_d, BLOCK_V=block_v,
            num_warps=_warps(block_d * block_v), enable_fp_fusion=False,
        )  # fmt: skip
    return o_THV


def _warps(elements: int) -> int:
    return min(_MOST_WARPS, max(1, elements // _STATE))


# Where states lie among others, and parameters in a trainer's buffers, is not compiled in.
_NAMES = ["begins_ptr", "ends_ptr", "slots_ptr"]
_CONV_NAMES = [*_NAMES, "state_ptr"]
_DELTA_NAMES = [*_NAMES, "a_log_ptr", "bias_ptr", "memory_ptr"]
_SSD_NAMES = [*_DELTA_NAMES, "skip_ptr"]


@triton.jit(do_not_specialize=_CONV_NAMES, do_not_specialize_on_alignment=_CONV_NAMES)
def _conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, begins_ptr, ends_ptr, slots_ptr,
    GROUPS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAP_BLOCK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(0)
    begin, end = tl.load(begins_ptr + sequence), tl.load(ends_ptr + sequence)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    lanes = tl.program_id(2) * BLOCK_W + tl.arange(0, BLOCK_W)
    inside = lanes < CHANNELS
    at = tl.program_id(1) * CHANNELS + lanes
    line: tl.constexpr = GROUPS * CHANNELS
    if (slot >= 0) & (begin < end):
        state = state_ptr + slot * (TAPS - 1) * line + at
        for block in range(tl.cdiv(end - begin, BLOCK_T)):
            position = block * BLOCK_T + tl.arange(0, BLOCK_T)
            token = begin + position
            exists = token < end
            total = tl.zeros((BLOCK_T, BLOCK_W), dtype=tl.float32)
            if bias_ptr is not None:
                total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)[None, :]
            for back in tl.static_range(TAPS):
                here = position >= back
                new = (exists & here)[:, None] & inside[None, :]
                old = (exists & (position < back))[:, None] & inside[None, :]
                x = tl.load(x_ptr + (token - back).to(tl.int64)[:, None] * line + at[None, :], mask=new, other=0.0)
                before = tl.load(state + (TAPS - 1 + position - back)[:, None] * line, mask=old, other=0.0)
                tap = tl.load(weight_ptr + at * TAPS + (TAPS - 1 - back), mask=inside, other=0.0).to(tl.float32)
                total += tl.where(here[:, None], x.to(tl.float32), before.to(tl.float32)) * tap[None, :]
            out = total / (1.0 + tl.exp(-total))
            place = out_ptr + token.to(tl.int64)[:, None] * line + at[None, :]
            tl.store(place, out.to(out_ptr.dtype.element_ty), mask=exists[:, None] & inside[None, :])
        # Of the K - 1 before the sequence and its own tokens, the last K - 1.
        tap_number = tl.arange(0, TAP_BLOCK)
        behind = end - begin + tap_number - (TAPS - 1)
        kept = (tap_number < TAPS - 1)[:, None] & inside[None, :]
        older = tl.load(state + (behind + TAPS - 1)[:, None] * line, mask=kept & (behind < 0)[:, None], other=0.0)
        newer = tl.load(x_ptr + (begin + behind).to(tl.int64)[:, None] * line + at[None, :], mask=kept & (behind >= 0)[:, None], other=0.0)
        values = tl.where((behind < 0)[:, None], older, newer.to(older.dtype))
        # Every thread has read what another may overwrite.
        tl.debug_barrier()
        tl.store(state + tap_number[:, None] * line, values, mask=kept)


@triton.jit
def _softplus(x):
    # log(1 + e), precise for small e, too.
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit(do_not_specialize=_SSD_NAMES, do_not_specialize_on_alignment=_SSD_NAMES)
def _ssd_kernel(
    mixed_ptr, numbers_ptr, a_log_ptr, skip_ptr, bias_ptr, memory_ptr, y_ptr, begins_ptr, ends_ptr, slots_ptr, low, high,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, CHANNELS: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(begins_ptr + sequence), tl.load(ends_ptr + sequence)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    group, member = head // GROUP_HEADS, head % GROUP_HEADS
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    if (slot >= 0) & (begin < end):
        rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
        skip, bias = tl.load(skip_ptr + head).to(tl.float32), tl.load(bias_ptr + head).to(tl.float32)
        memory = memory_ptr + (slot * heads + head) * P * N + p[:, None] * N + n[None, :]
        inside = in_p[:, None] & in_n[None, :]
        state = tl.load(memory, mask=inside, other=0.0)
        for number in range(end - begin):
            row = (begin + number).to(tl.int64) * GROUPS + group
            line = mixed_ptr + row * CHANNELS
            x = tl.load(line + member * P + p, mask=in_p, other=0.0).to(tl.float32)
            b = tl.load(line + GROUP_HEADS * P + n, mask=in_n, other=0.0).to(tl.float32)
            c = tl.load(line + GROUP_HEADS * P + N + n, mask=in_n, other=0.0).to(tl.float32)
            raw = tl.load(numbers_ptr + row * GROUP_HEADS + member).to(tl.float32) + bias
            # What is no number stays none.
            size = tl.minimum(tl.maximum(_softplus(raw), low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)
            state = state * tl.exp(-size * rate) + (size * x)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1) + skip * x
            y_at = y_ptr + (row * GROUP_HEADS + member) * P + p
            tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=in_p)
        tl.store(memory, state, mask=inside)


@triton.jit(do_not_specialize=_DELTA_NAMES, do_not_specialize_on_alignment=_DELTA_NAMES)
def _delta_kernel(
    mixed_ptr, numbers_ptr, a_log_ptr, bias_ptr, memory_ptr, o_ptr, begins_ptr, ends_ptr, slots_ptr, epsilon, scale,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, CHANNELS: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(begins_ptr + sequence), tl.load(ends_ptr + sequence)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    group, member = head // GROUP_HEADS, head % GROUP_HEADS
    d, v = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_v = d < D, v < V
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    if (slot >= 0) & (begin < end):
        rate, bias = tl.exp(tl.load(a_log_ptr + head).to(tl.float32)), tl.load(bias_ptr + head).to(tl.float32)
        memory = memory_ptr + (slot * heads + head) * D * V + d[:, None] * V + v[None, :]
        inside = in_d[:, None] & in_v[None, :]
        state = tl.load(memory, mask=inside, other=0.0)
        for number in range(end - begin):
            row = (begin + number).to(tl.int64) * GROUPS + group
            line = mixed_ptr + row * CHANNELS
            value = tl.load(line + member * V + v, mask=in_v, other=0.0).to(tl.float32)
            key = tl.load(line + GROUP_HEADS * V + d, mask=in_d, other=0.0).to(tl.float32)
            query = tl.load(line + GROUP_HEADS * V + D + d, mask=in_d, other=0.0).to(tl.float32)
            key = key / tl.sqrt(tl.sum(key * key, 0) + epsilon)
            query = query / tl.sqrt(tl.sum(query * query, 0) + epsilon) * scale
            numbers = numbers_ptr + row * 2 * GROUP_HEADS + member
            size = _softplus(tl.load(numbers).to(tl.float32) + bias)
            strength = 1.0 / (1.0 + tl.exp(-tl.load(numbers + GROUP_HEADS).to(tl.float32)))
            state = state * tl.exp(-size * rate)
            change = strength * (value - tl.sum(state * key[:, None], 0))
            state += key[:, None] * change[None, :]
            o_at = o_ptr + (row * GROUP_HEADS + member) * V + v
            tl.store(o_at, tl.sum(state * query[:, None], 0).to(o_ptr.dtype.element_ty), mask=in_v)
        tl.store(memory, state, mask=inside)
