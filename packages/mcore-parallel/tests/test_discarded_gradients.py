# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums that begin with their first gradient have the bits of sums that begin at zero, whatever was in them before."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups, ShardSpec
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig
from mcore_parallel.pipeline import ModelChunks, Overlap, PipelineConfig
from mcore_parallel.tensor_parallel import ColumnParallelLinear, MainGradient, WeightGradientSink
from mcore_parallel.training import Batch
from tests.support.poisoned_gradients import check_same_bits

CONFIG = TransformerConfig(num_layers=4, hidden_size=16, num_attention_heads=2, ffn_hidden_size=24, vocab_size=32, init_method_std=0.2)
ALONE = ProcessGroups.single()
NARROW_SUMS = {"grad_reduce_in_fp32": False, "param_name_patterns_for_fp32_local_accumulation": ("*norm*", "*mlp*")}


class Sometimes(nn.Module):
    """A layer that some steps leave out."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.skipped = layer, False

    def forward(self, hidden: Tensor, step: Any) -> Any:
        return (hidden, None) if self.skipped else self.layer(hidden, step)


def gpt(groups: ProcessGroups, **options: Any) -> GPTModel:
    fields = {"share_embeddings_and_output_weights": options.pop("tied", False)}
    return GPTModel(replace(CONFIG, **fields), groups, **{"dtype": torch.float64, "seed": 3, **options})


def micro_batches(model: nn.Module, step: int, count: int, rank: int = 0) -> list[Batch]:
    """Seeded; the layer that can be left out is in every second step."""
    for module in model.modules():
        if isinstance(module, Sometimes):
            module.skipped = step % 2 == 1
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(CONFIG.vocab_size, (count, 2, 7), generator=generator)
    return [Batch(tokens=part[:, :-1], labels=part[:, 1:], loss_mask=torch.ones(2, 6)) for part in tokens]


MODELS: dict[str, dict[str, Any]] = {
    "float64": {},
    "tied": {"tied": True},
    "float32": {"dtype": torch.float32},
    "recomputed": {"recompute": RecomputeConfig(granularity="full")},
    "recomputed parts": {"recompute": RecomputeConfig(modules=("norm", "mlp"))},
}


def mark_of(name: str, count: int) -> Any:
    if name == "float64":
        return ()
    return pytest.mark.journey if count > 1 else pytest.mark.slow


@pytest.mark.parametrize(
    ("options", "fusion", "count"),
    [
        # Several micro-batches of every model, fused or not; one micro-batch of the plain one.
        pytest.param(options, fusion, count, id=f"{name}-{fusion}-{count}", marks=mark_of(name, count))
        for name, options in MODELS.items()
        for fusion in (False, True)
        for count in (1, 4)
    ],
)
def test_a_dense_model_trains_with_the_bits_of_zeroed_sums(options: dict[str, Any], fusion: bool, count: int) -> None:
    config = {"gradient_accumulation_fusion": fusion}
    check_same_bits(lambda: gpt(ALONE, **options), ALONE, lambda model, step: micro_batches(model, step, count), ddp=config)


@pytest.mark.parametrize("config", [{}, {"grad_reduce_in_fp32": False}, NARROW_SUMS], ids=["wide", "narrow", "both"])
def test_sums_of_sixteen_bits_too(config: dict[str, Any]) -> None:
    def build() -> GPTModel:
        return gpt(ALONE, dtype=torch.bfloat16)

    check_same_bits(build, ALONE, lambda model, step: micro_batches(model, step, 3), ddp=config, least=0.3)


@pytest.mark.parametrize("fusion", [False, True])
def test_a_layer_that_a_step_leaves_out_has_zero_gradients(fusion: bool) -> None:
    def build() -> GPTModel:
        model = gpt(ALONE)
        model.layers["1"] = Sometimes(model.layers["1"])
        return model

    config = {"gradient_accumulation_fusion": fusion, "bucket_size": 500}
    check_same_bits(build, ALONE, lambda model, step: micro_batches(model, step, 2), ddp=config)


def check_replicas() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))

    def batches(model: nn.Module, step: int) -> list[Batch]:
        return micro_batches(model, step, 3, groups.dp.rank)

    for options in ({}, {"use_distributed_optimizer": True}, {"use_distributed_optimizer": True, "overlap_param_gather": True}):
        for tied in (False, True):
            config = {"bucket_size": 500, "overlap_grad_reduce": True, **options}
            check_same_bits(lambda tied=tied: gpt(groups, tied=tied), groups, batches, ddp=config)


@pytest.mark.journey
@pytest.mark.world(2)
def test_replicas_that_sum_in_the_backward_train_with_the_bits_of_zeroed_sums(world) -> None:
    world(check_replicas)


def check_stages() -> None:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    pipelines = [
        (1, PipelineConfig(schedule="1f1b")),
        (1, PipelineConfig(schedule="zero_bubble")),
        (1, PipelineConfig(schedule="combined", delay_weight_grad=True)),
        (2, PipelineConfig()),
        (2, PipelineConfig(schedule="combined", delay_weight_grad=True)),
    ]
    for chunks, pipeline in pipelines:
        for tied in (False, True):
            parts = pipeline.place(CONFIG.num_layers, num_stages=2, num_chunks=chunks).of_rank(groups.pp.rank)

            def build(parts: Any = parts, tied: bool = tied) -> nn.Module:
                return ModelChunks([gpt(groups, tied=tied, layers=part) for part in parts])

            overlap = Overlap() if pipeline.schedule == "combined" else None
            check_same_bits(
                build, groups, lambda model, step: micro_batches(model, step, 4), steps=3, pipeline=pipeline.build(chunks), overlap=overlap
            )


@pytest.mark.journey
@pytest.mark.world(2)
def test_stages_train_with_the_bits_of_zeroed_sums_in_every_schedule(world) -> None:
    world(check_stages)


class Foreign(nn.Module, WeightGradientSink):
    """A layer of somebody who knows ``open`` only, and one parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(2))
        self.main_grad: MainGradient | None = None

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(shape=(3,)), "unused": ShardSpec(shape=(2,))}

    def accumulate_weight_gradients_into(self, main_grads: Any) -> None:
        self.main_grad = main_grads.get("weight")

    def backward(self) -> None:
        assert self.main_grad is not None
        with self.main_grad.open() as total:
            total.add_(2.0)


