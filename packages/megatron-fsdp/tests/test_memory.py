# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What the allocator of the host counts: each strategy needs less than the one before, and optimizer state has its share of bytes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp._parameters import local

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Allocations:
    """Bytes that this thread allocated and did not free, as the profiler is told."""

    def __enter__(self) -> "Allocations":
        self._profiler: Any = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profiler.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._profiler.__exit__(*error)
        events = [event for event in self._profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        self.most = self.left = 0
        for event in events:
            self.left += event.nbytes()
            self.most = max(self.most, self.left)


def tensors(model: MegatronFSDP, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in model.runtime.groups:
        yield from (each for each in (group.main, group.buffer.flat, group.gradients.reduced, group.gradients._whole) if each is not None)
    yield from (local(value) for entries in optimizer.state.values() for value in entries.values())


def train(depth: int, **options: Any) -> tuple[float, float]:
    """Most bytes in a step, and bytes of optimizer state, of this rank; in bytes of all parameters."""
    net = nn.Sequential(*(Block() for _ in range(depth)))
    whole = sum(parameter.nbytes for parameter in net.parameters())
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), foreach=False), fsdp_unit_modules=Block, **options)
    assert optimizer is not None

    def step() -> None:
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors(model, optimizer)}
    with Allocations() as allocations:
        step()
    state = sum(local(value).nbytes for entries in optimizer.state.values() for value in entries.values() if value.ndim)
    return (sum(storages.values()) + allocations.most) / whole, state / whole


def measured() -> list[tuple[float, float]]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    named = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    two_levels = (named, {**named, "outer_dp_sharding_strategy": "optim"})
    return [*(train(12, zero_dp_strategy=strategy) for strategy in range(4)), *(train(2, **options) for options in two_levels)]


@pytest.mark.journey
@pytest.mark.world(4)
def test_each_strategy_needs_less_memory_than_the_one_before(world):
    for actual in world(measured):
        most, state = zip(*actual, strict=True)
        assert most[3] < most[2] < most[1] < most[0]
        # Two moments, whole or a quarter; replicas of halves have halves, halves cut again quarters.
        assert state == pytest.approx((2, 0.5, 0.5, 0.5, 1, 0.5), rel=0.1)
