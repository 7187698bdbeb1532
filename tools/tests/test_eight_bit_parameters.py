# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Runs that gather parameters in 8 bits compute with the rounded ones, and step and save the others."""

import json
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager, read_tensor, save
from mcore_ckpt.manifest import read_manifest
from mcore_tools.recipes import RecipeError, RunConfig, override, recipe
from mcore_tools.training import train_rank
from megatron_fsdp import Float8Format
from tests.support.corpora import write_corpus

PATTERNS = ("layers.*.qkv.weight", "layers.*.experts.*")
FSDP = ("data_parallel=fsdp", f"fsdp.eight_bit_parameters=[{','.join(PATTERNS)}]")
STILL = ("optimizer.lr=0", "optimizer.min_lr=0", "train.steps=1")
LAYOUTS = {"dp": ["plan.dp=4"], "ep": ["plan.dp=4", "plan.ep=2"], "pp": ["plan.dp=2", "plan.pp=2"]}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A mixture in 64 bits that learnt for four steps."""
    folder = tmp_path_factory.mktemp("source")
    write_corpus(folder, "to be or not to be, that is the question. ")
    changes = [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", f"output={folder}/run"),
        *("model.num_layers=2", "model.hidden_size=16", "model.ffn_hidden_size=16", "model.vocab_size=320", "train.seq_len=16"),
        *("train.micro_batch_size=1", "train.global_batch_size=4", "train.steps=4", "train.eval_batches=1", "train.eval_interval=0"),
        *("train.warmup_steps=0", "train.dtype=float64", "log.tensorboard=false", "log.html=false"),
    ]
    config = override(recipe("moe_tiny"), changes)
    train_rank(config, "cpu")
    return config


def begun(source: RunConfig, output: Path, *changes: str) -> RunConfig:
    return override(source, [f"output={output}", f"load.path={source.output}", *changes])


def losses(config: RunConfig) -> list[float]:
    return [json.loads(line)["loss"] for line in (Path(config.output) / "train.jsonl").read_text(encoding="ascii").splitlines()]


def newest(config: RunConfig) -> Path:
    return CheckpointManager(Path(config.output) / "checkpoints").path(config.train.steps)


def train_each(configs: list[RunConfig]) -> None:
    for config in configs:
        train_rank(config, "cpu")


def rounded(name: str, value: torch.Tensor) -> torch.Tensor:
    """What the copies of a weight stand for; experts of two ranks have a scale on each."""
    if not any(fnmatchcase(name, pattern) for pattern in PATTERNS):
        return value
    payload, scale = Float8Format().quantize(value, value.abs().amax())
    Float8Format().restore(payload, scale, out := torch.empty_like(value))
    return out


@pytest.mark.journey
@pytest.mark.world(4)
def test_a_step_computes_with_rounded_weights_and_keeps_the_others(world, source: RunConfig, tmp_path: Path) -> None:
    names = [name for name in read_manifest(newest(source)).tensors if not name.startswith("optimizer.")]
    weights = {name: read_tensor(newest(source), name) for name in names}
    save({name: rounded(name, value) for name, value in weights.items()}, tmp_path / "rounded")
    expected = override(begun(source, tmp_path / "expected", *STILL), [f"load.path={tmp_path}/rounded"])
    train_rank(expected, "cpu")
    still = {name: begun(source, tmp_path / name, *STILL, *FSDP, *changes) for name, changes in LAYOUTS.items()}
    learns = begun(source, tmp_path / "learns", *FSDP, *LAYOUTS["ep"])
    world(train_each, configs=[*still.values(), learns])
    plain = begun(source, tmp_path / "plain")
    train_rank(plain, "cpu")
    for name, config in still.items():
        assert losses(config) == pytest.approx(losses(expected), rel=1e-10 if name != "ep" else 1e-4), name
        assert losses(config) != pytest.approx(losses(plain)[:1], rel=1e-6)
        assert all(torch.equal(read_tensor(newest(config), each), weights[each]) for each in names)
    assert losses(learns) == pytest.approx(losses(plain), rel=1e-2) and losses(learns)[-1] < losses(learns)[0]


def refused(config: RunConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        train_rank(config, "cpu")


@pytest.mark.world(2)
def test_what_nobody_gathers_is_named_before_anything_is_written(world, source: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    refused(
        begun(source, run, *FSDP),
        r"'layers\.\*\.qkv\.weight' matches layers\.0\.attention\.qkv\.weight, of which there is one replica.*raise plan\.dp",
    )
    experts = begun(source, run, *FSDP, "plan.dp=2", "plan.ep=2")
    world(
        refused,
        config=experts,
        words=r"'layers\.\*\.experts\.\*' matches layers\.0\.mlp\.experts\.up, of which there is one replica.*or leave it out",
    )
    none = begun(source, run, "data_parallel=fsdp", "plan.dp=2", "fsdp.eight_bit_parameters=[mlp.up]")
    world(
        refused,
        config=none,
        words=r"fsdp\.eight_bit_parameters='mlp\.up' matches no parameter; name some of embedding\.weight, layers\.0\.",
    )
    assert not run.exists()


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt_tiny", [], r"fsdp is set, but data_parallel='ddp'; set data_parallel=fsdp"),
        (
            "gpt_tiny",
            ["data_parallel=fsdp", "fsdp.zero_dp_strategy=optim"],
            r"zero_dp_strategy='optim' leaves parameters whole; set zero_dp_strategy=",
        ),
        (
            "countdown_tiny",
            ["data_parallel=fsdp", "rl.kl_beta=0"],
            r"fsdp\.eight_bit_parameters are rounded in the learner and not in engines",
        ),
    ],
    ids=["ddp", "optim", "rl"],
)
def test_choices_that_do_not_go_together_are_refused(name: str, changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        override(recipe(name), ["fsdp.eight_bit_parameters=[layers.*.weight]", *changes])
