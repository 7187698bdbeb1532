# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Triton kernel of the tensors with which a step begins; imported only when it runs."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

# T tokens of a step.

_TOKENS = 256


def enter_step(words: Tensor, last_tokens: Tensor) -> Tensor:
    """[3, T] int64: tokens, positions and slots of a step.

    Args:
        words: [3 T] int32, the same; ``-1 - line`` stands for the last token of a line.
        last_tokens: [M] int64, of each line.
    """
    count = len(words) // 3
    inputs_3T = torch.empty((3, count), dtype=torch.int64, device=words.device)
    if count:
        _enter_kernel[(triton.cdiv(count, _TOKENS),)](words, last_tokens, inputs_3T, count, TOKENS=_TOKENS, num_warps=4)
    return inputs_3T


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["words_ptr"])
def _enter_kernel(words_ptr, last_tokens_ptr, inputs_ptr, count, TOKENS: tl.constexpr):
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = place < count
    token = tl.load(words_ptr + place, mask=inside, other=0).to(tl.int64)
    drawn = tl.load(last_tokens_ptr + tl.where(token < 0, -1 - token, 0))
    tl.store(inputs_ptr + place, tl.where(token < 0, drawn, token), mask=inside)
    for row in tl.static_range(1, 3):
        at = row * count + place
        tl.store(inputs_ptr + at, tl.load(words_ptr + at, mask=inside, other=0).to(tl.int64), mask=inside)
