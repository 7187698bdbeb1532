# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The numbers of a long run: bounded, and with every peak."""

import itertools
import json
import math
import tracemalloc
from pathlib import Path

import pytest

from mcore_tools.reports import History


def filled(steps: int) -> History:
    history = History()
    for step in range(1, steps + 1):
        values = {"loss": 1.0 / step, "grad_norm": 1.0 + step % 3}
        if step % 1000 == 0:
            values["eval/loss"] = float(step)
        if step == 54_321:
            values["grad_norm"] = 100.0
        history.write(step, values)
    return history


def test_a_short_run_is_kept_whole() -> None:
    history = filled(900)
    assert history.curve("loss") == ([float(step) for step in range(1, 901)], [1.0 / step for step in range(1, 901)])
    assert history.curve("never") == ([], []) and history.names == ["loss", "grad_norm"]


@pytest.mark.journey
def test_memory_ends_growing() -> None:
    history = filled(2_000)
    tracemalloc.start()
    try:
        for step in range(2_001, 52_001):
            history.write(step, {name: float(step) for name in ("loss", "grad_norm", "lr", "step_s")})
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 1_000_000, grown


@pytest.mark.journey
def test_a_long_run_keeps_its_shape_its_peaks_and_its_ends() -> None:
    history = filled(100_000)
    steps, losses = history.curve("loss")
    assert len(steps) <= 1000 and steps == sorted(set(steps))
    assert (steps[0], losses[0]) == (1.0, 1.0) and (steps[-1], losses[-1]) == (100_000.0, 1e-5)
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 1000
    assert dict(zip(*history.curve("grad_norm"), strict=True))[54_321.0] == 100.0
    # Numbers that come seldom are not thinned with those of every step.
    assert len(history.curve("eval/loss")[0]) == 100
    assert [step for step, _ in history.recent] == list(range(99_981, 100_001))


@pytest.mark.parametrize("first", [1, 37, 5_000])
def test_a_run_that_goes_back_forgets_what_it_does_again(first: int) -> None:
    history = filled(5_000)
    for step in range(first, first + 40):
        history.write(step, {"loss": -1.0})
    steps, losses = history.curve("loss")
    assert steps == sorted(set(steps)) and steps[-1] == first + 39
    assert all((loss == -1.0) == (step >= first) for step, loss in zip(steps, losses, strict=True))


def test_values_that_are_no_numbers_give_way_to_those_that_are() -> None:
    history = History()
    for step in range(1, 4001):
        history.write(step, {"loss": math.nan if step % 2 else float(step)})
    _, losses = history.curve("loss")
    assert sum(map(math.isfinite, losses)) >= 0.9 * len(losses)


def test_a_resumed_run_shows_the_steps_before(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    assert not History.read(path, 9).recent
    path.write_text(
        '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 9.0}\n{"step": 2, "loss": null}\n{"step": 3, "loss": 1.0}\n{"step": 4, "lo'
    )
    history = History.read(path, 2)
    assert [step for step, _ in history.recent] == [1, 2] and history.curve("loss")[0] == [1.0, 2.0]
    assert math.isnan(history.curve("loss")[1][1])


@pytest.mark.journey
def test_a_long_file_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    with path.open("w", encoding="ascii") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step, "loss": float(step), "filler": step}) + " " * 200 + "\n")
    tracemalloc.start()
    try:
        history = History.read(path, 20_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert history.curve("loss")[1][-1] == 20_000.0
    assert peak < 1_000_000 < path.stat().st_size
