# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Self-attention and its core."""

import dataclasses

import pytest
import torch
from torch import Tensor

from mcore_parallel import Group, ProcessGroups
from mcore_parallel.nn import AttentionConfig, SelfAttention, Step, causal_attention, rotary_frequencies, rotary_tables


def slow_attention(q: Tensor, k: Tensor, v: Tensor, batch_size: int) -> Tensor:
    """Token by token, head by head."""
    out, length = torch.empty_like(q), len(q) // batch_size
    per_group = q.shape[1] // k.shape[1]
    for token in range(len(q)):
        start = token // length * length
        for head in range(q.shape[1]):
            keys, values = k[start : token + 1, head // per_group], v[start : token + 1, head // per_group]
            out[token, head] = torch.softmax(keys @ q[token, head] / q.shape[-1] ** 0.5, 0) @ values
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_attention_equals_the_loop(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2 * 5, heads, 6, dtype=torch.float64, generator=generator) for heads in (4, kv_heads, kv_heads))
    torch.testing.assert_close(causal_attention(q, k, v, 0, Step.causal(2, 5)), slow_attention(q, k, v, 2), rtol=1e-10, atol=1e-12)


def test_self_attention_cuts_qkv_by_key_value_group() -> None:
    torch.manual_seed(0)
    attention = SelfAttention(
        AttentionConfig(hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2), ProcessGroups.single(), dtype=torch.float64
    )
    x, step = torch.randn(6, 8, dtype=torch.float64), Step.causal(2, 3)
    rows = attention.qkv.weight.detach()
    assert rows.shape == (2, 8, 8)
    q = torch.stack([x @ rows[head // 2, head % 2 * 2 :][:2].T for head in range(4)], 1)
    k, v = (torch.stack([x @ rows[group, begin : begin + 2].T for group in range(2)], 1) for begin in (4, 6))
    expected = slow_attention(q, k, v, 2).flatten(1) @ attention.out.weight.T
    torch.testing.assert_close(attention(x, step), expected, rtol=1e-10, atol=1e-12)


def test_the_core_gets_the_turned_heads_the_layer_and_the_step() -> None:
    seen = []

    def core(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
        seen.append((q.shape, k.shape, v.shape, layer, step.attention))
        return q

    attention = SelfAttention(
        AttentionConfig(hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2), ProcessGroups.single(), layer=3, core=core
    )
    step = dataclasses.replace(Step.causal(1, 5), attention="pages")
    plain = attention(torch.ones(5, 8), step)
    turned = attention(torch.ones(5, 8), dataclasses.replace(step, rotary=rotary_tables(step.positions, rotary_frequencies(2))))
    assert seen == [((5, 4, 2), (5, 2, 2), (5, 2, 2), 3, "pages")] * 2
    torch.testing.assert_close(plain[0], turned[0])
    assert not torch.isclose(plain[1:], turned[1:]).all(1).any()


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_across_heads_divide_by_the_root_mean_square_of_all_heads(zero_centered: bool) -> None:
    seen = []

    def core(q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step) -> Tensor:
        seen.append((q, k, v))
        return q

    norms = {"qk_norm": True, "qk_norm_across_heads": True, "norm_zero_centered": zero_centered, "norm_epsilon": 1e-2}
    config = AttentionConfig(hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=2, **norms)
    attention = SelfAttention(config, ProcessGroups.single(), core=core, dtype=torch.float64)
    assert attention.q_norm is not None and attention.k_norm is not None
    weights = [torch.randn(size, dtype=torch.float64) for size in (8, 4)]
    for norm, weight in zip((attention.q_norm, attention.k_norm), weights, strict=True):
        assert norm.weight[0].item() == (0.0 if zero_centered else 1.0)
        norm.weight.data.copy_(weight)
    x = torch.randn(6, 8, dtype=torch.float64)
    attention(x, Step.causal(2, 3))
    rows = (x @ attention.qkv.weight.flatten(0, 1).T).unflatten(1, (2, 4, 2))
    parts = (rows[:, :, :2].flatten(1), rows[:, :, 2].flatten(1))
    for found, part, weight in zip(seen[0][:2], parts, weights, strict=True):
        expected = part / (part.square().mean(1, keepdim=True) + 1e-2).sqrt() * (weight + zero_centered)
        torch.testing.assert_close(found.flatten(1), expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(seen[0][2], rows[:, :, 3])


def test_norms_across_heads_that_cannot_be_are_refused() -> None:
    sizes = {"hidden_size": 8, "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "qk_norm_across_heads": True}
    for fields in ({}, {"qk_norm": True, "normalization": "LayerNorm"}):
        with pytest.raises(ValueError, match="qk_norm_across_heads=True needs qk_norm=True and normalization='RMSNorm'"):
            AttentionConfig(**sizes, **fields)
    groups = dataclasses.replace(ProcessGroups.single(), tp=Group((0, 1, 2, 3), 0))
    with pytest.raises(ValueError, match=r"tp=4 must divide num_query_groups=2 for norms across heads .*; lower tp"):
        SelfAttention(AttentionConfig(**sizes, qk_norm=True), groups)


def test_a_tp_that_does_not_divide_the_key_value_heads_is_an_error() -> None:
    groups = dataclasses.replace(ProcessGroups.single(), tp=Group((0, 1), 0))
    with pytest.raises(ValueError, match=r"tp=2 must divide num_query_groups=3 .*or be a multiple of it"):
        SelfAttention(AttentionConfig(hidden_size=8, num_heads=6, num_kv_heads=3, head_dim=2), groups)
    with pytest.raises(ValueError, match=r"num_query_groups=3 must divide num_attention_heads=4"):
        SelfAttention(AttentionConfig(hidden_size=8, num_heads=4, num_kv_heads=3, head_dim=2), groups)
    with pytest.raises(ValueError, match=r"tp=2 must divide num_attention_heads=3"):
        SelfAttention(AttentionConfig(hidden_size=8, num_heads=3, num_kv_heads=1, head_dim=2), groups)
