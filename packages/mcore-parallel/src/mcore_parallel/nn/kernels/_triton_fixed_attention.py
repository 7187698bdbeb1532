# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel of causal attention whose bits for a token depend on its own sequence only; imported only when it runs.

Keys come in tiles of one size that begin at multiples of it, from the first key on, whatever the queries beside and wherever keys lie:
a running softmax takes them in this order, and a tile of which a query sees nothing leaves its sums as they are. One compilation serves
training, prompts, parts of prompts and single tokens, so all of them round alike.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens of a step, R sequences of it, A heads, K key-value heads, d width of a head, w of its values, N slots of keys and values,
# B blocks of the longest sequence, P tiles of queries.

_LOG2_E = 1.4426950408889634


def fixed_tile_tokens(group: int, dtype: torch.dtype) -> int:
    """Tokens of a tile of queries, when ``group`` query heads share a key-value head."""
    return _lines(group, dtype) // group


def attend_fixed(
    q_TAd: Tensor,
    keys_NKd: Tensor,
    values_NKw: Tensor,
    out_TAw: Tensor,
    *,
    sink_A: Tensor | None,
    tables_RB: Tensor,
    starts_R: Tensor,
    contexts_R: Tensor,
    tiles: tuple[Tensor, Tensor],
    tile_tokens: int,
    block_size: int,
    in_step: bool,
    scale: float,
    window: int,
) -> None:
    """Attention of the queries of some tiles, into ``out_TAw``.

    Args:
        q_TAd: contiguous.
        keys_NKd: the heads of a slot side by side; slots of one distance wherever bits are to be equal.
        values_NKw: likewise.
        out_TAw: contiguous, of the dtype of q.
        sink_A: logits of the sinks, or None.
        tables_RB: int32 blocks of each sequence in the order of its tokens; of any stride between sequences.
        starts_R: [R + 1] int32, first token of each sequence among the T, and T.
        contexts_R: int32, tokens of each sequence, those of the step last; 0 for padding, whose result is 0.
        tiles: [P] int32 each, sequence and first token in it of each tile.
        tile_tokens: of a tile at most.
        block_size: slots of a block.
        in_step: a sequence's blocks are counted from its first token, and not from slot 0.
        scale: of the scores.
        window: tokens before its own that a query sees, -1 for all.
    """
    (heads, width), kv_heads, value_width = q_TAd.shape[1:], keys_NKd.shape[1], values_NKw.shape[-1]
    group, dtype = heads // kv_heads, q_TAd.dtype
    assert keys_NKd.stride()[1:] == (width, 1) and values_NKw.stride()[1:] == (value_width, 1)
    lines, (lanes, value_lanes) = _lines(group, dtype), (triton.next_power_of_2(max(16, size)) for size in (width, value_width))
    parts = -(-tile_tokens // (lines // group))
    if not len(tiles[0]):
        return
    _attend_kernel[(len(tiles[0]) * parts, kv_heads)](
        q_TAd, keys_NKd, values_NKw, out_TAw, sink_A, tables_RB, starts_R, contexts_R, *tiles, scale * _LOG2_E,
        window, int(in_step), tables_RB.stride(0), block_size, tile_tokens, parts, keys_NKd.stride(0), values_NKw.stride(0), heads,
        GROUP=group, LINES=lines, KEYS=32 if dtype == torch.float32 else 64, WIDTH=width, LANES=lanes, VALUE_WIDTH=value_width,
        VALUE_LANES=value_lanes, PRECISION="ieee" if dtype == torch.float32 else "tf32", num_warps=4,
        num_stages=2 if max(lanes, value_lanes) > 128 or dtype == torch.float32 else 3, enable_fp_fusion=False,
    )  # fmt: skip


def _lines(group: int, dtype: torch.dtype) -> int:
    """Query heads times tokens of a tile: what a matrix instruction of Hopper takes; float32 has single instructions."""
    return max(16 if dtype == torch.float32 else 64, triton.next_power_of_2(group))


# Nothing of these has a part in what becomes of a query, so nothing is compiled for their values.
_NAMES = [
    "tables_ptr", "starts_ptr", "contexts_ptr", "tile_rows_ptr", "tile_firsts_ptr", "window", "in_step", "table_stride", "block_size",
    "tile_tokens", "parts",
]  # fmt: skip


@triton.jit(do_not_specialize=_NAMES, do_not_specialize_on_alignment=_NAMES)
def _attend_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, sink_ptr, tables_ptr, starts_ptr, contexts_ptr, tile_rows_ptr, tile_firsts_ptr, scale,
    window, in_step, table_stride, block_size, tile_tokens, parts, keys_slot, values_slot, heads,
    GROUP: tl.constexpr, LINES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_LANES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = LINES // GROUP
    kv_head = tl.program_id(1)
    # The last tiles of a long sequence are the longest: they start first.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tl.load(tile_rows_ptr + program // parts)
    tile_first = tl.load(tile_firsts_ptr + program // parts)
    start = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - start
    context = tl.load(contexts_ptr + row)
    first = tile_first + program % parts * TOKENS
    end = tl.minimum(tl.minimum(first + TOKENS, tile_first + tile_tokens), tokens)

    # Each line of the tile is one head of one token; the heads that share a key-value head stand together.
    line = tl.arange(0, LINES)
    token, head = first + line // GROUP, kv_head * GROUP + line % GROUP
    real = (line // GROUP < TOKENS) & (token < end)
    position = context - tokens + token
    lanes, value_lanes = tl.arange(0, LANES), tl.arange(0, VALUE_LANES)
    columns, value_columns = lanes < WIDTH, value_lanes < VALUE_WIDTH
    place = ((start + token).to(tl.int64) * heads + head)[:, None]
    q = tl.load(q_ptr + place * WIDTH + lanes[None, :], mask=real[:, None] & columns[None, :], other=0.0)

    last = tl.where(first < end, context - tokens + end, 0)
    low = last * 0
    if window >= 0:
        low = tl.maximum(context - tokens + first - window, 0) // KEYS
    table = tables_ptr + row.to(tl.int64) * table_stride
    base = start.to(tl.int64) * in_step
    best = tl.full((LINES,), -1e30, dtype=tl.float32)
    total = tl.zeros((LINES,), dtype=tl.float32)
    result = tl.zeros((LINES, VALUE_LANES), dtype=tl.float32)
    for tile in range(low, tl.cdiv(last, KEYS)):
        key = tile * KEYS + tl.arange(0, KEYS)
        held = key < last
        slot = tl.load(table + key // block_size, mask=held, other=0).to(tl.int64) * block_size + key % block_size + base
        k = tl.load(
            keys_ptr + slot[None, :] * keys_slot + kv_head * WIDTH + lanes[:, None], mask=held[None, :] & columns[:, None], other=0.0
        )
        v = tl.load(
            values_ptr + slot[:, None] * values_slot + kv_head * VALUE_WIDTH + value_lanes[None, :],
            mask=held[:, None] & value_columns[None, :],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = key[None, :] <= position[:, None]
        if window >= 0:
            seen = seen & (key[None, :] >= position[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        highest = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(best - highest)
        total = total * shrink + tl.sum(weights, 1)
        result = tl.dot(weights.to(q.dtype), v, result * shrink[:, None], input_precision=PRECISION)
        best = highest
    if sink_ptr is not None:
        total += tl.exp2(tl.load(sink_ptr + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634 - best)
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    inside = real[:, None] & value_columns[None, :]
    tl.store(out_ptr + place * VALUE_WIDTH + value_lanes[None, :], result.to(out_ptr.dtype.element_ty), mask=inside)
