# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What ranks of torchrun say: a mistake once, by the first of them, and a rank that is gone by those that are left."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.corpora import write_corpus

SMALL = (
    *("model.num_layers=1", "model.hidden_size=16", "model.ffn_hidden_size=16", "model.vocab_size=320", "train.seq_len=16", "plan.dp=2"),
    *("train.micro_batch_size=1", "train.global_batch_size=2", "train.steps=100000", "train.warmup_steps=0", "train.eval_interval=0"),
    *("data.split=80,20,0", "log.tensorboard=false", "log.html=false", "output=out", "data.prefix=corpus", "data.tokenizer=tokenizer"),
)


def started(folder: Path, *changes: str) -> subprocess.Popen[str]:
    """Two ranks of a run under torchrun, in ``folder``."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port, "-m", "mcore_tools.train"]
    words += ["--recipe", "gpt_tiny", *(word for change in (*SMALL, *changes) for word in ("--set", change))]
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
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.stesp=3", "--set train.stesp: no field 'stesp'; did you mean 'steps'?"),
        ("data.prefix=nothing", "data.prefix='nothing': there is no nothing.idx; give the --output-prefix of mcore-preprocess"),
        ("load.path=nothing", "load.path='nothing' has nothing to begin with: nothing is not a checkpoint: there is no such folder"),
    ],
)
def test_a_mistake_is_said_once(change: str, words: str, tmp_path: Path) -> None:
    write_corpus(tmp_path, "to be or not to be, that is the question. ")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    lines = ended(started(tmp_path, change)).splitlines()
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1 and said[0].startswith(f"error: {words}"), lines
    # The launcher's own report ends with it.
    assert any(words in line for line in lines[-3:]), lines
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


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
