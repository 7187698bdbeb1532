# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A T5 learns spans of a small corpus, on two ranks as on one, and goes on from its steps."""

import dataclasses
import json
from pathlib import Path

import pytest

from mcore_ckpt import CheckpointManager
from mcore_ckpt.manifest import read_manifest
from mcore_tools.cli import main
from mcore_tools.distill import DistillConfig
from mcore_tools.recipes import RecipeError, RunConfig, override, recipe
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus

TEXT = "a shard is declared once and groups are arguments and nothing is silent and every token sees those on both sides. "
LAYOUTS = {"dp": ["plan.dp=2"], "tp": ["plan.tp=2"], "slices": ["plan.dp=2", "optimizer.use_distributed_optimizer=true"]}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, TEXT, num_documents=20)
    changes = [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", "train.dtype=float64"),
        *("model.hidden_size=32", "model.ffn_hidden_size=64", "train.steps=8", "train.seq_len=32", "spans.decoder_length=16"),
        *("train.micro_batch_size=4", "train.global_batch_size=8", "train.warmup_steps=0", "train.eval_interval=0", "train.eval_batches=1"),
        *("log.tensorboard=false", "log.html=false"),
    ]
    return override(recipe("t5_tiny"), changes)


def losses(config: RunConfig) -> list[float]:
    return [json.loads(line)["loss"] for line in (Path(config.output) / "train.jsonl").read_text(encoding="ascii").splitlines()]


def train_each(configs: list[RunConfig]) -> None:
    for config in configs:
        train_rank(config, "cpu")


@pytest.mark.journey
@pytest.mark.world(2)
def test_the_loss_falls_alike_in_any_layout(world, corpus: RunConfig, tmp_path: Path) -> None:
    alone = override(corpus, [f"output={tmp_path}/alone"])
    trained = train_rank(alone, "cpu")
    assert losses(alone)[-1] < losses(alone)[0] - 0.5 and trained.validation_loss < losses(alone)[0] - 0.5
    configs = [override(corpus, [*changes, f"output={tmp_path / name}"]) for name, changes in LAYOUTS.items()]
    world(train_each, configs=configs)
    for config in configs:
        assert losses(config) == pytest.approx(losses(alone), rel=1e-9), config.output


@pytest.mark.journey
def test_a_run_goes_on_and_says_what_it_is(corpus: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, part = (override(corpus, [f"output={tmp_path / name}", "train.steps=3"]) for name in ("whole", "part"))
    train_rank(whole, "cpu")
    train_rank(part, "cpu", stop=lambda: True)
    train_rank(part, "cpu")
    assert losses(part) == losses(whole) and len(losses(part)) == 3
    # No family of Hugging Face is that of its sizes.
    assert "family" not in read_manifest(CheckpointManager(tmp_path / "whole" / "checkpoints").path(3)).extra
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "whole"), "--prompt", "a shard"]) == 2
    assert "holds an encoder, with which nothing is generated; name a run with spans=none" in capsys.readouterr().err
    for verb in (["rl"], ["train", "--set", f"output={tmp_path}/out", "--set"]):
        place = f"load.path={tmp_path}/whole" if verb[0] == "train" else str(tmp_path / "whole")
        assert main([*verb, place]) == 2
        assert "holds an encoder, which predicts no next token; name a run with spans=none" in capsys.readouterr().err
    # Going on as, or beginning with, the other kind of model is refused before anything is written.
    decoder = dataclasses.replace(whole, spans=None)
    for run in (decoder, override(decoder, [f"output={tmp_path}/out", f"load.path={tmp_path}/whole"])):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(ValueError, match=r"another kind of model: spans is set there, masked=none and spans=none here"):
            train_rank(run, "cpu")
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["moe.num_moe_experts=4"], r"spans trains a T5Model, which does not go with moe; set moe=none, or spans=none"),
        (["recompute.granularity=full"], r"does not go with recompute; set recompute=none"),
        (["cuda_graphs=[layers.*]"], r"does not go with cuda_graphs; set cuda_graphs=\[\], or spans=none"),
        (["plan.cp=2"], r"whose layers stay together, found plan\.cp=2; set plan\.cp=1"),
        (["spans.sentinels=[2111,2112]"], r"spans has a token 2112, which must lie below model\.vocab_size=2112"),
        (["spans.decoder_length=2"], r"decoder_length=2 must be at least 3"),
    ],
    ids=["moe", "recompute", "graphs", "cp", "vocab", "length"],
)
def test_what_a_t5_does_not_go_with_is_refused(changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        override(recipe("t5_tiny"), changes)


def test_a_t5_is_no_student() -> None:
    with pytest.raises(ValueError, match=r"student must predict the next token; set student\.spans=none"):
        DistillConfig(student=recipe("t5_tiny"), teacher=recipe("gpt_tiny"))
