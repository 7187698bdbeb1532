# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Processes that share the experts of a mixture serve what one does, and come back together when one is killed."""

import asyncio
import contextlib
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
import torch

from mcore_ckpt import CheckpointManager
from mcore_inference import SamplingParams
from mcore_inference.coordinator import DataParallelInferenceCoordinator, InferenceClient
from mcore_moe import MoEConfig
from mcore_parallel import ProcessGroups
from mcore_parallel.data import train_bpe
from mcore_parallel.training import model_state
from mcore_tools.assembly import build_model
from mcore_tools.generate import main as generate
from mcore_tools.recipes import DataConfig, override, recipe
from mcore_tools.serve import main
from mcore_tools.serving import EngineLayout, open_engine, read_lora
from mcore_tools.training import run_assets
from tests.support.adapters import random_adapter
from tests.support.commands import Command, torchrun_environment

PROMPTS = ["what a", "needs", "checkpoint", "all", "server"]
PARAMS = SamplingParams(temperature=0, num_tokens_to_generate=8)


def save(folder: Path, name: str) -> Path:
    """A run with one saved step."""
    train_bpe(["what a checkpoint keeps is all that a server needs to know. " * 20], 290, folder / "words")
    sizes = ["model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.seq_len=48"]
    config = override(recipe(name), [*sizes, "train.dtype=float32"])
    config = dataclasses.replace(config, data=DataConfig(tokenizer=str(folder / "words")))
    model = build_model(config, ProcessGroups.single(), "cpu").eval()
    CheckpointManager(folder / name, assets=run_assets(config)).save(1, model_state(model, ProcessGroups.single()))
    return folder / name


def ask(url: str, prompt: str, model: str = "") -> str:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as response:
        return json.load(response)["choices"][0]["text"]


def whole_texts(folder: Path) -> list[str]:
    """Those of one process."""
    return [record.generated_text for record in open_engine(folder, "cpu", cache_gb=0.01).generate(PROMPTS, PARAMS)]


