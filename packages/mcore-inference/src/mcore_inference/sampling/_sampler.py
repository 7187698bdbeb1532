# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One draw of a step: logits in, tokens on the device at once and on the host when it asks."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_inference._kernels import has_kernels
from mcore_inference._stability import experimental_api
from mcore_inference.sampling._draw import SamplingRows, draw_alone, log_probs, processed_log_probs, sample, token_log_probs
from mcore_inference.sampling._params import SamplingParams
from mcore_inference.sampling._plain import PackedDraws, PartSums, PlainInputs, PlainSums
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel import aligned_rows, batch_invariant_log_norms, batch_invariant_losses

_SCORED_ROWS = 512
"""Tokens whose log-probabilities are computed at a time."""


# R rows (requests) of a step, N tokens of prompts, V vocabulary.
@experimental_api
@dataclass(frozen=True, kw_only=True)
class DrawRows:
    """What R requests ask of a draw, on the device."""

    settings: SamplingRows
    lines_R: Tensor
    """[R] int64, of ``Sampler.last_tokens``."""
    processed_R: Tensor
    """[R] int64, 1 where the log-probability is the one by which the token was drawn."""
    top_n: tuple[int, ...]
    """Best tokens that each row asks for."""
    wants_log_probs: bool
    processed_best_P: Tensor | None = None
    """[P] int64, numbers of rows whose best tokens are those of the distribution that they are drawn from; None for none."""

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        positions: Sequence[int],
        lines: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> "DrawRows":
        """Rows in the order given; positions are the tokens generated before."""
        numbers = torch.tensor([list(lines), [int(p.processed_log_probs) for p in params]])
        lines_R, processed_R = _sent(numbers, device)
        best = [row for row, p in enumerate(params) if p.processed_log_probs and p.top_n_logprobs]
        return cls(
            settings=SamplingRows.of(params, seeds, positions, vocab_size, device),
            lines_R=lines_R,
            processed_R=processed_R,
            top_n=tuple(p.top_n_logprobs for p in params),
            wants_log_probs=any(p.return_log_probs for p in params),
            processed_best_P=_sent(torch.tensor(best), device) if best else None,
        )


