# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``mcore train`` without a recipe: the model is that of the weights, published or Megatron's."""

import json
from pathlib import Path

import pytest
import torch

from mcore_ckpt import read_tensor
from mcore_ckpt.hf import import_hf
from mcore_ckpt.manifest import read_manifest
from mcore_tools.cli import main
from tests.support.corpora import write_corpus
from tests.support.published import write_chat, write_published

STEPS = ("train.steps=2", "train.seq_len=16", "train.global_batch_size=2", "train.eval_batches=1", "data.split=80,20,0")
SHOWN = ("log.tensorboard=false", "log.html=false")


def sets(*fields: str) -> list[str]:
    return [word for field in fields for word in ("--set", field)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A published model, and a corpus by its tokenizer's size."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write_published(tmp_path / "published")
    write_corpus(tmp_path, "to be or not to be, that is the question. ")
    return tmp_path


@pytest.mark.journey
def test_published_weights_go_on_with_pre_training(place: Path) -> None:
    still = sets("load.path=published", "data.prefix=corpus", "optimizer.lr=0", "optimizer.min_lr=0", "output=run", *STEPS, *SHOWN)
    assert main(["train", *still]) == 0
    published = dict(import_hf("published").tensors)
    step = place / "run" / "checkpoints" / "step_00000002"
    names = [name for name in read_manifest(step).tensors if not name.startswith("optimizer.")]
    assert names and all(torch.equal(read_tensor(step, name), published[name]) for name in names)
    # A run is as good, whose folder has the tokenizer, too.
    assert main(["train", *sets("load.path=run", "data.prefix=corpus", "output=more", *STEPS, *SHOWN, "train.steps=1")]) == 0
    # The context of the model is exported again.
    assert read_manifest(step).extra["hf_config"]["max_position_embeddings"] == 256


@pytest.mark.journey
def test_a_checkpoint_of_megatron_trains_without_a_rename(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "import-hf", "published", "ours"]) == 0
    assert main(["convert", "export-megatron", "ours", "theirs"]) == 0
    begin = ["data.prefix=corpus", "data.tokenizer=published", "output=run", *STEPS, *SHOWN]
    capsys.readouterr()
    assert main(["train", *sets("load.path=theirs", *begin)]) == 2
    message = capsys.readouterr().err
    assert "theirs is a checkpoint of Megatron-LM; `mcore convert import-megatron theirs OUT`" in message and message.count("\n") == 1
    assert main(["convert", "import-megatron", "theirs", "named", "--prefix", "model."]) == 0
    assert main(["train", *sets("load.path=named", *begin)]) == 2
    assert r"`mcore convert edit named OUT --rename 'model\.(.*)' '\1'`" in capsys.readouterr().err
    assert not (place / "run").exists()
    assert main(["convert", "edit", "named", "renamed", "--rename", r"model\.(.*)", r"\1"]) == 0
    assert main(["convert", "import-megatron", "theirs", "start"]) == 0
    for path in ("start", "renamed"):
        assert main(["train", *sets(f"load.path={path}", *begin, f"output=run_{path}")]) == 0
    first, second = [(place / f"run_{path}" / "train.jsonl").read_text().splitlines() for path in ("start", "renamed")]
    assert [json.loads(line)["loss"] for line in first] == [json.loads(line)["loss"] for line in second]
    # Its tokenizer is named, for there is none beside such weights.
    write_chat(place / "chat.jsonl")
    tune = ["sft", "start", "--data", "chat.jsonl", "--output", "tuned", "--no-export", *sets("train.steps=1", "train.seq_len=64", *SHOWN)]
    capsys.readouterr()
    assert main(tune) == 2
    assert (
        "error: start holds no tokenizer.json; set data.tokenizer to the folder of this model's tokenizer.json" in capsys.readouterr().err
    )
    assert not (place / "tuned").exists()
    assert main([*tune, *sets("data.tokenizer=published")]) == 0


def test_a_split_without_validation_leaves_no_folder(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = ["load.path=published", "data.prefix=corpus", "output=deep/run", *STEPS, "data.split=100,0,0", *SHOWN]
    assert main(["train", *sets(*fields)]) == 2
    assert "data.split='100,0,0' leaves no document of corpus for validation" in capsys.readouterr().err
    assert not (place / "deep").exists()
