# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The passes of draft heads behind a step: planned on the host, run on the device without a look back."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mcore_inference.context import HostStep, StepBuilder, StepInputs
from mcore_inference.sampling import DrawRows, Sampler, SamplingRows
from mcore_inference.speculation import DraftHeads

__all__ = ["DraftInputs", "DraftPass", "DraftRunner"]


# T tokens of a pass, S requests of all passes (in one order), M lines of requests, D model.
@dataclass(frozen=True, kw_only=True)
class DraftPass:
    """One pass as the host plans it."""

    host: HostStep
    """``-1 - place`` stands for the token that an earlier pass left in ``last_tokens``."""
    sources_T: np.ndarray
    """[T] rows of what the pass reads: for the first one the model's states, for one of another head what the head before kept [M + 1] and
    behind it the states of the pass before, else these alone."""
    places_4S: np.ndarray
    """[4, S]: token whose state a proposal is drawn from, and its place in ``last_tokens``; token whose state is kept, and its line. A
    request without has the last place, or line, which nobody reads."""
    draws: bool
    """Whether a request has a proposal here."""


@dataclass(frozen=True, kw_only=True)
class DraftInputs:
    """One pass on the device."""

    step: Callable[[], StepInputs]
    """Made when the passes before have drawn."""
    sources_T: Tensor
    places_4S: Tensor
    draws: bool


class DraftRunner:
    """Heads of one model with the tensors that their passes go on from, all at one address.

    Args:
        heads: of the model.
        builder: of their steps; its ``last_tokens`` have M places a proposal, and one more that nobody reads.
        max_requests: M.
        max_tokens: of a step of the model.
        hidden_size: D.
        dtype: of the states.
        vocab_size: ids that exist.
    """

    def __init__(
        self,
        heads: DraftHeads,
        builder: StepBuilder,
        *,
        max_requests: int,
        max_tokens: int,
        hidden_size: int,
        dtype: torch.dtype,
        vocab_size: int,
    ) -> None:
        self._heads, self._sampler = heads, Sampler(builder.last_tokens, vocab_size)
        self._hidden_TD = torch.zeros((max_tokens, hidden_size), dtype=dtype, device=builder.device)
        # Of each head but the last and each line, the state that the next head reads first in the next step.
        self._kept_MD = [self._hidden_TD.new_zeros((max_requests + 1, hidden_size)) for _ in range(heads.num_heads - 1)]

    def take_states(self, states: Sequence[Tensor]) -> None:
        """Leave what the heads begin with: from the outputs [T, D] of the modules that they read, of a step of the model."""
        hidden_TD = self._heads.begin(states)
        self._hidden_TD[: len(hidden_TD)].copy_(hidden_TD)

    def run(self, passes: Sequence[DraftInputs], settings: SamplingRows) -> Tensor:
        """Proposals [N, S] of the N first passes, those that draw; a token where a request has none, too.

        Args:
            passes: behind the step whose states were taken last.
            settings: of the S requests, positions those of their first proposals.
        """
        heads, hidden_TD = self._heads, self._hidden_TD
        tokens, last_states = list[Tensor](), list[tuple[Tensor, Tensor]]()
        for number, one in enumerate(passes, 1):
            if 1 < number <= heads.num_heads:
                hidden_TD = torch.cat([self._kept_MD[number - 2], hidden_TD])
            inputs, head = one.step(), min(number, heads.num_heads) - 1
            hidden_TD = heads.advance(head, hidden_TD[one.sources_T], inputs.tokens_T, inputs.step)
            drawn_S, places_S, kept_S, lines_S = one.places_4S
            if number < heads.num_heads:
                last_states.append((lines_S, hidden_TD[kept_S]))
            if one.draws:
                rows = DrawRows(
                    settings=dataclasses.replace(settings, position=settings.position + (number - 1)),
                    lines_R=places_S,
                    processed_R=torch.zeros_like(places_S),
                    top_n=(0,) * len(places_S),
                    wants_log_probs=False,
                )
                tokens.append(self._sampler.draw_tokens(heads.logits(hidden_TD[drawn_S]), rows))
        # Passes read what was kept the last time.
        for all_MD, (lines_S, own_SD) in zip(self._kept_MD, last_states, strict=False):
            all_MD[lines_S] = own_SD
        return torch.stack(tokens) if tokens else settings.seed.new_zeros((0, len(settings.seed)))
