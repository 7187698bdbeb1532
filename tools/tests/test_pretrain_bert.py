# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A BERT learns hidden tokens of a small corpus, in virtual stages as on one rank."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from mcore_parallel import ParallelPlan
from mcore_parallel.data import ByteTokenizer
from mcore_tools.assembly import datasets
from mcore_tools.launch import launch
from mcore_tools.pretrain_bert import check
from mcore_tools.recipes import DataConfig, RunConfig, override, recipe
from mcore_tools.train import main
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus

TEXT = "a shard is declared once and groups are arguments and nothing is silent and every token sees those on both sides. "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, TEXT, num_documents=20)
    config = override(
        recipe("bert_tiny"),
        [
            *("model.hidden_size=32", "model.ffn_hidden_size=64", "train.dtype=float64", "train.steps=12", "train.seq_len=32"),
            *("train.micro_batch_size=4", "train.warmup_steps=2", "train.eval_interval=0", "train.eval_batches=1", "optimizer.lr=3e-3"),
            *("log.tensorboard=false", "log.html=false"),
        ],
    )
    data = DataConfig(prefix=str(folder / "corpus"), tokenizer=str(folder / "tokenizer"), split="80,20,0")
    return dataclasses.replace(config, data=data)


def losses(config: RunConfig) -> list[float]:
    lines = (Path(config.output) / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.journey
def test_the_loss_falls_and_virtual_stages_give_the_same_curve(corpus: RunConfig, tmp_path: Path) -> None:
    alone = dataclasses.replace(corpus, output=str(tmp_path / "alone"))
    trained = train_rank(alone, "cpu")
    curve = losses(alone)
    assert len(curve) == 12
    assert curve[-1] < curve[0] - 0.5
    assert trained.validation_loss < curve[0] - 0.5
    staged = dataclasses.replace(corpus, plan=ParallelPlan(pp=2, vpp=2), output=str(tmp_path / "staged"))
    launch(train_rank, 2, config=staged, kind="cpu")
    assert losses(staged) == pytest.approx(curve, rel=1e-9)


def test_the_command_trains_its_own_recipe(
    corpus: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [f"data.prefix={corpus.data.prefix}", f"data.tokenizer={corpus.data.tokenizer}", "data.split=80,20,0", f"output={tmp_path}"]
    small = [
        "model.num_layers=1",
        "model.hidden_size=16",
        "train.steps=2",
        "train.seq_len=16",
        "train.eval_batches=1",
        "train.warmup_steps=0",
    ]
    monkeypatch.setattr(sys, "argv", ["pretrain_bert", *(word for change in changes + small for word in ("--set", change))])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(default_recipe="bert_tiny", check=check) == 0
    assert "validation loss" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["pretrain_bert", "--recipe", "gpt_tiny"])
    assert main(default_recipe="bert_tiny", check=check) == 2
    assert "masked=none and so predicts next tokens" in capsys.readouterr().err


def test_what_hides_no_tokens_or_hides_them_behind_text_is_refused(corpus: RunConfig) -> None:
    with pytest.raises(ValueError, match="masked=none and so predicts next tokens"):
        check(recipe("gpt_tiny"))
    assert check(corpus) is corpus
    with pytest.raises(ValueError, match=r"masked.mask_token=2112 must lie below model.vocab_size=2112"):
        override(recipe("bert_tiny"), ["masked.mask_token=2112"])
    with pytest.raises(ValueError, match=r"masked.mask_token=100 is a token of text among the 261"):
        datasets(override(corpus, ["masked.mask_token=100"]), ByteTokenizer())
