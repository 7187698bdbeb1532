# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What an operator turns of `mcore serve` reaches the engine and the server, also those of other processes, or is refused by its flag."""

import dataclasses
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mcore_ckpt import CheckpointManager
from mcore_inference import DynamicInferenceEngine
from mcore_parallel import ProcessGroups
from mcore_parallel.data import train_bpe
from mcore_parallel.training import model_state
from mcore_tools import cli
from mcore_tools.assembly import build_model
from mcore_tools.recipes import DataConfig, override, recipe
from mcore_tools.serve import main
from mcore_tools.serving import open_engine
from mcore_tools.training import run_assets
from tests.support.commands import Command

SIZES = ["--max-requests=4", "--max-step-tokens=16", "--block-size=8", "--no-prefix-caching", "--no-chunked-prefill"]
SIZES += ["--unified-memory-level=0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one saved step."""
    place = tmp_path_factory.mktemp("run")
    train_bpe(["words of a model that is served. " * 20], 290, place / "words")
    sizes = ("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.seq_len=16")
    config = override(recipe("gpt_tiny"), [*sizes, "train.dtype=float32"])
    config = dataclasses.replace(config, data=DataConfig(tokenizer=str(place / "words")))
    manager = CheckpointManager(place / "checkpoints", assets=run_assets(config))
    manager.save(1, model_state(build_model(config, ProcessGroups.single(), "cpu"), ProcessGroups.single()))
    return place / "checkpoints"


def test_sizes_and_backend_are_those_of_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    engines: list[DynamicInferenceEngine] = []

    def opened(*arguments: Any, **options: Any) -> DynamicInferenceEngine:
        engines.append(open_engine(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr("mcore_tools.generate.open_engine", opened)
    words = [str(folder), "--cache-gb", "0.01", "--prompt", "words", "--max-tokens", "4"]
    assert main(words) == 0
    assert main([*words, *SIZES, "--attention-backend", "torch"]) == 0
    usual, ours = (engine.context.config for engine in engines)
    assert (ours.max_requests, ours.max_tokens, ours.block_size_tokens, ours.unified_memory_level) == (4, 16, 8, 0)
    assert ours.enable_prefix_caching is False and ours.enable_chunked_prefill is False
    assert (usual.max_tokens, usual.block_size_tokens, usual.enable_prefix_caching, usual.enable_chunked_prefill) == (8192, 16, None, True)
    assert [engine.context.cache.attention_backend for engine in engines] == [None, "torch"]
    text = capsys.readouterr().out
    assert text[: len(text) // 2] * 2 == text != ""
    assert main([*words, "--prefix-caching"]) == 0 and engines[-1].context.config.enable_prefix_caching is True


def test_a_model_is_called_as_its_folder_wherever_the_command_stands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def serving(*_: Any, model_name: str, **options: Any) -> Any:
        names.append(model_name)
        raise ValueError("enough")

    monkeypatch.setattr("mcore_tools.serve.serve", serving)
    monkeypatch.chdir(folder)
    for checkpoint in (".", "step_00000001/..", str(folder)):
        assert main([checkpoint, "--port", "0", "--cache-gb", "0.01"]) == 2
    assert names == ["checkpoints"] * 3


@pytest.mark.timeout(120)
@pytest.mark.parametrize("coordinator", ["0", pytest.param("1", marks=pytest.mark.journey)])
def test_an_operator_names_the_model_and_reads_the_step_log(folder: Path, coordinator: str) -> None:
    words = [str(folder), "--port", "0", "--cache-gb", "0.01", *SIZES, "--log-interval-steps", "2", "--attention-backend", "torch"]
    words += ["--served-model-name", "team/model", "--max-refused-per-s", "0.001"]
    with Command(main, words, {"USE_COORDINATOR": coordinator}) as command:
        url = command.until("serving ").split(" on ")[1].split(";")[0]
        with urllib.request.urlopen(f"{url}/models", timeout=60) as response:
            assert [model["id"] for model in json.load(response)["data"]] == ["team/model"]
        body = {"model": "team/model", "prompt": "words", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 6
        # One that is refused is all that an address has.
        request = urllib.request.Request(f"{url}/completions", b"{}", {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="Error 422"):
            urllib.request.urlopen(request, timeout=60)
        with pytest.raises((OSError, urllib.error.URLError)):
            for _ in range(20):
                with pytest.raises(urllib.error.HTTPError, match="Error 422"):
                    urllib.request.urlopen(request, timeout=60)
        command.terminate()
        assert command.wait() == 0
        assert 'mcore_inference.steps {"' in command.errors, command.errors


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--max-step-tokens 0", "--max-step-tokens: max_tokens=0 must be an integer from 1"),
        ("--max-step-tokens 63", "--max-step-tokens 63 is less than the 64 requests of a step; raise it, or lower --max-requests"),
        ("--block-size x", "--block-size: 'x' must be a whole number"),
        ("--prefix-caching-mamba-gb 0", "--prefix-caching-mamba-gb: prefix_caching_mamba_gb=0.0 must be a number from"),
        ("--prefix-caching-mamba-gb 1 --prefix-caching", "prefix_caching_mamba_gb=1.0 is for states of recurrent layers"),
        ("--prefix-caching --no-prefix-caching", "--prefix-caching and --no-prefix-caching exclude each other; leave one out"),
        ("--unified-memory-level 3", "--unified-memory-level: unified_memory_level=3 must be an integer from 0 to 2"),
        ("--unified-memory-level 1", "--unified-memory-level 1: unified memory needs a GPU, and the model is on cpu"),
        ("--unified-memory-level 2 --prompt b", "--unified-memory-level 2: unified memory needs a GPU, and the model is on cpu"),
        ("--attention-backend best", "--attention-backend: invalid choice: 'best'"),
        ("--num-cuda-graphs 0", "--num-cuda-graphs: num_cuda_graphs=0 must be an integer from 1"),
        ("--num-cuda-graphs 4", "num_cuda_graphs=4: graphs need a GPU"),
        ("--log-interval-steps 0", "--log-interval-steps: log_interval_steps=0 must be an integer from 1"),
        ("--max-refused-per-s 0", "--max-refused-per-s: 0 must be at least 0.001"),
        ("--served-model-name ", "--served-model-name: '' must have 1 to 256 characters"),
        ("--served-model-name a --prompt b", "--served-model-name is of a server over HTTP, and --prompt starts none"),
        ("--max-refused-per-s 5 --prompt b", "--max-refused-per-s is of a server over HTTP, and --prompt starts none"),
        ("--top-k 3", "--top-k is of --prompt; give both, or leave it out"),
        ("--json-object", "--json-object is of --prompt; give both, or leave it out"),
    ],
)
def test_what_cannot_be_turned_so_is_refused_by_its_flag(
    words: str, reason: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    port = [] if "--prompt" in words else ["--port", "0"]
    try:
        code = cli.main(["serve", str(folder), *port, "--cache-gb", "0.01", *words.split(" ")])
    except SystemExit as end:
        code = end.code
    assert code == 2 and reason in capsys.readouterr().err
