# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters of stacked experts train as on one rank in every layout, and merge into the stacks."""

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import GroupedMLP, MoEConfig, SequentialMLP, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.backends import Fp8Config, choose_backend, quantize_base
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.tensor_parallel import LoraConfig, add_lora, is_adapter, merge_lora
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, model_state, train_step

CONFIG = TransformerConfig(
    num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, vocab_size=16, init_method_std=0.3, activation="swiglu"
)
MIXTURE = MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01)
LORA = LoraConfig(rank=2, alpha=8.0, targets=("experts", "qkv"))
EIGHT = dataclasses.replace(LORA, base_dtype="fp8_weight_only")
EXPERTS = [f"layers.0.mlp.experts.{name}_lora.{half}" for name in ("up", "down") for half in "AB"]
Run = tuple[list[float], dict[str, Any]]


def build(groups: ProcessGroups, config: LoraConfig = LORA, **options: Any) -> GPTModel:
    """With adapters whose B is not zero, the same in every layout."""
    model = GPTModel(CONFIG, groups, feed_forward=moe_feed_forward(MIXTURE), dtype=torch.float64, seed=3, **options)
    add_lora(model, config, groups, seed=5)
    with torch.no_grad():
        for shard in named_shards(model):
            if shard.name.endswith("lora.B"):
                generator = torch.Generator().manual_seed(len(shard.name))
                whole = torch.randn(shard.spec.shape, dtype=torch.float64, generator=generator)
                shard.parameter.copy_(0.3 * whole[shard.spec.slices(groups)])
    return model


def train(groups: ProcessGroups, config: LoraConfig = LORA, **options: Any) -> Run:
    """Losses and gradient norms of two steps, and the parameters after them."""
    model = build(groups, config, **options)
    quantize_base(model)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    assert set(sync.gradients()) == {name for name, _ in model.named_parameters() if is_adapter(name)} >= set(EXPERTS)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1.0, clip_grad=0.5, weight_decay=0.1), sync, groups)
    numbers: list[float] = []
    for step in range(2):
        tokens = torch.randint(0, 16, (2, 2, 5), generator=torch.Generator().manual_seed(step))
        batches = [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=torch.ones(2, 4)) for x in tokens[groups.dp.rank :: groups.dp.size]]
        report = train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=0.02, groups=groups)
        numbers += [report.loss, report.grad_norm]
    return numbers, model_state(model, groups)


def test_experts_that_cannot_be_kept_in_eight_bits_are_refused() -> None:
    narrow = LoraConfig(rank=2, targets=("qkv", "experts"), base_dtype="fp8")
    with pytest.raises(ValueError, match=r'base_dtype="fp8" multiplies in fp8, and experts .*; use base_dtype="fp8_weight_only"'):
        build(ProcessGroups.single(), narrow)
    groups = ProcessGroups.single()
    experts = GroupedMLP(2, 16, 32, groups, layers=choose_backend("torch", fp8=Fp8Config(recipe="rowwise")).layers(0, 1))
    with pytest.raises(ValueError, match="computes the products of experts, and so do the layers of GroupedMLP"):
        experts.add_lora(dataclasses.replace(narrow, base_dtype="fp8_weight_only"), 0)
    assert not experts.has_lora
    model = build(groups, EIGHT)
    quantize_base(model)
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.qkv\.weight is in fp8"):
        merge_lora(model)
    model = build(groups, dataclasses.replace(EIGHT, targets=("experts",)))
    assert quantize_base(model) == ["layers.0.mlp.experts"] and quantize_base(model) == []
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts\.up is in fp8"):
        merge_lora(model)


def check_rounded(plans: list[ParallelPlan]) -> None:
    """Outputs and gradients of experts in eight bits against those of experts that hold the rounded values."""
    for plan, kind, bias in itertools.product(plans, (GroupedMLP, SequentialMLP), (False, True)):
        groups = ProcessGroups.build(plan) if plan.world_size > 1 else ProcessGroups.single()
        rounded, narrow = (kind(4, 16, 24, groups, bias=bias, dtype=torch.float64) for _ in range(2))
        for experts in (rounded, narrow):
            experts.add_lora(EIGHT, 7)
            for name, parameter in experts.named_parameters():
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
                parameter.requires_grad_(is_adapter(name))
        wide = {name: getattr(narrow, name).detach().clone() for name in ("up", "down")}
        assert narrow.quantize_base() and not narrow.quantize_base()
        for name, before in wide.items():
            stored = getattr(narrow, name)
            assert stored.dtype == torch.float8_e4m3fn and stored.shape == before.shape and stored.nbytes == before.numel()
            value = (stored.double().flatten(1, -2) * narrow._stored[name].inverse_NO1.double()).view(before.shape)
            assert 1e-3 < ((value - before).norm() / before.norm()).item() < 0.04
            getattr(rounded, name).data.copy_(value)
        ends = torch.tensor([3, 3, 10, 12][: len(wide["up"])], dtype=torch.int32)
        results = []
        for experts in (rounded, narrow):
            generator = torch.Generator().manual_seed(3)
            rows = torch.randn(13, 16, dtype=torch.float64, generator=generator).requires_grad_()
            weights = torch.rand(13, dtype=torch.float64, generator=generator).requires_grad_()
            y = experts(rows, ends, weights)[: int(ends[-1])]
            y.backward(torch.randn(y.shape, dtype=torch.float64, generator=generator))
            assert rows.grad is not None and experts.up.grad is None and experts.down.grad is None
            own = {name: parameter.grad for name, parameter in experts.named_parameters() if is_adapter(name)}
            results.append([y.detach(), rows.grad[: int(ends[-1])], weights.grad, *own.values()])
        assert len(results[0]) == 7
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_experts_in_eight_bits_are_those_with_the_rounded_weights() -> None:
    check_rounded([ParallelPlan()])


