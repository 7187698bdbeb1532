# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The loop with timers, a profiler's window and dumps."""

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.numerics import compare_dumps
from mcore_parallel.numerics._recorder import read_entries
from mcore_parallel.training import (
    Batch,
    CommunicationReport,
    DumpConfig,
    ProfileConfig,
    Rerun,
    RerunConfig,
    Timers,
    Trainer,
    TrainerConfig,
)
from tests.support.trainers import Rows, build_trainer, counting

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=8, vocab_size=16)
PARTS = {"time/batch", "time/forward-backward", "time/grad-sync", "time/optimizer"}


def trainer(rows: Rows, steps: int = 5, groups: ProcessGroups | None = None, dumps: DumpConfig | None = None, **options: Any) -> Trainer:
    groups = ProcessGroups.single() if groups is None else groups

    def data(consumed: int) -> Iterator[list[Batch]]:
        while True:
            yield [counting(consumed + groups.dp.rank, 1)]
            consumed += groups.dp.size

    rhythm = TrainerConfig(steps=steps, eval_every=2, timers_every=2 if options.get("timers") else 0)
    loop = build_trainer(rhythm, data, model=CONFIG, groups=groups, writers=[rows], evaluation=lambda: [counting(3, 1)], **options)
    loop.dumps = None if dumps is None else dumps.build(loop.model, groups, loop.sync)
    return loop


def times(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("time/") and name.count("/") == 1}


def test_the_first_step_is_told_by_itself_and_later_ones_as_means() -> None:
    rows = Rows()
    timers = Timers()
    timers("library-setup").set_elapsed(7.0)
    trainer(rows, timers=timers).run()
    first, second, third, fourth, fifth = map(times, rows.rows)
    assert set(first) == PARTS | {"time/library-setup"} and first["time/library-setup"] == 7.0
    assert set(second) == set(fourth) == PARTS | {"time/evaluate"}, "what did not run is left out"
    assert third == fifth == {}
    # Two steps lie behind the fourth line, and the evaluations between the steps.
    assert sum(fourth.values()) <= 1.5 * (rows.rows[2]["step_s"] + rows.rows[3]["step_s"]) / 2 + fourth["time/evaluate"]
    assert timers.first["forward-backward"] == pytest.approx(first["time/forward-backward"])


def test_timers_that_would_not_be_there_are_refused() -> None:
    with pytest.raises(ValueError, match="timers_every=2 needs timers"):
        loop = trainer(Rows())
        Trainer(TrainerConfig(steps=1, timers_every=2), loop.model, loop.sync, loop.optimizer, loop.objective, loop.data, loop.schedule)


def check_slowest_rank() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    rows = Rows()
    trainer(rows, groups=groups, timers=Timers(group=groups.world)).run()
    if groups.world.is_first:
        seen = [row for row in rows.rows if "time/optimizer" in row]
        assert len(seen) == 3 and all(row["time/optimizer/min"] <= row["time/optimizer"] for row in seen)


@pytest.mark.world(2)
def test_times_are_compared_over_the_ranks(world) -> None:
    world(check_slowest_rank)


@pytest.mark.journey
def test_a_window_traces_the_parts_of_its_steps_and_changes_no_bit(tmp_path: Path) -> None:
    straight, traced = trainer(Rows()), trainer(rows := Rows(), profile=ProfileConfig(
        tool="torch", step_start=2, step_end=4, output=str(tmp_path), record_shapes=False).build())  # fmt: skip
    straight.run()
    traced.run()
    for one, other in zip(straight.model.parameters(), traced.model.parameters(), strict=True):
        assert torch.equal(one, other)
    events = json.loads(gzip.decompress((tmp_path / "rank0.trace.json.gz").read_bytes()))["traceEvents"]
    named = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for name in ("step 2", "step 3", "evaluate"):
        assert named.count(name) == 1, name
    for name in ("batch", "forward-backward", "grad-sync", "optimizer"):
        assert named.count(name) == 2, name
    assert not any("communication" in name for row in rows.rows for name in row), "no kernel of a device ran"


@pytest.mark.journey
def test_the_line_of_the_last_traced_step_tells_the_exposed_share(tmp_path: Path) -> None:
    found = CommunicationReport(
        num_steps=2, span_s=2.0, compute_s=1.0, communication_s=0.5, exposed_s=0.25, other_s=0.75, exposed_by_collective={}
    )
    window = ProfileConfig(tool="torch", step_start=2, step_end=4, output=str(tmp_path)).build()
    original = window._write

    def write() -> None:
        original()
        window.communication = found

    window._write = write
    trainer(rows := Rows(), profile=window).run()
    assert [row.get("communication/exposed_share") for row in rows.rows] == [None, None, 0.125, None, None]


def test_dumps_of_two_runs_agree_and_hold_activations_gradients_and_weights(tmp_path: Path) -> None:
    for name in ("one", "other"):
        options: dict[str, Any] = {"rerun": Rerun(RerunConfig(mode="validate"))} if name == "other" else {}
        dumps = DumpConfig(every=3, statistics_only=False, output=str(tmp_path / name))
        trainer(Rows(), dumps=dumps, **options).run()
        assert [path.name for path in sorted((tmp_path / name).iterdir())] == ["step_00000001", "step_00000004"]
    assert compare_dumps(tmp_path / "other" / "step_00000004", tmp_path / "one" / "step_00000004", exact=True).ok
    assert not compare_dumps(tmp_path / "one" / "step_00000001", tmp_path / "one" / "step_00000004", exact=True).ok
    entries = read_entries(tmp_path / "one" / "step_00000001")
    assert {entry.phase for entry in entries.values()} == {"forward", "backward", "gradient", "parameter"}
    assert not any(entry.is_statistics for entry in entries.values())


def test_statistics_are_the_default_and_sliced_gradients_are_refused(tmp_path: Path) -> None:
    trainer(Rows(), steps=1, dumps=DumpConfig(every=1, output=str(tmp_path), gradients=False)).run()
    entries = read_entries(tmp_path / "step_00000001")
    assert all(entry.is_statistics for entry in entries.values())
    assert {entry.phase for entry in entries.values()} == {"forward", "backward"}
    model = GPTModel(CONFIG, ProcessGroups.single())
    with pytest.raises(ValueError, match="gradients=True needs gradients that are whole"):
        DumpConfig(every=1).build(model, ProcessGroups.single())
    with pytest.raises(ValueError, match="every=-1"):
        DumpConfig(every=-1)
