# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention whose bits for one token depend on its own sequence only."""

import itertools
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import AttentionSpec
from mcore_parallel.nn.attention._reference import ReferenceAttention


# T tokens, A heads, K key-value heads of G query heads each, d width of a head, w of values, L keys that a token sees.
class BatchInvariantAttention:
    """Causal attention of every token alone, by calls whose shapes follow from its position; for a CPU.

    The maths is float32, or float64 for float64 inputs. The backward is that of the definition (``ReferenceAttention``).

    Args:
        spec: what is asked for; causal.
        groups: without context parallelism.
    """

    def __init__(self, spec: AttentionSpec, groups: ProcessGroups) -> None:
        self.spec, self._reference = spec, ReferenceAttention(spec, groups)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        """q [T, A, d], k [T, K, d], v [T, K, w], sink [A] -> [T, A, w]."""
        return _Alone.apply(q, k, v, sink, self, layer, step)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, sink: Tensor | None) -> Tensor:
        """The forward."""
        if step.cu_seqlens is None:
            bounds = range(0, step.batch_size * step.seq_len + 1, step.seq_len)
        else:
            bounds = step.cu_seqlens.tolist()
        if self.spec.softmax_type == "off-by-one":
            sink = q.new_zeros(q.shape[1])
        left = self.spec.bounds[0]
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for start, end in itertools.pairwise(bounds):
            for token in range(start, end):
                first = start if left < 0 else max(start, token - left)
                out[token] = self.attend_token(q[token], k[first : token + 1], v[first : token + 1], sink)
        return out

    def attend_token(self, q_Ad: Tensor, k_LKd: Tensor, v_LKw: Tensor, sink_A: Tensor | None) -> Tensor:
        """[A, w] of a token that sees these keys."""
        wide = torch.promote_types(q_Ad.dtype, torch.float32)
        # Memory of their own: also the alignment is then the same everywhere.
        q_KGd = q_Ad.to(wide, copy=True).unflatten(0, (k_LKd.shape[1], -1))
        k_KLd, v_KLw = (x.transpose(0, 1).to(wide).clone(memory_format=torch.contiguous_format) for x in (k_LKd, v_LKw))
        scores_KGL = (q_KGd @ k_KLd.transpose(1, 2)) * self.spec.scale
        if sink_A is not None:
            extra_KG1 = sink_A.to(wide).view(*scores_KGL.shape[:2], 1)
            scores_KGL = torch.cat((scores_KGL, extra_KG1), dim=-1)
        weights_KGL = scores_KGL.softmax(dim=-1)[..., : k_KLd.shape[1]].contiguous()
        return (weights_KGL @ v_KLw).flatten(0, 1).to(q_Ad.dtype)


class _Alone(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, core: BatchInvariantAttention, layer: int, step: Step
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, sink)
        ctx.core, ctx.layer, ctx.step = core, layer, step
        return core.attend(q, k, v, step, sink)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        inputs = [None if saved is None else saved.detach().requires_grad_() for saved in ctx.saved_tensors]
        q, k, v, sink = inputs
        options = {} if sink is None else {"sink": sink}
        with torch.enable_grad():
            y = ctx.core._reference(q, k, v, ctx.layer, ctx.step, **options)
        found = iter(torch.autograd.grad(y, [one for one in inputs if one is not None], grads[0]))
        return *(None if one is None else next(found) for one in inputs), None, None, None
