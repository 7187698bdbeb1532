# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Numbers of each token from a forward pass: the same on every rank of every layout, and quiet."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.pipeline import ModelChunks, PipelineConfig
from mcore_parallel.training import Batch, score

SIZES = TransformerConfig(num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, vocab_size=64)


def log_probs(output: Any, batch: Batch) -> Tensor:
    return output.log_probs(batch.labels.flatten(), 0.7)


def micro_batches(count: int = 3, *, packed: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(64, (count, 2, 17), generator=generator)
    bounds = torch.tensor([0, 4, 12, 24, 32], dtype=torch.int32) if packed else None
    return [Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(2, 16), cu_seqlens=bounds) for row in rows]


def check_layout(plan: ParallelPlan, packed: bool) -> list[Tensor]:
    groups = ProcessGroups.build(plan)
    model: torch.nn.Module = GPTModel(SIZES, groups, dtype=torch.float64)
    if plan.vpp > 1:
        parts = PipelineConfig().place(SIZES.num_layers, num_stages=2, num_chunks=plan.vpp).of_rank(groups.pp.rank)
        model = ModelChunks([GPTModel(SIZES, groups, layers=part, dtype=torch.float64) for part in parts])
    batches = micro_batches(2, packed=packed)
    mine = batches[groups.dp.rank :: groups.dp.size]
    scored = score(model, mine, log_probs, groups=groups)
    whole = score(GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64), mine, log_probs)
    for ours, expected in zip(scored, whole, strict=True):
        assert ours.dtype == torch.float64 and not ours.requires_grad
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    return [value.clone() for value in scored]


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2), ParallelPlan(pp=2), ParallelPlan(cp=2), ParallelPlan(dp=2)], ids=str)
def test_every_rank_has_the_numbers_of_one(world, plan: ParallelPlan, packed: bool) -> None:
    one, other = world(check_layout, plan=plan, packed=packed)
    if plan.dp == 1:
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize("plan", [ParallelPlan(tp=2, pp=2), ParallelPlan(pp=2, cp=2), ParallelPlan(tp=2, cp=2)], ids=str)
def test_layouts_combine(world, plan: ParallelPlan) -> None:
    world(check_layout, plan=plan, packed=True)


@pytest.mark.world(2)
def test_virtual_stages_score_like_one(world) -> None:
    world(check_layout, plan=ParallelPlan(pp=2, vpp=2), packed=False)


def test_the_numbers_are_those_of_the_logits() -> None:
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64)
    for batch, values in zip(micro_batches(), score(model, micro_batches(), log_probs), strict=True):
        logits = model(batch.tokens.flatten(), batch.step())[0].logits().detach() / 0.7
        expected = logits.log_softmax(-1).gather(1, batch.labels.flatten()[:, None]).view(2, 16)
        torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


def test_the_pass_is_quiet_and_every_module_keeps_its_mode() -> None:
    model = GPTModel(SIZES, ProcessGroups.single(), dtype=torch.float64).train()
    list(model.modules())[3].eval()
    modes = [module.training for module in model.modules()]
    seen: list[bool] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: seen.append(module.training or torch.is_grad_enabled()))
    score(model, micro_batches(1), log_probs)
    assert seen and not any(seen)
    assert [module.training for module in model.modules()] == modes


def test_results_of_another_shape_are_refused() -> None:
    model = GPTModel(SIZES, ProcessGroups.single())
    with pytest.raises(ValueError, match=r"shape \(\); return a floating number for each of 32 tokens"):
        score(model, micro_batches(1), lambda output, batch: log_probs(output, batch).sum())
    with pytest.raises(ValueError, match="batches holds 0 micro-batches"):
        score(model, [], log_probs)
    share = dataclasses.replace(micro_batches(1)[0], context_size=2)
    with pytest.raises(ValueError, match=r"batches \[0\] are shares of context-parallel ranks; pass whole ones"):
        score(model, [share], log_probs)
