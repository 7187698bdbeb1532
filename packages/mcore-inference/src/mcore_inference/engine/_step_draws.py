# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The draws of steps, made where their logits are."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from mcore_inference.context import DynamicInferenceContext
from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._adjusted_requests import AdjustedRequests
from mcore_inference.engine._decode_batch import DecodeBatch
from mcore_inference.engine._pipeline import Pipeline
from mcore_inference.engine._prompt_scores import PromptScores
from mcore_inference.engine._stage_message import StageMessage, StepResults, check_warm, warm_up_message
from mcore_inference.engine._warm_up import warm_up_draws
from mcore_inference.sampling import AdjustRows, DrawRows, Draws, Sampler, SamplingParams, keep_allowed
from mcore_parallel.comm import Arrival

_LOG = logging.getLogger("mcore_inference.engine")


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Results that the last stage sends, and the others get."""

    message: StageMessage
    numbers: Arrival
    lines: Sequence[int] | np.ndarray
    """Of each draw."""


@dataclass(frozen=True, kw_only=True)
class BegunDraws:
    """Of one step; nobody has waited for another rank."""

    results: StepResults | None
    """None where another stage draws, or this one could not."""
    shared: Shared | None
    """None without other stages."""


# N rows of logits that are read, R of them draw, V vocabulary.
class StepDraws:
    """Draws the tokens of steps, and scores prompts. Of the stages of a pipeline the last one does so, and sends the results to the others.

    What a draw needs beside logits (penalties, forms, seeds, positions) each stage has, since all make the same calls; the device's part of
    it is kept where the draws are.

    Args:
        context: of the engine.
        vocab_size: ids that exist.
        pipeline: of the model; None where it has one stage.
        batch_invariant: as of ``Sampler``.
    """

    def __init__(self, context: DynamicInferenceContext, vocab_size: int, pipeline: Pipeline | None, *, batch_invariant: bool) -> None:
        self._context, self._vocab_size, self._pipeline = context, vocab_size, pipeline
        self.sampler = Sampler(context.builder.last_tokens, vocab_size, batch_invariant=batch_invariant)
        self.adjusted = AdjustedRequests(context, vocab_size)
        """Requests with penalties, biases or bans; none where another stage draws."""

    def batch(self, entries: list[ActiveRequest], *, is_invariant: bool) -> DecodeBatch:
        """Requests that draw a token in each of the steps that follow."""
        contexts = None if is_invariant else self._context.builder.decode_contexts(len(entries))
        return DecodeBatch(entries, self._context, self._vocab_size, self.adjusted, contexts)

    def begin(
        self,
        logits_NV: Tensor | None,
        sampled: Sequence[tuple[ActiveRequest, range]],
        prompt_rows: Sequence[tuple[ActiveRequest, int, list[int]]],
    ) -> BegunDraws:
        """Draw for requests of a step, and score prompts.

        Args:
            logits_NV: None where another stage has them.
            sampled: requests that draw a token, and one after each of their proposals; and their rows of the logits.
            prompt_rows: requests whose prompt is scored, the first of their rows, and the tokens that follow.
        """
        places = [(entry, count) for entry, rows in sampled for count in range(len(rows))]
        lines = [self._context.line(entry.record.request_id) for entry, _ in places]
        scored = [(entry, len(targets)) for entry, _, targets in prompt_rows]

        def draw(logits_NV: Tensor) -> StepResults:
            send, scores, draws = self._context.builder.send, list[PromptScores](), None
            for entry, first, targets in prompt_rows:
                rows_NV = logits_NV[first : first + len(targets)]
                values_N, best = self.sampler.score(rows_NV, send(targets), entry.params.top_n_logprobs)
                scores.append(PromptScores(entry=entry, values_N=values_N, best=best))
            if places:
                rows = [row for _, rows in sampled for row in rows]
                draws = self._draw(logits_NV if len(rows) == len(logits_NV) else logits_NV[send(rows)], places, lines)
            return StepResults(draws=draws, prompt_scores=scores)

        return self._begun(logits_NV, draw, [entry.params for entry, _ in places], scored, lines)

    def begin_batch(self, logits_RV: Tensor | None, batch: DecodeBatch) -> BegunDraws:
        """A token for each request of a batch; None for logits that another stage has."""

        def draw(logits_RV: Tensor) -> StepResults:
            return StepResults(draws=self._sample(logits_RV, batch.rows, batch.adjust_rows))

        return self._begun(logits_RV, draw, batch.params, (), batch.lines_R)

    def end(self, begun: BegunDraws) -> StepResults:
        """Wait for what another stage drew; the next step may begin with these tokens then."""
        shared, results = begun.shared, begun.results
        if shared is not None:
            numbers = shared.numbers.wait()
            if results is None:
                results = shared.message.unpack(numbers)
                if results.draws is not None:
                    lines_R = self._context.builder.send(shared.lines)
                    self.sampler.last_tokens[lines_R] = results.draws.tensors[0].clamp(min=0)
        assert results is not None, "who has no logits gets results"
        return results

    def warm_up(self, logits_RV: Tensor | None) -> None:
        """Draw from these logits, which are overwritten, for nobody; and tell the others.

        Raises:
            RuntimeError: the last stage could not draw, where this is another one.
            Exception: what a draw raised here.
        """
        message, failed = None, logits_RV is not None
        try:
            if logits_RV is not None:
                warm_up_draws(self.sampler, self.adjusted.adjuster, logits_RV, self._vocab_size)
                self.adjusted.clear()
            failed = False
        finally:
            if self._pipeline is not None:
                # The others wait for it, and nobody watches ranks that warm up.
                message = self._pipeline.broadcast(warm_up_message(self._context.device, failed=failed)).wait()
        if message is not None:
            check_warm(message)

    def _begun(
        self,
        logits_NV: Tensor | None,
        draw: Callable[[Tensor], StepResults],
        params: Sequence[SamplingParams],
        prompts: Sequence[tuple[ActiveRequest, int]],
        lines: Sequence[int] | np.ndarray,
    ) -> BegunDraws:
        if self._pipeline is None:
            assert logits_NV is not None, "one stage has all layers"
            return BegunDraws(results=draw(logits_NV), shared=None)
        message = StageMessage(params=params, prompts=prompts, vocab_size=self._vocab_size)
        results, numbers_M = None, None
        if logits_NV is not None:
            try:
                results = draw(logits_NV)
                numbers_M = message.pack(results)
            except Exception:
                # The others wait for these numbers, and would take those of the next step for them.
                results = None
                _LOG.exception("the last stage could not draw the tokens of a step")
        if numbers_M is None:
            numbers_M = message.failed(self._context.device)
        return BegunDraws(results=results, shared=Shared(message=message, numbers=self._pipeline.broadcast(numbers_M), lines=lines))

    def _draw(self, logits_RV: Tensor, places: Sequence[tuple[ActiveRequest, int]], lines: Sequence[int]) -> Draws:
        """A token for each of these requests, behind so many of its proposals."""
        entries = [entry for entry, _ in places]
        params, positions = [entry.params for entry in entries], [entry.position + count for entry, count in places]
        rows = DrawRows.of(params, [entry.seed for entry in entries], positions, lines, self._vocab_size, self._context.device)
        formed = [(row, entry.grammar.allowed(entry.stop_ids)) for row, entry in enumerate(entries) if entry.grammar is not None]
        return self._sample(logits_RV, rows, self.adjusted.rows(places), formed)

    def _sample(
        self, logits_RV: Tensor, rows: DrawRows, adjust_rows: AdjustRows | None, formed: Sequence[tuple[int, np.ndarray]] = ()
    ) -> Draws:
        """A token for each row.

        Args:
            logits_RV: of the model.
            rows: as many.
            adjust_rows: those with penalties, biases or bans.
            formed: rows that draw some tokens only, and their masks.
        """
        scores_RV = None
        if adjust_rows is not None:
            reads_raw = rows.wants_log_probs or any(rows.top_n)
            scores_RV = self.adjusted.adjuster.adjust(logits_RV, rows.settings.position, adjust_rows, overwrites=not reads_raw)
        if formed:
            rows_G, words_GW = self._context.builder.send([row for row, _ in formed]), np.stack([words for _, words in formed])
            whole_RV = logits_RV[:, : self._vocab_size] if scores_RV is None else scores_RV
            scores_RV = keep_allowed(whole_RV, rows_G, self._context.builder.send_words(words_GW))
        draws = self.sampler.draw(logits_RV, rows, scores_RV)
        if adjust_rows is not None:
            self.adjusted.adjuster.count(adjust_rows)
        return draws
