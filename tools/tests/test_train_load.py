# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a run begins with: another run's weights, an older step of it, or nothing at all."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager, read_tensor, save
from mcore_ckpt.inspect import diff
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.megatron import export_checkpoint_megatron, import_checkpoint_megatron
from mcore_tools import train
from mcore_tools.recipes import LoadConfig, RecipeError, RunConfig, config_text, override, read_config, recipe
from mcore_tools.training import place, train_rank
from mcore_tools.training._world import reproducible
from tests.support.corpora import write_corpus

STILL = ("optimizer.lr=0", "optimizer.min_lr=0", "train.seed=77")
"""A run that changes nothing, whose own weights would be others; its steps are what it began with, through the masters."""
LAYOUTS = {
    "slices": ["plan.dp=2", "optimizer.use_distributed_optimizer=true"],
    "fsdp": ["plan.dp=2", "data_parallel=fsdp"],
    "fsdp2": ["plan.dp=2", "data_parallel=fsdp2"],
    "tp": ["plan.tp=2"],
    "chunks": ["plan.pp=2", "plan.vpp=2"],
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run of six steps in 16 bits, of which every second is kept."""
    folder = tmp_path_factory.mktemp("source")
    write_corpus(folder, "to be or not to be, that is the question. ")
    changes = [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", f"output={folder}/run"),
        *("model.hidden_size=16", "model.ffn_hidden_size=16", "model.vocab_size=320", "train.seq_len=16", "train.micro_batch_size=1"),
        *("train.global_batch_size=4", "train.steps=6", "train.eval_batches=1", "train.eval_interval=0", "train.checkpoint_interval=2"),
        *("train.warmup_steps=0", "train.dtype=bfloat16", "log.tensorboard=false", "log.html=false"),
    ]
    config = override(recipe("gpt_tiny"), changes)
    train_rank(config, "cpu")
    return config


def steps_of(config: RunConfig) -> CheckpointManager:
    return CheckpointManager(Path(config.output) / "checkpoints")


def begun(source: RunConfig, output: Path, *changes: str) -> RunConfig:
    """A run of its own that begins with the other's step 4."""
    return override(source, [f"output={output}", f"load.path={source.output}", "load.step=4", *changes])


def rows(config: RunConfig) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(config.output) / "train.jsonl").read_text(encoding="ascii").splitlines()]


def check_weights(source: RunConfig, config: RunConfig, step: int) -> None:
    """The weights of ``step`` are those of the source's step 4, and the masters are these weights, which are in 16 bits."""
    theirs, ours = steps_of(source).path(4), steps_of(config).path(step)
    names = [name for name in read_manifest(theirs).tensors if not name.startswith("optimizer.")]
    assert len(names) > 10
    for name in names:
        weight = read_tensor(theirs, name)
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, read_tensor(ours, name)), name
        assert torch.equal(weight.float(), read_tensor(ours, f"optimizer.master.{name}")), name
    changed = [
        name for name in names if not torch.equal(read_tensor(theirs, f"optimizer.master.{name}"), read_tensor(theirs, name).float())
    ]
    assert changed, "the source's masters know more than its weights"


def train_each(configs: list[RunConfig]) -> None:
    for config in configs:
        train_rank(config, "cpu")


@pytest.mark.journey
@pytest.mark.world(2)
def test_a_run_begins_with_the_weights_of_another_in_any_layout(world, source: RunConfig, tmp_path: Path) -> None:
    configs = [begun(source, tmp_path / name, *STILL, *changes, "train.steps=1") for name, changes in LAYOUTS.items()]
    world(train_each, configs=configs)
    first = override(source, [f"output={tmp_path / 'fresh'}", *STILL, "train.steps=1"])
    train_rank(first, "cpu")
    for config in configs:
        check_weights(source, config, 1)
        (row,) = rows(config)
        assert row["step"] == 1 and row["num_tokens"] == rows(first)[0]["num_tokens"]
        extra = read_manifest(steps_of(config).path(1)).extra
        assert extra["trainer"] == {"step": 1, "consumed_samples": 4, "skipped_steps": 0} and extra["optimizer_step"] == 1


