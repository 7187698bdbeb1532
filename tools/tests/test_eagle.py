# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A draft head is trained for a small model, from it and from its features, measured and published."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch

from mcore_parallel import ProcessGroups
from mcore_parallel.models.eagle import EagleConfig, EagleHead, load_published, published_vocabulary, read_published
from mcore_parallel.training.eagle import FeatureStoreError
from mcore_tools.eagle import EagleRun, eagle_run, evaluate_rank, extract_rank, main, train_head
from mcore_tools.recipes import DataConfig, override, recipe
from mcore_tools.training import train_rank
from tests.support.corpora import write_corpus
from tests.support.published import write_published

TEXT = "a draft is short, a target is slow, and what the target would have said the draft has said before. "


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EagleRun:
    """A target that has learnt the text, and a head for it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_corpus(folder, TEXT, num_documents=20, vocab_size=290)
    target = override(
        recipe("gpt_tiny"),
        [
            *("model.num_layers=2", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.vocab_size=320", "train.steps=30"),
            *("train.seq_len=32", "train.micro_batch_size=4", "train.warmup_steps=2", "train.eval_interval=0", "train.eval_batches=1"),
            *("optimizer.lr=1e-2", f"output={folder / 'target'}", "log.tensorboard=false", "log.html=false"),
        ],
    )
    data = DataConfig(prefix=str(folder / "corpus"), tokenizer=str(folder / "tokenizer"), split="80,20,0")
    target = dataclasses.replace(target, data=data)
    train_rank(target, "cpu")
    return EagleRun(run=override(target, ["train.steps=30", "optimizer.lr=2e-2"]), target=target, draft_vocab_size=128, num_steps=3)


def at(base: EagleRun, output: Path, *changes: str) -> EagleRun:
    return override(base, [f"run.output={output}", *changes])


def losses(config: EagleRun) -> list[float]:
    lines = (Path(config.run.output) / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.journey
def test_a_head_learns_and_is_published(base: EagleRun, tmp_path: Path) -> None:
    config = at(base, tmp_path / "head", f"published={tmp_path / 'published'}")
    first = train_head(dataclasses.replace(config, run=override(config.run, ["train.steps=1", "train.lr_schedule=constant"])), "cpu")
    trained = train_head(config, "cpu")
    assert trained.step == 30 and len(losses(config)) == 30
    # The text has few continuations; the target knows them.
    assert first.accepted_tokens < 0.5 < trained.accepted_tokens <= 3, (first, trained)
    again = evaluate_rank(config, "cpu")
    assert again == trained
    weights = read_published(tmp_path / "published")
    vocabulary = published_vocabulary(weights, 320)
    assert vocabulary is not None and vocabulary.token_ids.tolist() == json.loads(
        (tmp_path / "head" / "draft_vocabulary.json").read_text("utf-8")
    )
    head = EagleHead(config.architecture(), ProcessGroups.single(), vocabulary=vocabulary, seed=None)
    load_published(head, weights)
    assert all(torch.isfinite(x).all() for x in head.parameters())
    assert json.loads((tmp_path / "published" / "config.json").read_text("utf-8"))["draft_vocab_size"] == 128
    with pytest.raises(FileExistsError, match="exists; give another folder"):
        evaluate_rank(config, "cpu")


@pytest.mark.journey
def test_features_on_disk_teach_as_well(base: EagleRun, tmp_path: Path) -> None:
    path = tmp_path / "head.json"
    path.write_text(EagleConfig.of_target(base.target.model, draft_vocab_size=64).to_json(), encoding="utf-8")
    config = at(base, tmp_path / "head", f"store={tmp_path / 'features'}", f"head={path}", "shard_samples=7")
    assert extract_rank(config, "cpu") > 10
    assert extract_rank(config, "cpu") == 0
    trained = train_head(config, "cpu")
    assert losses(config)[-1] < 0.7 * losses(config)[0] and trained.accepted_tokens > 0.5
    # Beside the target, on samples of the same text.
    running = evaluate_rank(dataclasses.replace(config, store=""), "cpu")
    assert running.loss == pytest.approx(trained.loss, rel=0.1)
    other = override(
        config, ["target.train.seed=7", "target.train.steps=1", "target.train.lr_schedule=constant", f"target.output={tmp_path / 'other'}"]
    )
    train_rank(other.target, "cpu")
    with pytest.raises(FeatureStoreError, match=r"holds features of \S*target/checkpoints/\S*30 [0-9a-f]{64}, "):
        train_head(other, "cpu")


@pytest.mark.journey
def test_a_published_model_is_a_target(base: EagleRun, tmp_path: Path) -> None:
    published = eagle_run("gpt_tiny", str(write_published(tmp_path / "llama", initializer_range=0.2, dtype=torch.bfloat16)))
    assert published.target.load.path == str(tmp_path / "llama") and published.run.train.dtype == "bfloat16"
    few = ("run.train.steps=8", "run.train.warmup_steps=2", "run.optimizer.lr=2e-2", f"store={tmp_path / 'features'}")
    run = override(base.run, ["train.dtype=bfloat16"])
    config = at(dataclasses.replace(base, run=run, target=published.target), tmp_path / "head", *few)
    assert extract_rank(config, "cpu") > 8
    trained = train_head(config, "cpu")
    assert trained.step == 8 and losses(config)[-1] < losses(config)[0]
    running = evaluate_rank(dataclasses.replace(config, store=""), "cpu")
    assert running.loss == pytest.approx(trained.loss, rel=0.1)
    wrong = at(config, tmp_path / "wrong", "target.model.rotary_base=77")
    with pytest.raises(ValueError, match=r"^target: .*holds the weights of another model: model.rotary_base=10000.* there, 77.* here"):
        train_head(wrong, "cpu")
    # Not even the vocabulary of its drafts was counted.
    assert not (tmp_path / "wrong").exists()
    # The folder of a run is the run that its recipe builds.
    head = eagle_run("gpt_tiny", base.target.output)
    own = head.target
    assert (own.model, own.train.dtype) == (base.target.model, base.target.train.dtype)
    # The head reads the tokenizer that lies there.
    assert head.run.data.tokenizer == f"{base.target.output}/tokenizer" and published.run.data.tokenizer == str(tmp_path / "llama")


def test_the_command(base: EagleRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    fields = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 320}
    changes: dict[str, object] = {f"target.model.{name}": value for name, value in fields.items()}
    changes |= {"target.output": base.target.output, "run.output": tmp_path / "head", "run.data.split": "80,20,0", "num_steps": 2}
    changes |= {"run.data.prefix": base.run.data.prefix, "run.data.tokenizer": base.run.data.tokenizer}
    sizes = {"steps": 2, "seq_len": 32, "eval_batches": 1, "warmup_steps": 0, "eval_interval": 0}
    changes |= {f"run.train.{name}": value for name, value in sizes.items()} | {"published": tmp_path / "published"}
    changes |= {"run.train.deterministic": "true"}

    def command(verb: str, changes: dict[str, object]) -> int:
        words = [word for path, value in changes.items() for word in ("--set", f"{path}={value}")]
        monkeypatch.setattr(sys, "argv", ["eagle", verb, "--recipe", "gpt_tiny", *words])
        return main()

    assert command("train", {}) == 2
    assert "run.data.prefix is empty" in capsys.readouterr().err
    for verb, message in (("train", "step 2: loss"), ("evaluate", "acceptance length"), ("export", "acceptance length")):
        assert command(verb, changes) == 0
        assert message in capsys.readouterr().out
    assert (tmp_path / "published" / "model.safetensors").exists()
    assert "accepted_tokens" in (tmp_path / "head" / "report.html").read_text(encoding="utf-8")
    for change, message in (
        ({"run.plan.pp": 2}, "a head has tp and ddp only"),
        ({"target.load.required": "true"}, "target.load.required=true is for a run that trains these weights"),
        ({"run.train.dtype": "bfloat16"}, "run.train.dtype=bfloat16 and target.train.dtype=float32 must be equal"),
        ({"head": tmp_path / "none.json"}, "none.json"),
        ({"target.output": tmp_path / "nothing", "store": tmp_path / "store"}, "holds no checkpoint"),
    ):
        assert command("extract" if "store" in change else "train", {**changes, **change}) == 2
        assert message in capsys.readouterr().err
