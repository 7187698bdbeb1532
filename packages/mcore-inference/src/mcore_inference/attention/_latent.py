# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of attention over a paged cache of latents; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_inference._triton_cast import inverse_of, rounded, shrunk
from mcore_inference.attention._decode import absorb, num_splits
from mcore_inference.attention._fp8 import add_pairs, bounded, pair_scores
from mcore_inference.attention._step import TableRows
from mcore_inference.attention._tiles import TILE_LINES
from mcore_inference.attention._triton import combine, largest_power
from mcore_inference.cache import LayerSlots

# T tokens of a step, R rows (requests) of it, A heads, W channels of an entry: C of the latent, which is the value too, and those of the
# rotary key; N slots, S splits of a row's context.

_LOG2_E = 1.4426950408889634
_SHARED_BYTES = 200 * 1024
"""Of a multiprocessor's memory, with a part left for what the compiler adds."""
_HEADS = 16
"""Heads of a tile: one side of a matrix instruction. All heads read the same entries, so a tile may hold any of them."""
_MAX_SPLITS = 32
"""More than for heads with keys of their own: one tile of heads is all that there is of a row where tp has cut them to 16."""
_PREFILL_LINES = 64
"""Heads times tokens of a tile of a prompt: its sums [64, 512] fill the registers of eight warps to a half."""


def append_scaled(entries_TW: Tensor, cached: LayerSlots, slots_T: Tensor) -> None:
    """Write the step's entries into their slots of a cache in fp8: latents with a scale a token, rotary keys as they are.

    Args:
        entries_TW: last stride 1.
        cached: slots of one layer.
        slots_T: [T] int64.
    """
    (tokens, width), rank = entries_TW.shape, cached.keys.shape[-1]
    assert cached.scales is not None and cached.rotary is not None, "slots of latents in fp8"
    if tokens:
        _append_kernel[(tokens,)](
            entries_TW, cached.keys, cached.scales[0], cached.rotary, slots_T, entries_TW.stride(0), cached.keys.stride(0),
            cached.rotary.stride(0), rank, width,
            RANK_BLOCK=triton.next_power_of_2(rank), ROPE_BLOCK=triton.next_power_of_2(width - rank), num_warps=1,
        )  # fmt: skip


def attend_latents(queries_TAW: Tensor, cached: LayerSlots, out_TAC: Tensor, rows: TableRows, *, scale: float, splits: int | None) -> None:
    """Causal attention of absorbed queries to the entries of their rows, into ``out_TAC``.

    Args:
        queries_TAW: last stride 1.
        cached: slots of one layer, those of the step's tokens written; in fp8 of an even C.
        out_TAC: contiguous; sums of the first C channels of the entries.
        rows: of the step, with tiles of 128 tokens.
        scale: of the scores.
        splits: parts of the context of rows of one token; None for as many as fill the GPU.
    """
    if rows.num_decode:
        tiles = triton.cdiv(queries_TAW.shape[1], _HEADS)
        count = num_splits(rows.num_decode, tiles, rows.longest, _MAX_SPLITS) if splits is None else splits
        _launch(queries_TAW, cached, out_TAC, rows, scale, None, count)
    for tiles in (rows.tiles, rows.whole_tiles):
        if tiles is not None:
            _launch(queries_TAW, cached, out_TAC, rows, scale, tiles, 1)


def _launch(
    queries: Tensor, cached: LayerSlots, out_TAC: Tensor, rows: TableRows, scale: float, tiles: tuple[Tensor, Tensor] | None, splits: int
) -> None:
    (_, num_heads, width), rank = queries.shape, out_TAC.shape[-1]
    heads = _HEADS if tiles is None else min(_HEADS, triton.next_power_of_2(num_heads))
    tokens = 1 if tiles is None else _lines(queries.dtype.itemsize) // heads
    parts = TILE_LINES // tokens
    # In fp8 channels come in pairs, of which the even and the odd ones are matrices of their own.
    entries, scales, rotary = cached.keys[:, 0], None if cached.scales is None else cached.scales[0], cached.rotary
    entries = entries if scales is None else entries.view(torch.int16)
    rank_block, rope_block = triton.next_power_of_2(max(16 if scales is None else 32, rank)), triton.next_power_of_2(max(16, width - rank))
    most = largest_power(rows.block_size)
    keys, stages = _tile(heads * tokens, most, rank_block + rope_block, queries.dtype.itemsize)
    out, sums, device = out_TAC, None, queries.device
    if splits > 1:
        out = torch.empty((rows.num_decode, num_heads, splits, rank), dtype=torch.float32, device=device)
        sums = torch.empty((rows.num_decode, num_heads, splits), dtype=torch.float32, device=device)
    tile_rows, tile_firsts = (None, None) if tiles is None else tiles
    programs = rows.num_decode if tiles is None else parts * len(tiles[0])
    _latent_kernel[(programs, triton.cdiv(num_heads, heads), splits)](
        queries, entries, scales, rotary, out, sums, rows.tables_RB, rows.starts_R, rows.contexts_R, tile_rows, tile_firsts,
        scale * _LOG2_E, queries.stride(0), queries.stride(1), entries.stride(0), None if rotary is None else rotary.stride(0),
        rows.tables_RB.stride(0), num_heads, rows.block_size, rank, width,
        HEADS=heads, TOKENS=tokens, PARTS=parts, KEYS=keys, RANK_BLOCK=rank_block, ROPE_BLOCK=rope_block, SPLITS=splits,
        DECODE=tiles is None, PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=4 if tiles is None else 8, num_stages=stages,
    )  # fmt: skip
    if sums is not None:
        combine(out, sums, out_TAC, rows.starts_R, None)


