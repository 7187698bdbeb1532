# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention by torch's scaled_dot_product_attention."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mcore_parallel.context_parallel import ContextParallelAttention
from mcore_parallel.groups import Group, ProcessGroups
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._spec import AttentionSpec

# In the order of their speed on the GPUs that have the first one's kernels for training; torch goes on to the next where one cannot.
KERNELS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


# A heads, K key-value heads, d width of a head, B sequences, S tokens a sequence.
class SDPAttention:
    """Attention to everything before a token (or to all tokens) of its sequence, by the fastest kernel torch has.

    Packed sequences go to the flash kernels that take bounds, or to the plain formula where there are none.

    Args:
        spec: what is asked for: neither window nor sink.
        groups: not read.
        kernels: of torch, in this order; None for torch's own choice.
    """

    def __init__(self, spec: AttentionSpec, groups: ProcessGroups, *, kernels: tuple[SDPBackend, ...] | None = None) -> None:
        self.causal, self.scale = spec.causal, spec.softmax_scale
        self.kernels = kernels
        alone = Group.single()
        self._packed = ContextParallelAttention(gathered=alone, heads=alone, ring=alone, window=spec.bounds, softmax_scale=self.scale)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
        """q [T, A, d], k and v [T, K, d] -> [T, A, width of v]."""
        if step.cu_seqlens is not None:
            return self._packed(q, k, v, layer, step)
        B, S = step.batch_size, step.seq_len
        q, k, v = (x.view(B, S, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        chosen = contextlib.nullcontext() if self.kernels is None or not q.is_cuda else sdpa_kernel(list(self.kernels), set_priority=True)
        with chosen:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)


def sdpa_attention(spec: AttentionSpec, groups: ProcessGroups) -> SDPAttention:
    """The variant that training takes."""
    return SDPAttention(spec, groups, kernels=_preferred(spec))


def _preferred(spec: AttentionSpec) -> tuple[SDPBackend, ...] | None:
    # cuDNN's kernels for training are the faster ones from Hopper on; below that torch's own order is right.
    if spec.device != "cuda" or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0):
        return None
    return KERNELS
