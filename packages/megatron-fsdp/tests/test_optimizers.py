# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Every elementwise rule of torch steps shards as it steps whole parameters, whatever state it begins with; others step plain shards."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model, fully_shard_optimizer
from tests.support.towers import Layer, Tower, tower, train

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, nesterov=False),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True, maximize=True),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "fused adagrad": functools.partial(torch.optim.Adagrad, fused=True),
    **{
        name: getattr(torch.optim, name)
        for name in ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.PReLU())


def backward(net: nn.Module, step: int, rank: int) -> None:
    net(torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()


def whole(make: Callable[[Any], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    net = build()
    optimizer = make(net.parameters())
    for step in range(3):
        for rank in range(2):
            backward(net, step, rank)
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict())


def sharded(make: Callable[[Any], torch.optim.Optimizer], *, looked_at: bool) -> MegatronFSDP:
    net = build()
    model, optimizer = fully_shard(net, make(net.parameters()), fsdp_unit_modules=nn.Linear)
    assert optimizer is not None
    if looked_at:
        model.optimizer_state_dict(optimizer)
    for step in range(3):
        backward(model, step, dist.get_rank())
        if looked_at:
            # Between the first gradient and the first step, too.
            model.optimizer_state_dict(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_rules() -> None:
    for name, make in RULES.items():
        expected = whole(make)
        for looked_at in (False, True):
            actual = dict(sharded(make, looked_at=looked_at).full_state_dict())
            assert all(torch.equal(actual[key], value) for key, value in expected.items()), (name, looked_at)


@pytest.mark.journey
@pytest.mark.world(2)
def test_rules_step_shards_as_whole_parameters_also_after_a_look_at_their_state(world):
    world(check_rules)


def check_loaded() -> None:
    results = []
    for loads in ("", "in place", "by name"):
        net = build()
        model, optimizer = fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        assert optimizer is not None
        state = model.optimizer_state_dict(optimizer)
        if loads:
            for entries in state["state"].values():
                entries["momentum_buffer"].to_local().fill_(1.0)
        if loads == "by name":
            model.load_optimizer_state_dict(optimizer, state)
        backward(model, 0, dist.get_rank())
        optimizer.step()
        results.append(dict(model.full_state_dict()))
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value - 0.09)
        assert torch.equal(results[2][name], results[1][name])


@pytest.mark.world(2)
def test_state_that_was_loaded_before_the_first_step_is_used(world):
    world(check_loaded)


def test_what_is_no_optimizer_and_no_sharded_model_is_refused():
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="model is a Sequential; pass what fully_shard_model returned"):
        fully_shard_optimizer(optimizer, net)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer is a MegatronFSDP; pass a torch.optim.Optimizer"):
        fully_shard_optimizer(fully_shard_model(build()), optimizer)  # type: ignore[arg-type]
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="module is a generator; pass the torch module"):
        fully_shard(net.parameters(), optimizer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer is a type"):
        fully_shard(net, torch.optim.AdamW)  # type: ignore[arg-type]
    assert not net._forward_pre_hooks, "nothing was sharded for it"
    with pytest.raises(TypeError, match="device_mesh is a tuple; make a mesh by"):
        fully_shard(net, device_mesh=(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"state for 'weight' on the meta device; build it from the sharded parameters"):
        fully_shard(net, torch.optim.Adagrad(net.parameters()))
    model = fully_shard_model(nn.Linear(2, 2))
    optimizer = fully_shard_optimizer(torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.5), model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert all(entries["sum"].min() == 1.5 for entries in optimizer.state.values())


class PlainSgd(torch.optim.Optimizer):
    """Has kernels of its own: nothing but plain tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert type(parameter) is nn.Parameter, "a DTensor has no memory of its own"
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["momentum"] = state.get("momentum", torch.zeros_like(parameter)) * group["momentum"] + parameter.grad
                    parameter -= group["lr"] * state["momentum"]


# What is known of an optimizer with such kernels is where it comes from.
FusedSgd = type("FusedSGD", (PlainSgd,), {"__module__": "transformer_engine.pytorch.optimizers.fused_sgd"})


def check_plain_shards(rule: type[PlainSgd], plain_shards: bool | None) -> None:
    torch.manual_seed(0)
    net = Tower()
    model = fully_shard_model(net, fsdp_unit_modules=Layer)
    optimizer = fully_shard_optimizer(rule(net.parameters()), model, plain_shards=plain_shards)
    reference, momentum = tower()
    momentum.param_groups[0]["momentum"] = 0.9
    train(model, optimizer, 3)
    train(reference, momentum, 3)
    expected = dict(reference.full_state_dict())
    assert all(torch.allclose(value, expected[name], rtol=1e-6) for name, value in model.full_state_dict())
    saved = model.optimizer_state_dict(optimizer)
    assert all(isinstance(entries["momentum"], DTensor) for entries in saved["state"].values())
    whole = {name: {"momentum": entries["momentum"].full_tensor()} for name, entries in saved["state"].items()}
    model.load_optimizer_state_dict(optimizer, {"state": whole, "param_groups": saved["param_groups"]})
    train(model, optimizer, 1), train(reference, momentum, 1)
    expected = dict(reference.full_state_dict())
    assert all(torch.allclose(value, expected[name], rtol=1e-6) for name, value in model.full_state_dict())


@pytest.mark.world(2)
def test_an_optimizer_may_step_plain_shards(world):
    world(check_plain_shards, rule=PlainSgd, plain_shards=True)


@pytest.mark.world(2)
def test_optimizers_of_transformer_engine_step_plain_shards(world):
    world(check_transformer_engine)


def check_transformer_engine() -> None:
    check_plain_shards(FusedSgd, None)
