# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Draws for nobody, so that no request waits until their kernels are compiled."""

from torch import Tensor

from mcore_inference.sampling import DrawRows, Sampler, SamplingParams

__all__ = ["warm_up_draws"]

_KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=40, top_p=0.9, min_p=0.01),
    SamplingParams(return_log_probs=True, top_n_logprobs=1),
    SamplingParams(top_p=0.9, return_log_probs=True, processed_log_probs=True),
)


def warm_up_draws(sampler: Sampler, logits_RV: Tensor, vocab_size: int) -> None:
    """Draw a token for each row by settings of every kind, from the logits and from such as penalties leave, and drop it.

    Args:
        sampler: no request has its first R lines.
        logits_RV: [R, at least vocab_size].
        vocab_size: ids that exist.
    """
    num_rows, adjusted_RV = len(logits_RV), logits_RV[:, :vocab_size].float()
    for kind in _KINDS:
        positions = [0] * num_rows
        rows = DrawRows.of([kind] * num_rows, positions, positions, range(num_rows), vocab_size, logits_RV.device)
        sampler.draw(logits_RV, rows)
        sampler.draw(logits_RV, rows, adjusted_RV).wait()
