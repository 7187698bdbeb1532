# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Attention by its definition, to measure every other core by."""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_parallel.context_parallel import sequence_prefixes, together
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.attention._cores import AttentionSpec
from mcore_parallel.nn.attention._softmax import soft_cap, softmax_with_sink
from mcore_parallel.nn.attention._windows import get_sliding_window_causal_mask


# T queries, T' keys, A heads, K key-value heads, d width of a head, e width of a value, i queries and j keys of a sequence.
def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    batch_size: int = 1,
    causal: bool = True,
    window: tuple[int, int] | None = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    cu_seqlens_k: Sequence[int] | Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention with the matrix of all scores of a sequence, in float32 or float64.

    A query that sees no key gives zeros. Sequences may have more keys than queries: the last query stands at the last key.

    Args:
        q: [T, A, d], sequence by sequence.
        k: [T', K, d].
        v: [T', K, e].
        batch_size: number of equal sequences, without ``cu_seqlens``.
        causal: a query sees no later key.
        window: (left, right) as of ``get_sliding_window_causal_mask``; what the causal mask hides stays hidden.
        sink: [A] logit of a key without a value for each head; zeros add 1 to the denominator.
        scale: factor of the scores; None for 1 / sqrt(d).
        softcap: of the scores, as of ``soft_cap``; None for none.
        cu_seqlens: [N + 1] bounds of packed sequences among the queries.
        cu_seqlens_k: the same among the keys; None for those of the queries.
        mask: [i, j] bool of further hidden keys, True where hidden; it adds to window and causality.

    Returns:
        [T, A, e], of the dtype of ``q``.
    """
    queries = _bounds(cu_seqlens, len(q), batch_size)
    keys = queries if cu_seqlens is not None and cu_seqlens_k is None else _bounds(cu_seqlens_k, len(k), batch_size)
    left, right = (-1, -1) if window is None else window
    bounds = (left, min(right, 0) if causal and right >= 0 else 0 if causal else right)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    repeat = q.shape[1] // k.shape[1]
    outs = []
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(queries), itertools.pairwise(keys), strict=True):
        q_iAd = q[q0:q1].to(wide)
        k_jAd, v_jAe = (x[k0:k1].to(wide).repeat_interleave(repeat, dim=1) for x in (k, v))
        scores = torch.einsum("iad,jad->aij", q_iAd, k_jAd) * factor
        scores = scores if softcap is None else soft_cap(scores, softcap)
        hidden = get_sliding_window_causal_mask(q1 - q0, k1 - k0, bounds, q.device)
        scores = scores.masked_fill(hidden if mask is None else hidden | mask, float("-inf"))
        weights = softmax_with_sink(scores, None if sink is None else sink[:, None, None]) if k1 > k0 else scores
        outs.append(torch.einsum("aij,jae->iae", weights, v_jAe))
    return torch.cat(outs).to(q.dtype)


class ReferenceAttention:
    """``reference_attention`` as a core.

    Args:
        spec: what is asked for.
        groups: not read.
    """

    def __init__(self, spec: AttentionSpec, groups: ProcessGroups) -> None:
        self.spec = spec
        self.follows_prefixes = self.takes_device_bounds = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        spec = self.spec
        if sink is None and spec.softmax_type == "off-by-one":
            sink = q.new_zeros(q.shape[1])
        attend = functools.partial(
            reference_attention, causal=False, window=spec.bounds, sink=sink, scale=spec.softmax_scale, softcap=spec.softcap
        )
        if step.max_seqlen is not None and step.cu_seqlens is not None:
            return attend(q, k, v, mask=~together(step.cu_seqlens, len(q)))
        bounds = step.cu_seqlens
        if step.cu_seqlens is not None and step.prefixes is not None:
            rows, bounds = _with_prefixes(step.cu_seqlens.tolist(), step.prefixes)
            k, v = (x.index_select(0, rows.to(x.device)) for x in (k, v))
        return attend(q, k, v, batch_size=step.batch_size, cu_seqlens=step.cu_seqlens, cu_seqlens_k=bounds)


def _with_prefixes(bounds: Sequence[int], prefixes: Tensor) -> tuple[Tensor, list[int]]:
    """Rows of the keys that each sequence sees, those in front of it first, and the bounds of these."""
    spans = [torch.arange(begin, end) for begin, end in itertools.pairwise(bounds)]
    seen = [
        own if prefix < 0 else torch.cat((spans[prefix], own))
        for own, prefix in zip(spans, sequence_prefixes(prefixes, len(spans)), strict=True)
    ]
    return torch.cat(seen), [0, *itertools.accumulate(map(len, seen))]


def _bounds(cu_seqlens: Sequence[int] | Tensor | None, tokens: int, batch_size: int) -> list[int]:
    if cu_seqlens is not None:
        return cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    return list(range(0, tokens + 1, tokens // batch_size)) if tokens else [0] * (batch_size + 1)
