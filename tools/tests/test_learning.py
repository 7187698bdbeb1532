# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The comparison of our trainer with a plain loop compares the same learning."""

import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mcore_tools.corpus import Corpus, default_text, prepare
from tools.bench import learning


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    text = [path for path in default_text() if path.name == learning.TINY_TEXT]
    return prepare(text, tmp_path_factory.mktemp("corpus"), 300, Console(file=io.StringIO()))


@pytest.mark.journey
def test_both_ways_learn_the_same_from_the_same_tokens(corpus: Corpus) -> None:
    pytest.importorskip("transformers")
    report = learning.compare(corpus, Path(corpus.prefix).parent, 5 * 512, ["eager"])
    ours, theirs = report["rows"]
    assert ours["tokens"] == theirs["tokens"] == 5 * 512
    for name in ("first_loss", "last_loss", "validation_loss"):
        assert theirs[name] == pytest.approx(ours[name], rel=1e-5), name
    assert ours["validation_by_tokens"] == pytest.approx(theirs["validation_by_tokens"], rel=1e-5)
    assert ours["last_loss"] < ours["first_loss"]
    assert abs(theirs["loss_less_mcore"]) < 1e-5 and theirs["seconds_by_mcore"] > 0


def test_a_slope_is_told_from_noise() -> None:
    noise = [(17 * step % 5) - 2 for step in range(500)]
    flat, rising = learning.slope(noise), learning.slope([3 * step + value for step, value in enumerate(noise)])
    assert abs(flat["bytes_a_step"]) < 0.01 and flat["standard_error"] < 0.01
    assert rising["bytes_a_step"] == pytest.approx(3.0, abs=0.01) and rising["growth_bytes"] == pytest.approx(1197, abs=4)


@pytest.mark.journey
def test_the_memory_of_a_run_is_recorded(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "prepare", lambda *_: corpus)
    monkeypatch.setattr(sys, "argv", ["learning", "--memory-slope", "--steps", "12", "--output", str(tmp_path / "slope.json")])
    learning.main()
    report = json.loads((tmp_path / "slope.json").read_text())
    assert report["steps"] == 12 and set(report["resident"]) == {"bytes_a_step", "standard_error", "growth_bytes"}
    assert report["device"]["bytes_a_step"] == 0.0 and report["versions"]["torch"]
