# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run that is told to stop saves, says how to go on, and goes on."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from mcore_ckpt.assets import extract_assets
from mcore_parallel.data import HuggingFaceTokenizer
from mcore_parallel.training import STOPPED_EXIT_CODE, InvalidResultError, RerunReport, SuspectResultError
from mcore_tools import train
from mcore_tools.recipes import read_config
from tests.support.corpora import write_corpus


@pytest.mark.journey
def test_a_signal_ends_a_run_that_the_next_start_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = write_corpus(tmp_path, "to be or not to be, that is the question. ")
    changes = [
        *(f"data.prefix={tmp_path}/corpus", f"data.tokenizer={tmp_path}/tokenizer", "data.split=80,20,0", f"output={tmp_path}/run"),
        *("model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=16", "train.seq_len=16", "train.micro_batch_size=2"),
        *("train.global_batch_size=4", "train.steps=6", "train.batch_ramp_up=[2,2,6]", "train.eval_batches=1", "train.eval_interval=0"),
        *("train.warmup_steps=0", "log.tensorboard=false", "log.straggler_interval=2", "rerun.mode=validate"),
        *("log.timers_interval=2", "dumps.every=4", "profile.tool=torch", "profile.step_start=2", "profile.step_end=3"),
        "cuda_graphs=[]",
    ]
    arguments = ["pretrain", "--recipe", "gpt_tiny", *(word for change in changes for word in ("--set", change))]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    original, output = train.train_rank, tmp_path / "run"

    def interrupted(config, kind, watchdog, stop, stamps):
        def stop_requested() -> bool:
            # As a scheduler does, after the second line.
            if len((output / "train.jsonl").read_text().splitlines()) == 2:
                signal.raise_signal(signal.SIGTERM)
            return stop()

        return original(config, kind, watchdog, stop_requested, stamps)

    monkeypatch.setattr(train, "train_rank", interrupted)
    # As torchrun sets it, which reads the file when a rank ends with another code than 0.
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert train.main() == STOPPED_EXIT_CODE == 143
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=143, error_file=str(tmp_path / "error.json"))
    assert failure.message["message"] == "no failure: stopped and saved after step 3; start it again to go on"
    assert "stopped and saved after step 3; start it again to go on" in capsys.readouterr().out
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["step_00000003"]
    monkeypatch.setattr(train, "train_rank", original)
    assert train.main() == 0
    assert "validation loss" in capsys.readouterr().out
    rows = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["num_samples"] for row in rows] == [2, 2, 2, 4, 4, 4]
    assert {"tflops_per_rank", "tokens_per_s", "loss", "lr", "grad_norm"} <= set(rows[0])
    assert "straggler/rank" in rows[1]
    assert rows[0]["time/program-setup"] >= 0 and "time/program-setup" not in rows[1]
    assert rows[1]["time/forward-backward"] > 0 and "time/forward-backward" not in rows[4]
    assert rows[2]["time/load"] > 0 if "time/load" in rows[2] else rows[3]["time/load"] > 0
    assert {path.name for path in (output / "profile").iterdir()} == {"rank0.trace.json.gz", "rank0.txt"}
    assert [path.name for path in sorted((output / "dumps").iterdir())] == ["step_00000001", "step_00000005"]
    page = (output / "report.html").read_text(encoding="utf-8")
    assert "ended, step 6 of 6" in page and "Loss" in page
    assert read_config(output / "config.yaml").train.batch_ramp_up == (2, 2, 6)
    assert (output / "tokenizer" / "tokenizer.json").exists()
    for step in (3, 6):
        # A step alone says what it was trained on and by which run.
        assets = tmp_path / f"kept{step}"
        extract_assets(output / "checkpoints" / f"step_{step:08d}", assets)
        assert HuggingFaceTokenizer(assets / "tokenizer").unique_identifiers == tokenizer.unique_identifiers
        assert read_config(assets / "run.yaml") == read_config(output / "config.yaml")


def test_a_refusal_is_told_to_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert train.main(["--recipe", "gpt_tinny"]) == 2
    message = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(tmp_path / "error.json")).message["message"]
    assert "gpt_tinny" in message and capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.slow
def test_torchrun_shows_why_a_run_was_refused(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "mcore_tools.train"]
    done = subprocess.run([*launcher, "--recipe", "gpt_tinny"], cwd=tmp_path, capture_output=True, text=True, timeout=50)
    # That of torchrun.
    assert done.returncode == 1
    (refusal,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "gpt_tinny" in refusal and f"traceback : {refusal.removeprefix('error: ')}" in done.stderr


@pytest.mark.parametrize(("kind", "status"), [(SuspectResultError, 16), (InvalidResultError, 17)])
def test_a_result_that_cannot_be_right_has_a_status_of_its_own(
    kind: type[SuspectResultError | InvalidResultError],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> None:
        raise kind(RerunReport(step=4, verdict="suspect", first=9.0, second=9.0, host="node", evidence=("rank 1: gradient",)))

    monkeypatch.setattr(train, "train_rank", fails)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (tmp_path / "x.idx").touch()
    places = ["--set", f"data.prefix={tmp_path}/x", "--set", "data.tokenizer=byte"]
    monkeypatch.setattr(sys, "argv", ["pretrain", "--recipe", "gpt_tiny", *places])
    assert train.main() == status
    message = capsys.readouterr().err
    assert message.startswith("error: step 4: loss=9.0 on node") and "rank 1: gradient" in message
