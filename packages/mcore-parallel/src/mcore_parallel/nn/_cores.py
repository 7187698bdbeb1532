# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention without parameters: the core slot of attention and the plain torch way to fill it."""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.nn._step import Step


class AttentionCore(Protocol):
    """The part of attention without parameters of its own.

    q is [T, A, d], k and v are [T, K, d] (A heads and K key-value heads of this tp rank), the result is [T, A, d].
    Query head a reads key-value head a // (A / K). ``layer`` is the number of the layer among those of this stage.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor: ...


def causal_attention(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
    """Causal softmax attention inside each of the step's B sequences, by torch's fused kernel.

    Scores are scaled by 1 / sqrt(d). It needs nothing of ``step.attention``, and the order of a sequence is the order of
    its tokens: ``step.positions`` are not read.
    """
    B, S = step.batch_size, step.seq_len
    q, k, v = (x.view(B, S, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)
