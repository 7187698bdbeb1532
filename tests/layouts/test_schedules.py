# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run whose schedule is chosen on the command line gives the losses of one rank, experts included."""

from functools import cache

import pytest

from mcore_parallel.pipeline import ScheduleError
from mcore_parallel.training import CrossEntropyObjective, train_step
from mcore_tools.assembly import assemble
from mcore_tools.recipes import RunConfig, override
from tests.layouts.test_one_curve import CONFIG, step_batches
from tests.support.journeys import journeys_among
from tests.support.world import run

STEPS = 4


def config_of(*changes: str) -> RunConfig:
    return override(CONFIG, ["model.num_layers=4", f"train.steps={STEPS}", *changes])


def losses(config: RunConfig) -> list[tuple[float, float]]:
    parts, rows = assemble(config, "cpu"), []
    for _, batches in zip(range(STEPS), step_batches(parts.groups), strict=False):
        report = train_step(
            parts.model,
            batches,
            CrossEntropyObjective(),
            parts.sync,
            parts.optimizer,
            lr=1e-2,
            groups=parts.groups,
            pipeline=parts.pipeline,
            overlap=parts.overlap,
        )
        rows.append((report.loss + report.aux, report.grad_norm))
    return rows


@cache
def serial() -> list[tuple[float, float]]:
    [rows] = run(losses, 1, config=config_of())
    return rows


SCHEDULES = {
    "interleaved": ["plan.vpp=2"],
    "groups": ["plan.vpp=2", "pipeline.schedule=interleaved", "pipeline.group_size=4"],
    "zero bubble": ["pipeline.schedule=zero_bubble", "pipeline.num_layers_in_first_stage=1"],
    "pairs": ["pipeline.schedule=combined"],
    "pairs of chunks": ["pipeline.schedule=combined", "plan.vpp=2", "pipeline.layout=Et|tt||tL", "pipeline.delay_weight_grad=true"],
}
LAYOUTS = {"pp2-dp2-ep2": ["plan.pp=2", "plan.dp=2", "plan.ep=2"], "tp2-pp2-ep2": ["plan.tp=2", "plan.pp=2", "plan.ep=2"]}


@pytest.mark.parametrize("layout", journeys_among(LAYOUTS, "tp2-pp2-ep2"))
@pytest.mark.parametrize("name", journeys_among(SCHEDULES, "interleaved", "pairs of chunks"))
def test_every_schedule_gives_the_losses_of_one_rank(name: str, layout: str) -> None:
    if name == "groups" and layout == "pp2-dp2-ep2":
        with pytest.raises(ScheduleError, match="group_size=4 must lie between num_stages=2 and num_microbatches=2; run at least 4"):
            assemble(config_of(*LAYOUTS[layout], *SCHEDULES[name]), "cpu")
        return
    config = config_of(*LAYOUTS[layout], *SCHEDULES[name])
    for rank, rows in enumerate(run(losses, 4, config=config)):
        for step, (ours, expected) in enumerate(zip(rows, serial(), strict=True)):
            assert ours == pytest.approx(expected, rel=1e-8), f"rank {rank} step {step}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["pipeline.schedule=zero_bubble", "plan.vpp=2"], "schedule='zero_bubble' has one chunk a stage, found vpp=2"),
        (["pipeline.schedule=interleaved"], "schedule='interleaved' needs vpp of at least 2, found vpp=1"),
        (["plan.pp=8", "plan.vpp=2"], "group_size=8 must lie between num_stages=8 and num_microbatches=4; run at least 8 micro-batches"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_before_any_communication(changes: list[str], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        assemble(config_of(*changes), "cpu")
