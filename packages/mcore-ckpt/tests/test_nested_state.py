# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Nested states go in and come back as torch.distributed.checkpoint takes them."""

import copy

import pytest
import torch
from torch import nn

from mcore_ckpt import CheckpointingException, CheckpointManager, load, save
from mcore_ckpt.manifest import read_manifest


def trained(seed, **options):
    """A small model and its optimizer after two steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), "lr": 0.1 * (seed + 1)}, {"params": model[1].parameters(), "betas": (0.5, 0.75)}]
    optimizer = torch.optim.AdamW(groups, **options)
    for _ in range(seed + 1):
        model(torch.ones(5, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model, optimizer, **more):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **more}


def assert_equal(mine, other, path="state"):
    assert type(mine) is type(other), path
    if isinstance(mine, dict):
        assert mine.keys() == other.keys(), path
        for key in mine:
            assert_equal(mine[key], other[key], f"{path}.{key}")
    elif isinstance(mine, list):
        for place, (one, two) in enumerate(zip(mine, other, strict=True)):
            assert_equal(one, two, f"{path}.{place}")
    elif isinstance(mine, torch.Tensor):
        assert torch.equal(mine, other), path
    else:
        assert mine == other, path


@pytest.mark.parametrize("format", ["native", "torch_dist"])
def test_a_model_with_its_optimizer_comes_back_whole(format, tmp_path):
    saved = state_of(*trained(1), step=7, best=None, note="x", curve=[3.0, 2.5], ema={"decay": 0.99, "shadow": {}})
    before = copy.deepcopy(saved)
    save(saved, tmp_path / "one", extra={"seed": 1}, format=format)
    model, optimizer = trained(0)
    asked = state_of(model, optimizer, step=0, best=1.5, note="", curve=[], ema={"decay": 0.0, "shadow": {}})
    assert load(asked, tmp_path / "one") == {"seed": 1}
    assert_equal(asked, before)
    optimizer.load_state_dict(asked["optimizer"])
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.75) and optimizer.param_groups[0]["lr"] == 0.2


def test_names_are_paths_so_that_flat_states_read_nested_ones(tmp_path):
    model, optimizer = trained(0)
    save(state_of(model, optimizer), tmp_path / "one")
    names = read_manifest(tmp_path / "one").tensors
    assert {"model.0.weight", "optimizer.state.3.exp_avg"} <= set(names)
    weight = torch.zeros(4, 3)
    load({"model.0.weight": weight}, tmp_path / "one", strict=False)
    assert torch.equal(weight, model[0].weight)


def test_a_manager_keeps_nested_states_and_asynchronous_ones_hold_their_values(tmp_path):
    model, optimizer = trained(1)
    state = state_of(model, optimizer, step=1)
    before = copy.deepcopy(state)
    manager = CheckpointManager(tmp_path)
    request = manager.save(1, state, asynchronous=True)
    with torch.no_grad():
        model[0].weight.zero_()
    state["step"] = 9
    request.wait()
    asked = state_of(*trained(0), step=0)
    assert manager.load(asked)[0] == 1
    assert_equal(asked, before)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}, "two entries of the state are called a.b"),
        ({"a": {(1, 2): torch.ones(1)}}, "a has a key (1, 2), which is tuple"),
        ({"a": {"b": object()}}, "a.b is object"),
        ({"a": {"b": nn.Linear(1, 1)}}, "as its state_dict()"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_path(state, words, tmp_path):
    with pytest.raises(CheckpointingException) as caught:
        save(state, tmp_path / "one")
    assert words in str(caught.value) and not (tmp_path / "one" / "manifest.json").exists()


def test_what_cannot_be_filled_is_refused_before_anything_is_written(tmp_path):
    save({"a": {"w": torch.ones(2), "lr": 0.1}}, tmp_path / "one")
    weight = torch.zeros(2)
    with pytest.raises(CheckpointingException, match=r"no value for a\.momentum"):
        load({"a": {"w": weight, "lr": 0.0, "momentum": 0.0}}, tmp_path / "one")
    save({"a": ([0.1], {"w": torch.ones(2)}, 3)}, tmp_path / "two")
    with pytest.raises(CheckpointingException, match=r"a\.0 stands in a tuple"):
        load({"a": ([0.1], {"w": weight}, 0)}, tmp_path / "two")
    assert not weight.any()
    with pytest.raises(CheckpointingException, match="state_values"):
        save({"a": {"lr": 0.1}}, tmp_path / "three", extra={"state_values": 1})
