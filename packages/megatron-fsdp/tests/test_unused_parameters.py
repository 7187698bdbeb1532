# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameters that a step does not use have no gradient, as in torch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import fully_shard


class Branches(nn.Module):
    """A unit whose branches are called as ``choice`` says, and a root with a parameter beside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.unit = nn.ModuleDict({"a": nn.Linear(5, 5), "b": nn.Linear(5, 5)})
        self.head, self.beside = nn.Linear(5, 3), nn.Parameter(torch.ones(3))
        self.choice: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.choice:
            x = torch.tanh(self.unit[name](x))
        return self.head(x).square().sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Branches()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


# For each step the branches that each micro-batch of each rank takes.
STEPS = [
    [[["a"], ["a"]], [["a"], ["a"]]],
    [[["a"], []], [[], ["b"]]],
    [[[], []], [[], []]],
    [[["a", "b"], ["b"]], [["b"], ["a"]]],
]


def train(sharded: bool, **options: Any) -> tuple[list[set[str]], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net: Any = Model().double()
    optimizer: Any = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    model: Any = net
    if sharded:
        model, optimizer = fully_shard(net, optimizer, fsdp_unit_modules=Branches, **options)
    rank, seen = dist.get_rank(), []
    for index, step in enumerate(STEPS):
        for position, choice in enumerate(step[rank % 2]):
            net.inner.choice = choice
            x = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * index + position + 100 * rank))
            if sharded and position == 0 and index % 2:
                with model.no_sync():
                    model(x).backward()
            else:
                model(x).backward()
        if not sharded:
            for parameter in net.parameters():
                num_gradients = torch.tensor(int(parameter.grad is not None))
                dist.all_reduce(num_gradients)
                if num_gradients:
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
        seen.append({name.removeprefix("module.") for name, parameter in model.named_parameters() if parameter.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return seen, dict(model.full_state_dict()) if sharded else dict(net.state_dict())


def check(options: dict[str, Any]) -> None:
    expected, weights = train(sharded=False)
    assert "inner.beside" not in set().union(*expected) and {"inner.unit.b.bias"} <= expected[1] - expected[0]
    assert expected[2] == {"inner.head.weight", "inner.head.bias"}
    actual, whole = train(sharded=True, **options)
    assert actual == expected
    for name, value in whole.items():
        torch.testing.assert_close(value, weights[name], rtol=1e-12, atol=1e-12)


@pytest.mark.world(4, shared=True)
@pytest.mark.parametrize(
    "options",
    [*({"zero_dp_strategy": strategy} for strategy in range(4)), {"cpu_offload": True}, {"fsdp_double_buffer": True}],
    ids=str,
)
def test_what_no_rank_uses_has_no_gradient_and_is_not_decayed(world, options):
    world(check, options=options)
