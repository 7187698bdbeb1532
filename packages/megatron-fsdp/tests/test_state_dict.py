# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Saving in one layout and loading in another."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard
from tests.support.world import run


class Odd(nn.Module):
    """Odd sizes, a scalar, a tied weight, a buffer, and a stacked weight whose leading dimension is too coarse to divide."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in ((7, 5), (5, 3), (3, 1), (1, 7)))
        self.scale = nn.Parameter(torch.ones(()))
        self.stacked = nn.Parameter(torch.randn(2, 50, 7))
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("counter", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x * self.scale).sum() + (self.stacked @ x.T).square().mean() + self.tied(x).sum()


def build(seed: int, **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Odd().double()
    net.counter.fill_(seed)
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=0.01), **{"fsdp_unit_modules": [nn.Linear], **options})
    assert optimizer is not None
    return model, optimizer


def step(model: MegatronFSDP, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state = model.optimizer_state_dict(optimizer)["state"]
    return {f"{name}.{key}": whole(value) for name, entries in state.items() for key, value in entries.items()}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().reshape(-1) if isinstance(value, DTensor) else value.clone().reshape(-1)


def save(directory: Path, options: dict[str, Any], *, background: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = build(1, **options)
    for seed in range(3):
        step(model, optimizer, seed)
    state = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
    # Training communicates over the default group meanwhile.
    group = dist.new_group() if background else None
    saving = (dcp.async_save if background else dcp.save)(state, checkpoint_id=directory, process_group=group)
    step(model, optimizer, 3)
    if background:
        saving.result()
    return dict(model.full_state_dict()), moments(model, optimizer)


def load(directory: Path, options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, optimizer = build(2, **options)
    state = {"model": model.state_dict(), "optimizer": model.optimizer_state_dict(optimizer)}
    dcp.load(state, checkpoint_id=directory)
    model.load_state_dict(state["model"])
    model.load_optimizer_state_dict(optimizer, state["optimizer"])
    step(model, optimizer, 3)
    return dict(model.full_state_dict()), moments(model, optimizer)


@pytest.mark.journey
@pytest.mark.parametrize(
    ("source", "target"),
    [((4, 3), (2, 1)), ((2, 0), (3, 3)), pytest.param((3, 3), (1, 2), marks=pytest.mark.slow), ((1, 3), (4, 2))],
    ids=lambda layout: f"{layout[0]} ranks strategy {layout[1]}",
)
def test_a_checkpoint_continues_in_another_world_and_strategy(tmp_path, source, target):
    saved = run(save, source[0], directory=tmp_path, options={"zero_dp_strategy": source[1]})[0]
    loaded = run(load, target[0], directory=tmp_path, options={"zero_dp_strategy": target[1], "fsdp_unit_modules": ()})[0]
    for mine, theirs in zip(saved, loaded, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(theirs[name].reshape(-1), mine[name].reshape(-1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "offloads", [pytest.param((True, False), marks=pytest.mark.journey), (False, True)], ids=["from the host", "to the host"]
)
def test_a_checkpoint_saved_while_training_goes_on_moves_between_host_and_device(tmp_path, offloads):
    saved = run(save, 2, directory=tmp_path, options={"cpu_offload": offloads[0]}, background=True)[0]
    loaded = run(load, 3, directory=tmp_path, options={"cpu_offload": offloads[1], "zero_dp_strategy": 2})[0]
    for mine, theirs in zip(saved, loaded, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(theirs[name].reshape(-1), mine[name].reshape(-1), rtol=1e-12, atol=1e-12)


def check_copies() -> None:
    model, optimizer = build(1)
    before = {name: value.clone() for name, value in model.full_state_dict()}
    copied = copy.deepcopy(model.state_dict())
    step(model, optimizer, 0)
    assert any(not torch.equal(value, before[name]) for name, value in model.full_state_dict())
    assert torch.equal(copied["layers.0.weight"].full_tensor(), before["layers.0.weight"])
    model.load_state_dict(copied)
    assert all(torch.equal(value, before[name]) for name, value in model.full_state_dict())
    with pytest.raises(TypeError, match="cannot be pickled; save it by torch.distributed.checkpoint"):
        pickle.dumps(model.state_dict())


@pytest.mark.world(2)
def test_a_copy_of_the_state_can_be_loaded_again_and_gives_the_whole_tensors(world):
    world(check_copies)


def check_full_tensors() -> None:
    torch.manual_seed(0)
    expected = {name: value.clone() for name, value in Odd().double().state_dict().items()}
    torch.manual_seed(0)
    model, _ = fully_shard(Odd().double(), fsdp_unit_modules=nn.Linear)
    for name, value in model.state_dict().items():
        if isinstance(value, DTensor):
            assert torch.equal(value.full_tensor(), expected[name]), name
    assert any(p.to_local().numel() == 0 for p in model.parameters())
    streamed = dict(model.full_state_dict())
    assert streamed.keys() == expected.keys() and all(torch.equal(streamed[name], expected[name]) for name in expected if name != "counter")
    # A whole plain state dict loads as it would into the plain module.
    model.load_state_dict({name: value + 1 for name, value in expected.items()})
    assert all(torch.equal(value, expected[name] + 1) for name, value in model.full_state_dict())


@pytest.mark.world(3)
def test_shards_give_back_the_whole_tensors_bit_for_bit(world):
    world(check_full_tensors)


def check_stream(path: Path, dtype: torch.dtype | None) -> None:
    model, _ = build(1)
    model.save_full_state_dict(path / "model.safetensors", dtype=dtype)
    dist.barrier()
    actual, expected = load_file(path / "model.safetensors"), dict(model.full_state_dict(dtype=dtype))
    assert actual.keys() == expected.keys() and {"layers.0.weight", "tied.weight", "counter"} <= actual.keys()
    assert all(actual[name].dtype == value.dtype and torch.equal(actual[name], value) for name, value in expected.items())
    assert [file.name for file in path.iterdir()] == ["model.safetensors"]
    other, _ = build(2, zero_dp_strategy="optim")
    other.load_state_dict(actual)
    assert all(torch.equal(value, actual[name].to(value.dtype)) for name, value in other.full_state_dict())
    with pytest.raises(ValueError, match="which safetensors lacks"):
        model.save_full_state_dict(path / "other.safetensors", dtype=torch.complex64)


@pytest.mark.world(2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_full_state_is_streamed_into_a_safetensors_file(world, tmp_path, dtype):
    world(check_stream, path=tmp_path, dtype=dtype)


def check_wrong_states() -> None:
    model, optimizer = build(0)
    state = dict(model.state_dict())
    missing = {name: value for name, value in state.items() if name != "scale"}
    with pytest.raises(ValueError, match=r"missing \['scale'\]"):
        model.load_state_dict(missing)
    assert model.load_state_dict(missing, strict=False).missing_keys == ["scale"]
    with pytest.raises(ValueError, match=r"unexpected \['extra'\]"):
        model.load_state_dict({**state, "extra": torch.ones(1)})
    with pytest.raises(ValueError, match="'stacked' has shape"):
        model.load_state_dict({**state, "stacked": torch.ones(3)})
    with pytest.raises(ValueError, match="assign"):
        model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match="no entry for"):
        model.load_optimizer_state_dict(optimizer, {"state": {}, "param_groups": {}})


@pytest.mark.world(2)
def test_a_state_that_does_not_fit_is_refused_by_name(world):
    world(check_wrong_states)


def check_silence() -> None:
    warnings.simplefilter("error")
    model, optimizer = build(0)
    step(model, optimizer, 0)
    model.state_dict(), model.optimizer_state_dict(optimizer), dict(model.full_state_dict())
    assert dist.get_world_size() == 2


@pytest.mark.world(2)
def test_nothing_warns(world):
    world(check_silence)


def check_operators() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    used: set[str] = set()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            used.add(str(func))
            return func(*args, **(kwargs or {}))

    with Operators():
        model, optimizer = build(0)
        step(model, optimizer, 0)
        dict(model.full_state_dict())
    assert "_c10d_functional.all_gather_into_tensor_out.default" in used
    assert "_c10d_functional.all_gather_into_tensor.default" not in used
    assert not any("coalesced" in name for name in used)


@pytest.mark.world(2)
def test_no_operator_is_used_that_damages_the_heap_on_gloo(world):
    """Its worker threads store the name of what they finished without a lock; names of 16 characters and more are freed twice."""
    world(check_operators)


def check_handed_over(source: str, target: str) -> None:
    (model, optimizer), (other, fresh) = build(1, zero_dp_strategy=source), build(2, zero_dp_strategy=target)
    step(model, optimizer, 0)
    other.load_state_dict(model.state_dict())
    # Nothing was made of it before: the scalar's moments must become what its own step count does not.
    other.load_optimizer_state_dict(fresh, model.optimizer_state_dict(optimizer))
    for each in ((model, optimizer), (other, fresh)):
        step(*each, 1)
    trained = dict(other.full_state_dict())
    for name, value in model.full_state_dict():
        assert torch.equal(trained[name], value), name


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize(("source", "target"), [("no_shard", "optim_grads_params"), ("optim", "no_shard"), ("no_shard", "no_shard")])
def test_an_optimizer_that_has_not_stepped_takes_the_state_of_another_strategy(world, source, target):
    world(check_handed_over, source=source, target=target)