def test_runs_that_give_the_same_bits_set_what_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    config = override(recipe("gpt_tiny"), ["train.deterministic=true"])
    for found in (None, "Tree"):
        monkeypatch.setattr(os, "environ", {} if found is None else {"NCCL_ALGO": found})
        refusal = nullcontext() if found is None else pytest.raises(ValueError, match="NCCL_ALGO=Ring .*, found 'Tree'; or set train")
        with refusal, reproducible(config, "cuda"):
            assert (os.environ["CUBLAS_WORKSPACE_CONFIG"], os.environ["NCCL_ALGO"]) == (":4096:8", "Ring")


@pytest.mark.journey
def test_the_same_command_goes_on_from_its_own_steps(source: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = begun(source, tmp_path / "run", "train.steps=2", "train.checkpoint_interval=1")
    whole = train_rank(config, "cpu")
    assert "goes on from weights of " in capsys.readouterr().out
    for last, words in ((1, "goes on from weights of "), (2, "goes on from step 1 of ")):
        changes = ["train.checkpoints_kept=0", "train.checkpoint_async_steps=1", "train.deterministic=true"]
        changes += ["train.checkpoint_format=torch_dist"]
        part = override(config, [f"output={tmp_path / 'parts'}", *changes])
        stopped = train_rank(part, "cpu", stop=lambda last=last: last == 1)
        assert words in capsys.readouterr().out
    assert (stopped.stopped_at, stopped.validation_loss) == (None, whole.validation_loss)
    assert [row["step"] for row in rows(part)] == [1, 2] and not torch.are_deterministic_algorithms_enabled()
    assert (steps_of(part).path(2) / ".metadata").exists()
    # What it began with may be gone by then.
    again = override(part, [f"load.path={tmp_path}/gone", "train.steps=3"])
    # The second step is committed while the third is trained.
    stored_steps: list[list[int]] = []
    train_rank(again, "cpu", stop=lambda: bool(stored_steps.append(steps_of(again).steps())))
    assert [row["step"] for row in rows(again)] == [1, 2, 3] == steps_of(again).steps() and stored_steps == [[1, 2]]


def test_all_of_an_older_step_goes_on_as_the_run_did(source: RunConfig, tmp_path: Path) -> None:
    config = begun(source, tmp_path / "run", "load.take=all", "train.seed=1234")
    train_rank(config, "cpu")
    assert [row["loss"] for row in rows(config)] == [row["loss"] for row in rows(source)[4:]]
    differences = diff(steps_of(source).path(6), steps_of(config).path(6))
    assert [str(one) for one in differences if one.kind != "asset"] == []
    assert steps_of(config).steps() == [6] and steps_of(source).steps() == [2, 4, 6]


@pytest.mark.journey
def test_a_position_without_the_state_of_the_optimizer(source: RunConfig, tmp_path: Path) -> None:
    # One checkpoint does as well as a folder of them; the other rule has other state.
    config = begun(source, tmp_path / "run", *STILL, "load.take=position", "load.step=none", "optimizer.optimizer=sgd", "train.steps=5")
    config = override(config, [f"load.path={steps_of(source).path(4)}"])
    train_rank(config, "cpu")
    check_weights(source, config, 5)
    extra = read_manifest(steps_of(config).path(5)).extra
    assert extra["trainer"] == {"step": 5, "consumed_samples": 20, "skipped_steps": 0} and extra["optimizer_step"] == 1


@pytest.mark.parametrize("form", ["torch_dist", pytest.param("fsdp_dtensor", marks=pytest.mark.journey)])
def test_a_step_takes_its_rates_and_decay_to_megatron_and_back(source: RunConfig, tmp_path: Path, form: str) -> None:
    optimizer = source.optimizer
    assert export_checkpoint_megatron(steps_of(source).path(4), tmp_path / "theirs", prefix="", format=form) == []
    import_checkpoint_megatron(tmp_path / "theirs", tmp_path / "back")
    extra = read_manifest(tmp_path / "back").extra
    # Samples are 4 a step. The fifth step has the rate of 4 parts in 6 of half a cosine.
    wanted = {"num_steps": 16, "lr_warmup_steps": 0, "lr_decay_steps": 24, "max_lr": optimizer.lr, "end_wd": 0.1}
    assert wanted.items() <= extra["opt_param_scheduler"].items()
    rate = optimizer.min_lr + 0.25 * (optimizer.lr - optimizer.min_lr)
    for group, wd_mult in zip(extra["optimizer_param_groups"], (1.0, 0.0), strict=True):
        assert (group["lr"], group["step"]) == (pytest.approx(rate), 4) and group["weight_decay"] == 0.1 * group["wd_mult"]
        assert (group["max_lr"], group["min_lr"], group["wd_mult"]) == (optimizer.lr, optimizer.min_lr, wd_mult)
    assert export_checkpoint_megatron(tmp_path / "back", tmp_path / "again", format=form) == []
    import_checkpoint_megatron(tmp_path / "again", tmp_path / "twice")
    assert diff(tmp_path / "back", tmp_path / "twice") == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            ["load.path=", "load.step=none", "load.required=true"],
            ["load.required=true", "run/checkpoints holds no checkpoint", "set output"],
        ),
        (["load.step=5"], ["load.step=5 is not in load.path=", "which has [2, 4, 6]"]),
        (["load.path={checkpoints}/step_00000004"], ["load.step=4", "is one checkpoint; set load.step=none"]),
        (["load.path={checkpoints}/nothing"], ["load.path=", "there is no such folder"]),
    ],
    ids=["required", "step", "one", "path"],
)
def test_what_is_not_there_is_named_before_anything_is_written(
    source: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: list[str],
    words: list[str],
) -> None:
    (tmp_path / "run.yaml").write_text(config_text(begun(source, tmp_path / "run")))
    filled = [change.format(checkpoints=steps_of(source).directory) for change in changes]
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["pretrain", "--config", str(tmp_path / "run.yaml"), *(f"--set={change}" for change in filled)])
    assert train.main() == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message
    assert not (tmp_path / "run").exists()


