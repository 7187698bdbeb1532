# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Checkpointer: keeps the state of steps, and fills live tensors from the newest one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mcore_ckpt import CheckpointManager
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.training import Checkpointer, TensorShard, model_state
from tests.contracts.conformance import mismatches

CONFIG = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, vocab_size=16)

PROVIDERS: dict[str, Callable[[Path], Checkpointer]] = {"mcore-ckpt": CheckpointManager}


def model(seed: int) -> GPTModel:
    return GPTModel(CONFIG, ProcessGroups.single(), seed=seed)


@pytest.mark.parametrize("name", PROVIDERS)
def test_the_newest_step_fills_live_tensors(name: str, tmp_path: Path) -> None:
    checkpointer = PROVIDERS[name](tmp_path / "checkpoints")
    assert mismatches(checkpointer, Checkpointer) == []
    assert checkpointer.latest() is None
    for step in (5, 10):
        checkpointer.save(step, model_state(model(step), ProcessGroups.single()), {"trainer": {"step": step, "share": 0.5}})
    assert checkpointer.latest() == 10
    # Another process finds the same.
    checkpointer = PROVIDERS[name](tmp_path / "checkpoints")
    target = model(0)
    step, extra = checkpointer.load(model_state(target, ProcessGroups.single()))
    assert (step, extra) == (10, {"trainer": {"step": 10, "share": 0.5}})
    expected = model(10).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in target.state_dict().items())
    assert not torch.equal(target.state_dict()["output.weight"], model(0).state_dict()["output.weight"])


@pytest.mark.parametrize("name", PROVIDERS)
def test_parts_and_lists_of_parts_make_up_a_tensor(name: str, tmp_path: Path) -> None:
    checkpointer = PROVIDERS[name](tmp_path)
    whole = torch.arange(12.0).view(4, 3)
    boxes = [TensorShard(whole[:1].clone(), (4, 3), (0, 0), 0), TensorShard(whole[1:].clone(), (4, 3), (1, 0), 0)]
    checkpointer.save(1, {"a": boxes}, {})
    column, row = torch.zeros(4, 1), torch.zeros(1, 3)
    checkpointer.load({"a": TensorShard(column, (4, 3), (0, 2), 0)})
    checkpointer.load({"a": TensorShard(row, (4, 3), (2, 0), 0)})
    assert torch.equal(column, whole[:, 2:]) and torch.equal(row, whole[2:3])
