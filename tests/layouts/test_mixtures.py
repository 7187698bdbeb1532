# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture with everything its router can do, in every layout: losses by name, loads, gradients and biases are those of one rank."""

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups, named_buffer_shards, named_shards
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import AuxReport, Batch, CrossEntropyObjective, train_step

MODEL = TransformerConfig(
    num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32, init_method_std=0.3
)
MIXTURE = MoEConfig(
    num_moe_experts=8,
    moe_router_topk=2,
    moe_ffn_hidden_size=12,
    moe_layer_freq=(0, 1, 1),
    moe_router_score_function="sigmoid",
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=1.5,
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.02,
    moe_router_load_balancing_type=("aux_loss", "seq_aux_loss", "device_aux_loss", "comm_aux_loss"),
    moe_aux_loss_coeff=(0.1, 0.05, 0.2, 0.3),
    moe_z_loss_coeff=0.01,
    moe_shared_expert_intermediate_size=8,
    moe_shared_expert_gate=True,
)
GLOBAL = dataclasses.replace(
    MIXTURE, moe_router_load_balancing_type=("global_aux_loss", "aux_loss"), moe_aux_loss_coeff=(0.1, 0.05),
    moe_router_score_function="softmax", moe_router_enable_expert_bias=False, moe_router_bias_update_rate=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What became of a model."""

    losses: list[float]
    layers: list[AuxReport]
    parameters: dict[str, Tensor]
    biases: dict[str, Tensor]


def micro_batches(step: int) -> list[Batch]:
    """Of 2 x 8 tokens, with ends of padding of different lengths."""
    tokens = torch.randint(32, (4, 2, 9), generator=torch.Generator().manual_seed(step))
    batches = []
    for number, part in enumerate(tokens):
        valid = torch.arange(8) < torch.tensor([[8], [8 - number]])
        batches.append(Batch(tokens=part[:, :-1], labels=part[:, 1:], loss_mask=valid.double(), valid=valid))
    return batches


def train(groups: ProcessGroups, mixture: MoEConfig, recompute: RecomputeConfig | None = None) -> tuple[GPTModel, Trained]:
    model = GPTModel(MODEL, groups, feed_forward=moe_feed_forward(mixture), recompute=recompute, dtype=torch.float64)
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    rule = OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0, weight_decay=0.0)
    optimizer = MegatronOptimizer(rule, sync, groups)
    mine = slice(groups.dp.rank, None, groups.dp.size)
    reports = [train_step(model, micro_batches(step)[mine], CrossEntropyObjective(), sync, optimizer, lr=0.3) for step in range(2)]
    parameters = {shard.name: shard.parameter.detach().clone() for shard in named_shards(model)}
    biases = {buffer.name: buffer.tensor.clone() for buffer in named_buffer_shards(model)}
    return model, Trained([report.loss + report.aux for report in reports], [report.layers for report in reports], parameters, biases)


@functools.cache
def serial(mixture: MoEConfig) -> Trained:
    return train(ProcessGroups.single(), mixture)[1]


def check(plan: ParallelPlan, mixture: MoEConfig, expected: Trained, recompute: RecomputeConfig | None = None) -> None:
    groups = ProcessGroups.build(plan)
    model, trained = train(groups, mixture, recompute)
    torch.testing.assert_close(trained.losses, expected.losses, rtol=1e-9, atol=0)
    for ours, wanted in zip(trained.layers, expected.layers, strict=True):
        assert ours.counts == wanted.counts and list(ours.counts) == [1, 2]
        assert ours.losses == pytest.approx(wanted.losses, rel=1e-9)
    for shard in named_shards(model):
        whole = expected.parameters[shard.name]
        torch.testing.assert_close(trained.parameters[shard.name], whole[shard.spec.slices(groups)], rtol=1e-8, atol=1e-11)
    for name, bias in trained.biases.items():
        assert torch.equal(bias, expected.biases[name])
        # Balanced experts stay, the others moved in every step.
        assert bias.any() or not bias.numel()


PLANS = [
    {"dp": 2, "ep": 2},
    {"tp": 2, "ep": 2},
    {"tp": 2, "etp": 2},
    {"tp": 2, "ep": 2, "sequence_parallel": False},
    {"cp": 2, "ep": 2},
    {"pp": 2},
]


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("degrees", PLANS, ids=lambda degrees: "-".join(f"{name}{size}" for name, size in degrees.items()))
def test_two_ranks_train_a_mixture_as_one(world, degrees: dict[str, Any]) -> None:
    world(check, plan=ParallelPlan(**degrees), mixture=MIXTURE, expected=serial(MIXTURE))


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    "degrees",
    [
        pytest.param({"tp": 2, "cp": 2, "ep": 4}, marks=pytest.mark.journey),
        {"dp": 4, "ep": 2, "etp": 2},
        {"tp": 2, "pp": 2, "ep": 2},
        {"tp": 2, "dp": 2, "ep": 4},
    ],
    ids=str,
)
def test_four_ranks_train_a_mixture_as_one(world, degrees: dict[str, Any]) -> None:
    world(check, plan=ParallelPlan(**degrees), mixture=MIXTURE, expected=serial(MIXTURE))


@pytest.mark.parametrize("again", [RecomputeConfig(granularity="full"), RecomputeConfig(modules=("mlp",))], ids=["full", "mlp"])
@pytest.mark.parametrize("mixture", [MIXTURE, GLOBAL], ids=["bias", "global"])
def test_recomputation_counts_nothing_twice(mixture: MoEConfig, again: RecomputeConfig) -> None:
    check(ParallelPlan(), mixture, serial(mixture), again)


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("degrees", [{"tp": 2, "ep": 2}, {"tp": 2, "sequence_parallel": False}, {"cp": 2}, {"pp": 2}], ids=str)
def test_the_loss_over_the_global_batch_is_that_of_one_rank(world, degrees: dict[str, Any]) -> None:
    world(check, plan=ParallelPlan(**degrees), mixture=GLOBAL, expected=serial(GLOBAL))


def check_replicas() -> None:
    """Replicas that share the tokens out: their losses are parts of the loss over all, at its own size."""
    groups, alone = ProcessGroups.build(ParallelPlan(dp=4, ep=2)), ProcessGroups.single()
    mixture = MoEConfig(num_moe_experts=8, moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=1.0)
    models = [GPTModel(MODEL, layout, feed_forward=moe_feed_forward(mixture), dtype=torch.float64) for layout in (groups, alone)]
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))
    batches = [
        Batch(tokens=part, labels=part, loss_mask=torch.ones(part.shape).double()) for part in (tokens[groups.dp.rank, None], tokens)
    ]
    reports, gradients = [], []
    for model, batch in zip(models, batches, strict=True):
        sync = DistributedDataParallel(DistributedDataParallelConfig(), model, model.groups)
        optimizer = MegatronOptimizer(OptimizerConfig(optimizer="sgd", lr=1.0, clip_grad=0.0, weight_decay=0.0), sync, model.groups)
        reports.append(train_step(model, [batch], CrossEntropyObjective(), sync, optimizer, lr=0.0))
        gradients.append(sync.gradients()["layers.1.mlp.router.weight"].clone())
    assert reports[0].layers.losses == pytest.approx(reports[1].layers.losses, rel=1e-9)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-8, atol=1e-12)


@pytest.mark.world(4)
def test_the_global_loss_weighs_the_same_whatever_dp_is(world) -> None:
    world(check_replicas)
