# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel between the projection and the attention of steps with prompts; imported only when it runs."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_inference._triton_cast import inverse_of, rounded, shrunk
from mcore_inference.cache import LayerSlots
from mcore_parallel.nn import PackedHeads

# T tokens of a step, K key-value heads, G query heads of each, d width of a head.


def rotate_and_append(heads: PackedHeads, cached: LayerSlots, slots_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, K G, d] and keys [T, K, d], normalised and turned, and values [T, K, d]; keys and values are in their slots too.

    Keys and values are views of the projection's result, in which the keys are overwritten; beside a cache in fp8 the values too, by what
    the cache stands for.

    Args:
        heads: of T tokens.
        cached: slots of one layer.
        slots_T: [T] int64.
    """
    qkv_TKHd = heads.qkv
    tokens, kv_heads, blocks, width = qkv_TKHd.shape
    q = torch.empty((tokens, kv_heads * (blocks - 2), width), dtype=qkv_TKHd.dtype, device=qkv_TKHd.device)
    query_norm, key_norm, epsilon, shift = (None, None, 0.0, 0.0) if heads.norms is None else heads.norms.parts
    cos, sin = (None, None) if heads.tables is None else heads.tables
    key_scales, value_scales = (None, None) if cached.scales is None else cached.scales
    _rotate_kernel[(tokens, kv_heads)](
        qkv_TKHd, q, cached.keys, cached.values, key_scales, value_scales, slots_T, cos, sin, query_norm, key_norm, epsilon, shift,
        cached.keys.stride(0), cached.values.stride(0), 0 if key_scales is None else key_scales.stride(1),
        0 if cos is None else cos.stride(0), kv_heads, blocks,
        LINES=triton.next_power_of_2(blocks), HALF=width // 2, HALF_BLOCK=triton.next_power_of_2(width // 2),
        num_warps=4 if blocks > 8 else 2,
    )  # fmt: skip
    return q, qkv_TKHd[:, :, -2], qkv_TKHd[:, :, -1]


@triton.jit
def _rotate_kernel(
    packed_ptr, q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, slots_ptr, cos_ptr, sin_ptr, query_norm_ptr,
    key_norm_ptr, epsilon, shift,
    keys_slot, values_slot, scales_head, table_stride, kv_heads, blocks, LINES: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, lane = tl.arange(0, LINES)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    group = blocks - 2
    inside = (line < blocks) & (lane < HALF)
    rows = packed_ptr + (token * kv_heads + kv_head) * blocks * 2 * HALF + line * 2 * HALF
    first = tl.load(rows + lane, mask=inside, other=0.0)
    second = tl.load(rows + HALF + lane, mask=inside, other=0.0)
    is_value = line == group + 1
    a, b = first.to(tl.float32), second.to(tl.float32)
    if query_norm_ptr is not None:
        scale = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + epsilon)[:, None]
        real = lane < HALF
        query_a = tl.load(query_norm_ptr + lane, mask=real, other=0.0).to(tl.float32)
        query_b = tl.load(query_norm_ptr + HALF + lane, mask=real, other=0.0).to(tl.float32)
        key_a = tl.load(key_norm_ptr + lane, mask=real, other=0.0).to(tl.float32)
        key_b = tl.load(key_norm_ptr + HALF + lane, mask=real, other=0.0).to(tl.float32)
        a = a * scale * (tl.where(line < group, query_a, key_a) + shift)
        b = b * scale * (tl.where(line < group, query_b, key_b) + shift)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + token * table_stride + lane, mask=lane < HALF, other=0.0)
        sin = tl.load(sin_ptr + token * table_stride + lane, mask=lane < HALF, other=0.0)
        a, b = a * cos - b * sin, b * cos + a * sin
    kind = q_ptr.dtype.element_ty
    a, b = tl.where(is_value, first, a.to(kind)), tl.where(is_value, second, b.to(kind))
    slot = tl.load(slots_ptr + token)
    query_rows = q_ptr + (token * kv_heads * group + kv_head * group + line) * 2 * HALF
    tl.store(query_rows + lane, a, mask=inside & (line < group))
    tl.store(query_rows + HALF + lane, b, mask=inside & (line < group))
    place = kv_head * 2 * HALF + lane
    is_key = line == group
    cached = keys_ptr.dtype.element_ty
    first_cached, second_cached = a.to(cached), b.to(cached)
    if key_scales_ptr is not None:
        wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
        inverse = inverse_of(tl.maximum(tl.max(tl.abs(wide_a), 1), tl.max(tl.abs(wide_b), 1)), tl.sum(wide_a, 1) + tl.sum(wide_b, 1))[
            :, None
        ]
        wide_a, wide_b = rounded(shrunk(wide_a, inverse)), rounded(shrunk(wide_b, inverse))
        first_cached, second_cached = wide_a.to(cached), wide_b.to(cached)
        a, b = (wide_a * inverse).to(kind), (wide_b * inverse).to(kind)
        tl.store(rows + lane, a, mask=inside & is_value)
        tl.store(rows + HALF + lane, b, mask=inside & is_value)
        column = tl.arange(0, 1)[None, :]
        tl.store(key_scales_ptr + kv_head * scales_head + slot + column + line * 0, inverse, mask=is_key)
        tl.store(value_scales_ptr + kv_head * scales_head + slot + column + line * 0, inverse, mask=is_value)
    tl.store(rows + lane, a, mask=inside & is_key)
    tl.store(rows + HALF + lane, b, mask=inside & is_key)
    tl.store(keys_ptr + slot * keys_slot + place + line * 0, first_cached, mask=inside & is_key)
    tl.store(keys_ptr + slot * keys_slot + place + HALF + line * 0, second_cached, mask=inside & is_key)
    tl.store(values_ptr + slot * values_slot + place + line * 0, first_cached, mask=inside & is_value)
    tl.store(values_ptr + slot * values_slot + place + HALF + line * 0, second_cached, mask=inside & is_value)
