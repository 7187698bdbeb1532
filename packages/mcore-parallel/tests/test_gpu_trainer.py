# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps that are run again, and stragglers, on a GPU."""

import dataclasses
import math
from collections.abc import Iterator

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, ModelOutput, TransformerConfig
from mcore_parallel.optim import ConstantSchedule, MegatronOptimizer, OptimizerConfig
from mcore_parallel.training import (
    Batch,
    CrossEntropyObjective,
    LossReport,
    Rerun,
    RerunConfig,
    RerunReport,
    StragglerProbe,
    Trainer,
    TrainerConfig,
)

pytestmark = pytest.mark.gpu
CONFIG = TransformerConfig(num_layers=2, hidden_size=256, num_attention_heads=4, ffn_hidden_size=512, vocab_size=512)


def data(consumed: int) -> Iterator[list[Batch]]:
    while True:
        generator = torch.Generator().manual_seed(consumed)
        tokens = torch.randint(512, (2, 129), generator=generator).cuda()
        yield [Batch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=torch.ones(2, 128, device="cuda"))]
        consumed += 2


class Faulty:
    """Cross entropy that is no number in one call."""

    def __init__(self, call: int) -> None:
        self.call, self.count = call, 0

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        report = CrossEntropyObjective()(output, batch)
        self.count += 1
        return dataclasses.replace(report, sum=report.sum * math.nan) if self.count == self.call else report


def train(call: int, rerun: Rerun) -> tuple[Trainer, StragglerProbe]:
    torch.manual_seed(1)
    groups = ProcessGroups.single()
    model = GPTModel(CONFIG, groups, dtype=torch.bfloat16, device="cuda")
    sync = DistributedDataParallel(DistributedDataParallelConfig(), model, groups)
    optimizer = MegatronOptimizer(OptimizerConfig(lr=1e-3), sync, groups)
    probe = StragglerProbe(model, groups, every=2)
    parts = (model, sync, optimizer, Faulty(call), data, ConstantSchedule(max_lr=1e-3))
    trainer = Trainer(TrainerConfig(steps=6), *parts, probe=probe, rerun=rerun)
    trainer.run()
    return trainer, probe


def test_a_passing_fault_is_named_and_leaves_the_loss_alone() -> None:
    reports: list[RerunReport] = []
    found, _ = train(4, Rerun(RerunConfig(mode="validate"), notify=reports.append))
    clean, _ = train(0, Rerun(RerunConfig(mode="validate"), notify=reports.append))
    assert [(report.step, report.verdict) for report in reports] == [(4, "transient")]
    assert found.state == clean.state
    for one, other in zip(found.model.parameters(), clean.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-3)


def test_the_forward_is_timed_on_the_device() -> None:
    groups = ProcessGroups.single()
    model = GPTModel(CONFIG, groups, dtype=torch.bfloat16, device="cuda")
    probe = StragglerProbe(model, groups, every=1)
    batch = next(data(0))[0]
    model(batch.tokens.flatten(), batch.step())
    found = probe()
    assert found["straggler/rank"] == 0 and found["straggler/slowdown"] == 1 and 0 < found["straggler/forward_s"] < 60
    assert probe()["straggler/forward_s"] == 0
