# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Cores that take the projection's result give what norms, rotation and an ordinary core give one after the other."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.nn import (
    AttentionConfig,
    PackedAttentionCore,
    PackedHeads,
    SelfAttention,
    Step,
    reference_attention,
    rotary_frequencies,
    rotary_tables,
    track_max_logits,
)

SIZES: dict[str, Any] = {"hidden_size": 24, "num_heads": 6, "num_kv_heads": 2, "head_dim": 8}


class SplitsItself:
    """Takes packed heads where ``takes`` says so, and computes them by the reference."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.asked: list[tuple[int, Step]] = []
        self.packed: list[PackedHeads] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        return reference_attention(q, k, v, batch_size=step.batch_size, window=(-1, 0), sink=sink)

    def takes_packed(self, heads: PackedHeads, layer: int, step: Step) -> bool:
        self.asked.append((layer, step))
        return self.takes

    def attend_packed(self, heads: PackedHeads, layer: int, step: Step, *, sink: Tensor | None = None) -> Tensor:
        self.packed.append(heads)
        return self(*heads.split(), layer, step, sink=sink)


def build(core: Any, **fields: Any) -> SelfAttention:
    """With biases, sinks and norms that are no zeros and ones."""
    module = SelfAttention(AttentionConfig(**{**SIZES, **fields}), ProcessGroups.single(), layer=3, core=core, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=generator)
    return module


def steps(width: int, *, interleaved: bool = False) -> tuple[Step, Step]:
    """One as a trainer makes it, and the same for a core that is brought something."""
    plain = Step.causal(2, 7)
    tables = [rotary_tables(plain.positions + 3, rotary_frequencies(width, base).double(), interleaved=interleaved) for base in (1e4, 50.0)]
    plain = dataclasses.replace(plain, rotary=tables[0], rotary_window=tables[1])
    return plain, dataclasses.replace(plain, attention="pages")


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, 8),
        ({"qkv_bias": True}, 8),
        ({"softmax_type": "learnable", "qkv_bias": True, "out_bias": True, "rotary": "window"}, 8),
        ({"qk_norm": True, "norm_epsilon": 1e-2}, 8),
        ({"qk_norm": True, "norm_zero_centered": True, "output_gate": True}, 4),
        ({"rotary_interleaved": True}, 8),
        ({"qk_norm": True, "rotary": None}, 8),
    ],
)
def test_packed_heads_give_what_ordinary_ones_give(fields: dict[str, Any], width: int) -> None:
    core = SplitsItself()
    module = build(core, **fields)
    x = torch.randn(14, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, paged = steps(width, interleaved=fields.get("rotary_interleaved", False))
    wanted = module(x, plain)
    assert not core.asked and not core.packed, "a step of a trainer asks nothing"
    torch.testing.assert_close(module(x, paged), wanted, rtol=1e-12, atol=1e-12)
    assert [(layer, step is paged) for layer, step in core.asked] == [(3, True)]
    (heads,) = core.packed
    assert heads.qkv.shape == (14, 2, 5, 8) and heads.interleaved == fields.get("rotary_interleaved", False)
    assert heads.tables is (None if fields.get("rotary", "") is None else paged.rotary_window if "rotary" in fields else paged.rotary)
    assert (heads.norms is not None) == ("qk_norm" in fields)


def test_a_core_that_does_not_take_the_heads_gets_ordinary_ones() -> None:
    x, (plain, paged) = torch.randn(14, 24, dtype=torch.float64), steps(8)
    core = SplitsItself(takes=False)
    module = build(core, qk_norm=True)
    assert torch.equal(module(x, paged), module(x, plain))
    assert len(core.asked) == 1 and not core.packed


@pytest.mark.parametrize(
    "fields", [{"qk_norm": True, "normalization": "LayerNorm"}, {"qk_norm": True}, {"qk_norm": True, "qk_norm_across_heads": True}, {}]
)
def test_what_packed_heads_cannot_say_is_computed_as_ever(fields: dict[str, Any]) -> None:
    """Layer norms, norms of a batch-invariant mode, norms across heads, and logits that somebody watches."""
    core = SplitsItself()
    module = build(core, **fields)
    if not fields:
        track_max_logits(module)
    elif "qk_norm_across_heads" not in fields:
        assert module.q_norm is not None and module.k_norm is not None
        module.q_norm.batch_invariant = module.k_norm.batch_invariant = True
    module(torch.randn(14, 24, dtype=torch.float64), steps(8)[1])
    assert not core.asked and (module.logits is not None) == (not fields)


def test_functions_are_no_packed_cores() -> None:
    assert isinstance(SplitsItself(), PackedAttentionCore)
    assert not isinstance(SplitsItself.__call__, PackedAttentionCore)


def test_gradients_of_a_training_step_are_those_of_a_core_without_packed_heads() -> None:
    x, (plain, _) = torch.randn(14, 24, dtype=torch.float64), steps(8)
    results = []
    for core in (SplitsItself(), SplitsItself().__call__):
        module = build(core, qk_norm=True, qkv_bias=True, softmax_type="learnable")
        module(x, plain).square().sum().backward()
        results.append({name: parameter.grad for name, parameter in module.named_parameters()})
    assert results[0].keys() == results[1].keys()
    for name, grad in results[0].items():
        assert grad is not None and torch.equal(grad, results[1][name]), name
