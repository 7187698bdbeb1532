# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel of attention in a decode step, from the projection's result to the heads' outputs; imported only when it runs."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_inference._triton_cast import inverse_of, rounded, shrunk
from mcore_inference.attention._fp8 import absorb_pairs, bounded
from mcore_inference.cache import LayerSlots
from mcore_parallel.nn import PackedHeads

# R rows (requests) of one token each, K key-value heads, G query heads of each, d width of a head, S splits of a row's context.

_LOG2_E = 1.4426950408889634
_KEYS = 64
_PROGRAMS = 132
"""Programs that are aimed at: one for each multiprocessor of Hopper."""
_MAX_SPLITS = 8


def num_splits(rows: int, kv_heads: int, longest: int, most: int = _MAX_SPLITS) -> int:
    """Parts that the context of each row is cut into, so that few rows fill the GPU too.

    Args:
        rows: of the step.
        kv_heads: of this rank.
        longest: tokens that a context can have.
        most: parts.
    """
    wanted = triton.cdiv(_PROGRAMS, rows * kv_heads)
    return max(1, min(wanted, triton.cdiv(longest, 64), most))


def attend_packed(
    heads: PackedHeads,
    cached: LayerSlots,
    slots_R: Tensor,
    *,
    tables_RB: Tensor,
    contexts_R: Tensor,
    block_size: int,
    scale: float,
    window: int,
    sink_A: Tensor | None,
    softcap: float | None = None,
    splits: int,
    finished: Tensor,
) -> Tensor:
    """Normalise and turn queries and keys, write the new keys and values into their slots, attend: [R, K G, d].

    Args:
        heads: of R tokens, one a row.
        cached: slots of one layer.
        slots_R: [R] int64, of the new tokens.
        tables_RB: [R, B] int32, blocks of each row in the order of its tokens.
        contexts_R: [R] int32, tokens of each row in the cache, the new one included; 0 for a row of padding, whose result is 0.
        block_size: tokens of a block; a multiple of 16.
        scale: of the scores.
        window: tokens before its own that a query sees, -1 for all.
        sink_A: [A] logits of the sinks, or None.
        softcap: of the scores, as of ``mcore_parallel.nn.soft_cap``; None for none.
        splits: parts of each row's context; the last program of a row adds them up.
        finished: [at least R K] int32 of zeros, which the programs count in, and leave zero.
    """
    rows, kv_heads, blocks, width = heads.qkv.shape
    group, device = blocks - 2, heads.qkv.device
    out = torch.empty((rows, kv_heads * group, width), dtype=heads.qkv.dtype, device=device)
    parts = sums = None
    if splits > 1:
        parts = torch.empty((rows, kv_heads * group, splits, width), dtype=torch.float32, device=device)
        sums = torch.empty((rows, kv_heads * group, splits), dtype=torch.float32, device=device)
    keys_NKd, values_NKd = cached.keys, cached.values
    # Values in fp8 are read by pairs of channels.
    pairs_NKd = None if cached.scales is None else values_NKd.view(torch.int16)
    pairs_slot, pairs_head = (0, 0) if pairs_NKd is None else pairs_NKd.stride()[:2]
    key_scales, value_scales = (None, None) if cached.scales is None else cached.scales
    cos, sin = (None, None) if heads.tables is None else heads.tables
    query_norm, key_norm, epsilon, shift = (None, None, 0.0, 0.0) if heads.norms is None else heads.norms.parts
    if rows:
        _decode_kernel[(rows, kv_heads, splits)](
            heads.qkv, keys_NKd, values_NKd, pairs_NKd, key_scales, value_scales, slots_R, out, parts, sums, finished, tables_RB,
            contexts_R, cos, sin, query_norm, key_norm,
            sink_A, epsilon, shift, scale * _LOG2_E, None if softcap is None else softcap * _LOG2_E, window,
            keys_NKd.stride(0), keys_NKd.stride(1), values_NKd.stride(0),
            values_NKd.stride(1), pairs_slot, pairs_head, 0 if key_scales is None else key_scales.stride(1), tables_RB.stride(0),
            0 if cos is None else cos.stride(0), kv_heads, block_size, width,
            GROUP=group, LINES=max(16, triton.next_power_of_2(group)), KEYS=min(_KEYS, block_size & -block_size),
            WIDTH=triton.next_power_of_2(max(16, width)), SPLITS=splits, SPLIT_BLOCK=triton.next_power_of_2(splits),
            PRECISION="ieee" if heads.qkv.dtype == torch.float32 else "tf32", num_warps=2,
            num_stages=3 if width <= 64 else 2,
        )  # fmt: skip
    return out


