# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a step brings its requests, and the message by which the last stage of a pipeline tells the others."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mcore_inference.engine._active_request import ActiveRequest
from mcore_inference.engine._prompt_scores import PromptScores
from mcore_inference.sampling import Draws, SamplingParams

_FAILED_TOKEN, _FAILED_LOG_PROB = -2, 2.0
"""In place of what could not be drawn: a draw gives neither."""


@dataclass(frozen=True, kw_only=True)
class StepResults:
    """Draws and log-probabilities of prompts, on the device and on their way to the host."""

    draws: Draws | None = None
    prompt_scores: Sequence[PromptScores] = ()


# R draws of a step, N tokens of a prompt, B best tokens, M numbers of the message.
@dataclass(frozen=True, kw_only=True)
class StageMessage:
    """The form of the results of a step as float64, which holds tokens and log-probabilities as they are.

    A draw is 8 bytes. Where a request of the step asks for log-probabilities, each draw has 8 bytes more, and 16 for each of as many best
    tokens as one asks for; a token of a prompt that is scored has 8, and 16 for each best token. Every stage knows the requests, and so
    the form.
    """

    params: Sequence[SamplingParams]
    """Of each draw."""
    prompts: Sequence[tuple[ActiveRequest, int]]
    """Requests whose prompt is scored, and the tokens of it."""
    vocab_size: int

    @property
    def num_numbers(self) -> int:
        """M."""
        return sum(math.prod(shape) for shape in self._shapes)

    def failed(self, device: torch.device) -> Tensor:
        """[M] of a step that could not be drawn, by which it fails on all stages alike (``check_drawn``)."""
        numbers_M = torch.full((self.num_numbers,), _FAILED_LOG_PROB, dtype=torch.float64, device=device)
        numbers_M[: len(self.params)] = _FAILED_TOKEN
        return numbers_M

    def pack(self, results: StepResults) -> Tensor:
        """[M] float64 of results on their device."""
        parts = [*(() if results.draws is None else results.draws.tensors)]
        for scores in results.prompt_scores:
            parts += [scores.values_N, *(scores.best or ())]
        assert [part.shape for part in parts] == self._shapes, "the form follows from what the requests ask"
        return torch.cat([part.double().flatten() for part in parts]) if parts else torch.empty(0, dtype=torch.float64)

    def unpack(self, numbers_M: Tensor) -> StepResults:
        """The results, on the device of the message."""
        shapes = self._shapes
        split = numbers_M.split([math.prod(shape) for shape in shapes])
        parts = iter([part.view(shape) for part, shape in zip(split, shapes, strict=True)])
        draws, scores = None, list[PromptScores]()
        if self.params:
            tokens_R, log_probs_R = next(parts).long(), next(parts) if self._has_log_probs else None
            top = (next(parts).long(), next(parts)) if self._num_best else None
            draws = Draws(tokens_R, log_probs_R, top, [params.top_n_logprobs for params in self.params])
        for entry, _ in self.prompts:
            values_N, wants_best = next(parts), entry.params.top_n_logprobs
            scores.append(PromptScores(entry=entry, values_N=values_N, best=(next(parts).long(), next(parts)) if wants_best else None))
        return StepResults(draws=draws, prompt_scores=scores)

    @cached_property
    def _has_log_probs(self) -> bool:
        return any(params.return_log_probs for params in self.params)

    @cached_property
    def _num_best(self) -> int:
        """B of the draws."""
        return min(max((params.top_n_logprobs for params in self.params), default=0), self.vocab_size)

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        count, num_best = len(self.params), self._num_best
        shapes: list[tuple[int, ...]] = [(count,)] * (1 + self._has_log_probs) if count else []
        shapes += [(count, num_best)] * 2 if num_best else []
        for entry, num_tokens in self.prompts:
            num_best = min(entry.params.top_n_logprobs, self.vocab_size)
            shapes += [(num_tokens,), *([(num_tokens, num_best)] * 2 if num_best else [])]
        return shapes


def check_drawn(draws: Sequence[tuple[int, float, dict[int, float]]], prompt_scores: Sequence[PromptScores]) -> None:
    """Look at results that have come.

    Raises:
        RuntimeError: another stage, or this one, could not draw them.
    """
    failed = draws[0][0] == _FAILED_TOKEN if draws else any(scores.values_N[0].item() == _FAILED_LOG_PROB for scores in prompt_scores[:1])
    if failed:
        raise RuntimeError("the last stage of the pipeline could not draw the tokens of a step; its log says why")


def warm_up_message(device: torch.device, *, failed: bool) -> Tensor:
    """[1] by which the last stage says whether its draws are warm (``check_warm``)."""
    return torch.full((1,), _FAILED_TOKEN if failed else 0, dtype=torch.float64, device=device)


def check_warm(message: Tensor) -> None:
    """Look at a message of a warm-up that has come.

    Raises:
        RuntimeError: the last stage could not draw.
    """
    if message.item() == _FAILED_TOKEN:
        raise RuntimeError("the last stage of the pipeline could not draw in its warm-up; its error says why")