@experimental_api
class Draws:
    """Tokens of R rows on their way to the host; nobody waits until ``wait``."""

    def __init__(self, tokens_R: Tensor, log_probs_R: Tensor | None, top: tuple[Tensor, Tensor] | None, top_n: Sequence[int]) -> None:
        device = tokens_R.device
        parts = tokens_R, log_probs_R, *(top or (None, None))
        self.tensors = [part for part in parts if part is not None]
        """On the device: tokens and log-probabilities [R], ids and log-probabilities of best tokens; without those that nobody asks for."""
        self._tensors = [None if x is None else x.to("cpu", non_blocking=True) for x in parts]
        self._top_n = top_n
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> list[tuple[int, float, dict[int, float]]]:
        """Of each row: token (-1 where no score was finite), log-probability (0.0 unless asked for), and of the best tokens asked for those
        that can be drawn."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, values, ids, tops = (None if x is None else x.tolist() for x in self._tensors)
        assert tokens is not None
        best: list[dict[int, float]] = [{}] * len(tokens)
        if ids is not None and tops is not None:
            rows = zip(ids, tops, self._top_n, strict=True)
            ranked = [itertools.islice(zip(row, values, strict=True), count) for row, values, count in rows]
            best = [{token: value for token, value in row if value > -math.inf} for row in ranked]
        return list(zip(tokens, [0.0] * len(tokens) if values is None else values, best, strict=True))


@experimental_api
class Sampler:
    """Draws a token for each row of a step, every row by its own settings.

    Args:
        last_tokens: [M] int64, where the token of each line is left for the next step; a row without a finite score leaves 0.
        vocab_size: ids that exist.
        batch_invariant: draw every row as if it were alone, by log-probabilities in the bits of a trainer with such a backend.
    """

    def __init__(self, last_tokens: Tensor, vocab_size: int, *, batch_invariant: bool = False) -> None:
        self.last_tokens, self.vocab_size, self._batch_invariant = last_tokens, vocab_size, batch_invariant
        # Tokens and log-probabilities of plain draws, at one address for recordings.
        self._results_M2 = torch.zeros((len(last_tokens), 2), dtype=torch.int64, device=last_tokens.device)

    @property
    def draws_plainly(self) -> bool:
        """Whether ``draw_plain`` gives what ``draw`` does."""
        return not self._batch_invariant

    def draw(self, logits_RV: Tensor, rows: DrawRows, adjusted_RV: Tensor | None = None) -> Draws:
        """Tokens of R rows.

        Args:
            logits_RV: [R, at least vocab_size], of the model.
            rows: as many.
            adjusted_RV: [R, vocab_size], what is drawn from where it is not the logits (penalties, biases, bans).
        """
        top = None
        tokens_R, log_probs_R = self._drawn(logits_RV, rows, adjusted_RV)
        if count := min(max(rows.top_n), self.vocab_size):
            top = self._best(logits_RV, count)
            if rows.processed_best_P is not None:
                scores_RV = logits_RV[:, : self.vocab_size] if adjusted_RV is None else adjusted_RV
                self._replace_best(top, scores_RV, rows.settings, rows.processed_best_P)
        self.last_tokens[rows.lines_R] = tokens_R.clamp(min=0)
        return Draws(tokens_R, log_probs_R if rows.wants_log_probs else None, top, rows.top_n)

    def draw_tokens(self, logits_RV: Tensor, rows: DrawRows) -> Tensor:
        """The tokens [R] int64 of ``draw`` as ``last_tokens`` has them, on the device alone, so that a recording may hold it."""
        tokens_R = self._drawn(logits_RV, rows, None)[0].clamp(min=0)
        self.last_tokens[rows.lines_R] = tokens_R
        return tokens_R

    def plain_sums(self, inputs: PlainInputs, num_columns: int) -> PlainSums:
        """For the kernel that computes logits [R, V] of so many columns in front of ``draw_plain``."""
        sums = PartSums.empty(len(inputs.lines_R), num_columns, self.last_tokens.device)
        parts = {"best_RN": sums.best_RN, "weight_RN": sums.weight_RN, "raw_RN": sums.raw_RN}
        return PlainSums(**parts, words=inputs.words, vocab_size=self.vocab_size)

    def draw_plain(self, logits_RV: Tensor, inputs: PlainInputs, sums: PartSums | None = None) -> None:
        """Draw as ``draw`` does by settings that are read where they lie, so that a recording may hold it; ``take`` brings the tokens.

        Args:
            logits_RV: [R, at least vocab_size], of the model.
            inputs: of as many rows, which may ask for no draws.
            sums: of the logits, where a kernel that computed them filled them in.
        """
        if has_kernels(logits_RV.device, logits_RV.dtype):
            from mcore_inference.sampling._triton import draw_plain

            draw_plain(logits_RV, inputs, sums, self._results_M2, self.last_tokens, self.vocab_size)
            return
        real_R = (inputs.lines_R >= 0) & (inputs.words[0] > 0)
        temperature_R, seed_R, position_R, processed_R = (field[real_R] for field in inputs.fields())
        if len(seed_R):
            none_R = torch.zeros_like(temperature_R)
            settings = SamplingRows(
                temperature=temperature_R.double(), top_k=seed_R, top_p=none_R, min_p=none_R, seed=seed_R, position=position_R,
                all_greedy=False, has_ranks=False, has_min_p=False,
            )  # fmt: skip
            lines_R = inputs.lines_R[real_R].long()
            rows = DrawRows(settings=settings, lines_R=lines_R, processed_R=processed_R, top_n=(), wants_log_probs=True)
            tokens_R, log_probs_R = self._drawn(logits_RV[real_R], rows, None)
            assert log_probs_R is not None, "they are wanted"
            places_R = real_R.nonzero()[:, 0]
            self._results_M2[places_R] = torch.stack([tokens_R, log_probs_R.double().view(torch.int64)], dim=1)
            self.last_tokens[lines_R] = tokens_R.clamp(min=0)

    def take(self, num_rows: int, *, wants_log_probs: bool) -> PackedDraws:
        """What ``draw_plain`` drew last, on its way to the host."""
        return PackedDraws(self._results_M2[:num_rows], wants_log_probs=wants_log_probs)

    def _drawn(self, logits_RV: Tensor, rows: DrawRows, adjusted_RV: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Tokens [R], -1 without a finite score, and log-probabilities [R], which mean something where they are wanted."""
        settings, log_probs_R = rows.settings, None
        scores_RV = logits_RV[:, : self.vocab_size] if adjusted_RV is None else adjusted_RV
        kernels = has_kernels(scores_RV.device, scores_RV.dtype)
        if self._batch_invariant and kernels:
            tokens_R, log_probs_R = self._draw_rows(logits_RV, scores_RV, rows)
        elif self._batch_invariant:
            tokens_R, log_probs_R = draw_alone(logits_RV, scores_RV, settings, rows.processed_R, self.vocab_size)
        elif kernels:
            # Raw log-probabilities count padding of the vocabulary too.
            source_RV = logits_RV if adjusted_RV is None else adjusted_RV
            tokens_R, log_probs_R = self._draw_by_kernels(source_RV, rows)
            if adjusted_RV is not None and rows.wants_log_probs:
                raw_R = log_probs(logits_RV).gather(1, tokens_R.clamp(min=0)[:, None])[:, 0]
                log_probs_R = torch.where(rows.processed_R == 1, log_probs_R, raw_R)
        else:
            tokens_R = sample(scores_RV, settings)
            if rows.wants_log_probs:
                picked_R = tokens_R.clamp(min=0)[:, None]
                raw_R = log_probs(logits_RV).gather(1, picked_R)[:, 0]
                drawn_R = processed_log_probs(scores_RV, settings).gather(1, picked_R)[:, 0]
                log_probs_R = torch.where(rows.processed_R == 1, drawn_R, raw_R)
        return tokens_R, log_probs_R

    def score(self, logits_NV: Tensor, tokens_N: Tensor, top_n: int) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Log-probabilities [N] of tokens that are known, and ids and log-probabilities [N, top_n] of the best ones; None for none.

        Args:
            logits_NV: [N, at least vocab_size], of the model.
            tokens_N: [N] int64.
            top_n: of the best, at most all that exist.
        """
        count, values, best = min(top_n, self.vocab_size), [], []
        # In pieces: in float32 those of a whole step are many times its logits.
        for rows_NV, own_N in zip(logits_NV.split(_SCORED_ROWS), tokens_N.split(_SCORED_ROWS), strict=True):
            if self._batch_invariant:
                values.append(token_log_probs(rows_NV, own_N))
                best.append(self._best(rows_NV, count) if count else None)
            else:
                values_NV = log_probs(rows_NV)
                values.append(values_NV.gather(1, own_N[:, None])[:, 0])
                best.append(_largest(values_NV[:, : self.vocab_size], count) if count else None)
        ranked = [piece for piece in best if piece is not None]
        top = (torch.cat([ids for ids, _ in ranked]), torch.cat([tops for _, tops in ranked])) if ranked else None
        return torch.cat(values), top

    def _best(self, logits_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Ids and log-probabilities [R, count] of the best tokens."""
        if self._batch_invariant and has_kernels(logits_RV.device, logits_RV.dtype):
            largest_R, log_sum_R = batch_invariant_log_norms(logits_RV)
            values_RV = logits_RV.float() - largest_R[:, None] - log_sum_R[:, None]
            # Which of equal ones is among the best depends on nothing but their ids.
            values_RV, ids_RV = values_RV[:, : self.vocab_size].sort(dim=1, descending=True, stable=True)
            return ids_RV[:, :count].contiguous(), values_RV[:, :count].contiguous()
        alone = logits_RV.split(1) if self._batch_invariant else (logits_RV,)
        values_RV = torch.cat([log_probs(part) for part in alone])[:, : self.vocab_size]
        return _largest(values_RV, count)

    def _replace_best(self, top: tuple[Tensor, Tensor], scores_RV: Tensor, settings: SamplingRows, rows_P: Tensor) -> None:
        """Let ``top`` [R, count] of these rows be of the distributions that they are drawn from; -inf for tokens that cannot be."""
        scores_PV, settings = scores_RV[rows_P], settings.take(rows_P)
        parts = [slice(row, row + 1) for row in range(len(scores_PV))] if self._batch_invariant else [slice(None)]
        values_PV = torch.cat([processed_log_probs(scores_PV[part].clone(), settings.take(part)) for part in parts])
        # Which of equal ones is among the best depends on nothing but their ids.
        values_PV, ids_PV = values_PV.sort(dim=1, descending=True, stable=True)
        count = top[0].shape[1]
        top[0][rows_P], top[1][rows_P] = ids_PV[:, :count], values_PV[:, :count].to(top[1].dtype)

    def _draw_rows(self, logits_RV: Tensor, scores_RV: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor | None]:
        """Tokens and, where they are wanted, log-probabilities of the rows, by kernels that the settings of other rows do not choose."""
        from mcore_inference.sampling._ranked import draw_ranked
        from mcore_inference.sampling._triton import draw

        settings, vocab_size, values_R = rows.settings, self.vocab_size, None
        # One dtype and one distance of rows: a neighbour's penalties change neither.
        wide_RV = aligned_rows(scores_RV.float())
        inputs = settings.temperature, settings.seed, settings.position, rows.processed_R
        tokens_R, _ = draw(wide_RV, *inputs, vocab_size, wants_log_probs=False)
        cut_R = torch.zeros_like(tokens_R, dtype=torch.bool)
        if settings.has_ranks or settings.has_min_p:
            narrow = (settings.top_k < vocab_size) | (settings.top_p < 1) | (settings.min_p > 0)
            cut_R = narrow & (settings.temperature > 0)
            ranked_R, values_R = draw_ranked(wide_RV, settings, torch.ones_like(tokens_R), vocab_size)
            tokens_R = torch.where(cut_R, ranked_R, tokens_R)
        if not rows.wants_log_probs:
            return tokens_R, None
        picked_R, greedy_R = tokens_R.clamp(min=0), settings.temperature == 0
        temperature_R = settings.temperature.masked_fill(greedy_R, 1.0)
        drawn_R = -batch_invariant_losses(scores_RV, picked_R, Group.single(), vocab_size, temperature=temperature_R)[0]
        if values_R is not None:
            drawn_R = torch.where(cut_R, values_R, drawn_R)
        drawn_R = drawn_R.masked_fill(greedy_R, 0.0)
        return tokens_R, torch.where(rows.processed_R == 1, drawn_R, token_log_probs(logits_RV, picked_R))

    def _draw_by_kernels(self, scores_RV: Tensor, rows: DrawRows) -> tuple[Tensor, Tensor]:
        settings = rows.settings
        if settings.has_ranks or settings.has_min_p:
            from mcore_inference.sampling._ranked import draw_ranked

            return draw_ranked(scores_RV, settings, rows.processed_R, self.vocab_size, wants_log_probs=rows.wants_log_probs)
        from mcore_inference.sampling._triton import draw

        inputs = settings.temperature, settings.seed, settings.position, rows.processed_R
        return draw(scores_RV, *inputs, self.vocab_size, wants_log_probs=rows.wants_log_probs)


def _sent(numbers: Tensor, device: torch.device) -> Tensor:
    """On the device; nobody waits."""
    return numbers.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else numbers


def _largest(values_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns and values [R, count] of the largest of each row, the largest first."""
    best = values_RV.topk(count, dim=1)
    return best.indices, best.values
