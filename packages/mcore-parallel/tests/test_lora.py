# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters train as on one rank in every layout, leave the base alone, and merge into it."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.comm import gather_from_tensor_model_parallel_region
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import BertModel, GPTModel, TransformerConfig, init_parameters
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.pipeline import zero_bubble
from mcore_parallel.tensor_parallel import (
    ColumnParallelLinear,
    LoraConfig,
    Route,
    RowParallelLinear,
    adapted_layers,
    add_lora,
    column_product,
    is_adapter,
    make_tp_invariant,
    merge_lora,
    row_product,
)
from mcore_parallel.training import Batch, CrossEntropyObjective, TensorShard, model_state, train_step

CONFIG = TransformerConfig(
    num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=12, vocab_size=16, init_method_std=0.3
)
LORA = LoraConfig(rank=2, alpha=8.0)
TOKENS = torch.arange(12) * 7 % 16
EXACT: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}


def build(groups: ProcessGroups, config: LoraConfig = LORA, **options: Any) -> GPTModel:
    """With adapters whose B is not zero, the same in every layout."""
    model = GPTModel(CONFIG, groups, dtype=torch.float64, seed=3, **options)
    add_lora(model, config, groups, seed=5)
    with torch.no_grad():
        for shard in named_shards(model):
            if shard.name.endswith("lora.B"):
                generator = torch.Generator().manual_seed(len(shard.name) + sum(shard.name.encode()))
                whole = torch.randn(shard.spec.shape, dtype=torch.float64, generator=generator)
                shard.parameter.copy_(0.3 * whole[shard.spec.slices(groups)])
    return model


def logits(model: GPTModel) -> Tensor:
    output = model(TOKENS, Step.causal(2, 6))[0].logits()
    return gather_from_tensor_model_parallel_region(output, model.groups.tp)


# Losses and gradient norms of the steps, and the parameters.
Run = tuple[list[float], dict[str, Any]]


def train(groups: ProcessGroups, config: LoraConfig = LORA, *, schedule: Any = None, sliced: bool = False, **options: Any) -> Run:
    """Two steps of four micro-batches."""
    model = build(groups, config, **options)
    sync = DistributedDataParallel(
        DistributedDataParallelConfig(use_distributed_optimizer=sliced, overlap_param_gather=sliced), model, groups
    )
    rule = OptimizerConfig(lr=1.0, clip_grad=0.5, weight_decay=0.1, use_distributed_optimizer=sliced)
    optimizer = MegatronOptimizer(rule, sync, groups)
    assert all(is_adapter(name) for name in sync.gradients())
    numbers: list[float] = []
    torch.manual_seed(11)
    for step in range(2):
        tokens = torch.randint(0, 16, (4, 2, 5), generator=torch.Generator().manual_seed(step))
        batches = [Batch(tokens=x[:, :-1], labels=x[:, 1:], loss_mask=torch.ones(2, 4)) for x in tokens[groups.dp.rank :: groups.dp.size]]
        report = train_step(model, batches, CrossEntropyObjective(), sync, optimizer, lr=0.02, groups=groups, pipeline=schedule)
        numbers += [report.loss, report.grad_norm]
    sync.finish_param_sync()
    return numbers, model_state(model, groups)


@functools.cache
def serial(config: LoraConfig = LORA) -> Run:
    return train(ProcessGroups.single(), config)


def check(found: Run, expected: Run) -> None:
    torch.testing.assert_close(found[0], expected[0], **EXACT)
    for name, shard in found[1].items():
        assert isinstance(shard, TensorShard)
        part = tuple(slice(begin, begin + size) for begin, size in zip(shard.offset, shard.data.shape, strict=True))
        torch.testing.assert_close(shard.data, expected[1][name].data[part], rtol=1e-8, atol=1e-10)


def check_layouts(expected: Run, dropped: Run, config: LoraConfig) -> None:
    for sequence_parallel in (False, True):
        for overlap in (None, True):
            plan = ParallelPlan(tp=2, sequence_parallel=sequence_parallel, tp_comm_overlap=overlap)
            groups = ProcessGroups.build(plan)
            check(train(groups), expected)
            check(train(groups, config), dropped)
    check(train(ProcessGroups.build(ParallelPlan(dp=2)), sliced=True), expected)
    stages = ProcessGroups.build(ParallelPlan(pp=2))
    for schedule in (None, zero_bubble):
        check(train(stages, schedule=schedule), expected)
    first_only = LoraConfig(rank=2, alpha=8.0, targets=("0.*.qkv",))
    count = len(add_lora(GPTModel(CONFIG, stages), first_only, stages))
    assert count == (1 if stages.pp.rank == 0 else 0)


@pytest.mark.journey
@pytest.mark.world(2)
def test_every_layout_trains_the_adapters_as_one_rank(world) -> None:
    dropping = LoraConfig(rank=2, alpha=8.0, dropout=0.25)
    expected, dropped = serial(), serial(dropping)
    assert expected[0] != dropped[0]
    world(check_layouts, expected=expected, dropped=dropped, config=dropping)


def test_only_adapters_learn_and_the_base_keeps_its_bits() -> None:
    before, after = model_state(build(ProcessGroups.single()), ProcessGroups.single()), serial()[1]
    assert [name for name in after if is_adapter(name)] == [name for name in after if not torch.equal(before[name].data, after[name].data)]
    assert sum(is_adapter(name) for name in after) == 2 * 4 * CONFIG.num_layers


