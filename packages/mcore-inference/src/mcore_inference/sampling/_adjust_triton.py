# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernels of penalties, biases and bans; imported only when they run."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mcore_inference.sampling._adjust import AdjustRows

# R rows of a step, A of them that are adjusted, V vocabulary, M lines of requests, N rows of counts, K entries of tables.
# B forbidden words of several tokens, W last tokens of a line.

_TILE = 4096


def adjust_rows(scores_RV: Tensor, position_R: Tensor, rows: AdjustRows, lines_M7: Tensor, counts_NV: Tensor, table_3K: Tensor) -> None:
    """As ``_adjust.adjust_rows`` on a processor, to the bit, of float32 scores whose last stride is 1."""
    count, vocab_size = len(rows.rows_A), scores_RV.shape[1]
    # Sums of products are rounded twice, as torch rounds them.
    kernel: Any = _adjust_kernel
    kernel[(count, triton.cdiv(vocab_size, _TILE))](
        scores_RV, position_R, rows.rows_A, rows.lines_A, rows.drafts_A2, rows.drafts_D, lines_M7, counts_NV, table_3K,
        scores_RV.stride(0), vocab_size, table_3K.shape[1], TILE=_TILE, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


# Where these begin depends on the number of rows.
_ROWS = ["position_ptr", "rows_ptr", "lines_ptr", "bounds_ptr", "drafts_ptr"]


@triton.jit(do_not_specialize_on_alignment=_ROWS)
def _adjust_kernel(
    scores_ptr, position_ptr, rows_ptr, lines_ptr, bounds_ptr, drafts_ptr, state_ptr, counts_ptr, table_ptr, stride, vocab_size, capacity,
    TILE: tl.constexpr,
):  # fmt: skip
    """One tile of one row."""
    number, first = tl.program_id(0), tl.program_id(1) * TILE
    row = tl.load(rows_ptr + number)
    ids = first + tl.arange(0, TILE)
    inside = ids < vocab_size
    scores = tl.load(scores_ptr + row * stride + ids, mask=inside, other=0.0)
    state = state_ptr + tl.load(lines_ptr + number) * 7

    counts_row = tl.load(state + 3).to(tl.int64)
    if counts_row >= 0:
        counts = tl.load(counts_ptr + counts_row * vocab_size + ids, mask=inside, other=0)
        for place in range(tl.load(bounds_ptr + 2 * number), tl.load(bounds_ptr + 2 * number + 1)):
            counts += 2 * (ids == tl.load(drafts_ptr + place)).to(tl.int32)
        repetition = tl.load(state).to(tl.float32)
        frequency = tl.load(state + 1).to(tl.float32)
        presence = tl.load(state + 2).to(tl.float32)
        scaled = tl.where(scores > 0, tl.div_rn(scores, tl.full((TILE,), 1.0, tl.float32) * repetition), scores * repetition)
        scores = tl.where(counts > 0, scaled, scores)
        outputs = counts >> 1
        scores = scores - (frequency * outputs.to(tl.float32) + tl.where(outputs > 0, presence, 0.0))

    # Entries of this tile: from the first that is not below it. Some rows draw nothing else.
    own = scores
    scores = tl.where(tl.load(state + 6) != 0, -float("inf"), scores)
    low, end = tl.load(state + 4).to(tl.int32), tl.load(state + 5).to(tl.int32)
    high = end + 0
    while low < high:
        middle = (low + high) // 2
        below = tl.load(table_ptr + middle).to(tl.int32) < first
        low, high = tl.where(below, middle + 1, low), tl.where(below, high, middle)
    position = tl.load(position_ptr + row)
    going_on = low < end
    while going_on:
        token = tl.load(table_ptr + low).to(tl.int32)
        going_on = token < first + TILE
        if going_on:
            bias = tl.load(table_ptr + capacity + low).to(tl.float32)
            banned = position.to(tl.float64) < tl.load(table_ptr + 2 * capacity + low)
            value = tl.where(banned, -float("inf"), own + bias)
            scores = tl.where(ids == token, value, scores)
        low += 1
        going_on = going_on & (low < end)
    tl.store(scores_ptr + row * stride + ids, scores, mask=inside)


def ban_words(scores_RV: Tensor, rows: AdjustRows, lines_M7: Tensor, table_3K: Tensor, tails_MW: Tensor) -> None:
    """As ``_adjust.ban_words``, of float32 scores whose last stride is 1."""
    num_back = tails_MW.shape[1]
    kernel: Any = _ban_kernel
    kernel[(len(rows.words_B3),)](
        scores_RV, rows.rows_A, rows.lines_A, rows.drafts_A2, rows.drafts_D, rows.words_B3, lines_M7, table_3K, tails_MW,
        scores_RV.stride(0), num_back, BACK=triton.next_power_of_2(num_back), num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize_on_alignment=[*_ROWS, "words_ptr"])
def _ban_kernel(
    scores_ptr, rows_ptr, lines_ptr, bounds_ptr, drafts_ptr, words_ptr, state_ptr, table_ptr, tails_ptr, stride, num_back,
    BACK: tl.constexpr,
):  # fmt: skip
    """One word of one row."""
    word = words_ptr + 3 * tl.program_id(0)
    place = tl.load(word)
    line = tl.load(lines_ptr + place)
    last = tl.load(state_ptr + line * 7 + 4).to(tl.int64) + tl.load(word + 1) + tl.load(word + 2) - 1
    back = tl.arange(0, BACK)
    inside = back < tl.load(word + 2) - 1
    wanted = tl.load(table_ptr + last - 1 - back, mask=inside, other=0.0).to(tl.int64)
    # Back from the end: tokens that the row assumes, then those of the output.
    end = tl.load(bounds_ptr + 2 * place + 1)
    behind = back - (end - tl.load(bounds_ptr + 2 * place))
    drafts = tl.load(drafts_ptr + end - 1 - back, mask=inside & (behind < 0), other=0)
    tails = tl.load(tails_ptr + line * num_back + num_back - 1 - behind, mask=inside & (behind >= 0), other=0)
    seen = tl.where(behind < 0, drafts, tails)
    if tl.sum((inside & (seen != wanted)).to(tl.int32), axis=0) == 0:
        token = tl.load(table_ptr + last).to(tl.int64)
        tl.store(scores_ptr + tl.load(rows_ptr + place) * stride + token, -float("inf"))
