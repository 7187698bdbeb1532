# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters that cross ranks in 8 bits."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import Float8Format, MegatronFSDP, fully_shard


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What the copies of a whole weight stand for."""
    payload, scale = Float8Format().quantize(weight.detach(), weight.detach().abs().amax())
    Float8Format().restore(payload, scale, out := torch.empty_like(weight))
    return out


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_scaling_rounds_to_the_precision_of_the_format(dtype):
    weight = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    form = Float8Format(dtype)
    payload, scale = form.quantize(weight, weight.abs().amax())
    assert payload.element_size() == 1 and torch.log2(scale) == torch.log2(scale).round()
    form.restore(payload, scale, out := torch.empty_like(weight))
    large = weight.abs() > weight.abs().amax() / 64
    assert ((out - weight) / weight)[large].abs().max() <= torch.finfo(dtype).eps / 2
    # Copies of what copies stand for are the same copies.
    again, _ = form.quantize(out, weight.abs().amax())
    assert torch.equal(again.view(torch.uint8), payload.view(torch.uint8))
    zero, scale = form.quantize(torch.zeros(3), torch.zeros(()))
    assert scale.isfinite() and not zero.float().any()


def serial(steps: int) -> dict[str, torch.Tensor]:
    """Computes with rounded weights and steps the others."""
    net, shadow = build(), build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                shadow.get_parameter(name).copy_(rounded(parameter) if name.endswith("weight") else parameter)
        shadow.zero_grad()
        shadow(batch(step)).square().mean().backward()
        for name, parameter in net.named_parameters():
            parameter.grad = shadow.get_parameter(name).grad
        optimizer.step()
    return dict(net.state_dict())


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(steps: int, **options: Any) -> MegatronFSDP:
    net = build()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fully_shard(net, sgd, fsdp_unit_modules=nn.Linear, eight_bit_parameters="*.weight", **options)
    assert optimizer is not None
    for step in range(steps):
        model(batch(step).chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class Counted(Float8Format):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def quantize(self, values: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return super().quantize(values, largest)


def check_training() -> None:
    expected = serial(3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_outer", "dp_shard"))
    two_levels = {"device_mesh": mesh, "dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_outer"}
    for options in ({}, two_levels, {**two_levels, "outer_dp_sharding_strategy": "optim"}):
        form = Counted()
        model = train(3, eight_bit_format=form, **options)
        for name, value in model.full_state_dict():
            torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)
        assert form.calls == 3 * 3, "three weights, once a step, though each is gathered twice"
    for wrong, message in (
        ({"zero_dp_strategy": "optim"}, "whole on every rank"),
        ({"parameter_strategies": {"0.*": 1}}, "'0.weight', which is whole"),
    ):
        with pytest.raises(ValueError, match=message):
            train(0, **wrong)
    with pytest.raises(ValueError, match="8 bits"):
        Float8Format(torch.bfloat16)


@pytest.mark.world(4)
def test_training_computes_with_rounded_weights_and_steps_the_others(world):
    world(check_training)