# As of prompts: one kernel for the numbers of all steps.
@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots_ptr", "tables_ptr", "contexts_ptr"])
def _decode_kernel(
    qkv_ptr, keys_ptr, values_ptr, pairs_ptr, key_scales_ptr, value_scales_ptr, slots_ptr, out_ptr, parts_ptr, sums_ptr, finished_ptr,
    tables_ptr, contexts_ptr, cos_ptr, sin_ptr,
    query_norm_ptr, key_norm_ptr, sink_ptr, epsilon, shift, scale, softcap, window, keys_slot, keys_head, values_slot, values_head,
    pairs_slot, pairs_head, scales_head, table_stride, angle_stride, kv_heads, block_size, width,
    GROUP: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    line, lane = tl.arange(0, LINES), tl.arange(0, WIDTH)
    real, inside = line < GROUP, lane < width
    half = width // 2
    partner, sign = tl.where(lane < half, lane + half, lane - half), tl.where(lane < half, -1.0, 1.0)

    # Where keys are, first of all: each of these loads waits for the one before, and what follows needs none of them.
    context = tl.load(contexts_ptr + row)
    if SPLITS > 1:
        new_slot = tl.load(slots_ptr + row)
    cached = tl.maximum(context - 1, 0)
    table = tables_ptr + row.to(tl.int64) * table_stride
    # Keys in the cache that the row sees, in tiles of KEYS; this split's share of them.
    low, first = cached * 0, cached * 0
    if window >= 0:
        first = tl.maximum(cached - window, 0)
        low = first // KEYS
    high = tl.cdiv(cached, KEYS)
    if SPLITS > 1:
        share = tl.cdiv(high - low, SPLITS)
        low = low + split * share
        high = tl.minimum(high, low + share)
    following = tl.load(table + tl.minimum(low, tl.maximum(high - 1, 0)) * KEYS // block_size)

    # Queries of the group, and the new key and value, as the projection left them.
    packed = qkv_ptr + (row * kv_heads + kv_head).to(tl.int64) * (GROUP + 2) * width
    lines = packed + line[:, None] * width
    mask = real[:, None] & inside[None, :]
    q = tl.load(lines + lane[None, :], mask=mask, other=0.0)
    k_new = tl.load(packed + GROUP * width + lane, mask=inside, other=0.0)
    v_new = tl.load(packed + (GROUP + 1) * width + lane, mask=inside, other=0.0)
    kind = q.dtype
    q_factor = tl.full((LINES, 1), 1.0, dtype=tl.float32)
    k_factor = 1.0
    q_wide, k_wide = q.to(tl.float32), k_new.to(tl.float32)
    if query_norm_ptr is not None:
        q_factor = 1.0 / tl.sqrt(tl.sum(q_wide * q_wide, 1) / width + epsilon)[:, None]
        k_factor = 1.0 / tl.sqrt(tl.sum(k_wide * k_wide, 0) / width + epsilon)
        q_wide = q_wide * q_factor * (tl.load(query_norm_ptr + lane, mask=inside, other=0.0).to(tl.float32) + shift)[None, :]
        k_wide = k_wide * k_factor * (tl.load(key_norm_ptr + lane, mask=inside, other=0.0).to(tl.float32) + shift)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + row * angle_stride + lane, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + row * angle_stride + lane, mask=inside, other=0.0) * sign
        q_other = tl.load(lines + partner[None, :], mask=mask, other=0.0).to(tl.float32)
        k_other = tl.load(packed + GROUP * width + partner, mask=inside, other=0.0).to(tl.float32)
        if query_norm_ptr is not None:
            q_other = q_other * q_factor * (tl.load(query_norm_ptr + partner, mask=inside, other=0.0).to(tl.float32) + shift)[None, :]
            k_other = k_other * k_factor * (tl.load(key_norm_ptr + partner, mask=inside, other=0.0).to(tl.float32) + shift)
        q_wide = q_wide * cos[None, :] + q_other * sin[None, :]
        k_wide = k_wide * cos + k_other * sin
    q, k_new, v_cached = q_wide.to(kind), k_wide.to(keys_ptr.dtype.element_ty), v_new.to(values_ptr.dtype.element_ty)
    k_read, v_read, line_scale = k_new.to(kind).to(tl.float32), v_cached.to(tl.float32), scale
    q_read = q.to(tl.float32)
    key_inverse, value_inverse = 1.0, 1.0
    if key_scales_ptr is not None:
        k_rounded, v_wide = k_wide.to(kind).to(tl.float32), v_new.to(tl.float32)
        key_inverse = inverse_of(tl.max(tl.abs(k_rounded), 0), tl.sum(k_rounded, 0))
        value_inverse = inverse_of(tl.max(tl.abs(v_wide), 0), tl.sum(v_wide, 0))
        k_rounded, v_wide = rounded(shrunk(k_rounded, key_inverse)), rounded(shrunk(v_wide, value_inverse))
        k_new, v_cached = k_rounded.to(keys_ptr.dtype.element_ty), v_wide.to(values_ptr.dtype.element_ty)
        k_read, v_read = k_rounded * key_inverse, v_wide * value_inverse
        if kind != tl.float32:
            q, most = bounded(q)
            kind = tl.float16
            line_scale = (most * scale)[:, None]

    # Tiles that the row sees whole need no mask.
    whole = low
    if window < 0:
        whole = tl.maximum(low, tl.minimum(high, cached // KEYS))
    best = tl.full((LINES,), -1e30, dtype=tl.float32)
    total = tl.zeros((LINES,), dtype=tl.float32)
    result = tl.zeros((LINES, WIDTH), dtype=tl.float32)
    pair = tl.arange(0, WIDTH // 2)
    even, odd = tl.zeros((LINES, WIDTH // 2), dtype=tl.float32), tl.zeros((LINES, WIDTH // 2), dtype=tl.float32)
    for tile in range(low, whole):
        # A tile of keys lies in one block, whose number was read a tile earlier.
        slot = following.to(tl.int64) * block_size + tile * KEYS % block_size + tl.arange(0, KEYS)
        following = tl.load(table + tl.minimum(tile + 1, high - 1) * KEYS // block_size)
        k = tl.load(keys_ptr + slot[None, :] * keys_slot + kv_head * keys_head + lane[:, None], mask=inside[:, None], other=0.0)
        scores = tl.dot(q, k.to(kind), input_precision=PRECISION) * line_scale
        if key_scales_ptr is not None:
            at = kv_head * scales_head + slot
            scores = scores * tl.load(key_scales_ptr + at)[None, :]
            if softcap is not None:
                scores = capped(scores, softcap)
            within = slot[:, None] * pairs_slot + kv_head * pairs_head + pair[None, :]
            v = tl.load(pairs_ptr + within, mask=pair[None, :] < width // 2, other=0)
            best, total, even, odd = absorb_pairs(scores, v, tl.load(value_scales_ptr + at), best, total, even, odd, kind, PRECISION)
        else:
            if softcap is not None:
                scores = capped(scores, softcap)
            v = tl.load(values_ptr + slot[:, None] * values_slot + kv_head * values_head + lane[None, :], mask=inside[None, :], other=0.0)
            best, total, result = absorb(scores, v.to(kind), best, total, result, PRECISION)
    for tile in range(whole, high):
        key = tile * KEYS + tl.arange(0, KEYS)
        slot = tl.load(table + tile * KEYS // block_size).to(tl.int64) * block_size + key % block_size
        seen = (key < cached) & (key >= first)
        k = tl.load(
            keys_ptr + slot[None, :] * keys_slot + kv_head * keys_head + lane[:, None], mask=seen[None, :] & inside[:, None], other=0.0
        )
        scores = tl.dot(q, k.to(kind), input_precision=PRECISION) * line_scale
        if key_scales_ptr is not None:
            at = kv_head * scales_head + slot
            scores = scores * tl.load(key_scales_ptr + at, mask=seen, other=0.0)[None, :]
            if softcap is not None:
                scores = capped(scores, softcap)
            scores = tl.where(seen[None, :], scores, -float("inf"))
            value_scales = tl.load(value_scales_ptr + at, mask=seen, other=0.0)
            within = slot[:, None] * pairs_slot + kv_head * pairs_head + pair[None, :]
            v = tl.load(pairs_ptr + within, mask=seen[:, None] & (pair[None, :] < width // 2), other=0)
            best, total, even, odd = absorb_pairs(scores, v, value_scales, best, total, even, odd, kind, PRECISION)
        else:
            if softcap is not None:
                scores = capped(scores, softcap)
            scores = tl.where(seen[None, :], scores, -float("inf"))
            v = tl.load(
                values_ptr + slot[:, None] * values_slot + kv_head * values_head + lane[None, :],
                mask=seen[:, None] & inside[None, :],
                other=0.0,
            )
            best, total, result = absorb(scores, v.to(kind), best, total, result, PRECISION)

    if key_scales_ptr is not None:
        result = tl.interleave(even, odd)
    # The first split adds the new token, and writes it into the cache.
    adds = (split == 0) & (context > 0)
    # Not inside & adds, which is no mask of booleans in every Triton.
    writes = lane < tl.where(adds, width, 0)
    if SPLITS == 1:
        new_slot = tl.load(slots_ptr + row)
    tl.store(keys_ptr + new_slot * keys_slot + kv_head * keys_head + lane, k_new, mask=writes)
    tl.store(values_ptr + new_slot * values_slot + kv_head * values_head + lane, v_cached, mask=writes)
    if key_scales_ptr is not None:
        tl.store(key_scales_ptr + kv_head * scales_head + new_slot, key_inverse, mask=adds)
        tl.store(value_scales_ptr + kv_head * scales_head + new_slot, value_inverse, mask=adds)
    score = tl.sum(q_read * k_read[None, :], 1) * scale
    if softcap is not None:
        score = capped(score, softcap)
    score = tl.where(adds, score, -float("inf"))
    highest = tl.maximum(best, score)
    weight, shrink = tl.exp2(score - highest), tl.exp2(best - highest)
    total = total * shrink + weight
    result = result * shrink[:, None] + weight[:, None] * v_read[None, :]
    best = highest

    head = kv_head * GROUP + line
    places = (row * kv_heads * GROUP + head).to(tl.int64)
    if SPLITS > 1:
        # A split that saw no key weighs nothing.
        tl.store(sums_ptr + places * SPLITS + split, tl.where(total > 0, best + tl.log2(total), -float("inf")), mask=real)
        tl.store(parts_ptr + (places * SPLITS + split)[:, None] * width + lane[None, :], result / _safe(total)[:, None], mask=mask)
        tl.debug_barrier()
        before = tl.atomic_add(finished_ptr + row * kv_heads + kv_head, 1, sem="acq_rel")
        if before == SPLITS - 1:
            # Past the first-level cache, which may hold what stood there before.
            splits = tl.arange(0, SPLIT_BLOCK)
            held = real[:, None] & (splits < SPLITS)[None, :]
            sums = tl.load(sums_ptr + places[:, None] * SPLITS + splits[None, :], mask=held, other=-float("inf"), cache_modifier=".cg")
            best = tl.maximum(tl.max(sums, 1), -1e30)
            total = tl.sum(tl.exp2(sums - best[:, None]), 1)
            result = tl.zeros((LINES, WIDTH), dtype=tl.float32)
            for number in tl.static_range(SPLITS):
                at = places * SPLITS + number
                of_all = tl.exp2(tl.load(sums_ptr + at, mask=real, other=-float("inf"), cache_modifier=".cg") - best)
                result += (
                    tl.load(parts_ptr + at[:, None] * width + lane[None, :], mask=mask, other=0.0, cache_modifier=".cg") * of_all[:, None]
                )
            if sink_ptr is not None:
                total += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - best)
            result = result / _safe(total)[:, None]
            tl.store(out_ptr + places[:, None] * width + lane[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)
            tl.store(finished_ptr + row * kv_heads + kv_head, 0)
    else:
        if sink_ptr is not None:
            total += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - best)
        result = result / _safe(total)[:, None]
        tl.store(out_ptr + places[:, None] * width + lane[None, :], result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def capped(scores, softcap):
    """``soft_cap`` of scores in powers of two, as the cap is; tanh(x) is 1 - 2 / (1 + 2^(2 x log2(e)))."""
    return softcap * (1.0 - 2.0 / (1.0 + tl.exp2(scores / softcap * 2.8853900817779268)))


@triton.jit
def absorb(scores, v, best, total, result, PRECISION: tl.constexpr):
    """Add a tile of keys to a running softmax."""
    highest = tl.maximum(best, tl.max(scores, 1))
    weights = tl.exp2(scores - highest[:, None])
    shrink = tl.exp2(best - highest)
    result = tl.dot(weights.to(v.dtype), v, result * shrink[:, None], input_precision=PRECISION)
    return highest, total * shrink + tl.sum(weights, 1), result


@triton.jit
def _safe(total):
    return tl.where(total > 0, total, 1.0)
