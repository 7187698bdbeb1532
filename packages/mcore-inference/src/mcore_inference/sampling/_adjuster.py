# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Penalties, biases and bans on scores, by state of each request that stays on the device."""

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from mcore_inference._kernels import has_kernels
from mcore_inference._stability import experimental_api
from mcore_inference.sampling._adjust import AdjustRows, adjust_rows, ban_words
from mcore_inference.sampling._params import SamplingParams

# R rows of a step, A of them that are adjusted, P of these with penalties, V vocabulary, M lines of requests, N rows of counts.
# K entries of all tables, E of those of the rows, D proposed tokens, S tokens that rows have seen, C lines whose draw is counted.
# B forbidden words of several tokens, each of one row, W last tokens of a line.

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
    num_entries: int
    table_3E: np.ndarray
    """Ids, rising; what is added to their scores; tokens before which they are banned. Behind the entries come the ids of the words."""
    words_B2: np.ndarray
    """Where the ids of each forbidden word of several tokens are in the table, and how many they are."""
    begin: int = 0
    """Of the entries in the table of all lines."""


@experimental_api
class ScoreAdjuster:
    """Adjusts the scores of rows by penalties, biases, bans and allowed ids, each row by what its request asks, without a look at the host.

    What a request asks, and a table of its biases, of the ids that end it, or of those allowed, and of its forbidden words are sent once
    (24 bytes an entry or token of a word). A request with penalties has int32 [V] counts of its tokens as well, and each line its last
    tokens once any asks for words of several, which ``count`` keeps up to date from the tokens drawn. Rows of counts are allocated as
    requests ask, at most two for each one that asks, never more than M, and stay until ``clear``.

    Args:
        last_tokens: [M] int64, as of ``Sampler``.
        vocab_size: V, ids that exist.
    """

    max_word_tokens: ClassVar[int] = 32
    """Of one forbidden word; W is one less."""

    def __init__(self, last_tokens: Tensor, vocab_size: int) -> None:
        self._last_tokens, self._vocab_size, self._device = last_tokens, vocab_size, last_tokens.device
        # Penalties, row of the counts, begin and end in the table, whether nothing else is drawn; as float64, which holds all of them.
        self._lines_M7 = torch.zeros((len(last_tokens), 7), dtype=torch.float64, device=self._device)
        self.num_counted = np.zeros(len(last_tokens), dtype=np.int64)
        """[M], tokens of the output of each line that its counts or last tokens hold, those included that the host does not know."""
        self.clear()

    @property
    def num_bytes(self) -> int:
        """Of counts, tables and last tokens on the device."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self._counts_NV, self._table_3K, self._tails_MW))

    def clear(self) -> None:
        """Forget all lines and give their memory back; lines may begin again."""
        self._lines: dict[int, _Line] = {}
        self._free: list[int] = []
        self._num_counts = self._num_entries = 0
        self._counts_NV = torch.zeros((0, self._vocab_size), dtype=torch.int32, device=self._device)
        """Two for each time that a token was generated, and one where it is in the prompt."""
        self._table_3K = torch.zeros((3, 0), dtype=torch.float64, device=self._device)
        self._tails_MW = torch.zeros((0, self.max_word_tokens - 1), dtype=torch.int64, device=self._device)
        """Last tokens of each line's output, -1 before the first; of no line until one has words."""
        self._begun: list[int] = []
        # Of rows of counts, tokens that the device has not counted yet.
        self._prompts: dict[int, Sequence[int]] = {}
        self._outputs: dict[int, list[int]] = {}
        # Of lines with words, the same.
        self._recent: dict[int, list[int]] = {}

    def begin(
        self,
        line: int,
        params: SamplingParams,
        stop_ids: Collection[int],
        prompt: Sequence[int],
        output: Sequence[int],
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Give a line to a request, whoever had it before.

        Args:
            line: below M.
            params: of the request.
            stop_ids: banned before ``min_tokens``.
            prompt: its token ids.
            output: token ids generated so far.
            bad_words: token ids that do not follow each other in the output, 1 to ``max_word_tokens`` of each word.
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
        long_words = [word for word in bad_words if len(word) > 1]
        entries_3E = _table(params, stop_ids, {word[0] for word in bad_words if len(word) == 1})
        sizes = np.array([len(word) for word in long_words], dtype=np.int64)
        words_3E = np.zeros((3, sizes.sum()))
        words_3E[0] = [token for word in long_words for token in word]
        self._lines[line] = _Line(
            counts=counts,
            numbers=numbers,
            restricts=restricts,
            num_entries=entries_3E.shape[1],
            table_3E=np.concatenate([entries_3E, words_3E], axis=1),
            words_B2=np.stack([entries_3E.shape[1] + sizes.cumsum() - sizes, sizes], axis=1),
        )
        if long_words:
            self._recent[line] = list(output)
        self.num_counted[line] = len(output)
        self._begun.append(line)

    def extend(self, line: int, tokens: Sequence[int]) -> None:
        """Count the next tokens of a line's output that ``count`` did not count."""
        state = self._lines[line]
        if state.counts >= 0:
            self._outputs.setdefault(state.counts, []).extend(tokens)
        if len(state.words_B2):
            self._recent.setdefault(line, []).extend(tokens)
        self.num_counted[line] += len(tokens)

    def release(self, line: int) -> None:
        """Take a line from its request; another one may have its memory."""
        state = self._lines.pop(line, None)
        self._recent.pop(line, None)
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
        tailed = [line for line in counted if len(self._lines[line].words_B2)]
        assumed = [drafts[place] if states[place].counts >= 0 or len(states[place].words_B2) else () for place in order]
        ends = list(itertools.accumulate(len(tokens) for tokens in assumed))
        words = [np.insert(words_B2, 0, number, axis=1) for number, place in enumerate(order) if len(words_B2 := states[place].words_B2)]
        parts: list[Sequence[int] | np.ndarray] = [
            [rows[place] for place in order],
            [lines[place] for place in order],
            [bound for tokens, end in zip(assumed, ends, strict=True) for bound in (end - len(tokens), end)],
            [token for tokens in assumed for token in tokens],
            counting,
            [self._lines[line].counts * self._vocab_size for line in counting],
            np.concatenate(words).ravel() if words else (),
            tailed,
        ]
        numbers = self._send(np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]))
        rows_A, lines_A, bounds, drafts_D, counted_C, places_C, words_B3, tailed_C = numbers.split([len(part) for part in parts])
        return AdjustRows(
            rows_A=rows_A,
            lines_A=lines_A,
            drafts_A2=bounds.view(-1, 2),
            drafts_D=drafts_D,
            counted_C=counted_C,
            places_C=places_C,
            words_B3=words_B3.view(-1, 3),
            tailed_C=tailed_C,
            lines=tuple(dict.fromkeys([*counting, *tailed])),
            num_penalized=sum(state.counts >= 0 for state in states),
            num_penalized_drafts=sum(len(drafts[place]) for place in order if states[place].counts >= 0),
            num_entries=sum(state.num_entries for state in states),
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
        adjust, ban = adjust_rows, ban_words
        if has_kernels(scores_RV.device, scores_RV.dtype):
            from mcore_inference.sampling import _adjust_triton

            adjust, ban = _adjust_triton.adjust_rows, _adjust_triton.ban_words
        adjust(scores_RV, position_R, rows, self._lines_M7, self._counts_NV, self._table_3K)
        if len(rows.words_B3):
            ban(scores_RV, rows, self._lines_M7, self._table_3K, self._tails_MW)
        return scores_RV

    def count(self, rows: AdjustRows) -> None:
        """Count the tokens that were drawn last for these rows, wherever they are."""
        if not rows.lines:
            return
        if len(rows.counted_C):
            tokens_C = self._last_tokens[rows.counted_C]
            twos_C = torch.full_like(tokens_C, 2, dtype=torch.int32)
            self._counts_NV.view(-1).index_add_(0, rows.places_C + tokens_C, twos_C)
        if len(rows.tailed_C):
            tokens_C1 = self._last_tokens[rows.tailed_C][:, None]
            self._push(rows.tailed_C, tokens_C1, torch.ones_like(tokens_C1))
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
        self._send_recent([line for line in begun if line in self._recent])

    def _send_recent(self, begun: list[int]) -> None:
        """Bring the last tokens of lines with words up to what the host knows; those that begin have none."""
        recent, self._recent = self._recent, {}
        if not recent:
            return
        num_back = self._tails_MW.shape[1]
        if not len(self._tails_MW):
            self._tails_MW = self._tails_MW.new_full((len(self._last_tokens), num_back), -1)
        if begun:
            self._tails_MW.index_fill_(0, self._send(np.array(begun)), -1)
        tails = [tokens[-num_back:] for tokens in recent.values()]
        # Line, number of tokens, and these.
        parts = [[line, len(tokens), *tokens, *[0] * (num_back - len(tokens))] for line, tokens in zip(recent, tails, strict=True)]
        lines_C, sizes_C1, tokens_CW = self._send(np.array(parts)).tensor_split((1, 2), dim=1)
        self._push(lines_C[:, 0], tokens_CW, sizes_C1)

    def _push(self, lines_C: Tensor, tokens_CN: Tensor, sizes_C1: Tensor) -> None:
        """Put the first so many of these tokens behind the last tokens of lines."""
        tails_CW = self._tails_MW[lines_C]
        kept_CW = torch.arange(tails_CW.shape[1], device=self._device) + sizes_C1
        self._tails_MW[lines_C] = torch.cat([tails_CW, tokens_CN], dim=1).gather(1, kept_CW)

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
        values = [[*state.numbers, state.counts, state.begin, state.begin + state.num_entries, state.restricts] for state in states]
        self._lines_M7[self._send(np.array(lines))] = self._send(np.array(values, dtype=np.float64))

    def _send(self, numbers: np.ndarray) -> Tensor:
        """As int64 or float64 on the device; from pinned memory a copy waits for nothing."""
        tensor = torch.from_numpy(numbers if numbers.dtype == np.float64 else numbers.astype(np.int64))
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor


def _table(params: SamplingParams, stop_ids: Collection[int], bad_ids: Collection[int]) -> np.ndarray:
    """Entries of a line; ``bad_ids`` are never drawn."""
    bias, banned = params.logit_bias or {}, stop_ids if params.min_tokens else ()
    ids = sorted(set(params.allowed_token_ids or (*bias, *banned, *bad_ids)))
    until = [math.inf if token in bad_ids else params.min_tokens if token in banned else 0 for token in ids]
    return np.array([ids, [bias.get(token, 0.0) for token in ids], until], dtype=np.float64)
