# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of one token of linear mixers, from the projection to the heads' outputs; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# R rows (sequences) of one token each, M slots of states, G groups, W channels of a group, K taps, H heads, h of a group; of Mamba-2 P
# channels of a head and N of a state, of a delta net D channels of a key and V of a value.
#
# One program computes some channels of one head of one row. It alone has the convolution's state of its values; that of what the heads of
# a group share is read by all their programs, so the last of them to finish, which a counter tells, writes it.

_STATE = 4096
"""Elements of a head's state that a program holds: 32 registers of each thread."""


def ssd_decode(
    channels_RGW: Tensor, numbers_RGh: Tensor, conv: tuple[Tensor, Tensor | None], heads: tuple[Tensor, Tensor, Tensor],
    state: tuple[Tensor, Tensor], slots_R: Tensor, finished: Tensor, limits: tuple[float, float],
) -> Tensor:  # fmt: skip
    """y [R, H, P] of Mamba-2; the states in these slots go on by a token.

    Args:
        channels_RGW: of each group values [h P], b [N] and c [N], as the projection left them; the last dim has stride 1.
        numbers_RGh: step sizes before bias and softplus, likewise.
        conv: weight [G, W, K] and bias [G, W].
        heads: A_log, D and the bias of the step sizes, [H] float32.
        state: of the convolution [M, K - 1, G, W], and of the heads [M, H, P, N] float32, contiguous.
        slots_R: one for each row, each once; -1 for a row of padding, whose result is 0.
        finished: [at least R G] int32 of zeros, which the programs count in, and leave zero.
        limits: of the step sizes.
    """
    memory = state[1]
    p, n = memory.shape[2:]
    block_n = triton.next_power_of_2(n)
    block_p = max(1, min(triton.next_power_of_2(p), _STATE // block_n))
    y_RHP = torch.empty((len(slots_R), memory.shape[1], p), dtype=channels_RGW.dtype, device=channels_RGW.device)
    if len(slots_R):
        _ssd_kernel[(len(slots_R), memory.shape[1], triton.cdiv(p, block_p))](
            channels_RGW, numbers_RGh, *conv, *heads, *state, slots_R, finished, y_RHP, *_strides(channels_RGW, numbers_RGh), *limits,
            **_sizes(channels_RGW, numbers_RGh.shape[-1], conv[0]), P=p, N=n, BLOCK_P=block_p, BLOCK_N=block_n, num_warps=4,
        )  # fmt: skip
    return y_RHP


def delta_decode(
    channels_RGW: Tensor, numbers_RGn: Tensor, weight_GWK: Tensor, heads: tuple[Tensor, Tensor],
    state: tuple[Tensor, Tensor], slots_R: Tensor, finished: Tensor, epsilon: float,
) -> Tensor:  # fmt: skip
    """o [R, H, V] of a gated delta net, as ``ssd_decode``.

    Args:
        channels_RGW: of each key head values [h V], the key [D] and the query [D].
        numbers_RGn: of each key head a [h] and b [h], for decay and strength.
        weight_GWK: of the convolution, which has no bias.
        heads: A_log and the bias of a, [H] float32.
        state: of the convolution [M, K - 1, G, W], and of the heads [M, H, D, V] float32, contiguous.
        slots_R: as there.
        finished: as there.
        epsilon: added to the squared length of a query or key.
    """
    memory = state[1]
    d, v = memory.shape[2:]
    block_d = triton.next_power_of_2(d)
    block_v = max(1, min(triton.next_power_of_2(v), _STATE // block_d))
    o_RHV = torch.empty((len(slots_R), memory.shape[1], v), dtype=channels_RGW.dtype, device=channels_RGW.device)
    if len(slots_R):
        _delta_kernel[(len(slots_R), memory.shape[1], triton.cdiv(v, block_v))](
            channels_RGW, numbers_RGn, weight_GWK, *heads, *state, slots_R, finished, o_RHV, *_strides(channels_RGW, numbers_RGn),
            epsilon, d**-0.5, **_sizes(channels_RGW, numbers_RGn.shape[-1] // 2, weight_GWK),
            D=d, V=v, BLOCK_D=block_d, BLOCK_V=block_v, num_warps=4,
        )  # fmt: skip
    return o_RHV


def _strides(channels: Tensor, numbers: Tensor) -> tuple[int, ...]:
    assert channels.stride(-1) == numbers.stride(-1) == 1
    return *channels.stride()[:2], *numbers.stride()[:2]


def _sizes(channels: Tensor, group_heads: int, weight: Tensor) -> dict[str, Any]:
    taps = weight.shape[-1]
    return {
        "GROUPS": channels.shape[1], "GROUP_HEADS": group_heads, "CHANNELS": channels.shape[2], "TAPS": taps,
        "TAP_BLOCK": triton.next_power_of_2(taps - 1),
    }  # fmt: skip


@triton.jit
def _convolved(x_ptr, conv_ptr, weight_ptr, bias_ptr, at, inside, tap_stride, TAPS: tl.constexpr, TAP_BLOCK: tl.constexpr):
    """Some channels of a group behind convolution and SiLU: float32, rounded as torch rounds them."""
    tap = tl.arange(0, TAP_BLOCK)
    held = (tap < TAPS - 1)[:, None] & inside[None, :]
    old = tl.load(conv_ptr + tap[:, None] * tap_stride + at[None, :], mask=held, other=0.0).to(tl.float32)
    weights = tl.load(weight_ptr + at[None, :] * TAPS + tap[:, None], mask=held, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    total = tl.sum(old * weights, 0)
    total += x.to(tl.float32) * tl.load(weight_ptr + at * TAPS + TAPS - 1, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return (total / (1.0 + tl.exp(-total))).to(x.dtype).to(tl.float32)


@triton.jit
def _remember(x_ptr, conv_ptr, at, inside, tap_stride, TAPS: tl.constexpr, TAP_BLOCK: tl.constexpr):
    """Move the convolution's state of some channels on by a token."""
    tap = tl.arange(0, TAP_BLOCK)
    later = (tap < TAPS - 2)[:, None] & inside[None, :]
    place = conv_ptr + tap[:, None] * tap_stride + at[None, :]
    values = tl.load(place + tap_stride, mask=later, other=0.0)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(values.dtype)
    values = tl.where((tap == TAPS - 2)[:, None], x[None, :], values)
    # Every thread has read what another may overwrite.
    tl.debug_barrier()
    tl.store(place, values, mask=(tap < TAPS - 1)[:, None] & inside[None, :])


@triton.jit
def _softplus(x):
    # log(1 + e), precise for small e, too.
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    return tl.maximum(x, 0.0) + tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _is_last(finished_ptr, row, group, GROUPS: tl.constexpr, PROGRAMS: tl.constexpr):
    """Whether all other programs of a row's group have read what they share; the counter is zero again then."""
    tl.debug_barrier()
    counter = finished_ptr + row * GROUPS + group
    last = tl.atomic_add(counter, 1, sem="acq_rel") == PROGRAMS - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _ssd_kernel(
    channels_ptr, numbers_ptr, weight_ptr, conv_bias_ptr, a_log_ptr, skip_ptr, bias_ptr, conv_ptr, memory_ptr, slots_ptr, finished_ptr,
    y_ptr, channels_row, channels_group, numbers_row, numbers_group, low, high,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAP_BLOCK: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, member = head // GROUP_HEADS, head % GROUP_HEADS
    p, n = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    in_p, in_n = p < P, n < N
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    taps: tl.constexpr = GROUPS * CHANNELS
    y_at = y_ptr + (row * heads + head) * P + p
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        line = channels_ptr + row * channels_row + group * channels_group
        conv = conv_ptr + slot * (TAPS - 1) * taps + group * CHANNELS
        weight = weight_ptr + group * CHANNELS * TAPS
        conv_bias = conv_bias_ptr
        if conv_bias_ptr is not None:
            conv_bias = conv_bias_ptr + group * CHANNELS
        x_at, b_at = member * P + p, GROUP_HEADS * P + n
        x = _convolved(line, conv, weight, conv_bias, x_at, in_p, taps, TAPS, TAP_BLOCK)
        b = _convolved(line, conv, weight, conv_bias, b_at, in_n, taps, TAPS, TAP_BLOCK)
        c = _convolved(line, conv, weight, conv_bias, b_at + N, in_n, taps, TAPS, TAP_BLOCK)
        raw = tl.load(numbers_ptr + row * numbers_row + group * numbers_group + member).to(tl.float32) + tl.load(bias_ptr + head)
        # What is no number stays none.
        size = tl.minimum(tl.maximum(_softplus(raw), low, tl.PropagateNan.ALL), high, tl.PropagateNan.ALL)
        decay = tl.exp(-size * tl.exp(tl.load(a_log_ptr + head)))
        memory = memory_ptr + (slot * heads + head) * P * N + p[:, None] * N + n[None, :]
        inside = in_p[:, None] & in_n[None, :]
        state = tl.load(memory, mask=inside, other=0.0) * decay + (size * x)[:, None] * b[None, :]
        tl.store(memory, state, mask=inside)
        y = tl.sum(state * c[None, :], 1) + tl.load(skip_ptr + head) * x
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=in_p)
        _remember(line, conv, x_at, in_p, taps, TAPS, TAP_BLOCK)
        if _is_last(finished_ptr, row, group, GROUPS, GROUP_HEADS * ((P + BLOCK_P - 1) // BLOCK_P)):
            _remember(line, conv, b_at, in_n, taps, TAPS, TAP_BLOCK)
            _remember(line, conv, b_at + N, in_n, taps, TAPS, TAP_BLOCK)
    else:
        tl.store(y_at, tl.zeros((BLOCK_P,), dtype=tl.float32).to(y_ptr.dtype.element_ty), mask=in_p)


@triton.jit
def _delta_kernel(
    channels_ptr, numbers_ptr, weight_ptr, a_log_ptr, bias_ptr, conv_ptr, memory_ptr, slots_ptr, finished_ptr, o_ptr,
    channels_row, channels_group, numbers_row, numbers_group, epsilon, scale,
    GROUPS: tl.constexpr, GROUP_HEADS: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAP_BLOCK: tl.constexpr,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group, member = head // GROUP_HEADS, head % GROUP_HEADS
    d, v = tl.arange(0, BLOCK_D), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    in_d, in_v = d < D, v < V
    heads: tl.constexpr = GROUPS * GROUP_HEADS
    taps: tl.constexpr = GROUPS * CHANNELS
    o_at = o_ptr + (row * heads + head) * V + v
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot >= 0:
        line = channels_ptr + row * channels_row + group * channels_group
        conv = conv_ptr + slot * (TAPS - 1) * taps + group * CHANNELS
        weight = weight_ptr + group * CHANNELS * TAPS
        v_at, k_at = member * V + v, GROUP_HEADS * V + d
        value = _convolved(line, conv, weight, None, v_at, in_v, taps, TAPS, TAP_BLOCK)
        key = _convolved(line, conv, weight, None, k_at, in_d, taps, TAPS, TAP_BLOCK)
        query = _convolved(line, conv, weight, None, k_at + D, in_d, taps, TAPS, TAP_BLOCK)
        key = key / tl.sqrt(tl.sum(key * key, 0) + epsilon)
        query = query / tl.sqrt(tl.sum(query * query, 0) + epsilon) * scale
        numbers = numbers_ptr + row * numbers_row + group * numbers_group + member
        size = _softplus(tl.load(numbers).to(tl.float32) + tl.load(bias_ptr + head))
        decay = tl.exp(-size * tl.exp(tl.load(a_log_ptr + head)))
        strength = 1.0 / (1.0 + tl.exp(-tl.load(numbers + GROUP_HEADS).to(tl.float32)))
        memory = memory_ptr + (slot * heads + head) * D * V + d[:, None] * V + v[None, :]
        inside = in_d[:, None] & in_v[None, :]
        state = tl.load(memory, mask=inside, other=0.0) * decay
        change = strength * (value - tl.sum(state * key[:, None], 0))
        state += key[:, None] * change[None, :]
        tl.store(memory, state, mask=inside)
        tl.store(o_at, tl.sum(state * query[:, None], 0).to(o_ptr.dtype.element_ty), mask=in_v)
        _remember(line, conv, v_at, in_v, taps, TAPS, TAP_BLOCK)
        if _is_last(finished_ptr, row, group, GROUPS, GROUP_HEADS * ((V + BLOCK_V - 1) // BLOCK_V)):
            _remember(line, conv, k_at, in_d, taps, TAPS, TAP_BLOCK)
            _remember(line, conv, k_at + D, in_d, taps, TAPS, TAP_BLOCK)
    else:
        tl.store(o_at, tl.zeros((BLOCK_V,), dtype=tl.float32).to(o_ptr.dtype.element_ty), mask=in_v)
