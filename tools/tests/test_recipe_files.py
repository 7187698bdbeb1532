# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs as files, and from the command line."""

import sys
from pathlib import Path

import pytest
import torch
import yaml

from mcore_tools import train
from mcore_tools.assembly import schedule
from mcore_tools.recipes import RECIPES, RecipeError, config_text, override, read_config, read_model_config, recipe, write_config


@pytest.mark.parametrize("name", RECIPES)
def test_a_written_run_reads_back_the_same(name: str, tmp_path: Path) -> None:
    write_config(recipe(name), tmp_path / "folder" / "run.yaml")
    assert read_config(tmp_path / "folder" / "run.yaml") == recipe(name)


def test_typed_values_survive_the_file(tmp_path: Path) -> None:
    config = override(
        recipe("gpt_tiny"),
        [
            *("moe.num_moe_experts=8", "model.window_size=[16,0]", "model.window_attn_skip_freq=[1, 0, 1, 0]", "model.norm_epsilon=1e-6"),
            *("optimizer.use_precision_aware_optimizer=true", "optimizer.exp_avg_dtype=bfloat16", "train.batch_ramp_up=[8,8,64]"),
        ],
    )
    assert (config.moe and config.moe.num_moe_experts, config.model.window_size) == (8, (16, 0))
    assert (config.model.window_attn_skip_freq, config.optimizer.exp_avg_dtype) == ((1, 0, 1, 0), torch.bfloat16)
    write_config(config, tmp_path / "run.yaml")
    assert read_config(tmp_path / "run.yaml") == config


def test_a_file_changes_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("recipe: gpt_tiny\nmodel: {num_layers: 6, window_size: [8, 0]}\noptimizer: {lr: 1e-4}\nmoe: {num_moe_experts: 2}\n")
    config = read_config(path)
    assert (config.model.num_layers, config.model.window_size, config.optimizer.lr) == (6, (8, 0), 1e-4)
    assert config.model.hidden_size == recipe("gpt_tiny").model.hidden_size
    assert config.moe is not None and config.moe.num_moe_experts == 2
    path.write_text("model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2, vocab_size: 16}\n")
    assert read_config(path).model.hidden_size == 8


@pytest.mark.parametrize(
    ("name", "part", "changes"),
    [
        ("arithmetic_tiny", "train", {"deterministic": True}),
        ("arithmetic_tiny", "log", {"peak_tflops": 989.0}),
        ("arithmetic_tiny", "data", {"fim": {}}),
        ("moe_tiny", "recompute", {"granularity": "selective", "method": "block"}),
        ("moe_tiny", "optimizer", {"optimizer": "lion", "use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}),
        ("moe_tiny", "log", {"gone": True}),
    ],
)
def test_the_model_of_a_run_is_read_whatever_the_run_says_of_its_training(
    name: str, part: str, changes: dict[str, object], tmp_path: Path
) -> None:
    config = override(recipe(name), ["train.dtype=float64", "train.seq_len=32"])
    values, path = yaml.safe_load(config_text(config)), tmp_path / "run.yaml"
    values[part] = {**(values[part] or {}), **changes}
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(RecipeError):
        read_config(path)
    read = read_model_config(path, "step 7")
    assert (read.model, read.moe, read.train.dtype, read.train.seq_len) == (config.model, config.moe, "float64", 32)
    del values["model"]["vocab_size"]
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(RecipeError, match=r"^step 7: model: set model\.vocab_size too, without a default$"):
        read_model_config(path, "step 7")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("recipe: gpt_tiny\ntrain: {stpes: 4}", "train.stpes: no field 'stpes'; did you mean 'steps'"),
        ("recipe: gpt_tin\n", "did you mean 'gpt_tiny'"),
        ("recipe: gpt_tiny\ntrain: {steps: many}", "train.steps='many' is not of type int"),
        ("recipe: gpt_tiny\ntrain: {steps: true}", "train.steps=True is not of type int"),
        ("recipe: gpt_tiny\ntrain: {steps: 0}", "run.yaml: train: steps=0 must be at least 1"),
        ("recipe: gpt_tiny\nmodel: {window_size: [1, 2, 3]}", "is not of type tuple"),
        ("train: {steps: 4}", "the run: set model too, without a default"),
        ("model: {num_layers: 4}", "model: set model.hidden_size, model.num_attention_heads, model.vocab_size too, without a default"),
        ("- gpt_tiny", "must map fields to values, found list"),
        ("train: {steps: [", "is no YAML"),
        ("recipe: !!python/object/apply:os.getcwd []", "is no YAML"),
    ],
)
def test_a_bad_file_names_what_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_config(tmp_path / "run.yaml")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("train.batch_ramp_up=[8,16,100]", r"global_batch_size=16 is not start=8 plus a multiple of increment=16"),
        ("train.batch_ramp_up=[4,4,100]", r"batch sizes \[4, 12\] are not multiples of micro_batch_size=8"),
        ("train.batch_steps=0:8 100:12", r"batch sizes \[12\] are not multiples"),
        ("train.lr_schedule=cosin", "lr_schedule='cosin' must be one of constant, linear, cosine"),
        ("train.lr_schedule=wsd", "wsd_decay_steps=0 does not go with lr_schedule='wsd'"),
        ("rerun.mode=on", "is not of type"),
        ("train.end_weight_decay=-1", "end_weight_decay=-1.0 must not be negative; set none for no change"),
        ("train.checkpoint_async_steps=-1", "checkpoint_async_steps=-1 must not be negative"),
    ],
)
def test_schedules_are_checked_when_they_are_set(change: str, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        override(recipe("gpt_tiny"), [change])


def test_rates_and_decay_of_each_step_are_fields() -> None:
    changes = ["train.steps=8", "train.warmup_steps=2", "train.warmup_init_lr=1", "optimizer.lr=3", "optimizer.min_lr=1"]
    changes += ["optimizer.weight_decay=0.1", "train.end_weight_decay=0.3", "train.lr_schedule=linear", "train.lr_decay_steps=6"]
    rates = schedule(override(recipe("gpt_tiny"), changes))
    steps = [rates.lr(step) for step in range(9)]
    assert steps == [1, 2, 3, 2.5, 2, 1.5, 1, 1, 1]
    assert [getattr(rate, "weight_decay", None) for rate in steps[::4]] == pytest.approx([0.1, 0.2, 0.3])
    changes += ["train.lr_schedule=wsd", "train.wsd_decay_steps=2", "train.wsd_decay_style=linear", "train.end_weight_decay=none"]
    assert [schedule(override(recipe("gpt_tiny"), changes)).lr(step) for step in (3, 4, 5, 6)] == [3, 3, 2, 1]


def test_the_command_writes_and_reads_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["pretrain", *arguments])
        return train.main()

    assert run("--recipe", "gpt_tiny", "--set", "train.steps=7", "--write-config", str(path)) == 0
    assert run("--config", str(path), "--set", "train.seq_len=32", "--write-config", "-") == 0
    assert capsys.readouterr().out == config_text(override(recipe("gpt_tiny"), ["train.steps=7", "train.seq_len=32"]))
    assert run() == 2
    assert "neither --recipe nor --config" in capsys.readouterr().err


@pytest.mark.journey
def test_a_file_nested_too_deeply_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train: " + "[" * 1000 + "]" * 1000)
    with pytest.raises(RecipeError, match=r"run\.yaml is nested too deeply"):
        read_config(tmp_path / "run.yaml")
    with pytest.raises(RecipeError, match="window_size"):
        override(recipe("gpt_tiny"), ["model.window_size=" + "[" * 1000])
