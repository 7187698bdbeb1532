# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of attention over a paged cache; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from mcore_inference._triton_cast import inverse_of, rounded, shrunk
from mcore_inference.attention._decode import capped
from mcore_inference.attention._fp8 import absorb_scaled, bounded
from mcore_inference.attention._tiles import FEWEST_KEYS, SHARED_BYTES, tile_bytes, tile_tokens
from mcore_inference.cache import LayerSlots

# T tokens of a step, R rows (requests) of it, A heads, K key-value heads, d width of a head, S splits of a row's context.

_LOG2_E = 1.4426950408889634


def append(k_TKd: Tensor, v_TKd: Tensor, cached: LayerSlots, slots_T: Tensor) -> None:
    """Write the step's keys and values into their slots of the cache; beside one in fp8 they become what it stands for.

    Values may be narrower than keys; the heads of a slot lie side by side.
    """
    tokens, heads, width = k_TKd.shape
    keys_NKd, values_NKd = cached.keys, cached.values
    if tokens and cached.scales is not None:
        for x, data, scales in zip((k_TKd, v_TKd), (keys_NKd, values_NKd), cached.scales, strict=True):
            _append_scaled_kernel[(tokens, heads)](
                x, data, scales, slots_T, x.stride(0), x.stride(1), data.stride(0), data.stride(1), scales.stride(1), width,
                BLOCK=triton.next_power_of_2(width), num_warps=1,
            )  # fmt: skip
    elif tokens:
        value_width, block = v_TKd.shape[-1], triton.next_power_of_2(heads * width)
        same = value_width == width
        _append_kernel[(tokens,)](
            k_TKd, v_TKd, keys_NKd, values_NKd, slots_T, k_TKd.stride(0), k_TKd.stride(1), v_TKd.stride(0), v_TKd.stride(1),
            keys_NKd.stride(0), values_NKd.stride(0), heads, width, value_width, SAME=same, BLOCK=block,
            num_warps=4 if same else max(4, min(16, block // 1024)),
        )  # fmt: skip


def attend(
    q_TAd: Tensor,
    cached: LayerSlots,
    out_TAd: Tensor,
    *,
    tables_RB: Tensor,
    starts_R: Tensor,
    contexts_R: Tensor,
    block_size: int,
    scale: float,
    window: int,
    sink_A: Tensor | None,
    softcap: float | None = None,
    tiles: tuple[Tensor, Tensor] | None,
    num_rows: int,
    splits: int,
    in_step: bool = False,
) -> None:
    """Causal attention of the step's queries over the cached keys and values of their rows, into ``out_TAd``.

    Args:
        q_TAd: [T, A, d], last stride 1.
        cached: slots of one layer.
        out_TAd: contiguous.
        tables_RB: [R, B] int32, blocks of each row in the order of its tokens.
        starts_R: [R + 1] int32, first token of each row among the T, and T.
        contexts_R: [R] int32, tokens of each row in the cache, those of the step included; 0 for a row of padding.
        block_size: tokens of a block; a multiple of 16.
        scale: of the scores.
        window: tokens before its own that a query sees, -1 for all.
        sink_A: [A] logits of the sinks, or None.
        softcap: of the scores, as of ``mcore_parallel.nn.soft_cap``; None for none.
        tiles: for rows of several tokens: (row, first token) of each program, int32; None where each row is one token.
        num_rows: R, without ``tiles``.
        splits: parts of each row's context; 1 with ``tiles``.
        in_step: the rows of the tiles have their whole context in the step, and ``cached`` holds those of its T tokens.
    """
    heads, width = q_TAd.shape[1:]
    keys_NKd, values_NKd = cached.keys, cached.values
    key_scales, value_scales = (None, None) if cached.scales is None else cached.scales
    kv_heads = keys_NKd.shape[1]
    group = heads // kv_heads
    decode = tiles is None
    lines = max(16, triton.next_power_of_2(group * (1 if decode else tile_tokens(group))))
    described = not decode and _describes(keys_NKd) and _describes(values_NKd)
    most = 64 if in_step else largest_power(block_size)
    keys_block, warps, stages = _tile(decode, lines, most, width, q_TAd.dtype.itemsize, described=described)
    partial = splits > 1
    device = q_TAd.device
    out = torch.empty((num_rows, heads, splits, width), dtype=torch.float32, device=device) if partial else out_TAd
    sums = torch.empty((num_rows, heads, splits), dtype=torch.float32, device=device) if partial else None
    tile_rows, tile_firsts = tiles if tiles is not None else (None, None)
    programs = num_rows if tiles is None else tiles[0].shape[0]
    if not programs:
        return
    keys, values = keys_NKd, values_NKd
    if described:
        # The copy engine brings whole tiles of keys, which lie together in a block.
        keys, values = (TensorDescriptor.from_tensor(x, [keys_block, 1, width]) for x in (keys_NKd, values_NKd))
    _attend_kernel[(programs, kv_heads, splits)](
        q_TAd, keys, values, key_scales, value_scales, out, sums, tables_RB, starts_R, contexts_R, tile_rows, tile_firsts,
        None if partial else sink_A, scale * _LOG2_E, None if softcap is None else softcap * _LOG2_E, window,
        q_TAd.stride(0), q_TAd.stride(1), keys_NKd.stride(0), keys_NKd.stride(1), values_NKd.stride(0), values_NKd.stride(1),
        0 if key_scales is None else key_scales.stride(1), tables_RB.stride(0), heads, block_size, width,
        GROUP=group, LINES=lines, TOKENS=1 if decode else tile_tokens(group), KEYS=keys_block,
        WIDTH=triton.next_power_of_2(max(16, width)), SPLITS=splits, DECODE=decode, DESCRIBED=described, IN_STEP=in_step,
        PRECISION="ieee" if q_TAd.dtype == torch.float32 else "tf32", num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if sums is not None:
        combine(out, sums, out_TAd, starts_R, sink_A)


def combine(parts_RASd: Tensor, sums_RAS: Tensor, out_TAd: Tensor, starts_R: Tensor, sink_A: Tensor | None) -> None:
    """The results of rows of one token from those of the splits of their contexts, float32, and the logarithms (to 2) of their weights."""
    rows, heads, splits, width = parts_RASd.shape
    _combine_kernel[(rows, heads)](
        parts_RASd, sums_RAS, out_TAd, starts_R, sink_A, heads, width,
        SPLITS=splits, SPLIT_BLOCK=triton.next_power_of_2(splits), WIDTH=triton.next_power_of_2(width),
        num_warps=2 if splits * width <= 2048 else 8,
    )  # fmt: skip


def _describes(x: Tensor) -> bool:
    """Whether keys or values come by a tensor descriptor: from Hopper on."""
    width = x.shape[-1]
    aligned = x.stride(-1) == 1 and not any(number % 16 for number in (x.data_ptr(), *(2 * stride for stride in x.stride()[:-1])))
    fits = x.dtype.itemsize == 2 and width >= 16 and width == triton.next_power_of_2(width) and aligned
    return fits and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _tile(decode: bool, lines: int, most: int, width: int, itemsize: int, *, described: bool) -> tuple[int, int, int]:
    """Keys of a tile, warps and stages: those that were fastest on an H200 for heads of 64 and 128, fewer where these do not fit."""
    if decode:
        keys, warps, stages = min(most, 64), 2, 3
    elif described:
        keys, warps, stages = min(most, 64), 4 if width <= 64 else 8, 3 if width <= 128 else 2
    elif itemsize < 4:
        keys, warps, stages = min(most, 64), 4 if width <= 256 else 8, 2
    else:
        # Exact products of float32 are single instructions, unrolled: a compiler needs minutes for many of them in a thread.
        keys, warps, stages = min(most, 64 if width <= 64 else 32 if width <= 128 else 16), 8 if width <= 64 else 16, 2
    while tile_bytes(lines, keys, stages, width, itemsize) > SHARED_BYTES and keys > FEWEST_KEYS:
        keys, stages = (keys, stages - 1) if stages > 1 else (keys // 2, 1)
    return keys, warps, stages


def largest_power(size: int) -> int:
    """The largest power of two that divides a number."""
    return size & -size


@triton.jit
def _append_kernel(
    k_ptr, v_ptr, keys_ptr, values_ptr, slots_ptr, k_token, k_head, v_token, v_head, keys_slot, values_slot, heads, width,
    value_width, SAME: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside, head, lane = at < heads * width, at // width, at % width
    # Of one width, one division serves both.
    value_inside, value_head, value_lane = inside, head, lane
    if not SAME:
        value_inside, value_head, value_lane = at < heads * value_width, at // value_width, at % value_width
    k = tl.load(k_ptr + token * k_token + head * k_head + lane, mask=inside)
    v = tl.load(v_ptr + token * v_token + value_head * v_head + value_lane, mask=value_inside)
    tl.store(keys_ptr + slot * keys_slot + at, k.to(keys_ptr.dtype.element_ty), mask=inside)
    tl.store(values_ptr + slot * values_slot + at, v.to(values_ptr.dtype.element_ty), mask=value_inside)


@triton.jit
def _append_scaled_kernel(
    x_ptr, data_ptr, scales_ptr, slots_ptr, x_token, x_head, data_slot, data_head, scales_head, width, BLOCK: tl.constexpr
):  # fmt: skip
    token, head, lane = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    place = x_ptr + token * x_token + head * x_head + lane
    x = tl.load(place, mask=lane < width, other=0.0).to(tl.float32)
    inverse = inverse_of(tl.max(tl.abs(x), 0), tl.sum(x, 0))
    x = rounded(shrunk(x, inverse))
    tl.store(data_ptr + slot * data_slot + head * data_head + lane, x.to(data_ptr.dtype.element_ty), mask=lane < width)
    tl.store(scales_ptr + head * scales_head + slot, inverse)
    tl.store(place, (x * inverse).to(x_ptr.dtype.element_ty), mask=lane < width)


# The places of a step's numbers and the width of its tables change from step to step: not a kernel for each.
_OF_A_STEP = ["tables_ptr", "starts_ptr", "contexts_ptr", "tile_rows_ptr", "tile_firsts_ptr"]


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=_OF_A_STEP)
def _attend_kernel(
    q_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, out_ptr, sums_ptr, tables_ptr, starts_ptr, contexts_ptr,
    tile_rows_ptr, tile_firsts_ptr,
    sink_ptr, scale, softcap, window,
    q_token, q_head, keys_slot, keys_head, values_slot, values_head, scales_head, table_stride, heads, block_size,
    width, GROUP: tl.constexpr, LINES: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    DECODE: tl.constexpr, DESCRIBED: tl.constexpr, IN_STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if DECODE:
        row = tl.program_id(0)
        first = 0
    else:
        # The last tiles of a long prompt are the longest: they start first.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        row = tl.load(tile_rows_ptr + tile)
        first = tl.load(tile_firsts_ptr + tile)
    start = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - start
    context = tl.load(contexts_ptr + row)
    table = tables_ptr + row.to(tl.int64) * table_stride

    # Each line of the tile is one head of one token; the heads that share a key-value head stand together.
    line = tl.arange(0, LINES)
    token, head = first + line // GROUP, kv_head * GROUP + line % GROUP
    real = (line // GROUP < TOKENS) & (token < tokens)
    position = context - tokens + token
    lanes = tl.arange(0, WIDTH)
    columns = lanes < width
    places = (start + token).to(tl.int64)
    q = tl.load(
        q_ptr + places[:, None] * q_token + head[:, None] * q_head + lanes[None, :], mask=real[:, None] & columns[None, :], other=0.0
    )
    line_scale = scale
    if key_scales_ptr is not None:  # noqa: SIM102
        # Triton decides each of the two when it compiles.
        if q.dtype != tl.float32:
            q, most = bounded(q)
            line_scale = (most * scale)[:, None]

    # Keys that some query of the tile sees, in tiles of KEYS; this split's share of them.
    last = tl.minimum(context - tokens + first + TOKENS, context)
    low = last * 0
    if window >= 0:
        low = tl.maximum(context - tokens + first - window, 0) // KEYS
    high = tl.cdiv(last, KEYS)
    if SPLITS > 1:
        share = tl.cdiv(high - low, SPLITS)
        low = low + split * share
        high = tl.minimum(high, low + share)

    # Tiles that every query of the tile sees whole need no mask.
    whole = low
    if window < 0:
        whole = tl.maximum(low, tl.minimum(high, (context - tokens + first + 1) // KEYS))

    best = tl.full((LINES,), -1e30, dtype=tl.float32)
    total = tl.zeros((LINES,), dtype=tl.float32)
    result = tl.zeros((LINES, WIDTH), dtype=tl.float32)
    following = 0
    if not IN_STEP:
        following = tl.load(table + tl.minimum(low, tl.maximum(high - 1, 0)) * KEYS // block_size)
    for tile in range(low, whole):
        if IN_STEP:
            place = start + tile * KEYS
        else:
            # A tile of keys lies in one block, whose number was read a tile earlier.
            place = following * block_size + tile * KEYS % block_size
            following = tl.load(table + tl.minimum(tile + 1, high - 1) * KEYS // block_size)
        if DESCRIBED:
            k = keys_ptr.load([place, kv_head, 0]).reshape(KEYS, WIDTH).T
            v = values_ptr.load([place, kv_head, 0]).reshape(KEYS, WIDTH)
        else:
            slot = place.to(tl.int64) + tl.arange(0, KEYS)
            k = tl.load(keys_ptr + slot[None, :] * keys_slot + kv_head * keys_head + lanes[:, None], mask=columns[:, None], other=0.0)
            v = tl.load(values_ptr + slot[:, None] * values_slot + kv_head * values_head + lanes[None, :], mask=columns[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * line_scale
        if key_scales_ptr is not None:
            at = kv_head * scales_head + slot
            scores = scores * tl.load(key_scales_ptr + at)[None, :]
            if softcap is not None:
                scores = capped(scores, softcap)
            best, total, result = absorb_scaled(scores, v.to(q.dtype), tl.load(value_scales_ptr + at), best, total, result, PRECISION)
        else:
            if softcap is not None:
                scores = capped(scores, softcap)
            highest = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - highest[:, None])
            shrink = tl.exp2(best - highest)
            total = total * shrink + tl.sum(weights, 1)
            result = tl.dot(weights.to(q.dtype), v.to(q.dtype), result * shrink[:, None], input_precision=PRECISION)
            best = highest
    for tile in range(whole, high):
        key = tile * KEYS + tl.arange(0, KEYS)
        if IN_STEP:
            place = start + tile * KEYS
        else:
            place = tl.load(table + tile * KEYS // block_size) * block_size + tile * KEYS % block_size
        held = key < last
        if DESCRIBED:
            k = keys_ptr.load([place, kv_head, 0]).reshape(KEYS, WIDTH).T
            # What lies behind the row's tokens may be anything.
            v = tl.where(held[:, None], values_ptr.load([place, kv_head, 0]).reshape(KEYS, WIDTH), 0.0)
        else:
            slot = place.to(tl.int64) + tl.arange(0, KEYS)
            k = tl.load(
                keys_ptr + slot[None, :] * keys_slot + kv_head * keys_head + lanes[:, None],
                mask=held[None, :] & columns[:, None],
                other=0.0,
            )
            v = tl.load(
                values_ptr + slot[:, None] * values_slot + kv_head * values_head + lanes[None, :],
                mask=held[:, None] & columns[None, :],
                other=0.0,
            )
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION) * line_scale
        seen = key[None, :] <= position[:, None]
        if window >= 0:
            seen = seen & (key[None, :] >= position[:, None] - window)
        if key_scales_ptr is not None:
            at = kv_head * scales_head + slot
            scores = scores * tl.load(key_scales_ptr + at, mask=held, other=0.0)[None, :]
            if softcap is not None:
                scores = capped(scores, softcap)
            scores = tl.where(seen, scores, -float("inf"))
            value_scales = tl.load(value_scales_ptr + at, mask=held, other=0.0)
            best, total, result = absorb_scaled(scores, v.to(q.dtype), value_scales, best, total, result, PRECISION)
        else:
            if softcap is not None:
                scores = capped(scores, softcap)
            scores = tl.where(seen, scores, -float("inf"))
            highest = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2(scores - highest[:, None])
            shrink = tl.exp2(best - highest)
            total = total * shrink + tl.sum(weights, 1)
            result = tl.dot(weights.to(q.dtype), v.to(q.dtype), result * shrink[:, None], input_precision=PRECISION)
            best = highest

    if SPLITS > 1:
        result = result / tl.where(total > 0, total, 1.0)[:, None]
        sums = tl.where(total > 0, best + tl.log2(total), -float("inf"))
        at = (row * heads + head) * SPLITS + split
        tl.store(out_ptr + at.to(tl.int64)[:, None] * width + lanes[None, :], result, mask=real[:, None] & columns[None, :])
        tl.store(sums_ptr + at, sums, mask=real)
    else:
        if sink_ptr is not None:
            total += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - best)
        result = result / tl.where(total > 0, total, 1.0)[:, None]
        at = (places * heads + head)[:, None] * width + lanes[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=real[:, None] & columns[None, :])


@triton.jit(do_not_specialize_on_alignment=["starts_ptr"])
def _combine_kernel(
    parts_ptr, sums_ptr, out_ptr, starts_ptr, sink_ptr, heads, width, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    splits, lanes = tl.arange(0, SPLIT_BLOCK), tl.arange(0, WIDTH)
    at = (row * heads + head).to(tl.int64) * SPLITS
    sums = tl.load(sums_ptr + at + splits, mask=splits < SPLITS, other=-float("inf"))
    best = tl.maximum(tl.max(sums, 0), -1e30)
    weights = tl.exp2(sums - best)
    total = tl.sum(weights, 0)
    if sink_ptr is not None:
        total += tl.exp2(tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634 - best)
    inside = (splits < SPLITS)[:, None] & (lanes < width)[None, :]
    parts = tl.load(parts_ptr + (at + splits)[:, None] * width + lanes[None, :], mask=inside, other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    token, end = tl.load(starts_ptr + row).to(tl.int64), tl.load(starts_ptr + row + 1)
    # A row of padding may have no token.
    has_token = (lanes < width) & (token < end)
    tl.store(out_ptr + (token * heads + head) * width + lanes, result.to(out_ptr.dtype.element_ty), mask=has_token)
