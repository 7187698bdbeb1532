# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Penalties, biases and bans on scores, by state of each request that stays on the device."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mcore_inference._kernels import has_kernels
from mcore_inference._stability import experimental_api
from mcore_inference.sampling._adjust import AdjustRows, adjust_rows
from mcore_inference.sampling._params import SamplingParams

# R rows of a step, A of them that are adjusted, P of these with penalties, V vocabulary, M lines of requests, N rows of counts.
# K entries of all tables, E of those of the rows, D proposed tokens, S tokens that rows have seen, C lines whose draw is counted.

_MIN_CAPACITY = 1024
"""Entries of the first table."""


@dataclass(kw_only=True)
class _Line:
    counts: int
    """Row of the counts; -1 for none."""
    numbers: tuple[float, float, float]
    """Penalties: repetition, frequency, presence."""
    restricts: bool
    """Whether nothing but the ids of its table is drawn."""
    table_3E: np.ndarray
    """Ids, rising; what is added to their scores; tokens before which they are banned."""
    begin: int = 0
    """Of the entries in the table of all lines."""


@experimental_api
class ScoreAdjuster:
    """Adjusts the scores of rows by penalties, biases, bans and allowed ids, each row by what its request asks, without a look at the host.

    What a request asks, and a table of its biases and of the ids that end it, or of those allowed, are sent once (24 bytes an entry). A
    request with penalties has int32 [V] counts of its tokens as well, which ``count`` keeps up to date from the tokens drawn. Rows of
    counts are allocated as requests ask, at most two for each one that asks, never more than M, and stay until ``clear``.

    Args:
        last_tokens: [M] int64, as of ``Sampler``.
        vocab_size: V, ids that exist.
    """

    def __init__(self, last_tokens: Tensor, vocab_size: int) -> None:
        self._last_tokens, self._vocab_size, self._device = last_tokens, vocab_size, last_tokens.device
        # Penalties, row of the counts, begin and end in the table, whether nothing else is drawn; as float64, which holds all of them.
        self._lines_M7 = torch.zeros((len(last_tokens), 7), dtype=torch.float64, device=self._device)
        self.num_counted = np.zeros(len(last_tokens), dtype=np.int64)
        """[M], tokens of the output of each line that its counts hold, those included that the host does not know."""
        self.clear()

    @property
    def num_bytes(self) -> int:
        """Of counts and tables on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._counts_NV, self._table_3K))

    def clear(self) -> None:
        """Forget all lines and give their memory back; lines may begin again."""
        self._lines: dict[int, _Line] = {}
        self._free: list[int] = []
        self._num_counts = self._num_entries = 0
        self._counts_NV = torch.zeros((0, self._vocab_size), dtype=torch.int32, device=self._device)
        """Two for each time that a token was generated, and one where it is in the prompt."""
        self._table_3K = torch.zeros((3, 0), dtype=torch.float64, device=self._device)
        self._begun: list[int] = []
        # Of rows of counts, tokens that the device has not counted yet.
        self._prompts: dict[int, Sequence[int]] = {}
        self._outputs: dict[int, list[int]] = {}

    def begin(self, line: int, params: SamplingParams, stop_ids: Collection[int], prompt: Sequence[int], output: Sequence[int]) -> None:
        """Give a line to a request, whoever had it before.

        Args:
            line: below M.
            params: of the request.
            stop_ids: banned before ``min_tokens``.
            prompt: its token ids.
            output: token ids generated so far.
        """
        self.release(line)
        counts = -1
        if params.has_penalties:
            if not self._free:
                self._free.append(self._num_counts)
                self._num_counts += 1
            counts = self._free.pop()
            if params.repetition_penalty != 1.0:
                self._prompts[counts] = prompt
            self._outputs[counts] = list(output)
        numbers = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        restricts = params.allowed_token_ids is not None
        self._lines[line] = _Line(counts=counts, numbers=numbers, restricts=restricts, table_3E=_table(params, stop_ids))
        self.num_counted[line] = len(output)
        self._begun.append(line)

    def extend(self, line: int, tokens: Sequence[int]) -> None:
        """Count the next tokens of a line's output that ``count`` did not count."""
        if (counts := self._lines[line].counts) >= 0:
            self._outputs.setdefault(counts, []).extend(tokens)
        self.num_counted[line] += len(tokens)

    def release(self, line: int) -> None:
        """Take a line from its request; another one may have its memory."""
        state = self._lines.pop(line, None)
        if state is not None and state.counts >= 0:
            self._free.append(state.counts)
            self._prompts.pop(state.counts, None)
            self._outputs.pop(state.counts, None)

    def rows(self, rows: Sequence[int], lines: Sequence[int], drafts: Sequence[Sequence[int]], counted: Collection[int]) -> AdjustRows:
        """Rows of a step whose scores are adjusted.

        Args:
            rows: their places in the step.
            lines: of each, begun.
            drafts: of each, tokens that it assumes behind those counted.
            counted: lines of which ``count`` will count one more token.
        """
        self._send_begun()
        states = [self._lines[line] for line in lines]
        order = sorted(range(len(rows)), key=lambda place: states[place].counts < 0)
        counting = [line for line in counted if self._lines[line].counts >= 0]
        assumed = [drafts[place] if states[place].counts >= 0 else () for place in order]
        ends = list(itertools.accumulate(len(tokens) for tokens in assumed))
        parts = [
            [rows[place] for place in order],
            [lines[place] for place in order],
            [bound for tokens, end in zip(assumed, ends, strict=True) for bound in (end - len(tokens), end)],
            [token for tokens in assumed for token in tokens],
            counting,
            [self._lines[line].counts * self._vocab_size for line in counting],
        ]
        numbers = self._send(np.array([number for part in parts for number in part]))
        rows_A, lines_A, bounds, drafts_D, counted_C, places_C = numbers.split([len(part) for part in parts])
        return AdjustRows(
            rows_A=rows_A,
            lines_A=lines_A,
            drafts_A2=bounds.view(-1, 2),
            drafts_D=drafts_D,
            counted_C=counted_C,
            places_C=places_C,
            lines=tuple(counting),
            num_penalized=sum(state.counts >= 0 for state in states),
            num_entries=sum(state.table_3E.shape[1] for state in states),
            restricts=any(state.restricts for state in states),
        )

    def adjust(self, logits_RV: Tensor, position_R: Tensor, rows: AdjustRows, *, overwrites: bool = False) -> Tensor:
        """Scores in which some rows are adjusted: repetition, frequency and presence penalties, biases, bans.

        Args:
            logits_RV: [R, at least V].
            position_R: [R] int64, tokens of the output before the one to be drawn.
            rows: A of the R.
            overwrites: the logits themselves where they are wide enough, which nobody else needs then.

        Returns:
            [R, V], float32 or wider.
        """
        kind = torch.float64 if logits_RV.dtype == torch.float64 else torch.float32
        scores_RV = logits_RV[:, : self._vocab_size].to(kind, copy=not overwrites)
        adjust = adjust_rows
        if has_kernels(scores_RV.device, scores_RV.dtype):
            from mcore_inference.sampling import _adjust_triton

            adjust = _adjust_triton.adjust_rows
        adjust(scores_RV, position_R, rows, self._lines_M7, self._counts_NV, self._table_3K)
        return scores_RV

    def count(self, rows: AdjustRows) -> None:
        """Count the tokens that were drawn last for these rows, wherever they are."""
        if rows.lines:
            tokens_C = self._last_tokens[rows.counted_C]
            twos_C = torch.full_like(tokens_C, 2, dtype=torch.int32)
            self._counts_NV.view(-1).index_add_(0, rows.places_C + tokens_C, twos_C)
            self.num_counted[list(rows.lines)] += 1

    def _send_begun(self) -> None:
        """Bring the device up to what the host knows."""
        begun, self._begun = [line for line in dict.fromkeys(self._begun) if line in self._lines], []
        if begun:
            self._send_tables(begun)
            self._send_lines(begun)
            fresh = [counts for line in begun if (counts := self._lines[line].counts) >= 0]
            self._grow_counts()
            if fresh:
                self._counts_NV.index_fill_(0, self._send(np.array(fresh)), 0)
        prompts, self._prompts = self._prompts, {}
        outputs, self._outputs = self._outputs, {}
        counts = self._counts_NV.view(-1)
        if len(places := self._places(prompts)):
            counts.index_fill_(0, self._send(places), 1)
        if len(places := self._places(outputs)):
            counts.index_add_(0, self._send(places), torch.full((len(places),), 2, dtype=torch.int32, device=self._device))

    def _places(self, tokens: Mapping[int, Sequence[int]]) -> np.ndarray:
        """Of tokens of rows of counts, where they are counted."""
        parts = [counts * self._vocab_size + np.array(ids, dtype=np.int64) for counts, ids in tokens.items()]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def _grow_counts(self) -> None:
        held = len(self._counts_NV)
        if self._num_counts > held:
            rows = min(max(self._num_counts, 2 * held), len(self._last_tokens))
            grown_NV = torch.zeros((rows, self._vocab_size), dtype=torch.int32, device=self._device)
            grown_NV[:held] = self._counts_NV
            self._counts_NV = grown_NV

    def _send_tables(self, begun: list[int]) -> None:
        """Put the entries of lines behind those of others; where there is no room, all into a larger table, without gaps."""
        fresh = begun
        if self._num_entries + sum(self._lines[line].table_3E.shape[1] for line in begun) > self._table_3K.shape[1]:
            fresh, self._num_entries = list(self._lines), 0
            needed = sum(state.table_3E.shape[1] for state in self._lines.values())
            capacity = max(_MIN_CAPACITY, 1 << (2 * needed - 1).bit_length())
            self._table_3K = torch.zeros((3, capacity), dtype=torch.float64, device=self._device)
        start = self._num_entries
        for line in fresh:
            self._lines[line].begin = self._num_entries
            self._num_entries += self._lines[line].table_3E.shape[1]
        if self._num_entries > start:
            entries_3E = np.concatenate([self._lines[line].table_3E for line in fresh], axis=1)
            self._table_3K[:, start : self._num_entries] = self._send(entries_3E)
        if fresh is not begun:
            self._send_lines(fresh)

    def _send_lines(self, lines: list[int]) -> None:
        states = [self._lines[line] for line in lines]
        values = [[*state.numbers, state.counts, state.begin, state.begin + state.table_3E.shape[1], state.restricts] for state in states]
        self._lines_M7[self._send(np.array(lines))] = self._send(np.array(values, dtype=np.float64))

    def _send(self, numbers: np.ndarray) -> Tensor:
        """As int64 or float64 on the device; from pinned memory a copy waits for nothing."""
        tensor = torch.from_numpy(numbers if numbers.dtype == np.float64 else numbers.astype(np.int64))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def _table(params: SamplingParams, stop_ids: Collection[int]) -> np.ndarray:
    bias, banned = params.logit_bias or {}, stop_ids if params.min_tokens else ()
    ids = sorted(set(params.allowed_token_ids or (*bias, *banned)))
    until = [params.min_tokens if token in banned else 0 for token in ids]
    return np.array([ids, [bias.get(token, 0.0) for token in ids], until], dtype=np.float64)
