# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What ranks of torchrun say: a mistake once, by the first of them, and a rank that is gone by those that are left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mcore_tools import train
from tests.support.commands import Command, torchrun_environment
from tests.support.corpora import write_corpus

SMALL = (
    *("model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=16", "model.vocab_size=320", "train.seq_len=16", "plan.dp=2"),
    *("train.micro_batch_size=1", "train.global_batch_size=2", "train.steps=100000", "train.warmup_steps=0", "train.eval_interval=0"),
    *("data.split=80,20,0", "log.tensorboard=false", "log.html=false", "output=out", "data.prefix=corpus", "data.tokenizer=tokenizer"),
)


def arguments(*changes: str) -> list[str]:
    return ["--recipe", "gpt_tiny", *(word for change in (*SMALL, *changes) for word in ("--set", change))]


def files(folder: Path) -> dict[Path, int]:
    """With the times of their last changes."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def started(folder: Path, *changes: str) -> subprocess.Popen[str]:
    """Two ranks of a run under torchrun, in ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, "-m", "mcore_tools.train"]
    words += arguments(*changes)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What it wrote, once it came to an end that is no success."""
    try:
        errors = process.communicate(timeout=150)[1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode
    return errors


@pytest.mark.journey
@pytest.mark.timeout(240)
def test_a_mistake_is_said_once_and_shown_by_torchrun(tmp_path: Path) -> None:
    write_corpus(tmp_path, "to be or not to be, that is the question. ")
    before = files(tmp_path)
    lines = ended(started(tmp_path, "load.path=nothing")).splitlines()
    words = "load.path='nothing' has nothing to begin with: nothing is not a checkpoint: there is no such folder"
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0].startswith(f"error: {words}"), lines
    # The launcher's own report ends with it.
    assert any(words in line for line in lines[-3:]), lines
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.stesp=3", "--set train.stesp: no field 'stesp'; did you mean 'steps'?"),
        ("data.prefix=nothing", "data.prefix='nothing': there is no nothing.idx; give the --output-prefix of mcore-preprocess"),
    ],
)
def test_other_mistakes_are_said_once(
    change: str, words: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By ranks that end as torchrun ends them: the others when one has come to its end."""
    write_corpus(tmp_path, "to be or not to be, that is the question. ")
    before, reasons = files(tmp_path), tmp_path_factory.mktemp("reasons")
    monkeypatch.chdir(tmp_path)
    store, world = torchrun_environment(2)
    places = [{**world, "RANK": rank, "LOCAL_RANK": rank, "TORCHELASTIC_ERROR_FILE": str(reasons / rank)} for rank in "01"]
    with Command(train.main, arguments(change), places[0]) as first, Command(train.main, arguments(change), places[1]) as other:
        assert first.wait() == 2
        other.terminate()
        other.wait()
        (error,) = [line for line in (first.errors + other.errors).splitlines() if line.startswith("error: ")]
    assert error.startswith(f"error: {words}")
    assert json.loads((reasons / "0").read_text())["message"]["message"].startswith(words)
    assert files(tmp_path) == before
    del store


@pytest.mark.journey
@pytest.mark.timeout(240)
@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed_is_named_without_a_traceback(dead: int, tmp_path: Path) -> None:
    write_corpus(tmp_path, "to be or not to be, that is the question. ")
    process, log = started(tmp_path), tmp_path / "out" / "train.jsonl"
    deadline = time.monotonic() + 120
    while not (log.is_file() and log.read_text().count("\n") > 2):
        assert process.poll() is None and time.monotonic() < deadline, ended(process)
        time.sleep(0.2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (victim,) = [pid for pid in children if f"RANK={dead}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")]
    os.kill(int(victim), signal.SIGKILL)
    errors = ended(process)
    assert f"rank {dead}: dead, its process is gone; start the run again to go on from its newest checkpoint" in errors, errors
    # But for the launcher's own.
    assert errors.count("Traceback (most recent call last)") == 1, errors
