# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention without parameters: the core slot of attention and the plain torch way to fill it."""

import functools
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.context_parallel import ContextParallelAttention, context_parallel_attention
from mcore_parallel.groups import Group, ProcessGroups
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._spec import AttentionSpec


class AttentionCore(Protocol):
    """The part of attention without parameters of its own.

    q is [T, A, d], k and v are [T, K, d] (A heads and K key-value heads of this tp rank), the result is [T, A, d].
    Query head a reads key-value head a // (A / K). ``layer`` is the number of the layer among those of this stage.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor: ...


class SinkAttentionCore(Protocol):
    """An attention core that can leave a part of each softmax to a sink: a key without a value, whose logit [A] is learnt."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor: ...


@runtime_checkable
class AttentionCoreBuilder(Protocol):
    """Makes the core of a layer when it is told what the layer asks for: window, sink, scale, widths.

    Where a core can be given, this can be given in its place.
    """

    def build_core(self, spec: AttentionSpec, groups: ProcessGroups, layer: int) -> AttentionCore | SinkAttentionCore:
        """Args: what is asked for, the layout, the number of the layer among those of the stage."""
        ...


def causal_attention(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
    """Causal softmax attention inside each of the step's B sequences, by torch's fused kernel, or of its packed sequences.

    Scores are scaled by 1 / sqrt(d). It needs nothing of ``step.attention``, and the order of a sequence is the order of
    its tokens: ``step.positions`` are not read.
    """
    if step.cu_seqlens is not None:
        return _packed_attention()(q, k, v, layer, step)
    B, S = step.batch_size, step.seq_len
    q, k, v = (x.view(B, S, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(0, 1)


# Kept, because it keeps its plans: all layers, and their recomputation, ask for the same one.
@functools.cache
def _packed_attention() -> ContextParallelAttention:
    alone = Group.single()
    return ContextParallelAttention(gathered=alone, heads=alone, ring=alone)


def default_attention(groups: ProcessGroups) -> AttentionCore:
    """Causal attention of a layout: torch's kernel, or a ring when sequences are split over cp."""
    return causal_attention if groups.cp.size == 1 else context_parallel_attention(groups)