def test_who_adds_without_a_claim_adds_to_zero() -> None:
    layer = Foreign()
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), layer, ALONE)
    for _ in range(3):
        ddp.grad_buffers[0].data.fill_(torch.nan)
        ddp.discard_gradients()
        for _ in range(2):
            layer.backward()
        ddp.finish_grad_sync()
        assert ddp.gradients()["weight"].tolist() == [4.0] * 3 and ddp.gradients()["unused"].tolist() == [0.0] * 2


def test_gradients_that_are_looked_at_before_the_sum_are_zero_or_added_to() -> None:
    layer = ColumnParallelLinear(3, 2, ALONE, dtype=torch.float64)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), layer, ALONE)
    x = torch.ones(4, 3, dtype=torch.float64)
    ddp(x).sum().backward()
    ddp.finish_grad_sync()
    ddp.discard_gradients()
    assert not ddp.gradients()["weight"].any()
    with ddp.no_sync():
        ddp(x).sum().backward()
    assert (ddp.gradients()["weight"] == 4.0).all()
    ddp(x).sum().backward()
    ddp.finish_grad_sync()
    assert (ddp.gradients()["weight"] == 8.0).all()


def test_buffers_that_were_given_back_are_zero_again() -> None:
    layer = ColumnParallelLinear(3, 2, ALONE, dtype=torch.float64)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(), layer, ALONE)
    ddp.discard_gradients()
    ddp.offload_grad_buffers()
    ddp.gradients()
    ddp.restore_grad_buffers()
    ddp.grad_buffers[0].data.fill_(1.0)
    ddp(torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    assert (ddp.gradients()["weight"] == 5.0).all()
