# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Where the numbers of a run go, by the libraries themselves; offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_tools import train
from mcore_tools.recipes import override, recipe
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus


def changes(folder: Path) -> list[str]:
    """Of gpt_tiny: three tiny steps."""
    write_corpus(folder, "to be or not to be, that is the question. ")
    return [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", f"output={folder}/run"),
        *("model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=16", "train.seq_len=16", "train.micro_batch_size=1"),
        *("train.global_batch_size=2", "train.steps=3", "train.eval_batches=1", "train.eval_interval=0", "train.warmup_steps=0"),
        *("log.tensorboard=false", "log.html=false"),
    ]


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "run" / "train.jsonl").read_text(encoding="ascii").splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_missing_library_is_one_line_that_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    words = [word for change in [*changes(tmp_path), f"log.{name}_project=p"] for word in ("--set", change)]
    assert train.main(["--recipe", "gpt_tiny", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: log.{name}_project='p' needs {name}, which is not installed: pip install \"mcore-parallel[{name}]\"")
    assert message.count("\n") == 1 and not (tmp_path / "run").exists()


def test_tensorboard_reads_the_losses_of_a_run(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_rank(override(recipe("gpt_tiny"), [*changes(tmp_path), "log.tensorboard=true"]), "cpu")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in events] == [(step, pytest.approx(loss, rel=1e-6)) for step, loss in losses(tmp_path)]


def test_weights_and_biases_reads_the_losses_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    train_rank(override(recipe("gpt_tiny"), [*changes(tmp_path), "log.wandb_project=p"]), "cpu")
    (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    identity = (tmp_path / "run" / "wandb_run").read_text(encoding="ascii")
    assert file.name == f"run-{identity}.wandb"
    # What is sent later holds each number as text.
    stored = file.read_bytes()
    assert [loss for _, loss in losses(tmp_path) if json.dumps(loss).encode() not in stored] == []


@pytest.mark.timeout(600)
def test_trackio_reads_the_losses_of_a_run_that_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    config = [*changes(tmp_path), "log.trackio_project=p", "train.checkpoint_interval=2"]
    # It reads its folder when it is imported, and must reach no address.
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1", "https_proxy": "http://127.0.0.1:9"}
    for steps in (2, 3):
        words = [word for change in [*config, f"train.steps={steps}"] for word in ("--set", change)]
        train_it = [sys.executable, "-m", "mcore_tools", "train", "--recipe", "gpt_tiny", *words]
        subprocess.run(train_it, env=environment, check=True, capture_output=True, timeout=300)
    name = "run-" + (tmp_path / "run" / "trackio_run").read_text(encoding="ascii")
    ask = [Path(sys.executable).with_name("trackio"), "get", "metric", "--project", "p", "--run", name, "--metric", "loss", "--json"]
    answer = json.loads(subprocess.run(ask, env=environment, check=True, capture_output=True, timeout=120).stdout)
    assert [(row["step"], row["value"]) for row in answer["values"]] == losses(tmp_path) != []