@pytest.mark.journey
def test_what_does_not_fit_is_named(source: RunConfig, tmp_path: Path) -> None:
    fewer = ["model.num_layers=2", "load.override=[model.num_layers]"]
    with pytest.raises(ValueError, match=r"has weights that this model has not: layers\.2\..*mcore-ckpt edit --drop"):
        train_rank(begun(source, tmp_path / "small", *fewer), "cpu")
    weights = tmp_path / "weights"
    theirs = steps_of(source).path(4)
    save({name: read_tensor(theirs, name) for name in read_manifest(theirs).tensors if not name.startswith("optimizer.")}, weights)
    alone = ["load.step=none", f"load.path={weights}", "train.steps=1"]
    with pytest.raises(ValueError, match=r"load\.take='position' goes on with a run, and .* is of none; set load\.take=weights"):
        train_rank(begun(source, tmp_path / "run", *alone, "load.take=position"), "cpu")
    config = begun(source, tmp_path / "run", *alone, *STILL)
    train_rank(config, "cpu")
    check_weights(source, config, 1)
    with pytest.raises(ValueError, match=r"student\.load\.path='.*' is for `mcore train` only"), place(config, "student"):
        pass


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["load.step=4"], r"choose from path, which is empty.*output=NEW load\.path=OLD/checkpoints"),
        (["load.take=all"], "choose from path, which is empty"),
        (["load.path=x", "load.step=-1"], "step=-1 must not be negative"),
        (["load.path=x", "load.take=some"], "load.take='some' is not of type"),
        (["load.path=a/checkpoints", "output=a"], r"load\.path='a/checkpoints' lies in output='a'; begin in another folder"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        override(recipe("gpt_tiny"), changes)


def test_a_file_without_the_section_still_reads(tmp_path: Path) -> None:
    text, cut, _ = config_text(recipe("gpt_tiny")).partition("load:\n")
    assert cut
    (tmp_path / "old.yaml").write_text(text)
    assert read_config(tmp_path / "old.yaml").load == LoadConfig()
    (tmp_path / "new.yaml").write_text(text + "load: {path: runs/first/checkpoints, step: 200, take: all}\n")
    assert read_config(tmp_path / "new.yaml").load == LoadConfig(path="runs/first/checkpoints", step=200, take="all")
