# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs in float16: the loss is scaled, the scale is found by steps that are skipped, and the curve is that of float32."""

import json
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager, read_tensor
from mcore_parallel.training import NonFiniteLossError
from mcore_tools.cli import main
from mcore_tools.recipes import RecipeError, RunConfig, override, recipe
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus

FLOAT16 = ("train.dtype=float16", "optimizer.initial_loss_scale=256")
LAYOUTS = {
    "tp": ["plan.tp=2"],
    "fsdp": ["plan.dp=2", "data_parallel=fsdp"],
    "slices": ["plan.dp=2", "optimizer.use_distributed_optimizer=true"],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, "to be or not to be, that is the question. ")
    return [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", "train.seq_len=16"),
        *("train.micro_batch_size=1", "train.global_batch_size=4", "train.steps=8", "train.eval_batches=1", "train.eval_interval=0"),
        *("train.warmup_steps=0", "log.tensorboard=false", "log.html=false", "model.num_layers=2", "model.hidden_size=32"),
        *("model.ffn_hidden_size=32", "model.vocab_size=320"),
    ]


def rows(config: RunConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(config.output) / "train.jsonl").read_text(encoding="ascii").splitlines()]


def train_each(configs: list[RunConfig]) -> None:
    for config in configs:
        train_rank(config, "cpu")


@pytest.mark.journey
@pytest.mark.world(2)
def test_the_curve_is_that_of_float32_in_any_layout(world, corpus: list[str], tmp_path: Path) -> None:
    wide = override(recipe("gpt_tiny"), [*corpus, f"output={tmp_path}/wide"])
    train_rank(wide, "cpu")
    expected = [row["loss"] for row in rows(wide)]
    configs = [
        override(recipe("gpt_tiny"), [*corpus, *FLOAT16, *changes, f"output={tmp_path / name}"]) for name, changes in LAYOUTS.items()
    ]
    mixture = [*corpus, *FLOAT16, "plan.dp=2", "plan.ep=2", f"output={tmp_path}/mixture"]
    world(train_each, configs=[*configs, override(recipe("moe_tiny"), mixture)])
    for config in configs:
        assert [row["loss"] for row in rows(config)] == pytest.approx(expected, rel=5e-3), config.output
        assert all(row["loss_scale"] == 256 and row["skipped_steps"] == 0 for row in rows(config))
    learnt = [row["loss"] for row in rows(override(configs[0], [f"output={tmp_path}/mixture"]))]
    assert learnt[-1] < learnt[0] - 0.5 and expected[-1] < expected[0] - 0.5


@pytest.mark.journey
def test_steps_are_skipped_until_the_scale_is_found_and_a_start_goes_on_with_it(corpus: list[str], tmp_path: Path) -> None:
    run = [*corpus, "train.dtype=float16", "optimizer.initial_loss_scale=1048576", "optimizer.hysteresis=1"]
    config = override(recipe("gpt_tiny"), [*run, "train.steps=16", f"output={tmp_path}/run"])
    train_rank(config, "cpu")
    last = rows(config)[-1]
    assert 0 < last["skipped_steps"] < 16 and last["loss_scale"] == 2.0 ** (20 - last["skipped_steps"])
    folder = CheckpointManager(Path(config.output) / "checkpoints").path(16)
    assert read_tensor(folder, "output.weight").dtype == torch.float16
    train_rank(override(config, ["train.steps=17"]), "cpu")
    assert rows(config)[-1]["loss_scale"] == last["loss_scale"] and rows(config)[-1]["skipped_steps"] == last["skipped_steps"]
    assert main(["generate", config.output, "--prompt", "to be", "--max-tokens", "2"]) == 0


def test_an_overflow_that_no_lower_scale_helps_ends_the_run(corpus: list[str], tmp_path: Path) -> None:
    lowest = ["optimizer.initial_loss_scale=1e12", "optimizer.min_loss_scale=1e12"]
    constant = ["optimizer.loss_scale=1e12"]
    for changes in (lowest, constant):
        with pytest.raises(NonFiniteLossError, match=r"step 1: .*1 steps were skipped, max_skipped_steps=0"):
            train_rank(override(recipe("gpt_tiny"), [*corpus, "train.dtype=float16", *changes, f"output={tmp_path}/run"]), "cpu")


def test_a_loss_scale_needs_the_dtype_and_nothing_else() -> None:
    run = override(recipe("gpt_tiny"), ["optimizer.loss_scale=8", "train.dtype=float16"])
    assert run.optimizer.loss_scale == 8
    for change in ("fp16=True", "loss_scale=8.0", "initial_loss_scale=8.0", "min_loss_scale=8.0", "loss_scale_window=8", "hysteresis=8"):
        with pytest.raises(RecipeError, match=rf"optimizer\.{change} scales the loss of float16, and train\.dtype='bfloat16'; set train"):
            override(run, ["train.dtype=bfloat16", "optimizer.loss_scale=none", f"optimizer.{change}"])


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt_tiny", ["fp8.recipe=rowwise"], r"fp8 widens to bfloat16, and train\.dtype='float16'; set train\.dtype=bfloat16, or fp8=none"),
        ("gpt_tiny", ["lora.base_dtype=fp8", "load.path=x"], r"lora\.base_dtype widens to bfloat16.* or lora\.base_dtype=none"),
        ("countdown_tiny", [], r"train\.dtype=float16 is for `mcore train` only, and rl is set; leave it at its default"),
    ],
    ids=["fp8", "lora", "rl"],
)
def test_what_float16_does_not_go_with_is_refused(name: str, changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        override(recipe(name), ["train.dtype=float16", *changes])
    # By `mcore distill` and `mcore eagle`.
    assert override(recipe("gpt_tiny"), ["train.dtype=float16"]).fields_of_train == ["train.dtype=float16"]
