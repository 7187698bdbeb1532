# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of the gradients of causal attention over packed sequences; imported only when they run.

The scores are computed again. One kernel goes over the keys for each tile of queries, another over the queries for each tile of keys
(Dao, 2023): every sum has one program, so nothing is added atomically and results repeat bit by bit.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens, R sequences, A heads, K key-value heads, d width of a head, w of its values, P tiles of queries or keys.

_LOG2_E = 1.4426950408889634


def gradient_tiles(group: int, widths: tuple[int, int], dtype: torch.dtype) -> tuple[int, int]:
    """Tokens of a tile of queries, when ``group`` query heads share a key-value head, and of a tile of keys."""
    return _lines(group, widths, dtype) // group, _keys(widths, dtype)


def attention_gradients(
    inputs: tuple[Tensor, Tensor, Tensor],
    out_TAw: Tensor,
    grad_TAw: Tensor,
    sink_A: Tensor | None,
    *,
    starts_R: Tensor,
    query_tiles: tuple[Tensor, Tensor],
    key_tiles: tuple[Tensor, Tensor],
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys and values in their dtypes, and [A] float32 of the sinks.

    Args:
        inputs: q [T, A, d], k [T, K, d] and v [T, K, w], contiguous and of one dtype.
        out_TAw: what the forward gave, contiguous.
        grad_TAw: of that, contiguous, in its dtype.
        sink_A: logits of the sinks, contiguous, or None.
        starts_R: [R + 1] int32, first token of each sequence, and T.
        query_tiles: [P] int32 each, sequence and first token in it of each tile of ``gradient_tiles``.
        key_tiles: likewise.
        scale: of the scores.
        window: tokens before its own that a query sees, -1 for all.
    """
    q, k, v = inputs
    (tokens, heads, width), (kv_heads, value_width) = q.shape, v.shape[1:]
    group, widths = heads // kv_heads, (width, value_width)
    stats_2TA = torch.zeros((2, tokens, heads), dtype=torch.float32, device=q.device)
    dq, dk, dv = (torch.zeros_like(x) for x in inputs)
    lanes, value_lanes = (triton.next_power_of_2(max(16, size)) for size in widths)
    sizes = {
        "GROUP": group, "LINES": _lines(group, widths, q.dtype), "KEYS": _keys(widths, q.dtype), "WIDTH": width, "LANES": lanes,
        "VALUE_WIDTH": value_width, "VALUE_LANES": value_lanes, "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": 8 if max(widths) > 64 else 4, "num_stages": 1 if q.dtype == torch.float32 or max(widths) > 128 else 2,
    }  # fmt: skip
    # The last query that sees a key is counted from it in 32 bits.
    shape = (scale * _LOG2_E, min(window, tokens), heads)
    if len(query_tiles[0]):
        _query_kernel[(len(query_tiles[0]), kv_heads)](
            q, k, v, out_TAw, grad_TAw, sink_A, dq, *stats_2TA, starts_R, *query_tiles, scale, *shape, **sizes
        )
        _key_kernel[(len(key_tiles[0]), kv_heads)](q, k, v, grad_TAw, dk, dv, *stats_2TA, starts_R, *key_tiles, scale, *shape, **sizes)
    if sink_A is None:
        return dq, dk, dv, None
    log_sums_TA, products_TA = stats_2TA
    return dq, dk, dv, -(torch.exp2(sink_A.float() * _LOG2_E - log_sums_TA) * products_TA).sum(0)


def _lines(group: int, widths: tuple[int, int], dtype: torch.dtype) -> int:
    """Query heads times tokens of a tile of queries."""
    least = 16 if dtype == torch.float32 else 128 if max(widths) <= 64 else 64
    return max(least, triton.next_power_of_2(group))


def _keys(widths: tuple[int, int], dtype: torch.dtype) -> int:
    return 32 if dtype == torch.float32 or max(widths) > 128 else 64


_NAMES = ["starts_ptr", "tile_rows_ptr", "tile_firsts_ptr", "window"]


@triton.jit
def _rows_of(ptr, line_places, mask, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """Rows at some places, 0 where the mask is not set."""
    lanes = tl.arange(0, LANES)
    return tl.load(ptr + line_places[:, None] * WIDTH + lanes[None, :], mask=mask[:, None] & (lanes < WIDTH)[None, :], other=0.0)


@triton.jit(do_not_specialize=_NAMES, do_not_specialize_on_alignment=_NAMES)
def _query_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_ptr, sink_ptr, dq_ptr, log_sums_ptr, products_ptr, starts_ptr, tile_rows_ptr, tile_firsts_ptr,
    scale, scale2, window, heads,
    GROUP: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = LINES // GROUP
    # The last tiles of a long sequence are the longest: they start first.
    program, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tile_rows_ptr + program), tl.load(tile_firsts_ptr + program)
    start = tl.load(starts_ptr + row).to(tl.int64)
    end = tl.minimum(first + TOKENS, tl.load(starts_ptr + row + 1) - start.to(tl.int32))
    kv_heads = heads // GROUP
    # Each line is one head of one token; the heads that share a key-value head stand together.
    line = tl.arange(0, LINES)
    token, head = first + line // GROUP, kv_head * GROUP + line % GROUP
    real = (line // GROUP < TOKENS) & (token < end)
    place = (start + token) * heads + head
    q = _rows_of(q_ptr, place, real, WIDTH, LANES)
    grad = _rows_of(grad_ptr, place, real, VALUE_WIDTH, VALUE_LANES)
    out = _rows_of(out_ptr, place, real, VALUE_WIDTH, VALUE_LANES)
    product = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
    low = first * 0
    if window >= 0:
        low = tl.maximum(first - window, 0) // KEYS
    high = tl.cdiv(end, KEYS)

    best = tl.full((LINES,), -1e30, dtype=tl.float32)
    total = tl.zeros((LINES,), dtype=tl.float32)
    for tile in range(low, high):
        key = tile * KEYS + tl.arange(0, KEYS)
        k = _rows_of(k_ptr, (start + key) * kv_heads + kv_head, key < end, WIDTH, LANES)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        seen = key[None, :] <= token[:, None]
        if window >= 0:
            seen = seen & (key[None, :] >= token[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        total = total * tl.exp2(best - highest) + tl.sum(tl.exp2(scores - highest[:, None]), 1)
        best = highest
    if sink_ptr is not None:
        total += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - best)
    log_sum = best + tl.log2(tl.where(total > 0, total, 1.0))
    tl.store(log_sums_ptr + place, log_sum, mask=real)
    tl.store(products_ptr + place, product, mask=real)

    dq = tl.zeros((LINES, LANES), dtype=tl.float32)
    for tile in range(low, high):
        key = tile * KEYS + tl.arange(0, KEYS)
        k = _rows_of(k_ptr, (start + key) * kv_heads + kv_head, key < end, WIDTH, LANES)
        v = _rows_of(v_ptr, (start + key) * kv_heads + kv_head, key < end, VALUE_WIDTH, VALUE_LANES)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
        seen = key[None, :] <= token[:, None]
        if window >= 0:
            seen = seen & (key[None, :] >= token[:, None] - window)
        weights = tl.where(seen, tl.exp2(scores - log_sum[:, None]), 0.0)
        change = weights * (tl.dot(grad, tl.trans(v), input_precision=PRECISION) - product[:, None])
        dq = tl.dot(change.to(q.dtype), k, dq, input_precision=PRECISION)
    lanes = tl.arange(0, LANES)
    inside = real[:, None] & (lanes < WIDTH)[None, :]
    tl.store(dq_ptr + place[:, None] * WIDTH + lanes[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_NAMES, do_not_specialize_on_alignment=_NAMES)
def _key_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, log_sums_ptr, products_ptr, starts_ptr, tile_rows_ptr, tile_firsts_ptr,
    scale, scale2, window, heads,
    GROUP: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = LINES // GROUP
    program, kv_head = tl.program_id(0), tl.program_id(1)
    row, first = tl.load(tile_rows_ptr + program), tl.load(tile_firsts_ptr + program)
    start = tl.load(starts_ptr + row).to(tl.int64)
    tokens = tl.load(starts_ptr + row + 1) - start.to(tl.int32)
    kv_heads = heads // GROUP
    key, line = first + tl.arange(0, KEYS), tl.arange(0, LINES)
    held = key < tokens
    key_place = (start + key) * kv_heads + kv_head
    k = _rows_of(k_ptr, key_place, held, WIDTH, LANES)
    v = _rows_of(v_ptr, key_place, held, VALUE_WIDTH, VALUE_LANES)
    last = tokens
    if window >= 0:
        last = tl.minimum(tokens, first + KEYS + window)
    dk = tl.zeros((KEYS, LANES), dtype=tl.float32)
    dv = tl.zeros((KEYS, VALUE_LANES), dtype=tl.float32)
    for tile in range(first // TOKENS, tl.cdiv(last, TOKENS)):
        token, head = tile * TOKENS + line // GROUP, kv_head * GROUP + line % GROUP
        real = (line // GROUP < TOKENS) & (token < tokens)
        place = (start + token) * heads + head
        q = _rows_of(q_ptr, place, real, WIDTH, LANES)
        grad = _rows_of(grad_ptr, place, real, VALUE_WIDTH, VALUE_LANES)
        log_sum = tl.load(log_sums_ptr + place, mask=real, other=0.0)
        product = tl.load(products_ptr + place, mask=real, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale2
        seen = (key[:, None] <= token[None, :]) & real[None, :]
        if window >= 0:
            seen = seen & (key[:, None] >= token[None, :] - window)
        weights = tl.where(seen, tl.exp2(scores - log_sum[None, :]), 0.0)
        dv = tl.dot(weights.to(q.dtype), grad, dv, input_precision=PRECISION)
        change = weights * (tl.dot(v, tl.trans(grad), input_precision=PRECISION) - product[None, :])
        dk = tl.dot(change.to(q.dtype), q, dk, input_precision=PRECISION)
    lanes, value_lanes = tl.arange(0, LANES), tl.arange(0, VALUE_LANES)
    inside, value_inside = held[:, None] & (lanes < WIDTH)[None, :], held[:, None] & (value_lanes < VALUE_WIDTH)[None, :]
    tl.store(dk_ptr + key_place[:, None] * WIDTH + lanes[None, :], (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + key_place[:, None] * VALUE_WIDTH + value_lanes[None, :], dv.to(dv_ptr.dtype.element_ty), mask=value_inside)
