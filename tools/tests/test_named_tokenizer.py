# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A tokenizer without files, from text to an exported model."""

from pathlib import Path

import pytest

from mcore_tools.cli import main

TEXT = "one two three four five six seven eight nine ten. "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose corpus ``mcore preprocess --tokenizer byte`` wrote."""
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "text.jsonl").write_text("".join(f'{{"text": "{TEXT * 4}"}}\n' for _ in range(8)))
    words = f"preprocess --input {folder}/text.jsonl --output-prefix {folder}/corpus --tokenizer byte --append-eod"
    assert main(words.split()) == 0
    assert main(["train", *fields(folder, steps=2)]) == 0
    return folder / "run"


def fields(folder: Path, *, steps: int) -> list[str]:
    changes = ["model.num_layers=2", "model.hidden_size=48", "model.ffn_hidden_size=96", "model.vocab_size=264"]
    changes += [f"train.steps={steps}", "train.seq_len=32", "train.warmup_steps=1", "train.eval_batches=1", "log.tensorboard=false"]
    changes += [f"data.prefix={folder}/corpus", "data.tokenizer=byte", "data.split=80,20,0", f"output={folder}/run"]
    return ["--recipe", "gpt_tiny", *(word for change in changes for word in ("--set", change))]


@pytest.mark.journey
def test_bytes_are_trained_on_and_resumed(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (run / "tokenizer" / "tokenizer_metadata.json").is_file()
    assert main(["train", *fields(run.parent, steps=3)]) == 0
    assert sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())[-1].endswith("3")


def test_a_run_and_its_export_generate_bytes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = tmp_path / "export"
    assert main(["convert", "export-hf", str(run / "checkpoints"), str(export)]) == 0
    capsys.readouterr()
    lines = []
    for model in (run, export):
        code = main(["generate", str(model), "--prompt", "one two", "--max-tokens", "8"])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        lines.append(captured.out)
    assert lines[0] == lines[1]
    assert lines[0].startswith("one two")


def test_conversations_need_a_tokenizer_with_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 2)
    words = ["--data", str(chats), "--output", str(tmp_path / "tuned")]
    assert main(["sft", str(run), *words]) == 2
    assert "holds no tokenizer.json" in capsys.readouterr().err
    assert main(["convert", "export-hf", str(run / "checkpoints"), str(tmp_path / "export")]) == 0
    for name, reason in (("byte", "has no tokenizer.json, which conversations are written with"), ("nothing", "holds no tokenizer.json")):
        assert main(["sft", str(tmp_path / "export"), *words, "--set", f"data.tokenizer={name}"]) == 2
        assert f"data.tokenizer='{name}' {reason}" in capsys.readouterr().err