def _lines(itemsize: int) -> int:
    """Of a tile of a prompt: float32 has single instructions only, whose operands lie in registers."""
    return _PREFILL_LINES if itemsize == 2 else _HEADS


def _tile(lines: int, most: int, width: int, itemsize: int) -> tuple[int, int]:
    """Keys of a tile and stages, what shared memory and registers hold: an entry is loaded once, for scores and for sums."""
    keys, stages = min(most, 32 if itemsize == 2 else 16), 2
    while (lines + keys * stages) * width * itemsize > _SHARED_BYTES and stages > 1:
        stages -= 1
    return keys, stages


@triton.jit
def _append_kernel(
    x_ptr, data_ptr, scales_ptr, rotary_ptr, slots_ptr, x_token, data_slot, rotary_slot, rank, width,
    RANK_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr,
):  # fmt: skip
    token, lane, turned = tl.program_id(0).to(tl.int64), tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
    slot, entry = tl.load(slots_ptr + token).to(tl.int64), x_ptr + token * x_token
    latent = tl.load(entry + lane, mask=lane < rank, other=0.0).to(tl.float32)
    key = tl.load(entry + rank + turned, mask=turned < width - rank, other=0.0)
    inverse = inverse_of(tl.max(tl.abs(latent), 0), tl.sum(latent, 0))
    latent = rounded(shrunk(latent, inverse)).to(data_ptr.dtype.element_ty)
    tl.store(data_ptr + slot * data_slot + lane, latent, mask=lane < rank)
    tl.store(scales_ptr + slot, inverse)
    tl.store(rotary_ptr + slot * rotary_slot + turned, key, mask=turned < width - rank)


