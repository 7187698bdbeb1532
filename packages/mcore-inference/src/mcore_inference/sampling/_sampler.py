# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One draw of a step: logits in, tokens on the device at once and on the host when it asks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_inference.sampling._draw import SamplingRows, adjust, log_probs, processed_log_probs, sample
from mcore_inference.sampling._params import SamplingParams


# R rows (requests) of a step, V vocabulary.
@dataclass(frozen=True, kw_only=True)
class SampledRow:
    """A request as the sampler sees it."""

    params: SamplingParams
    seed: int
    position: int
    """Tokens generated before, those included that the host does not know yet."""
    line: int
    """Of ``Sampler.last_tokens``."""
    prompt: Sequence[int] = ()
    """For penalties."""
    output: Sequence[int] = ()
    """For penalties."""
    banned: Sequence[int] = ()
    """Tokens that must not be drawn."""


class Draws:
    """Tokens of R rows on their way to the host.

    Args:
        tensors: of the device; copied without waiting.
        top_n: of each row.
    """

    def __init__(self, tokens_R: Tensor, log_probs_R: Tensor | None, top: tuple[Tensor, Tensor] | None, top_n: Sequence[int]) -> None:
        device = tokens_R.device
        self._tensors = [None if x is None else x.to("cpu", non_blocking=True) for x in (tokens_R, log_probs_R, *(top or (None, None)))]
        self._top_n = top_n
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(device))

    def wait(self) -> list[tuple[int, float, dict[int, float]]]:
        """Of each row: token (-1 where no score was finite), log-probability (0.0 unless asked for), the best tokens asked for."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens, values, ids, tops = (None if x is None else x.tolist() for x in self._tensors)
        assert tokens is not None
        best: list[dict[int, float]] = [{}] * len(tokens)
        if ids is not None and tops is not None:
            rows = zip(ids, tops, self._top_n, strict=True)
            best = [dict(itertools.islice(zip(row, values, strict=True), count)) for row, values, count in rows]
        return list(zip(tokens, [0.0] * len(tokens) if values is None else values, best, strict=True))


class Sampler:
    """Draws a token for each row of a step, every row by its own settings.

    Args:
        last_tokens: [M] int64, where the token of each line is left for the next step; a row without a finite score leaves 0.
        vocab_size: ids that exist.
    """

    def __init__(self, last_tokens: Tensor, vocab_size: int) -> None:
        self.last_tokens, self.vocab_size = last_tokens, vocab_size

    def draw(self, logits_RV: Tensor, rows: Sequence[SampledRow]) -> Draws:
        """[R, at least vocab_size] logits and as many rows."""
        params, device = [row.params for row in rows], logits_RV.device
        by_kernel = logits_RV.is_cuda and logits_RV.dtype != torch.float64 and all(map(_is_plain, rows))
        log_probs_R = top = None
        if by_kernel:
            from mcore_inference.sampling._triton import draw

            temperatures = [0.0 if p.is_greedy else p.temperature for p in params]
            numbers = torch.tensor([(row.seed, row.position, row.line, row.params.processed_log_probs) for row in rows]).T.contiguous()
            temperature_R = torch.tensor(temperatures).pin_memory().to(device, non_blocking=True)
            seed_R, position_R, lines_R, processed_R = numbers.pin_memory().to(device, non_blocking=True)
            tokens_R, log_probs_R = draw(logits_RV, temperature_R, seed_R, position_R, processed_R, self.vocab_size)
        else:
            banned = [row.banned for row in rows]
            scores_RV = adjust(logits_RV[:, : self.vocab_size], params, [row.prompt for row in rows], [row.output for row in rows], banned)
            seeds, positions = [row.seed for row in rows], [row.position for row in rows]
            settings = SamplingRows.of(params, seeds, positions, self.vocab_size, device)
            tokens_R = sample(scores_RV, settings)
            lines_R = torch.tensor([row.line for row in rows], device=device)
            if any(p.return_log_probs for p in params):
                picked_R = tokens_R.clamp(min=0)[:, None]
                log_probs_R = log_probs(logits_RV).gather(1, picked_R)[:, 0]
                if any(processed := [p.processed_log_probs for p in params]):
                    drawn_R = processed_log_probs(scores_RV, settings).gather(1, picked_R)[:, 0]
                    log_probs_R = torch.where(torch.tensor(processed, device=device), drawn_R, log_probs_R)
        if count := max(p.top_n_logprobs for p in params):
            values_RV = log_probs(logits_RV)
            values = values_RV[:, : self.vocab_size].topk(min(count, self.vocab_size), dim=1)
            top = values.indices, values.values
        if not any(p.return_log_probs for p in params):
            log_probs_R = None
        self.last_tokens[lines_R] = tokens_R.clamp(min=0)
        return Draws(tokens_R, log_probs_R, top, [p.top_n_logprobs for p in params])


def needs_history(params: SamplingParams) -> bool:
    """Whether a draw depends on the tokens that were drawn before, which the host must then know."""
    return params.has_penalties


def _is_plain(row: SampledRow) -> bool:
    """Whether greedy choice or a draw at a temperature is all that is asked for."""
    p = row.params
    ranks = not p.is_greedy and (p.top_k > 0 or 0 < p.top_p < 1 or p.min_p > 0)
    return not (ranks or p.has_penalties or p.logit_bias or row.banned)