def test_a_layer_with_an_adapter_computes_the_product_of_two_matrices_beside_its_own() -> None:
    groups, x = ProcessGroups.single(), torch.randn(3, 4, dtype=torch.float64)
    for layer in (
        ColumnParallelLinear(4, (2, 3), groups, bias=True, dtype=torch.float64),
        RowParallelLinear(4, 6, groups, bias=True, dtype=torch.float64),
    ):
        nn.init.normal_(layer.bias)
        model = nn.ModuleDict({"layer": layer})
        plain = layer(x)
        add_lora(model, LoraConfig(rank=2, alpha=3.0, targets=("layer",)), groups)
        assert torch.equal(layer(x), plain)
        assert layer.lora is not None and layer.lora.A.any()
        nn.init.normal_(layer.lora.B)
        expected = plain + 1.5 * F.linear(F.linear(x, layer.lora.A), layer.lora.B.flatten(0, -2))
        torch.testing.assert_close(layer(x), expected, **EXACT)


def test_outputs_begin_as_those_of_the_base_to_the_bit() -> None:
    groups = ProcessGroups.single()
    model = GPTModel(CONFIG, groups)
    plain = logits(model)
    names = add_lora(model, LORA, groups)
    assert names == [f"layers.{n}.{part}" for n in range(2) for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]
    assert torch.equal(logits(model), plain)
    # As a model that is made without values does.
    init_parameters(model, 0)
    assert torch.equal(logits(model), plain)


def check_merge(expected: Tensor) -> None:
    for sequence_parallel in (False, True):
        groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
        model = build(groups)
        torch.testing.assert_close(logits(model), expected, **EXACT)
        names = [name for name, _ in adapted_layers(model)]
        assert merge_lora(model) == names and len(names) == 8
        torch.testing.assert_close(logits(model), expected, **EXACT)
        assert not any(is_adapter(name) for name, _ in model.named_parameters()) and all(p.requires_grad for p in model.parameters())


@pytest.mark.world(2)
def test_merged_weights_compute_the_same_in_every_layout(world) -> None:
    world(check_merge, expected=logits(build(ProcessGroups.single())).detach())


class OtherProducts:
    """Computes the GEMMs of a layer as the layer does, where another library might."""

    def column(self, x: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        return column_product(x, weight_OI, route)

    def row(self, x_TI: Tensor, weight_OI: Tensor, route: Route) -> Tensor:
        return row_product(x_TI, weight_OI, route)

    def weight_changed(self) -> None:
        """Nothing is kept."""


def check_other_products() -> None:
    for sequence_parallel in (False, True):
        groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=sequence_parallel))
        found: list[list[Tensor]] = []
        for other in (False, True):
            model = build(groups)
            for _, layer in adapted_layers(model) if other else ():
                layer.products = OtherProducts()
            y = logits(model)
            y.square().sum().backward()
            found.append([y.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert len(found[0]) == 17
        for plain, other_way in zip(*found, strict=True):
            torch.testing.assert_close(other_way, plain, **EXACT)


@pytest.mark.world(2)
def test_an_adapter_goes_beside_products_that_something_else_computes(world) -> None:
    world(check_other_products)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_recomputation_changes_no_bit(dropout: float) -> None:
    config = LoraConfig(rank=2, alpha=8.0, dropout=dropout)
    expected = serial(config)
    for recompute in (RecomputeConfig(granularity="full"), RecomputeConfig(modules=("norm", "mlp"))):
        found = train(ProcessGroups.single(), config, recompute=recompute)
        assert found[0] == expected[0]
        assert all(torch.equal(shard.data, expected[1][name].data) for name, shard in found[1].items())


@pytest.mark.parametrize("options", [{"granularity": "full"}, {"modules": ("attention",)}, {"modules": ("norm", "mlp")}], ids=str)
def test_a_second_run_with_other_dropout_is_refused(options: dict[str, Any]) -> None:
    groups, recompute = ProcessGroups.single(), RecomputeConfig(**options, preserve_rng_state=False)
    for model in (GPTModel(CONFIG, groups, recompute=recompute), BertModel(CONFIG, groups, recompute=recompute)):
        with pytest.raises(
            ValueError, match=r"preserve_rng_state=False .* and dropout=0.25 of LoraConfig draws some.*set preserve_rng_state"
        ):
            add_lora(nn.ModuleList([model]), LoraConfig(targets=("*.qkv",), dropout=0.25), groups)
        assert not list(adapted_layers(model)) and all(parameter.requires_grad for parameter in model.parameters())
        assert add_lora(model, LoraConfig(targets=("*.qkv",)), groups)
    plain = GPTModel(CONFIG, groups, recompute=RecomputeConfig(modules=("norm", "core_attention"), preserve_rng_state=False))
    assert add_lora(plain, LoraConfig(targets=("*.qkv",), dropout=0.25), groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("*.qkv", "*.fc1")}, r"targets='\*\.fc1' names no linear layer; the model has down, out, qkv, up"),
        ({"targets": ("*embedding",)}, r"targets='\*embedding' names embedding, and VocabParallelEmbedding takes no adapter"),
        ({"targets": ()}, "targets is empty"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"alpha": 0.0}, "alpha=0.0 must be above 0"),
        ({"dropout": 1.0}, "dropout=1.0 must lie between 0 and 1"),
    ],
)
def test_what_cannot_be_adapted_is_refused_by_name_and_changes_nothing(options: dict[str, Any], message: str) -> None:
    groups = ProcessGroups.single()
    model = GPTModel(CONFIG, groups, device="meta")
    with pytest.raises(ValueError, match=message):
        add_lora(model, LoraConfig(**options), groups)
    assert not list(adapted_layers(model)) and all(parameter.requires_grad for parameter in model.parameters())


def test_a_second_adapter_of_a_layer_and_blocks_of_one_are_refused() -> None:
    model = build(ProcessGroups.single())
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.qkv has an adapter; merge_lora ends it"):
        add_lora(model, LORA, ProcessGroups.single())
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.qkv has an adapter, whose sums follow tp"):
        make_tp_invariant(model, blocks=2)
