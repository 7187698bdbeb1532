# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a user can get wrong at the command line: one line that says so, exit status 1, nothing written, nothing lost."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mcore_parallel.data import ByteTokenizer, preprocess, train_bpe
from mcore_tools import quickstart, train


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A tokenizer and a small corpus; ``broken`` is the corpus with a cut index."""
    folder = tmp_path / "data"
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    tokenizer = train_bpe(["to be or not to be"], 300, folder / "tokenizer")
    preprocess([tmp_path / "text.txt"], folder / "good", tokenizer)
    preprocess([tmp_path / "text.txt"], folder / "broken", ByteTokenizer())
    (folder / "broken.idx").write_bytes((folder / "broken.idx").read_bytes()[:-5])
    return folder


def fails(main: Callable[[], int], arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that ``main`` prints about its ``arguments``."""
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    assert main() == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1, message
    return message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["plan.tp=2"], ["tp=2", "dp=1", "= 2 ranks", "world has 1"]),
        (["plan.tp=3"], ["tp=3 must divide", "lower tp"]),
        (["data.prefix="], ["data.prefix is empty", "mcore-preprocess"]),
        (["data.prefix={data}/nothing"], ["nothing.idx", "No such file"]),
        (["data.prefix={data}/broken"], ["broken.idx", "truncated"]),
        (["data.tokenizer={data}/nothing"], ["nothing", "tokenizer.json"]),
        (["data.split=100,0,0"], ["data.split='100,0,0'"]),
        (["model.vocab_size=64"], ["model.vocab_size=64", "is smaller than"]),
        (["train.stepz=3"], ["did you mean 'steps'"]),
    ],
    ids=lambda value: value[0].split("/")[-1] if isinstance(value, list) else None,
)
def test_pretraining_names_what_cannot_be(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], changes: list[str], words: list[str]
) -> None:
    output = tmp_path / "run"
    assignments = [f"data.prefix={corpus}/good", f"data.tokenizer={corpus}/tokenizer", f"output={output}", *changes]
    arguments = [word for change in assignments for word in ("--set", change.format(data=corpus))]
    message = fails(train.main, ["--recipe", "gpt_tiny", *arguments], monkeypatch, capsys)
    assert all(word in message for word in words), message
    # The index of the samples is a cache that the next run uses.
    assert not output.exists() or {path.name for path in output.iterdir()} <= {"index_cache"}


def test_an_unknown_recipe_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'moe_tiny'" in fails(train.main, ["--recipe", "moe_tny"], monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "{tmp}/nothing"], "nothing: no such file"),
        (["--text", "{tmp}/empty.txt"], "no document with text"),
        (["--text", "{tmp}/lines.jsonl"], "lines.jsonl:2 is no JSON"),
        (["--set", "plan.tp=4"], "--set plan: the journey chooses this itself"),
        (["--set", "moe=none"], "trains a mixture"),
        (["--set", "train.steps=0"], "steps=0 must be at least 1"),
        (["--iterations", "2"], "iterations=2 must be at least 3"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)
def test_the_quickstart_refuses_before_it_removes_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "lines.jsonl").write_text('{"text": "good"}\nnot json\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.html").write_text("the last one")
    filled = [word.format(tmp=tmp_path) for word in arguments]
    message = fails(quickstart.main, ["--text", str(Path(__file__)), "--output", str(tmp_path / "run"), *filled], monkeypatch, capsys)
    assert words in message
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["report.html"]


def test_the_quickstart_removes_nothing_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    message = fails(quickstart.main, ["--text", str(Path(__file__)), "--output", str(tmp_path)], monkeypatch, capsys)
    assert "thesis.txt, which no quickstart wrote" in message
    assert (tmp_path / "thesis.txt").exists()
