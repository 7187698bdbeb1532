# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A mixture begins as the dense model that it is made of, in any layout, and goes on as a mixture."""

import json
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager, read_tensor, save
from mcore_ckpt.manifest import read_manifest
from mcore_tools.cli import main
from mcore_tools.recipes import RecipeError, RunConfig, override, recipe
from mcore_tools.training import export_run, train_rank
from tests.support.corpora import write_corpus

COPIES = ("moe.num_moe_experts=4", "moe.moe_router_topk=2")
SLICES = ("moe.num_moe_experts=8", "moe.moe_router_topk=4", "moe.moe_ffn_hidden_size=8")
LAYOUTS = {
    "ep": [*SLICES, "plan.dp=2", "plan.ep=2"],
    "tp-ep": [*COPIES, "plan.tp=2", "plan.ep=2"],
    "etp": [*SLICES, "plan.tp=2", "plan.etp=2"],
    "chunks": [*COPIES, "plan.pp=2", "plan.vpp=2"],
    "fsdp": [*SLICES, "plan.dp=2", "plan.ep=2", "data_parallel=fsdp"],
    "slices": [*COPIES, "plan.dp=2", "optimizer.use_distributed_optimizer=true"],
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A dense run of four steps in 64 bits."""
    folder = tmp_path_factory.mktemp("dense")
    write_corpus(folder, "to be or not to be, that is the question. ")
    changes = [
        *(f"data.prefix={folder}/corpus", f"data.tokenizer={folder}/tokenizer", "data.split=80,20,0", f"output={folder}/run"),
        *("model.hidden_size=16", "model.ffn_hidden_size=16", "model.vocab_size=320", "train.seq_len=16", "train.micro_batch_size=1"),
        *("train.global_batch_size=4", "train.steps=4", "train.eval_batches=1", "train.eval_interval=0", "train.warmup_steps=0"),
        *("train.dtype=float64", "log.tensorboard=false", "log.html=false"),
    ]
    config = override(recipe("gpt_tiny"), changes)
    train_rank(config, "cpu")
    return config


def grown(dense: RunConfig, output: Path, *changes: str) -> RunConfig:
    """A run of its own that begins as the dense one ended."""
    return override(dense, [f"output={output}", f"load.path={dense.output}", "load.upcycle=true", "moe.moe_aux_loss_coeff=0.01", *changes])


def losses(config: RunConfig) -> list[float]:
    return [json.loads(line)["loss"] for line in (Path(config.output) / "train.jsonl").read_text(encoding="ascii").splitlines()]


def train_each(configs: list[RunConfig]) -> None:
    for config in configs:
        train_rank(config, "cpu")


def last_step(config: RunConfig) -> Path:
    return CheckpointManager(Path(config.output) / "checkpoints").path(config.train.steps)


@pytest.mark.journey
@pytest.mark.world(2)
def test_the_first_loss_is_that_of_the_dense_model_in_any_layout(world, dense: RunConfig, tmp_path: Path) -> None:
    same = override(dense, [f"output={tmp_path}/dense", f"load.path={dense.output}"])
    train_rank(same, "cpu")
    configs = [grown(dense, tmp_path / name, *changes) for name, changes in LAYOUTS.items()]
    world(train_each, configs=configs)
    for config in configs:
        first, *others = losses(config)
        assert first == pytest.approx(losses(same)[0], rel=1e-10), config.output
        assert len(others) == 3 and min(others) < first
    # One run on other ranks: routers are drawn alike everywhere.
    ep, fsdp = losses(configs[0]), losses(configs[4])
    assert ep == pytest.approx(fsdp, rel=1e-9) and ep[1:] != pytest.approx(losses(same)[1:], rel=1e-6)


@pytest.mark.journey
def test_the_same_command_goes_on_with_the_mixture(dense: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = grown(dense, tmp_path / "run", *SLICES)
    train_rank(config, "cpu")
    part = override(config, [f"output={tmp_path}/part", "train.checkpoint_interval=2"])
    stops = iter([False, True])
    assert train_rank(part, "cpu", stop=lambda: next(stops)).stopped_at == 2
    assert "goes on from weights of " in capsys.readouterr().out
    train_rank(override(part, [f"load.path={tmp_path}/gone"]), "cpu")
    assert "goes on from step 2 of " in capsys.readouterr().out and losses(part) == losses(config)
    # Slices of one feed-forward lie in a row, and their routers learn apart.
    router = read_tensor(last_step(config), "layers.1.mlp.router.weight")
    assert router.shape == (8, 16) and not torch.equal(router[0], router[1]) and torch.allclose(router[0], router[1], atol=0.1)


@pytest.mark.journey
def test_a_hugging_face_folder_becomes_a_mixture(dense: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    export_run(Path(dense.output) / "checkpoints", tmp_path / "hf")
    fields = ["data.prefix=" + dense.data.prefix, "data.split=80,20,0", "train.seq_len=16", "train.steps=2", "train.warmup_steps=0"]
    fields += ["train.global_batch_size=4", "train.eval_batches=1", "train.eval_interval=0", "log.tensorboard=false", "log.html=false"]
    common = [*fields, f"load.path={tmp_path}/hf", "train.dtype=float64"]
    runs = {"same": [], "mixture": ["load.upcycle=true", *COPIES]}
    for name, changes in runs.items():
        assert main(["train", *(f"--set={change}" for change in (*common, f"output={tmp_path}/{name}", *changes))]) == 0
    first, mixture = (losses(override(dense, [f"output={tmp_path}/{name}"])) for name in runs)
    assert mixture[0] == pytest.approx(first[0], rel=1e-10) and len(mixture) == 2
    assert read_manifest(tmp_path / "mixture" / "checkpoints" / "step_00000002").extra["family"] in ("mixtral", "qwen3_moe")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["load.upcycle=true", *COPIES], r"upcycle=true makes a mixture of the weights of a dense model, found path=''"),
        (
            ["load.upcycle=true", *COPIES, "load.path=x", "load.take=all"],
            r"take='all'; name that model with load\.path, and set load\.take=",
        ),
        (["load.upcycle=true", "load.path=x"], r"moe=none; set moe\.num_moe_experts=8, or load\.upcycle=false"),
        (["load.upcycle=true", "load.path=x", *COPIES, "lora.rank=2"], r"load\.upcycle=true does not go with lora: train the mixture"),
    ],
    ids=["path", "take", "moe", "lora"],
)
def test_choices_that_do_not_go_together_are_refused(changes: list[str], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        override(recipe("gpt_tiny"), changes)


@pytest.mark.journey
def test_what_does_not_become_the_mixture_is_named_before_anything_is_written(dense: RunConfig, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for changes, words in (
        (
            [*COPIES, "moe.moe_ffn_hidden_size=5"],
            r"load\.upcycle=true: moe_ffn_hidden_size=5 of layers\.0\..* must divide the dense width 16",
        ),
        ([*COPIES, "moe.moe_shared_expert_intermediate_size=8"], r"shared_experts\.up\.weight has no part in a dense model"),
        ([*COPIES, "model.ffn_hidden_size=32"], r"model\.ffn_hidden_size=16 there, 32 here"),
        (["moe.num_moe_experts=4", "moe.moe_router_topk=3", "moe.moe_ffn_hidden_size=8"], r"moe_router_topk=3 must be a multiple of 2"),
        ([*COPIES, "model.num_layers=3"], r"model\.num_layers=4 there, 3 here"),
    ):
        with pytest.raises(ValueError, match=words):
            train_rank(grown(dense, run, *changes), "cpu")
    mixture = grown(dense, tmp_path / "mixture", *COPIES, "train.steps=1")
    train_rank(mixture, "cpu")
    again = override(grown(dense, run, *COPIES), [f"load.path={mixture.output}"])
    with pytest.raises(
        ValueError, match=r"load\.upcycle=true makes a mixture of a dense model, and .* holds one already; set load\.upcycle=false"
    ):
        train_rank(again, "cpu")
    # Weights alone say nothing of their model but by their names.
    names = [name for name in read_manifest(last_step(mixture)).tensors if not name.startswith("optimizer.")]
    save({name: read_tensor(last_step(mixture), name) for name in names}, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"holds one already"):
        train_rank(override(again, [f"load.path={tmp_path}/weights"]), "cpu")
    assert not run.exists()
