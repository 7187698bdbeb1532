# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a draw needs to know of each part of a row of logits; imported only by kernels.

The same numbers come from the kernel that reads logits and from the output layer that has them in registers: sums are of integers, so that
they do not depend on how threads share a part.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

import triton
import triton.language as tl


@triton.jit
def best_and_weight(logits, ids, vocab_size, scale):
    """Of P parts of 64 ids: the best logit, and the sum of weights beside it. A part with NaN says NaN.

    Args:
        logits: [P, 64] float32; -inf where there is no column.
        ids: of the columns. Padding of the vocabulary counts in no draw.
        vocab_size: ids that exist.
        scale: of the logits, [P, 1] or a number.
    """
    scores = tl.where(ids < vocab_size, logits, -float("inf"))
    best = tl.max(scores, 1)
    # NaN is passed over by a maximum.
    broken = tl.sum((logits != logits).to(tl.int32), 1) > 0
    weight = _summed(tl.exp((scores - tl.where(best > -float("inf"), best, 0.0)[:, None]) * scale))
    return tl.where(broken, float("nan"), best), weight


@triton.jit
def raw_log_sum(logits):
    """Of P parts: the log-sum [P] of all logits [P, 64], those of padding too, which count in the model's own probabilities."""
    highest = tl.max(logits, 1)
    total = _summed(tl.exp(logits - tl.where(highest > -float("inf"), highest, 0.0)[:, None]))
    # As a log-sum: parts are of different heights.
    return tl.where(highest > -float("inf"), highest + tl.log(total), -float("inf"))


@triton.jit
def plain_temperature(words_ptr, row):
    """Of rows in the words of ``PlainRows``."""
    return tl.load(words_ptr + 4 + row).to(tl.float32, bitcast=True)


@triton.jit
def _summed(weights):
    """Of weights [P, 64] from 0 to 1, in steps of 2^-24."""
    return tl.sum((weights * 16777216.0 + 0.5).to(tl.int32), 1).to(tl.float32) * 5.9604644775390625e-08
