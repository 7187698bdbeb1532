# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The page of a run under way."""

import json
import math
import re
import xml.etree.ElementTree
from pathlib import Path

import pytest

from mcore_tools.reports import History, LiveReport, Plot
from mcore_tools.reports._live import _PHASES, _phases
from mcore_tools.reports._plot import svg

_SVG = "{http://www.w3.org/2000/svg}"


def test_the_page_is_written_while_the_run_is_under_way_and_at_its_end(tmp_path: Path) -> None:
    clock = [0.0]
    report = LiveReport(tmp_path / "report.html", "a <run>", 30, "train:\n  steps: 30", History(), lambda: clock[0])
    page = tmp_path / "report.html"
    for step in range(1, 16):
        clock[0] += 1.0
        report.write(step, {"loss": 3.0 - step / 10, "lr": 0.1, "tokens_per_s": 5.0, "step_s": 2.0, "aux/load": 1.0})
        assert page.exists() == (step >= 10), step
    text = page.read_text(encoding="utf-8")
    assert "http-equiv='refresh'" in text and "running, about 0:00:40 left, step 10 of 30" in text
    report.close()
    text = page.read_text(encoding="utf-8")
    assert "http-equiv='refresh'" not in text and "ended, step 15 of 30" in text
    assert "a &lt;run&gt;" in text and "steps: 30" in text
    for title in ("Loss", "Learning rate", "Throughput", "Expert load"):
        assert title in text
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
    assert links and all(link.startswith("#") for link in links), "the page needs another file"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_newest_answers_stand_in_the_page(tmp_path: Path) -> None:
    report = LiveReport(tmp_path / "report.html", "run", 30, "", History())
    lines = [
        json.dumps({"step": step, "env_id": "e", "problem_id": "p", "reward": step / 8, "prompt": f"<{step}>", "answer": "x" * 30_000})
        for step in range(20)
    ]
    (tmp_path / "examples.jsonl").write_text("\n".join([*lines, lines[0][:40]]))
    report.write(1, {"reward": 0.5, "token_lag": 0.25, "token_lag/0": 0.75, "token_lag/1": 0.25})
    report.close()
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    # Of the end of the file, what is whole: a line is 30 kB, and the last one is cut short.
    shown = [step for step in range(20) if f"&lt;{step}&gt; | xxx" in text]
    assert shown == [16, 17, 18, 19] and "step 19, e, reward 2.375" in text
    assert "Age of the tokens" in text and "0 refits" in text and "1 refits" in text


def test_a_timeline_has_the_phases_of_the_newest_iterations_and_a_histogram_the_lengths(tmp_path: Path) -> None:
    report = LiveReport(tmp_path / "report.html", "run", 30, "", History())
    parts = {"to_generation_s": 0.5, "generate_s": 2.0, "to_training_s": 0.5, "exchange_s": 1.0, "pack_s": 0.25, "score_s": 0.75}
    seconds = {"rollout_s": 4.0, "train_s": 3.0, "refit_s": 0.5, "step_s": 9.0, **parts}
    for step in range(1, 31):
        lengths = {"length/0-7": 1.0} if step == 1 else {"length/8-15": 0.25, "length/24-31": 0.75}
        report.write(step, {"reward": 0.5, **seconds, **lengths})
    phases = _phases({"reward": 0.5, **seconds})
    assert sum(phases.values()) == 9.0 and (phases["update"], phases["wait"], phases["evaluate, save"]) == (2.0, 0.0, 1.5)
    ahead = _phases({**seconds, "lag": 1.0})
    assert (ahead["generate"], ahead["wait"], sum(ahead.values())) == (0.0, 4.0, 9.0)
    alone = _phases({**seconds, **dict.fromkeys(parts, 0.0), "generate_s": 6.0, "lag": 0.0})
    assert (alone["generate"], alone["wait"], sum(alone.values())) == (4.0, 0.0, 9.0)
    timeline = report._timeline()
    assert list(timeline.bars) == [name for name in _PHASES if name != "wait"]
    assert timeline.bars["generate"] == (list(range(11, 31)), [2.0] * 20)
    [lengths] = report._lengths()
    assert lengths.bars == {"newest 20": ([3.5, 11.5, 27.5], [0.0, 0.25, 0.75])} and lengths.bar_width == 8
    assert lengths.curves == {"iteration 1": ([3.5, 11.5, 27.5], [1.0, 0.0, 0.0])}
    report.close()
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Timeline of the newest iterations" in text and "Lengths of answers" in text and "length/8-15" not in text


def test_bars_stand_on_top_of_one_another() -> None:
    text = svg(Plot(title="", x_label="", y_label="", bars={"one": ([1, 2], [1.0, 2.0]), "two": ([1, 2], [1.0, 1.0])}))
    root = xml.etree.ElementTree.fromstring(text)
    paths = [path.get("d", "") for group in root.iter(f"{_SVG}g") if (group.get("id") or "").startswith("patch_") for path in group]
    # Corners of each bar: left x, bottom, top.
    corners = [[float(word) for word in re.findall(r"-?[\d.]+", path)] for path in paths if path.count("L") == 3]
    bars = [(numbers[0], numbers[1], numbers[5]) for numbers in corners]
    (first, second), (third, fourth) = bars[2:4], bars[4:6]
    assert third[0] == first[0] and third[1] == pytest.approx(first[2]) and fourth[1] == pytest.approx(second[2])
    assert second[1] - second[2] == pytest.approx(2 * (first[1] - first[2]), rel=1e-6)


@pytest.mark.parametrize("values", [[], [1.0], [0.0, 0.0], [-3.0, 1e-9, 17.2], [1e12, 1e12 + 1], [math.nan, 2.0], [0.001, 0.0014]])
def test_a_plot_is_well_formed_whatever_the_numbers(values: list[float]) -> None:
    plot = Plot(title="a & b", x_label="x", y_label="y", curves={"one": (list(range(len(values))), values), "two": ([], [])})
    text = svg(plot)
    curve = next((group for group in xml.etree.ElementTree.fromstring(text).iter(f"{_SVG}g") if group.get("id") == "curve-0"), None)
    finite = sum(map(math.isfinite, values))
    # Few points are marked: each is one use of the marker.
    assert (0 if curve is None else len(list(curve.iter(f"{_SVG}use")))) == finite
    assert svg(plot) == text and "a &amp; b" in text


def test_a_long_curve_is_thinned_and_keeps_its_ends() -> None:
    plot = Plot(title="", x_label="", y_label="", curves={"": ([float(x) for x in range(12345)], [float(x) for x in range(12345)])})
    text = svg(plot)
    assert len(text) < 60_000