def test_weights_of_experts_are_rounded(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = save(tmp_path, "moe_tiny")
    engine = open_engine(folder, "cpu", cache_gb=0.01, weight_dtype="fp8_weight_only")
    experts = {name: weight for name, weight in engine.model.named_parameters() if name.endswith(("experts.up", "experts.down"))}
    assert experts and all(weight.dtype == torch.float8_e4m3fn for weight in experts.values())
    for choice in ("fp8", "fp8_weight_only"):
        assert generate([str(folder), "--prompt", "what a", "--max-tokens", "8", "--weight-dtype", choice]) == 0
        assert capsys.readouterr().out.startswith("what a")


@pytest.mark.journey
@pytest.mark.timeout(180)
def test_engines_that_share_experts_answer_by_adapters(tmp_path: Path) -> None:
    folder = save(tmp_path, "moe_tiny")
    whole = open_engine(folder, "cpu", cache_gb=0.01)
    adapter = random_adapter(whole.model, 2, 1, ("qkv", "out"))
    extra = {"lora": {"rank": adapter.rank, "alpha": adapter.alpha}, "lora_base": str(folder)}
    CheckpointManager(tmp_path / "ours").save(1, adapter.tensors(), extra)
    whole = open_engine(folder, "cpu", cache_gb=0.01, loras={"ours": read_lora(folder, tmp_path / "ours")})
    expected = {name: [record.generated_text for record in whole.generate(PROMPTS, PARAMS, lora=name)] for name in ("ours", None)}
    assert expected["ours"] != expected[None]
    words = [str(folder), "--port", "0", "--cache-gb", "0.01", "--data-parallel", "2", "--expert-parallel"]
    with Command(main, [*words, "--lora", f"ours={tmp_path / 'ours'}"]) as command:
        url = command.until("serving ", 120.0).split(" on ")[1].split(";")[0]
        with ThreadPoolExecutor(8) as pool:
            for name, texts in expected.items():
                assert list(pool.map(lambda prompt, model=name or "": ask(url, prompt, model), PROMPTS)) == texts
        command.terminate()
        assert command.wait() == 0, command.errors


SPLIT = {"tp2": ["--tp", "2"], "pp2": ["--pp", "2"]}


async def ask_engines(coordinator: DataParallelInferenceCoordinator) -> tuple[list[str], set[str]]:
    """The answers of two engines, and their names."""
    await asyncio.to_thread(coordinator.wait_for_engines, 2)
    async with InferenceClient(coordinator.address) as client:
        records = await asyncio.gather(*[client.add_request(prompt, PARAMS) for prompt in PROMPTS])
        engines = {engine.name for engine in (await client.status()).engines}
        await client.stop_engines()
    return [record.generated_text for record in records], engines


@pytest.mark.journey
@pytest.mark.parametrize("name", ["tp2", pytest.param("pp2", marks=pytest.mark.slow)])
def test_engines_of_two_ranks_that_share_experts_answer_as_one_process(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, "moe_tiny")
    _store, world = torchrun_environment(4)
    with DataParallelInferenceCoordinator() as coordinator, contextlib.ExitStack() as stack:
        words = [
            str(folder),
            "--cache-gb",
            "0.01",
            "--data-parallel",
            "2",
            "--expert-parallel",
            "--join",
            coordinator.address,
            *SPLIT[name],
            *([] if name == "pp2" else ["--redundant-experts", "4", "--rebalance-steps", "3"]),
        ]
        ranks = [
            stack.enter_context(Command(main, [*words, "--name", f"rank-{rank}"], {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
            for rank in range(4)
        ]
        texts, engines = asyncio.run(ask_engines(coordinator))
        codes = [rank.wait() for rank in ranks]
    assert texts == whole_texts(folder) and codes == [0] * 4
    # The first rank of each works for the coordinator.
    assert engines == {"tp2": {"rank-0", "rank-2"}, "pp2": {"rank-0", "rank-1"}}[name]


@pytest.mark.journey
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("split", "doomed", "name"),
    [
        pytest.param([], 1, "dp-1", id="whole"),
        pytest.param(SPLIT["tp2"], 3, "dp-1 (tp rank 1)", id="tp2", marks=pytest.mark.slow),
        pytest.param(SPLIT["pp2"], 2, "dp-0 (tp rank 0 of stage 1)", id="pp2", marks=pytest.mark.slow),
    ],
)
def test_engines_that_share_experts_answer_as_one_and_come_back_together(tmp_path: Path, split: list[str], doomed: int, name: str) -> None:
    folder = save(tmp_path, "moe_tiny")
    expected = whole_texts(folder)
    command = [sys.executable, "-m", "mcore_tools", "serve", str(folder), "--port", "0", "--cache-gb", "0.01"]
    command += ["--data-parallel", "2", "--expert-parallel", *split]
    log = tmp_path / "log"
    with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        try:
            url = process.stdout.readline().split(" on ")[1].split(";")[0]  # type: ignore[union-attr]
            with ThreadPoolExecutor(5) as pool:
                assert list(pool.map(ask, [url] * 5, PROMPTS)) == expected
            children = children_of(process)
            os.kill(children[doomed], signal.SIGKILL)
            while "and is started again" not in log.read_text():
                time.sleep(0.05)
            # It waits for the engines, which are other processes now.
            assert ask(url, PROMPTS[0]) == expected[0]
            again = children_of(process)
            assert len(again) == len(children) and not set(again) & set(children)
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        finally:
            process.kill()
    lines = log.read_text()
    assert process.returncode == 0, lines
    other = "dp-0" if name.startswith("dp-1") else "dp-1"
    assert f"{name} ended with exit code -9 and is started again, and with it {other}" in lines, lines
    assert not any(Path(f"/proc/{pid}").exists() for pid in [*children, *again])


def children_of(process: "subprocess.Popen[str]") -> list[int]:
    """Those of all its threads, the oldest first: one of them starts engines again."""
    return sorted(int(pid) for thread in Path(f"/proc/{process.pid}/task").iterdir() for pid in (thread / "children").read_text().split())


def test_what_cannot_share_experts_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture, dense = save(tmp_path / "a", "moe_tiny"), save(tmp_path / "b", "gpt_tiny")
    monkeypatch.delenv("RANK", raising=False)
    for folder, words, reason in (
        (dense, ["--data-parallel", "2"], "the model has none"),
        (mixture, [], "give --data-parallel of 2 and more"),
        (mixture, ["--data-parallel", "7"], "--data-parallel 7 with --expert-parallel must divide num_moe_experts="),
        (mixture, ["--data-parallel", "2", "--tp", "3"], "tp=3 must divide"),
        (mixture, ["--data-parallel", "2", "--redundant-experts", "3"], "ep=2 must divide num_moe_experts=4 and num_redundant_experts=3"),
        (mixture, ["--data-parallel", "2", "--redundant-experts", "10"], "at most 4 copies of num_moe_experts=4"),
        (mixture, ["--data-parallel", "2", "--pp", "3"], "num_layers=2 are fewer than pp*vpp=3*1"),
        (mixture, ["--data-parallel", "2", "--tp", "2", "--join", "tcp://127.0.0.1:1"], "is one of 4 processes; leave out --join"),
    ):
        assert main([str(folder), *([] if "--join" in words else ["--port", "0"]), "--expert-parallel", *words]) == 2
        assert reason in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert main([str(mixture), "--port", "0", "--expert-parallel", "--data-parallel", "2", "--tp", "2"]) == 2
    assert "--data-parallel 2 of 2 GPUs each (--tp, --pp) needs 4 and 3 are visible" in capsys.readouterr().err


def test_experts_move_only_where_ranks_share_them(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    mixture, dense = save(tmp_path / "a", "moe_tiny"), save(tmp_path / "b", "gpt_tiny")
    monkeypatch.delenv("RANK", raising=False)
    for folder, words, reason in (
        (
            dense,
            ["serve", "--port", "0", "--data-parallel", "2", "--redundant-experts", "2"],
            "between ranks, and the model has no experts",
        ),
        (mixture, ["serve", "--port", "0", "--data-parallel", "2", "--rebalance-steps", "9"], "--tp 1 leaves all experts on each rank"),
        (mixture, ["generate", "--prompt", "x", "--redundant-experts", "2"], "with ep=1 each rank holds all"),
        (mixture, ["generate", "--prompt", "x", "--rebalance-steps", "0"], "--rebalance-steps"),
    ):
        verb, *more = words
        try:
            code = {"serve": main, "generate": generate}[verb]([str(folder), *more])
        except SystemExit as ended:
            code = ended.code
        assert code == 2 and reason in capsys.readouterr().err, words


def test_experts_are_spread_over_the_tp_ranks_of_engines_where_they_are_even() -> None:
    layout = EngineLayout(tp=2, pp=2, num_sharing=2)
    assert [(plan.ep, plan.expert_tp, plan.dp) for plan in (layout.plan(MoEConfig(num_moe_experts=count)) for count in (8, 6))] == [
        (4, 1, 2),
        (2, 2, 2),
    ]
    assert [layout.engine_of(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert layout.describe(6) == "tp rank 0 of stage 1"
