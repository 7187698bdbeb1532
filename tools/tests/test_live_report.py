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
