# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A run of a mixture of experts on two ranks: it learns, says its losses by name, and is exported."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mcore_ckpt import CheckpointManager
from mcore_ckpt.inspect import diff
from mcore_ckpt.manifest import read_manifest
from mcore_tools.assembly import throughput
from mcore_tools.corpus import default_text, prepare
from mcore_tools.recipes import RunConfig, override, recipe
from mcore_tools.training import export_run, train_rank
from tests.support.corpora import write_corpus
from tools.bench.learning import TINY_TEXT


def small(folder: Path, prefix: str, *changes: str) -> RunConfig:
    """The recipe on few and narrow layers."""
    sizes = ("model.num_layers=2", "model.hidden_size=48", "model.vocab_size=320", "moe.moe_ffn_hidden_size=24", "train.seq_len=32")
    rhythm = ("train.steps=40", "train.warmup_steps=4", "train.eval_interval=40", "train.eval_batches=2", "train.checkpoint_interval=40")
    sinks = ("log.tensorboard=false", "log.html=false")
    places = (f"data.prefix={prefix}", f"data.tokenizer={folder}/tokenizer", "data.split=90,10,0", f"output={folder}/run")
    return override(recipe("qwen3_moe_tiny"), [*sizes, *rhythm, *sinks, *places, *changes])


def train_small(config: RunConfig) -> float:
    return train_rank(config, "cpu").validation_loss


@pytest.mark.journey
@pytest.mark.world(2)
@pytest.mark.parametrize("degrees", [("plan.tp=2", "plan.ep=2"), ("plan.dp=2", "plan.ep=2")], ids=["tp-ep", "dp-ep"])
def test_the_recipe_learns_on_two_ranks_with_losses_by_name(world: Any, degrees: tuple[str, ...], tmp_path: Path) -> None:
    text = [path for path in default_text() if path.name == TINY_TEXT]
    corpus = prepare(text, tmp_path, 300, Console(file=io.StringIO()))
    config = small(tmp_path, corpus.prefix, *degrees)
    losses = world(train_small, config=config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "train.jsonl").read_text(encoding="ascii").splitlines()]
    assert len(rows) == 40 and losses[0] == losses[1] < rows[0]["loss"] - 1.5
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.5
    names = {"load_balancing_loss", "global_load_balancing_loss", "z_loss", "load"}
    for row in rows:
        reported = {name.removeprefix("aux/") for name in row if name.startswith("aux/")}
        assert reported == names | {f"{name}/layer_{layer}" for name in names for layer in (0, 1)} | {"idle_experts"}
        weighed = 0.01 * row["aux/global_load_balancing_loss"] + 0.001 * row["aux/load_balancing_loss"] + 1e-3 * row["aux/z_loss"]
        assert row["aux"] == pytest.approx(2 * weighed, rel=1e-5)
        assert row["aux/load"] == pytest.approx((row["aux/load/layer_0"] + row["aux/load/layer_1"]) / 2)
    transformers = pytest.importorskip("transformers")
    exported = export_run(tmp_path / "run" / "checkpoints", tmp_path / "hf")
    assert read_manifest(CheckpointManager(tmp_path / "run" / "checkpoints").path(40)).extra["family"] == "qwen3_moe"
    model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    assert type(model).__name__ == "Qwen3MoeForCausalLM" and model.config.num_experts == 16


def test_operations_count_shared_experts_and_dense_layers() -> None:
    plain = recipe("qwen3_moe_tiny")
    mixed = override(plain, ["moe.moe_layer_freq=2"])
    dense = override(plain, ["moe=none"])
    one, half, none = (throughput(config, "cpu").flops_per_token for config in (plain, mixed, dense))
    assert half == pytest.approx((one + none) / 2)
    shared = override(plain, ["moe.moe_shared_expert_intermediate_size=64"])
    assert throughput(shared, "cpu").flops_per_token == pytest.approx(one + 4 * 6 * 3 * 128 * 64)


def test_a_run_that_goes_on_draws_the_noise_that_it_would_have_drawn(tmp_path: Path) -> None:
    write_corpus(tmp_path, "to be or not to be, that is the question. ")
    rhythm = ("train.steps=2", "train.checkpoint_interval=1", "train.eval_interval=0", "train.eval_batches=1", "train.warmup_steps=0")
    batch = ("train.micro_batch_size=2", "train.global_batch_size=4")
    config = small(tmp_path, f"{tmp_path}/corpus", *rhythm, *batch, "moe.moe_input_jitter_eps=0.2")
    train_rank(config, "cpu")
    steps = CheckpointManager(tmp_path / "run" / "checkpoints")

    def differences(name: str, *changes: str) -> list[str]:
        """Of step 2, after a run from step 1."""
        resumed = CheckpointManager(tmp_path / name / "checkpoints")
        shutil.copytree(steps.path(1), resumed.path(1))
        train_rank(override(config, [f"output={tmp_path}/{name}", *changes]), "cpu")
        return [one.name for one in diff(steps.path(2), resumed.path(2)) if one.name in read_manifest(steps.path(2)).tensors]

    assert not differences("resumed")
    assert differences("quiet", "moe.moe_input_jitter_eps=none")
