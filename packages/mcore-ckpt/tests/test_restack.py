# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Pairs of attention and feed-forward as layers of one kind each, and back."""

import pytest
import torch

from mcore_ckpt import CheckpointingException, save
from mcore_ckpt._core._load import read_tensor
from mcore_ckpt.assets import read_asset
from mcore_ckpt.cli import main
from mcore_ckpt.manifest import read_manifest
from mcore_ckpt.restack import to_hybrid, to_uniform


def pairs(layers):
    state = {"model.embedding.weight": torch.randn(8, 4)}
    for layer in range(layers):
        for part in ("input_norm.weight", "attention.qkv.weight", "ffn_norm.weight", "mlp.up.weight"):
            state[f"model.layers.{layer}.{part}"] = torch.randn(3, 4)
            state[f"optimizer.exp_avg.layers.{layer}.{part}"] = torch.randn(3, 4)
    return state


def content(folder):
    manifest = read_manifest(folder)
    return {name: read_tensor(folder, name, manifest) for name in manifest.tensors}, manifest.extra


def test_there_and_back_are_the_same_bytes_and_the_config_follows(tmp_path, capsys):
    state = pairs(3)
    save(state, tmp_path / "c", extra={"step": 7, "config": {"num_layers": 3, "hidden_size": 4}}, assets={"run.yaml": b"3"})
    assert main(["to-hybrid", str(tmp_path / "c"), str(tmp_path / "hybrid")]) == 0
    hybrid, extra = content(tmp_path / "hybrid")
    assert extra == {"step": 7, "config": {"num_layers": 6, "hidden_size": 4, "hybrid_layer_pattern": "*-*-*-"}}
    assert len(hybrid) == len(state)
    assert torch.equal(hybrid["model.layers.2.attention.qkv.weight"], state["model.layers.1.attention.qkv.weight"])
    assert torch.equal(hybrid["optimizer.exp_avg.layers.5.mlp.up.weight"], state["optimizer.exp_avg.layers.2.mlp.up.weight"])
    assert main(["to-uniform", str(tmp_path / "hybrid"), str(tmp_path / "back")]) == 0
    assert read_asset(tmp_path / "back", "run.yaml") == b"3"
    back, extra = content(tmp_path / "back")
    assert extra["config"] == {"num_layers": 3, "hidden_size": 4, "hybrid_layer_pattern": None}
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("name", "convert"),
    [("layers.1.mamba.in_proj.weight", to_hybrid), ("layers.1.attention.qkv.weight", to_uniform), ("embedding.weight", to_hybrid)],
)
def test_a_stack_of_another_kind_is_refused_by_what_shows_it(tmp_path, name, convert):
    save({name: torch.ones(2)}, tmp_path / "c")
    with pytest.raises(CheckpointingException, match=name if "layers" in name else "it has no layers"):
        convert(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_damaged_source_is_named_and_nothing_is_written(tmp_path):
    save(pairs(1), tmp_path / "c")
    (file,) = (tmp_path / "c").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointingException, match=file.name):
        to_hybrid(tmp_path / "c", tmp_path / "out")
    assert not (tmp_path / "out").exists()
