# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Losses that cannot be right: a passing fault, one that stays, and a right result are told apart."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import ModelOutput
from mcore_parallel.training import (
    Batch,
    CrossEntropyObjective,
    InvalidResultError,
    LossReport,
    Rerun,
    RerunConfig,
    RerunReport,
    SuspectResultError,
    Trainer,
    TrainerConfig,
)
from tests.support.trainers import Rows, build_trainer


class Faulty:
    """Cross entropy that is multiplied by ``factor`` in some of its calls, one micro-batch each."""

    def __init__(self, calls: Sequence[int], factor: float) -> None:
        self.calls, self.factor, self.count = calls, factor, 0

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        report = CrossEntropyObjective()(output, batch)
        self.count += 1
        return dataclasses.replace(report, sum=report.sum * self.factor) if self.count in self.calls else report


def trainer(objective: Any, rerun: Rerun | None, groups: ProcessGroups | None = None, steps: int = 6) -> Trainer:
    return build_trainer(TrainerConfig(steps=steps), objective=objective, groups=groups, rerun=rerun)


def validate(reports: list[RerunReport], record: Path | None = None, **options: Any) -> Rerun:
    return Rerun(RerunConfig(mode="validate", window=2, **options), record, reports.append)


def parameters(loop: Trainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in loop.model.parameters()]


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e3])
def test_a_passing_fault_leaves_no_trace_in_the_model(factor: float) -> None:
    reports: list[RerunReport] = []
    # Call 4 is step 4, which nothing was run twice before.
    found, clean = trainer(Faulty([4], factor), validate(reports)), trainer(CrossEntropyObjective(), None)
    assert found.run() == clean.run()
    assert all(torch.equal(*pair) for pair in zip(parameters(found), parameters(clean), strict=True))
    assert [(report.step, report.verdict) for report in reports] == [(4, "transient")]


def test_the_same_again_ends_the_run_before_the_update_and_elsewhere_it_is_judged(tmp_path: Path) -> None:
    reports: list[RerunReport] = []
    stays = Faulty(range(4, 100), 1e3)
    loop, before = trainer(stays, validate(reports, tmp_path / "rerun.json")), trainer(CrossEntropyObjective(), None, steps=3)
    before.run()
    with pytest.raises(SuspectResultError, match=r"step 4: loss=.* start again on other machines"):
        loop.run()
    assert loop.state.step == 3
    assert all(torch.equal(*pair) for pair in zip(parameters(loop), parameters(before), strict=True))
    record = json.loads((tmp_path / "rerun.json").read_text())
    assert record["step"] == 4 and record["verdict"] == "suspect"
    # Here the step gives another loss: the first machine was at fault.
    reports.clear()
    assert trainer(CrossEntropyObjective(), validate(reports, tmp_path / "rerun.json")).run().step == 6
    assert [(report.verdict, report.host) for report in reports] == [("hardware", record["host"])]
    assert not (tmp_path / "rerun.json").exists()


def test_a_spike_that_comes_again_is_right_and_no_number_is_an_error(tmp_path: Path) -> None:
    reports: list[RerunReport] = []
    path = tmp_path / "rerun.json"
    for factor, verdicts in ((1e3, ["suspect", "reproduced"]), (math.nan, ["suspect", "reproduced"])):
        reports.clear()
        with pytest.raises(SuspectResultError):
            # Two runs for evidence and one more.
            trainer(Faulty([4, 5, 6, 7], factor), validate(reports, path)).run()
        again = trainer(Faulty([4], factor), validate(reports, path))
        if math.isnan(factor):
            with pytest.raises(InvalidResultError, match="look at the data"):
                again.run()
        else:
            assert again.run().step == 6
        assert [report.verdict for report in reports] == verdicts


def test_disabled_runs_nothing_twice_and_report_measures_every_step() -> None:
    for mode, count, difference in (("disabled", 6, None), ("report", 12, 0.0)):
        objective, lines = Faulty([], 1.0), Rows()
        loop = trainer(objective, Rerun(RerunConfig(mode=mode)))
        loop.writers = (lines,)
        loop.run()
        assert objective.count == count
        assert [values.get("rerun/difference") for values in lines.rows] == [difference] * 6


def check_the_faulty_rank_is_named(name: str) -> list[RerunReport]:
    groups = ProcessGroups.build(ParallelPlan(**{name: 2}))
    reports: list[RerunReport] = []
    faulty = groups.world.rank == 1
    rerun = Rerun(RerunConfig(mode="validate", window=2), notify=reports.append)
    try:
        loop = trainer(Faulty(range(4, 100), math.nan) if faulty else CrossEntropyObjective(), rerun, groups)
        loop.run()
    except SuspectResultError as error:
        return [*reports, error.report]
    raise AssertionError("the run went on")


@pytest.mark.world(2)
def test_the_rank_and_the_tensors_of_a_fault_are_named(world: Callable[..., list[Any]]) -> None:
    first, second = world(check_the_faulty_rank_is_named, name="dp")
    assert len(first) == 2 and len(second) == 1, "only the first rank is told"
    (evidence,) = second[0].evidence
    assert second[0].evidence == first[1].evidence
    assert evidence.startswith("rank 1 (dp 1 of ranks 0, 1): loss of micro-batch 0 is not finite; gradient of ")
    assert "more" in evidence


@pytest.mark.parametrize(
    "change",
    [{"mode": "on"}, {"spike_factor": 1.0}, {"window": 0}, {"tolerance": -1.0}, {"spike_factor": math.nan}, {"tolerance": math.nan}],
)
def test_bad_settings_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        RerunConfig(**change)
