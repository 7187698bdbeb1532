# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Adapters of stacked experts in a run: each layout learns what one rank learns, and saves adapters alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager, read_tensor
from mcore_ckpt.manifest import read_manifest
from mcore_tools import sft
from mcore_tools.launch import launch
from mcore_tools.recipes import override
from mcore_tools.training import train_rank
from tests.support.published import write_chat, write_published

LAYOUTS = {
    "pp": ["plan.pp=2"],
    "ep": ["plan.dp=2", "plan.ep=2"],
    "fsdp": ["plan.dp=2", "data_parallel=fsdp"],
    "fsdp, ep": ["plan.dp=2", "plan.ep=2", "data_parallel=fsdp"],
}
HALVES = {f"layers.{layer}.mlp.experts.{name}_lora.{half}" for layer in range(2) for name in ("up", "down") for half in "AB"}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("published")
    write_published(folder / "llama")
    copied = shutil.copytree(folder / "llama", folder / "mixture")
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "max_position_embeddings": 256}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, **experts, num_key_value_heads=2, head_dim=16, initializer_range=0.2)
    Qwen3MoeForCausalLM(config).save_pretrained(copied)
    write_chat(copied / "chat.jsonl")
    return copied


def tune(mixture: Path, output: Path, layout: list[str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradient norms of three steps, and what the last one saved of the experts."""
    base = sft.base_config(str(mixture), [str(mixture / "chat.jsonl")], str(output))
    changes = ["lora.rank=4", "lora.alpha=16", "lora.targets=[qkv,experts]", "train.seq_len=128", "train.global_batch_size=4"]
    changes += ["train.steps=3", "train.dtype=float64", "train.eval_interval=0", "optimizer.lr=1e-2", "optimizer.weight_decay=0.1"]
    # Of a rank's own tokens, so that it depends on their division.
    changes += ["moe.moe_aux_loss_coeff=0", "log.tensorboard=false", "log.html=false", *layout]
    config = sft.prepared(override(base, changes), ["train.steps", "train.eval_batches"], rank=0)
    ranks = config.plan.world_size
    train_rank(config, "cpu") if ranks == 1 else launch(train_rank, ranks, config=config, kind="cpu")
    rows = [row for row in map(json.loads, (output / "train.jsonl").read_text().splitlines()) if "loss" in row]
    folder = CheckpointManager(output / "checkpoints").folder(3)
    assert all("lora." in name for name in read_manifest(folder).tensors)
    return [row[name] for row in rows for name in ("loss", "grad_norm")], {name: read_tensor(folder, name) for name in HALVES}


def test_fsdp2_is_refused_by_name(mixture: Path, tmp_path: Path) -> None:
    base = sft.base_config(str(mixture), [str(mixture / "chat.jsonl")], str(tmp_path))
    with pytest.raises(ValueError, match=r"data_parallel='fsdp2' does not divide experts .*; set data_parallel=fsdp, or moe=none"):
        override(base, ["lora.targets=[qkv,experts]", "plan.dp=2", "data_parallel=fsdp2"])


def test_an_export_that_has_no_form_for_experts_is_refused_before_training(
    mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(mixture), "--data", str(mixture / "chat.jsonl"), "--output", str(tmp_path / "run"), "--set", "sft.export=adapter"]
    assert sft.main([*words, "--set", "lora.targets=[qkv,experts]"]) == 2
    assert "has no form for adapters of experts, such as layers.0.mlp.experts.up_lora.A; set sft.export=merged" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def alone(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Of one rank."""
    return tune(mixture, tmp_path_factory.mktemp("alone") / "run", [])


@pytest.mark.journey
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_teaches_the_experts_the_same(
    mixture: Path, tmp_path: Path, alone: tuple[list[float], dict[str, torch.Tensor]], layout: str
) -> None:
    numbers, halves = tune(mixture, tmp_path / "run", LAYOUTS[layout])
    assert len(numbers) == 6 and numbers == pytest.approx(alone[0], rel=1e-8)
    for name, expected in alone[1].items():
        assert expected.abs().max() > 0, name
        torch.testing.assert_close(halves[name], expected, rtol=1e-6, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}")
