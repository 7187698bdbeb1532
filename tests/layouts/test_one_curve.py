# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One model, one seed, one data order: every layout gives the same losses."""

import dataclasses
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from mcore_moe import MoEConfig
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import TransformerConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from mcore_tools.assembly import Parts, assemble
from mcore_tools.recipes import RunConfig, TrainConfig
from tests.support.world import run

CONFIG = RunConfig(
    model=TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=64, init_method_std=0.1
    ),
    moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01),
    train=TrainConfig(steps=5, seq_len=16, micro_batch_size=2, global_batch_size=8, dtype="float64"),
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0),
)


def losses(
    plan: ParallelPlan, device: str = "cpu", dtype: str = "float64", data_parallel: str = "ddp", base: RunConfig = CONFIG
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; the same global batches whatever the layout."""
    train = dataclasses.replace(base.train, dtype=dtype)
    parts = assemble(dataclasses.replace(base, plan=plan, train=train, data_parallel=data_parallel), device)
    return [trained(parts, batches) for batches in step_batches(parts.groups, device)]


def trained(parts: Parts, batches: list[Batch]) -> tuple[float, float]:
    """(loss, gradient norm) of one step."""
    report = train_step(parts.model, batches, CrossEntropyObjective(), parts.sync, parts.optimizer, lr=1e-2)
    return report.loss + report.aux, report.grad_norm


def step_batches(groups: ProcessGroups, device: str = "cpu") -> Iterator[list[Batch]]:
    """The micro-batches of this rank, step by step."""
    train = CONFIG.train
    generator = torch.Generator().manual_seed(0)
    for _ in range(train.steps):
        tokens = torch.randint(CONFIG.model.vocab_size, (train.global_batch_size, train.seq_len + 1), generator=generator)
        mask = (torch.rand(train.global_batch_size, train.seq_len, generator=generator) > 0.2).double()
        micro = range(groups.dp.rank, train.global_batch_size // train.micro_batch_size, groups.dp.size)
        yield [
            Batch(tokens=tokens[part, :-1].to(device), labels=tokens[part, 1:].to(device), loss_mask=mask[part].to(device))
            for part in (slice(i * train.micro_batch_size, (i + 1) * train.micro_batch_size) for i in micro)
        ]


def marked(layouts: dict[str, ParallelPlan], *slow: str) -> list[Any]:
    """The names of all layouts; those given are slow, as their parts meet in others, the others of several axes are journeys."""
    marks = {name: pytest.mark.slow if name in slow else pytest.mark.journey for name in layouts if name in slow or "-" in name}
    return [pytest.param(name, marks=marks.get(name, ())) for name in layouts]


@cache
def serial() -> list[tuple[float, float]]:
    [rows] = run(losses, 1, plan=ParallelPlan())
    return rows


LAYOUTS = {
    "tp2": ParallelPlan(tp=2, ep=1, etp=1),
    "pp2": ParallelPlan(pp=2),
    "dp2": ParallelPlan(dp=2),
    "ep2": ParallelPlan(dp=2, ep=2),
    "tp2-ep2": ParallelPlan(tp=2, ep=2),
    "tp2-pp2-ep2": ParallelPlan(tp=2, pp=2, ep=2),
    "tp2-dp2-ep4": ParallelPlan(tp=2, dp=2, ep=4),
    "pp2-dp2-ep2": ParallelPlan(pp=2, dp=2, ep=2),
    "tp2-dp2-ep2-etp2": ParallelPlan(tp=2, dp=2, ep=2, etp=2),
    "tp2-pp2-etp2": ParallelPlan(tp=2, pp=2, etp=2),
    "cp2": ParallelPlan(cp=2),
    "tp2-cp2-ep2": ParallelPlan(tp=2, cp=2, ep=2),
    "pp2-cp2-ep2": ParallelPlan(pp=2, cp=2, ep=2),
}

FULLY_SHARDED = {
    "fsdp1": ParallelPlan(),
    "fsdp2": ParallelPlan(dp=2),
    "fsdp4": ParallelPlan(dp=4),
    "tp2-fsdp2": ParallelPlan(tp=2, etp=2, dp=2),
    "pp2-fsdp2": ParallelPlan(pp=2, dp=2),
    "ep2-fsdp4": ParallelPlan(dp=4, ep=2),
    "tp2-ep2-fsdp2": ParallelPlan(tp=2, etp=1, ep=2, dp=2),
}


def test_the_model_learns() -> None:
    rows = serial()
    assert rows[-1][0] < rows[0][0]


@pytest.mark.parametrize("name", marked(LAYOUTS, "tp2-ep2", "tp2-dp2-ep4", "pp2-dp2-ep2", "tp2-pp2-etp2", "pp2-cp2-ep2"))
def test_every_layout_gives_the_losses_of_one_rank(name: str) -> None:
    plan = LAYOUTS[name]
    for rank, rows in enumerate(run(losses, plan.world_size, plan=plan)):
        for step, (ours, expected) in enumerate(zip(rows, serial(), strict=True)):
            assert ours == pytest.approx(expected, rel=1e-8), f"rank {rank} step {step}"


@pytest.mark.parametrize("name", marked(FULLY_SHARDED, "fsdp4", "ep2-fsdp4"))
def test_fully_sharded_replicas_give_the_losses_of_one_rank(name: str) -> None:
    plan = FULLY_SHARDED[name]
    for rank, rows in enumerate(run(losses, plan.world_size, plan=plan, data_parallel="fsdp")):
        for step, (ours, expected) in enumerate(zip(rows, serial(), strict=True)):
            assert ours == pytest.approx(expected, rel=1e-8), f"rank {rank} step {step}"


TORCH_SHARDED = {
    "fsdp2-2": ParallelPlan(dp=2),
    "fsdp2-4": ParallelPlan(dp=4),
    "tp2-fsdp2-2": ParallelPlan(tp=2, dp=2),
    "cp2-fsdp2-2": ParallelPlan(cp=2, dp=2),
}
TORCH_SHARDED_MARKS = {
    ("fsdp2-2", False): (),
    ("fsdp2-2", True): (),
    ("tp2-fsdp2-2", True): pytest.mark.journey,
    ("cp2-fsdp2-2", False): pytest.mark.journey,
}


def dense(*, tied: bool) -> RunConfig:
    model = dataclasses.replace(CONFIG.model, share_embeddings_and_output_weights=tied)
    return dataclasses.replace(CONFIG, moe=None, model=model)


@cache
def dense_serial(*, tied: bool) -> list[tuple[float, float]]:
    [rows] = run(losses, 1, plan=ParallelPlan(), base=dense(tied=tied))
    return rows


@pytest.mark.parametrize(
    ("name", "tied"),
    [
        # Both kinds of weights alone; beside each other axis one of them.
        pytest.param(name, tied, marks=TORCH_SHARDED_MARKS.get((name, tied), pytest.mark.slow))
        for name in TORCH_SHARDED
        for tied in (False, True)
    ],
)
def test_replicas_sharded_by_torch_give_the_losses_of_whole_ones(name: str, tied: bool) -> None:
    plan = TORCH_SHARDED[name]
    for rank, rows in enumerate(run(losses, plan.world_size, plan=plan, data_parallel="fsdp2", base=dense(tied=tied))):
        for step, (ours, wanted) in enumerate(zip(rows, dense_serial(tied=tied), strict=True)):
            assert ours == pytest.approx(wanted, rel=1e-8), f"rank {rank} step {step}"
