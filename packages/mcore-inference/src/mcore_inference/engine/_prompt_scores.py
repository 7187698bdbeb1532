# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Log-probabilities of the tokens of a prompt, from a step to the record of their request."""

from dataclasses import dataclass

from torch import Tensor

from mcore_inference.engine._active_request import ActiveRequest


@dataclass(frozen=True, kw_only=True)
class PromptScores:
    """Of N tokens of one prompt, those that a step computes."""

    entry: ActiveRequest
    values_N: Tensor
    best: tuple[Tensor, Tensor] | None
    """Ids and log-probabilities [N, n] of the best tokens at these places, where they are asked for."""

    def hand_out(self) -> None:
        """Wait for them, and put them behind those of earlier chunks; an ended request takes none."""
        if self.entry.ended:
            return
        segment = self.entry.segment
        segment.prompt_log_probs = [*(segment.prompt_log_probs or ()), *self.values_N.tolist()]
        if self.best is not None:
            ids, values = (x.tolist() for x in self.best)
            ranked = [dict(zip(*row, strict=True)) for row in zip(ids, values, strict=True)]
            segment.prompt_top_n_logprobs = [*(segment.prompt_top_n_logprobs or ()), *ranked]
