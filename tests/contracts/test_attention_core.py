# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The attention core: whatever computes it, causal softmax attention with grouped heads has one value."""

import math

import pytest
import torch
from torch import Tensor

from mcore_inference import PagedAttention
from mcore_parallel import ProcessGroups
from mcore_parallel.context_parallel import CP_COMM_TYPES, context_parallel_attention
from mcore_parallel.nn import AttentionCore, Step, causal_attention, default_attention
from tests.contracts.conformance import mismatches

SINGLE = ProcessGroups.single()

PROVIDERS: dict[str, AttentionCore] = {
    "torch": causal_attention,
    "default": default_attention(SINGLE),
    "paged": PagedAttention(),
    **{f"context-parallel-{kind}": context_parallel_attention(SINGLE, kind) for kind in CP_COMM_TYPES if "+" not in kind},
}


def by_definition(q: Tensor, k: Tensor, v: Tensor, batch_size: int) -> Tensor:
    """[T, A, d], [T, K, d], [T, K, d] -> [T, A, d], one query and head at a time."""
    out, length, share = torch.empty_like(q), len(q) // batch_size, q.shape[1] // k.shape[1]
    for token in range(len(q)):
        first = token // length * length
        for head in range(q.shape[1]):
            scores = k[first : token + 1, head // share] @ q[token, head] / math.sqrt(q.shape[2])
            out[token, head] = scores.softmax(0) @ v[first : token + 1, head // share]
    return out


@pytest.mark.parametrize("name", PROVIDERS)
def test_a_core_gives_causal_attention_and_its_gradient(name: str) -> None:
    core = PROVIDERS[name]
    assert mismatches(core, AttentionCore) == []
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(2 * 8, heads, 4, dtype=torch.float64, generator=generator) for heads in (4, 2, 2, 4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    expected, out = by_definition(*inputs, batch_size=2), core(*inputs, 0, Step.causal(2, 8))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    found = torch.autograd.grad((out * weight).sum(), inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