@triton.jit
def _latent_kernel(
    q_ptr, entries_ptr, scales_ptr, rotary_ptr, out_ptr, sums_ptr, tables_ptr, starts_ptr, contexts_ptr, tile_rows_ptr, tile_firsts_ptr,
    scale, q_token, q_head, entry_stride, rotary_stride, table_stride, heads, block_size, rank, width,
    HEADS: tl.constexpr, TOKENS: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr, RANK_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr, SPLITS: tl.constexpr, DECODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(2)
    if DECODE:
        row = tl.program_id(0)
        first = 0
    else:
        # The last tiles of a long prompt are the longest: they start first. A tile of the step is several programs.
        place = tl.num_programs(0) - 1 - tl.program_id(0)
        row = tl.load(tile_rows_ptr + place // PARTS)
        first = tl.load(tile_firsts_ptr + place // PARTS) + place % PARTS * TOKENS
    start = tl.load(starts_ptr + row)
    tokens = tl.load(starts_ptr + row + 1) - start
    context = tl.load(contexts_ptr + row)
    table = tables_ptr + row.to(tl.int64) * table_stride

    # Each line is one head of one token.
    line = tl.arange(0, HEADS * TOKENS)
    token, head = first + line // HEADS, tl.program_id(1) * HEADS + line % HEADS
    real = (token < tokens) & (head < heads)
    position = context - tokens + token
    lane, turned = tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
    in_rank, in_rope = lane < rank, turned < width - rank
    places = (start + token).to(tl.int64)
    lines = q_ptr + (places * q_token + head * q_head)[:, None]
    q = tl.load(lines + lane[None, :], mask=real[:, None] & in_rank[None, :], other=0.0)
    q_rope = tl.load(lines + rank + turned[None, :], mask=real[:, None] & in_rope[None, :], other=0.0)
    if scales_ptr is not None:
        kind = q.dtype
        # Pairs come as 2^-8 of what they are.
        line_scale = scale * 256.0
        if q.dtype != tl.float32:
            kind = tl.float16
            q, largest = bounded(q)
            line_scale = (largest * line_scale)[:, None]
        q_even, q_odd = tl.split(tl.reshape(q, (HEADS * TOKENS, RANK_BLOCK // 2, 2)))
        pair = tl.arange(0, RANK_BLOCK // 2)
        in_pairs = pair < rank // 2

    # Keys that some line sees, in tiles of KEYS; this split's share of them. A program behind the row's last token sees none.
    last = tl.where(first < tokens, tl.minimum(context - tokens + first + TOKENS, context), 0)
    low, high = last * 0, tl.cdiv(last, KEYS)
    if SPLITS > 1:
        share = tl.cdiv(high, SPLITS)
        low = split * share
        high = tl.minimum(high, low + share)
    # Tiles that every line sees whole need no mask.
    whole = tl.maximum(low, tl.minimum(high, (context - tokens + first + 1) // KEYS))
    best = tl.full((HEADS * TOKENS,), -1e30, dtype=tl.float32)
    total = tl.zeros((HEADS * TOKENS,), dtype=tl.float32)
    if scales_ptr is None:
        result = tl.zeros((HEADS * TOKENS, RANK_BLOCK), dtype=tl.float32)
    else:
        even = tl.zeros((HEADS * TOKENS, RANK_BLOCK // 2), dtype=tl.float32)
        odd = tl.zeros((HEADS * TOKENS, RANK_BLOCK // 2), dtype=tl.float32)
        # Of the scales so far, which both are over.
        most = tl.full((), 1e-35, dtype=tl.float32)
    following = tl.load(table + tl.minimum(low, tl.maximum(high - 1, 0)) * KEYS // block_size)
    for tile in range(low, whole):
        # A tile of keys lies in one block, whose number was read a tile earlier.
        slot = following.to(tl.int64) * block_size + tile * KEYS % block_size + tl.arange(0, KEYS)
        following = tl.load(table + tl.minimum(tile + 1, high - 1) * KEYS // block_size)
        entries = entries_ptr + slot[:, None] * entry_stride
        if scales_ptr is None:
            latent = tl.load(entries + lane[None, :], mask=in_rank[None, :], other=0.0)
            key = tl.load(entries + rank + turned[None, :], mask=in_rope[None, :], other=0.0)
            scores = tl.dot(q_rope, tl.trans(key), input_precision=PRECISION)
            scores = tl.dot(q, tl.trans(latent), scores, input_precision=PRECISION) * scale
            best, total, result = absorb(scores, latent, best, total, result, PRECISION)
        else:
            pairs = tl.load(entries + pair[None, :], mask=in_pairs[None, :], other=0)
            key = tl.load(rotary_ptr + slot[:, None] * rotary_stride + turned[None, :], mask=in_rope[None, :], other=0.0)
            inverse = tl.load(scales_ptr + slot)
            scores = pair_scores(q_even, q_odd, pairs, kind, PRECISION) * line_scale * inverse[None, :]
            scores += tl.dot(q_rope, tl.trans(key), input_precision=PRECISION) * scale
            best, total, most, even, odd = add_pairs(scores, pairs, inverse, best, total, most, even, odd, kind, PRECISION)
    for tile in range(whole, high):
        number = tile * KEYS + tl.arange(0, KEYS)
        held = number < last
        slot = tl.load(table + tile * KEYS // block_size).to(tl.int64) * block_size + number % block_size
        entries = entries_ptr + slot[:, None] * entry_stride
        if scales_ptr is None:
            latent = tl.load(entries + lane[None, :], mask=held[:, None] & in_rank[None, :], other=0.0)
            key = tl.load(entries + rank + turned[None, :], mask=held[:, None] & in_rope[None, :], other=0.0)
            scores = tl.dot(q_rope, tl.trans(key), input_precision=PRECISION)
            scores = tl.dot(q, tl.trans(latent), scores, input_precision=PRECISION) * scale
            scores = tl.where(held[None, :] & (number[None, :] <= position[:, None]), scores, -float("inf"))
            best, total, result = absorb(scores, latent, best, total, result, PRECISION)
        else:
            pairs = tl.load(entries + pair[None, :], mask=held[:, None] & in_pairs[None, :], other=0)
            keys = rotary_ptr + slot[:, None] * rotary_stride + turned[None, :]
            key = tl.load(keys, mask=held[:, None] & in_rope[None, :], other=0.0)
            inverse = tl.load(scales_ptr + slot, mask=held, other=0.0)
            scores = pair_scores(q_even, q_odd, pairs, kind, PRECISION) * line_scale * inverse[None, :]
            scores += tl.dot(q_rope, tl.trans(key), input_precision=PRECISION) * scale
            scores = tl.where(held[None, :] & (number[None, :] <= position[:, None]), scores, -float("inf"))
            best, total, most, even, odd = add_pairs(scores, pairs, inverse, best, total, most, even, odd, kind, PRECISION)

    if scales_ptr is not None:
        result = tl.interleave(even, odd) * (most * 256.0)
    result = result / tl.where(total > 0, total, 1.0)[:, None]
    mask = real[:, None] & in_rank[None, :]
    if SPLITS > 1:
        # A split that saw no key weighs nothing.
        at = (row * heads + head).to(tl.int64) * SPLITS + split
        tl.store(out_ptr + at[:, None] * rank + lane[None, :], result, mask=mask)
        tl.store(sums_ptr + at, tl.where(total > 0, best + tl.log2(total), -float("inf")), mask=real)
    else:
        at = (places * heads + head)[:, None] * rank + lane[None, :]
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=mask)
