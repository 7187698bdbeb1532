# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Weights of another dtype than the run's: widened, rounded where the run says so, refused before files are written otherwise."""

from pathlib import Path

import pytest
import torch

from mcore_ckpt import read_tensor
from mcore_ckpt.inspect import resolve_folder
from mcore_tools.recipes import RunConfig, override, recipe
from mcore_tools.training import find_origin, train_rank
from tests.support.corpora import write_corpus

NAMES = ("embedding.weight", "layers.0.attention.qkv.weight", "layers.1.mlp.down.weight", "final_norm.weight")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """A run of each dtype, which came to its end."""
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder, "to be or not to be, that is the question. ")
    base = override(
        recipe("gpt_tiny"),
        [
            *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", "train.seq_len=16"),
            *("train.micro_batch_size=1", "train.global_batch_size=2", "train.steps=1", "train.eval_batches=1", "train.eval_interval=0"),
            *("train.warmup_steps=0", "log.tensorboard=false", "log.html=false", "model.num_layers=2", "model.hidden_size=16"),
            *("model.num_attention_heads=2", "model.ffn_hidden_size=24", "model.vocab_size=320"),
        ],
    )
    made = {dtype: override(base, [f"train.dtype={dtype}", f"output={folder}/{dtype}"]) for dtype in ("float32", "bfloat16")}
    for run in made.values():
        train_rank(run, "cpu")
    return made


def weights(run: RunConfig) -> dict[str, torch.Tensor]:
    folder = resolve_folder(Path(run.output) / "checkpoints")
    return {name: read_tensor(folder, name) for name in NAMES}


def begun(runs: dict[str, RunConfig], dtype: str, origin: str, output: Path, *changes: str) -> RunConfig:
    """A run that leaves the weights of another as they are."""
    path = runs[origin].output
    still = ("optimizer.lr=0", "optimizer.min_lr=0", "optimizer.weight_decay=0")
    return override(runs[dtype], [f"load.path={path}", f"output={output}", *still, *changes])


@pytest.mark.journey
def test_weights_are_widened_to_the_dtype_of_the_run(runs: dict[str, RunConfig], tmp_path: Path) -> None:
    run = begun(runs, "float32", "bfloat16", tmp_path / "run")
    train_rank(run, "cpu")
    for name, tensor in weights(runs["bfloat16"]).items():
        assert torch.equal(weights(run)[name], tensor.float()), name


def test_weights_are_rounded_only_where_the_run_says_so(runs: dict[str, RunConfig], tmp_path: Path) -> None:
    run = begun(runs, "bfloat16", "float32", tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"'float32', and train\.dtype='bfloat16' here .* set train\.dtype=float32, or .*=\[train\.dtype\]"
    ):
        train_rank(run, "cpu")
    assert not (tmp_path / "run").exists()
    train_rank(override(run, ["load.override=[train.dtype]"]), "cpu")
    for name, tensor in weights(runs["float32"]).items():
        assert torch.equal(weights(run)[name], tensor.bfloat16()), name


def test_a_run_goes_on_in_its_own_dtype(runs: dict[str, RunConfig], tmp_path: Path) -> None:
    words = r"'bfloat16', and train\.dtype='float32' here: .* set train\.dtype=bfloat16, or begin another output with load\.take=weights"
    before = {path: path.stat().st_mtime_ns for path in Path(runs["bfloat16"].output).rglob("*")}
    for change in ("train.steps=2", "load.override=[train.dtype]"):
        with pytest.raises(ValueError, match=words):
            train_rank(override(runs["bfloat16"], ["train.dtype=float32", change]), "cpu")
    assert {path: path.stat().st_mtime_ns for path in Path(runs["bfloat16"].output).rglob("*")} == before
    with pytest.raises(ValueError, match=words):
        train_rank(begun(runs, "float32", "bfloat16", tmp_path / "run", "load.take=all"), "cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_without_a_recipe_takes_the_dtype_of_the_weights(runs: dict[str, RunConfig], dtype: str) -> None:
    assert find_origin(runs[dtype].output).dtype == dtype
