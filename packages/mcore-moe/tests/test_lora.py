# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters of stacked experts train as on one rank in every layout, and merge into the stacks."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
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


def train(groups: ProcessGroups, **options: Any) -> Run:
    """Losses and gradient norms of two steps, and the parameters after them."""
    model = build(groups, **options)
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


def test_weights_of_experts_are_not_kept_in_eight_bits() -> None:
    with pytest.raises(ValueError, match=r"base_dtype='fp8' is for linear layers, and targets='experts' names layers\.0\.mlp\.experts"):
        build(ProcessGroups.single(), LoraConfig(rank=2, targets=("qkv", "experts"), base_dtype="fp8"))


@functools.cache
def serial() -> Run:
    return train(ProcessGroups.single())


def check_layouts(expected: Run) -> None:
    for plan in (
        ParallelPlan(dp=2, ep=2),
        ParallelPlan(dp=2),
        ParallelPlan(tp=2, etp=2),
        ParallelPlan(tp=2, etp=2, sequence_parallel=True),
        ParallelPlan(tp=2, ep=2, etp=1, sequence_parallel=True),
    ):
        numbers, state = train(ProcessGroups.build(plan))
        torch.testing.assert_close(numbers, expected[0], rtol=1e-9, atol=1e-12, msg=lambda text, plan=plan: f"{plan}: {text}")
        for name, shard in state.items():
            assert isinstance(shard, TensorShard)
            part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
            torch.testing.assert_close(shard.data, expected[1][name].data[part], rtol=1e-8, atol=1e-10)


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
