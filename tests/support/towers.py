# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A tower of layers to shard, and its training."""

from typing import Any

import torch
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.fail = False
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise RuntimeError("layer failed")
        return torch.tanh(x @ self.weight)


class Tower(nn.Module):
    def __init__(self, width: int = 8, depth: int = 6) -> None:
        super().__init__()
        self.entry = nn.Linear(width, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Headed(nn.Module):
    """Returns hidden states; the caller applies the head, as one does whose loss needs no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.head = Tower(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x)


def tower(**options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Tower()
    model, optimizer = fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.1), **{"fsdp_unit_modules": Layer, **options})
    assert optimizer is not None
    return model, optimizer


def train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, steps: int) -> torch.Tensor:
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.ones(2, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()
