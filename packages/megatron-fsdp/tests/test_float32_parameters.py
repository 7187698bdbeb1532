# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters that their module keeps in float32 compute, are stepped and add up their gradients in it, whatever the rest does."""

import copy
import re
from collections.abc import Collection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import KeepsFloat32, MixedPrecisionPolicy, fully_shard

WIDTH = 6
NARROW = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


class Decay(nn.Module):
    """``rate`` [WIDTH] is applied in its own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.rate = nn.Parameter(torch.randn(WIDTH))

    def float32_parameters(self) -> Collection[str]:
        return ("rate",)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return x + (y.to(self.rate.dtype) * torch.exp(-self.rate.exp())).to(x.dtype)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Decay(), Decay(), Decay())


def narrowed(net: nn.Module) -> nn.Module:
    """A copy that computes in bfloat16 but for the rates."""
    narrow = copy.deepcopy(net).to(torch.bfloat16)
    for (name, parameter), own in zip(narrow.named_parameters(), net.parameters(), strict=True):
        if name.endswith("rate"):
            parameter.data = own.data.clone()
    return narrow


def loss_of(net: Any, step: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    return net(x.to(torch.bfloat16)).float().square().mean()


def expected_run() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of float32 weights that are rounded for each step, with gradients summed in float32."""
    net = build()
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=0.05), []
    for step in range(4):
        narrow = narrowed(net)
        loss = loss_of(narrow, step)
        loss.backward()
        losses.append(loss.item())
        for parameter, rounded in zip(net.parameters(), narrow.parameters(), strict=True):
            assert rounded.grad is not None
            parameter.grad = rounded.grad.float()
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return losses, dict(net.state_dict())


def check_bits() -> None:
    expected, weights = expected_run()
    for options in (*({"zero_dp_strategy": strategy} for strategy in range(4)), {"fsdp_double_buffer": True}):
        net = build()
        model, optimizer = fully_shard(
            net, torch.optim.AdamW(net.parameters(), lr=0.05), fsdp_unit_modules=Decay, mixed_precision=NARROW, **options
        )
        assert optimizer is not None
        losses = []
        for step in range(4):
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        assert losses == expected, options
        assert all(torch.equal(value, weights[name]) for name, value in model.full_state_dict()), options


@pytest.mark.world(2)
def test_they_compute_in_float32_beside_bfloat16_bit_for_bit(world):
    world(check_bits)


@pytest.mark.parametrize(
    ("created", "policy", "compute", "main", "gradient"),
    [
        (torch.float32, MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.float32, torch.float32, torch.float32),
        (torch.bfloat16, MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.float32, torch.float32, torch.float32),
        (torch.float64, MixedPrecisionPolicy(param_dtype=torch.bfloat16), torch.float32, torch.float64, torch.float64),
        (torch.float32, MixedPrecisionPolicy(param_dtype=torch.float8_e4m3fn), torch.float32, torch.float32, torch.float32),
        (torch.float32, MixedPrecisionPolicy(param_dtype=torch.float64), torch.float64, torch.float32, torch.float32),
        (torch.float32, MixedPrecisionPolicy(main_params_dtype=torch.bfloat16), torch.float32, torch.float32, torch.float32),
        (
            torch.float32,
            MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16),
            torch.float32,
            torch.float32,
            torch.float32,
        ),
        # Without a set dtype the module's own holds, as for all others.
        (torch.bfloat16, MixedPrecisionPolicy(), torch.bfloat16, torch.float32, torch.float32),
    ],
)
def test_dtypes_of_a_policy_are_float32_at_least_for_them(created, policy, compute, main, gradient):
    net = Decay()
    net.rate.data = net.rate.data.to(created)
    model, _ = fully_shard(net, mixed_precision=policy)
    [group] = [group for group in model.runtime.groups if group.parameters[0].name == "rate"]
    assert [item.name for item in group.parameters] == ["rate"] or compute == policy.compute_dtype(torch.float32)
    assert group.parameters[0].full.dtype == compute
    assert group.parameters[0].sharded.dtype == main
    assert group.gradients.dtype == gradient


def test_one_that_is_tied_to_another_module_stays_float32():
    net = nn.ModuleDict({"plain": nn.LayerNorm(WIDTH, bias=False), "decay": Decay()})
    net["decay"].rate = net["plain"].weight
    model, _ = fully_shard(net, mixed_precision=NARROW)
    dtypes = {item.name: item.full.dtype for group in model.runtime.groups for item in group.parameters}
    assert dtypes == {"plain.weight": torch.float32, "decay.inner.weight": torch.bfloat16, "decay.inner.bias": torch.bfloat16}


def test_those_that_are_also_to_be_gathered_in_8_bits_are_refused():
    assert isinstance(Decay(), KeepsFloat32)
    with pytest.raises(ValueError, match="eight_bit_parameters match 'rate', which its module keeps in float32"):
        fully_shard(Decay(), eight_bit_parameters="rate")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("rates",), "float32_parameters() of 0 names 'rates', which is no parameter of its own"),
        (("rate", "inner.weight"), "float32_parameters() of 0 names 'inner.weight', which is no parameter of its own"),
        ("rate", "float32_parameters() of 0 is the string 'rate'; return a tuple of names"),
    ],
)
def test_names_that_a_module_does_not_have_are_refused(names: Collection[str], message: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Decay, "float32_parameters", lambda _: names)
    with pytest.raises(ValueError, match=re.escape(message)):
        fully_shard(nn.Sequential(Decay()), mixed_precision=NARROW)
