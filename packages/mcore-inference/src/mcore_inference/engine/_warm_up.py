# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Draws for nobody, so that no request waits until their kernels are compiled."""

from torch import Tensor

from mcore_inference.sampling import DrawRows, Sampler, SamplingParams, ScoreAdjuster

__all__ = ["warm_up_draws"]

_KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(return_log_probs=True, top_n_logprobs=1),
    SamplingParams(top_p=0.9, return_log_probs=True, processed_log_probs=True),
)


_ADJUSTED = SamplingParams(repetition_penalty=1.1, logit_bias={0: 1.0})


def warm_up_draws(sampler: Sampler, adjuster: ScoreAdjuster, logits_RV: Tensor, vocab_size: int) -> None:
    """Draw a token for each row by settings of every kind, from the logits and from such as penalties leave, and drop it.

    Args:
        sampler: no request has its first R lines.
        adjuster: with as many lines; it has begun the first one afterwards.
        logits_RV: [R, at least vocab_size]; they are overwritten.
        vocab_size: ids that exist.
    """
    num_rows = len(logits_RV)
    adjuster.begin(0, _ADJUSTED, (), [0], [0], [[0, 0]])
    adjust_rows = adjuster.rows([0], [0], [()], [0])
    for kind in _KINDS:
        positions = [0] * num_rows
        rows = DrawRows.of([kind] * num_rows, positions, positions, range(num_rows), vocab_size, logits_RV.device)
        sampler.draw(logits_RV, rows)
        overwrites = not kind.return_log_probs
        sampler.draw(logits_RV, rows, adjuster.adjust(logits_RV, rows.settings.position, adjust_rows, overwrites=overwrites)).wait()
        adjuster.count(adjust_rows)
