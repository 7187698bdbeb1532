# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows with penalties, biases and bans, and their scores in torch."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_inference._stability import experimental_api

# R rows of a step, A of them that are adjusted, P of these with penalties, V vocabulary, M lines of requests, N rows of counts.
# K entries of all tables, E of those of the rows, D proposed tokens, S tokens that rows have seen, C lines whose draw is counted.
# B forbidden words of several tokens, each of one row, W last tokens of a line.


@experimental_api
@dataclass(frozen=True, kw_only=True)
class AdjustRows:
    """Rows of a step whose scores are adjusted, those with penalties first."""

    rows_A: Tensor
    """[A] int64."""
    lines_A: Tensor
    """[A] int64, of requests."""
    drafts_A2: Tensor
    """[A, 2] int64, where the tokens that a row assumes begin in ``drafts_D``, and end."""
    drafts_D: Tensor
    """[D] int64, in the order of the rows; those with penalties or forbidden words of several tokens have some."""
    counted_C: Tensor
    """[C] int64, lines whose token is the next of their output."""
    places_C: Tensor
    """[C] int64, where their counts begin."""
    words_B3: Tensor
    """[B, 3] int64: of each forbidden word of several tokens its row, as a place among the A, where its ids are behind the begin of the
    line's entries, and how many they are."""
    tailed_C: Tensor
    """[C] int64, lines with such words whose token is the next of their output."""
    lines: tuple[int, ...]
    """Those of ``counted_C`` and ``tailed_C``, on the host."""
    num_penalized: int
    """P."""
    num_penalized_drafts: int
    """Of ``drafts_D``, the first ones, those that rows with penalties assume."""
    num_entries: int
    """E, of the tables of all rows."""
    restricts: bool
    """Whether some rows draw ids of their tables alone."""


def adjust_rows(scores_RV: Tensor, position_R: Tensor, rows: AdjustRows, lines_M7: Tensor, counts_NV: Tensor, table_3K: Tensor) -> None:
    """Adjust rows of scores in place; only those that change are touched.

    Args:
        scores_RV: [R, V] float32 or float64.
        position_R: [R] int64, tokens of the output before the one to be drawn.
        rows: A of the R.
        lines_M7: [M, 7] float64: repetition, frequency and presence penalty, row of the counts (-1 for none), begin and end in the table,
            and 1 where nothing else is drawn.
        counts_NV: [N, V] int32: two for each time that a token was generated, one where it is in the prompt.
        table_3K: [3, K] float64: ids, rising within a line; biases; tokens before which an id is banned.
    """
    kind, device = scores_RV.dtype, scores_RV.device
    lines_A7 = lines_M7[rows.lines_A]
    if num := rows.num_penalized:
        counts_PV = counts_NV[lines_A7[:num, 3].long()]
        if total := rows.num_penalized_drafts:
            begins_P, ends_P = rows.drafts_A2[:num].T
            row_D = _repeated(ends_P - begins_P, total)
            twos_D = torch.full_like(row_D, 2, dtype=torch.int32)
            counts_PV.index_put_((row_D, rows.drafts_D[:total]), twos_D, accumulate=True)
        row_S, ids_S = counts_PV.nonzero(as_tuple=True)
        at, outputs_S = (rows.rows_A[row_S], ids_S), counts_PV[row_S, ids_S] >> 1
        repetition_S, frequency_S, presence_S = lines_A7[row_S, :3].to(kind).T
        scores_S = scores_RV[at]
        scores_S = torch.where(scores_S > 0, scores_S / repetition_S, scores_S * repetition_S)
        scores_RV[at] = scores_S - (frequency_S * outputs_S + presence_S * (outputs_S > 0))
    if total := rows.num_entries:
        begins_A, ends_A = lines_A7[:, 4:6].long().T
        sizes_A = ends_A - begins_A
        row_E = _repeated(sizes_A, total)
        place_E = torch.arange(total, device=device) + (begins_A - sizes_A.cumsum(0) + sizes_A)[row_E]
        ids_E, bias_E, until_E = table_3K[:, place_E]
        at = rows.rows_A[row_E], ids_E.long()
        banned_E = position_R[at[0]] < until_E
        entries_E = (scores_RV[at] + bias_E.to(kind)).masked_fill(banned_E, -math.inf)
        if rows.restricts:
            scores_RV[rows.rows_A] = scores_RV[rows.rows_A].masked_fill(lines_A7[:, 6:] > 0, -math.inf)
        scores_RV[at] = entries_E


def ban_words(scores_RV: Tensor, rows: AdjustRows, lines_M7: Tensor, table_3K: Tensor, tails_MW: Tensor) -> None:
    """Ban in place the last token of each forbidden word whose others end the output that a row assumes.

    Args:
        scores_RV: [R, V] float32 or float64.
        rows: with words of 2 to W + 1 tokens.
        lines_M7: as of ``adjust_rows``.
        table_3K: the ids of words, in its first row.
        tails_MW: [M, W] int64, the last tokens of each line's output; -1 before the first.
    """
    place_B, offset_B, length_B = rows.words_B3.T
    line_B = rows.lines_A[place_B]
    last_B = lines_M7[line_B, 4].long() + offset_B + length_B - 1
    back_W = torch.arange(tails_MW.shape[1], device=scores_RV.device)
    wanted_BW = table_3K[0, (last_B[:, None] - 1 - back_W).clamp(min=0)]
    # Back from the end: tokens that the row assumes, then those of the output.
    begin_B, end_B = rows.drafts_A2[place_B].T
    behind_BW = back_W - (end_B - begin_B)[:, None]
    seen_BW = tails_MW[line_B].flip(1).gather(1, behind_BW.clamp(min=0))
    if len(rows.drafts_D):
        drafts_BW = rows.drafts_D[(end_B[:, None] - 1 - back_W).clamp(min=0)]
        seen_BW = torch.where(behind_BW < 0, drafts_BW, seen_BW)
    ends_B = ((seen_BW == wanted_BW) | (back_W >= length_B[:, None] - 1)).all(1)
    scores_RV[rows.rows_A[place_B[ends_B]], table_3K[0, last_B[ends_B]].long()] = -math.inf


def _repeated(sizes_A: Tensor, total: int) -> Tensor:
    """[total] int64: each place as often as its size says, which the host knows the sum of."""
    return torch.arange(len(sizes_A), device=sizes_A.device).repeat_interleave(sizes_A, output_size=total)