@pytest.mark.journey
@pytest.mark.world(2)
def test_ranks_that_share_or_divide_experts_round_them_alike(world) -> None:
    world(check_rounded, plans=[ParallelPlan(dp=2, ep=2), ParallelPlan(tp=2, etp=2)])
    world(check_layouts, expected=train(ProcessGroups.single(), config=EIGHT), config=EIGHT)


def test_eight_bits_of_experts_survive_recomputation_and_change_only_adapters() -> None:
    groups = ProcessGroups.single()
    model = build(groups, EIGHT)
    assert quantize_base(model) == ["layers.0.attention.qkv", "layers.0.mlp.experts"]
    before, (numbers, after) = model_state(model, groups), train(groups, config=EIGHT)
    assert numbers != serial()[0]
    changed = [name for name in after if not torch.equal(before[name].data.float(), after[name].data.float())]
    assert changed == [name for name in after if is_adapter(name)]
    assert train(groups, config=EIGHT, recompute=RecomputeConfig(granularity="full"))[0] == numbers


@functools.cache
def serial() -> Run:
    return train(ProcessGroups.single())


def check_layouts(expected: Run, config: LoraConfig = LORA) -> None:
    for plan in (
        ParallelPlan(dp=2, ep=2),
        ParallelPlan(dp=2),
        ParallelPlan(tp=2, etp=2),
        ParallelPlan(tp=2, etp=2, sequence_parallel=True),
        ParallelPlan(tp=2, ep=2, etp=1, sequence_parallel=True),
    ):
        numbers, state = train(ProcessGroups.build(plan), config)
        torch.testing.assert_close(numbers, expected[0], rtol=1e-9, atol=1e-12, msg=lambda text, plan=plan: f"{plan}: {text}")
        for name, shard in state.items():
            assert isinstance(shard, TensorShard)
            part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
            whole = expected[1][name].data[part]
            if shard.data.dtype == torch.float8_e4m3fn:
                assert torch.equal(shard.data.view(torch.uint8), whole.view(torch.uint8)), name
            else:
                torch.testing.assert_close(shard.data, whole, rtol=1e-8, atol=1e-10)


@pytest.mark.journey
@pytest.mark.world(2)
def test_every_layout_trains_the_adapters_as_one_rank(world) -> None:
    world(check_layouts, expected=serial())


def logits(model: GPTModel) -> Tensor:
    return model(torch.arange(12) * 7 % 16, Step.causal(2, 6))[0].logits()


def test_experts_begin_as_they_were_and_merge_into_their_stacks() -> None:
    groups = ProcessGroups.single()
    plain = GPTModel(CONFIG, groups, feed_forward=moe_feed_forward(MIXTURE), dtype=torch.float64, seed=3)
    expected = logits(plain)
    assert add_lora(plain, LORA, groups) == ["layers.0.attention.qkv", "layers.0.mlp.experts"]
    assert torch.equal(logits(plain), expected)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts has an adapter"):
        add_lora(plain, LoraConfig(targets=("experts",)), groups)
    model = build(groups)
    expected = logits(model)
    assert merge_lora(model) == ["layers.0.attention.qkv", "layers.0.mlp.experts"]
    torch.testing.assert_close(logits(model), expected, rtol=1e-10, atol=1e-12)
    assert not any(is_adapter(name) for name, _ in model.named_parameters())


def test_recomputation_changes_no_bit() -> None:
    numbers, state = train(ProcessGroups.single(), recompute=RecomputeConfig(granularity="full"))
    assert numbers == serial()[0]
    assert all(torch.equal(shard.data, serial()[1][name].data) for name, shard in state.items())


def test_dropout_of_experts_is_refused_and_changes_nothing() -> None:
    model = GPTModel(CONFIG, ProcessGroups.single(), feed_forward=moe_feed_forward(MIXTURE))
    with pytest.raises(ValueError, match=r"dropout=0\.1 would depend on where the rows of experts lie"):
        add_lora(model, LoraConfig(rank=2, dropout=0.1, targets=("qkv", "experts")), ProcessGroups.single())
    assert all(p.requires_grad for p in model.parameters()) and not any(is_adapter(name) for name, _ in model.named_parameters())
