# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run that was saved in one layout goes on in another as if nothing had happened."""

import dataclasses
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager
from mcore_moe import MoEConfig
from mcore_parallel import ParallelPlan
from mcore_parallel.models import TransformerConfig
from mcore_parallel.optim import OptimizerConfig
from mcore_parallel.training import Batch, CrossEntropyObjective, train_step
from tools.assemble import Parts, assemble
from tools.recipes import RunConfig, TrainConfig

# Three layers of this width: the border between two slices of the experts falls inside an expert, so a slice is several boxes.
CONFIG = RunConfig(
    model=TransformerConfig(
        num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=24, vocab_size=32, init_method_std=0.1
    ),
    moe=MoEConfig(num_moe_experts=4, moe_router_topk=2, moe_aux_loss_coeff=0.01),
    train=TrainConfig(seq_len=8, dtype="float64"),
    optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=1.0),
)
SAVED = ParallelPlan(tp=2, dp=2, ep=2)


def start(plan: ParallelPlan, sliced: bool, seed: int) -> Parts:
    optimizer = dataclasses.replace(CONFIG.optimizer, use_distributed_optimizer=sliced)
    train = dataclasses.replace(CONFIG.train, seed=seed)
    return assemble(dataclasses.replace(CONFIG, plan=plan, optimizer=optimizer, train=train), "cpu")


def advance(parts: Parts, steps: range) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step; the same four micro-batches a step in every layout."""
    rows = []
    for step in steps:
        tokens = torch.randint(32, (4, 2, 9), generator=torch.Generator().manual_seed(step))
        mine = tokens[parts.groups.dp.rank :: parts.groups.dp.size]
        batches = [Batch(tokens=part[:, :-1], labels=part[:, 1:], loss_mask=torch.ones(2, 8, dtype=torch.float64)) for part in mine]
        report = train_step(parts.model, batches, CrossEntropyObjective(), parts.sync, parts.optimizer, lr=1e-2)
        rows.append((report.loss + report.aux, report.grad_norm))
    return rows


def check_goes_on(folder: str, targets: list[tuple[ParallelPlan, bool]]) -> int:
    """Save after three steps with the optimizer in slices; every target layout continues with the same numbers."""
    first = start(SAVED, True, seed=1)
    advance(first, range(3))
    state = first.state()
    CheckpointManager(folder).save(3, state, {"optimizer_step": first.optimizer.step_count})
    expected = advance(first, range(3, 6))
    for plan, sliced in targets:
        other = start(plan, sliced, seed=2)
        step, extra = CheckpointManager(folder).load(other.state())
        assert step == 3
        other.optimizer.load_step_count(extra["optimizer_step"])
        for ours, wanted in zip(advance(other, range(3, 6)), expected, strict=True):
            assert ours == pytest.approx(wanted, rel=1e-8), (plan, sliced)
    return sum(len(value) > 1 for value in state.values() if isinstance(value, list))


@pytest.mark.world(4)
def test_a_sliced_optimizer_state_goes_on_in_every_layout(world, tmp_path: Path) -> None:
    targets = [
        (SAVED, True),
        (SAVED, False),
        (ParallelPlan(pp=2, dp=2), True),
        (ParallelPlan(tp=2, pp=2, ep=2), True),
        (ParallelPlan(dp=4, ep=2, etp=2), True),
    ]
    parts = world(check_goes_on, folder=str(tmp_path), targets=targets)
    assert any(parts), "no rank held a tensor in several parts: the test would not show that they load"
