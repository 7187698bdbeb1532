# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Processes that share the experts of a mixture serve what one does, and come back together when one is killed."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mcore_ckpt import CheckpointManager
from mcore_inference import SamplingParams
from mcore_parallel import ProcessGroups
from mcore_parallel.data import train_bpe
from mcore_parallel.training import model_state
from mcore_tools.assembly import build_model
from mcore_tools.recipes import DataConfig, override, recipe
from mcore_tools.serve import main
from mcore_tools.serving import open_engine
from mcore_tools.training import run_assets

PROMPTS = ["what a", "needs", "checkpoint", "all", "server"]


def save(folder: Path, name: str) -> Path:
    """A run with one saved step."""
    train_bpe(["what a checkpoint keeps is all that a server needs to know. " * 20], 290, folder / "words")
    sizes = ["model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.seq_len=48"]
    config = override(recipe(name), [*sizes, "train.dtype=float32"])
    config = dataclasses.replace(config, data=DataConfig(tokenizer=str(folder / "words")))
    model = build_model(config, ProcessGroups.single(), "cpu").eval()
    CheckpointManager(folder / name, assets=run_assets(config)).save(1, model_state(model, ProcessGroups.single()))
    return folder / name


def ask(url: str, prompt: str) -> str:
    body = json.dumps({"prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as response:
        return json.load(response)["choices"][0]["text"]


@pytest.mark.journey
@pytest.mark.timeout(240)
def test_engines_that_share_experts_answer_as_one_and_come_back_together(tmp_path: Path) -> None:
    folder = save(tmp_path, "moe_tiny")
    engine = open_engine(folder, "cpu", cache_gb=0.01)
    params = SamplingParams(temperature=0, num_tokens_to_generate=8)
    expected = [record.generated_text for record in engine.generate(PROMPTS, params)]
    command = [sys.executable, "-m", "mcore_tools", "serve", str(folder), "--port", "0", "--cache-gb", "0.01"]
    command += ["--data-parallel", "2", "--expert-parallel"]
    log = tmp_path / "log"
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            url = process.stdout.readline().split(" on ")[1].split(";")[0]  # type: ignore[union-attr]
            with ThreadPoolExecutor(5) as pool:
                assert list(pool.map(ask, [url] * 5, PROMPTS)) == expected
            children = children_of(process)
            os.kill(children[0], signal.SIGKILL)
            while log.read_text().count("and is started again") < 2:
                time.sleep(0.05)
            # It waits for the engines, which are other processes now.
            assert ask(url, PROMPTS[0]) == expected[0]
            again = children_of(process)
            assert len(again) == 2 and not set(again) & set(children)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
    lines = log.read_text()
    assert process.returncode == 0, lines
    assert "dp-0 ended with exit code -9 and is started again" in lines or "dp-1 ended with exit code -9 and is started again" in lines
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*children, *again])


def children_of(process: "subprocess.Popen[str]") -> list[int]:
    """Those of all its threads: one of them starts engines again."""
    return [int(pid) for thread in Path(f"/proc/{process.pid}/task").iterdir() for pid in (thread / "children").read_text().split()]


def test_what_cannot_share_experts_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, dense = save(tmp_path / "a", "moe_tiny"), save(tmp_path / "b", "gpt_tiny")
    monkeypatch.delenv("RANK", raising=False)
    for folder, words, reason in (
        (dense, ["--data-parallel", "2"], "the model has none"),
        (mixture, [], "give --data-parallel of 2 and more"),
        (mixture, ["--data-parallel", "7"], "--data-parallel 7 with --expert-parallel must divide num_moe_experts="),
        (mixture, ["--data-parallel", "2", "--tp", "2"], "--expert-parallel excludes --tp 2"),
        (mixture, ["--data-parallel", "2", "--join", "tcp://127.0.0.1:1"], "and this world has 1; leave out --join"),
    ):
        assert main([str(folder), "--port", "0", "--expert-parallel", *words]) == 1
        assert reason in capsys.readouterr().err
