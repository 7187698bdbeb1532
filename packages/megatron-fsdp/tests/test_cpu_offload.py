# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Main parameters, gradients and optimizer state on the host: on a machine without a device the same numbers by the same path."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp._shard_tensor import dtensor_of, spec_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(6), nn.Linear(6, 9)
        self.down, self.scale = nn.Linear(9, 6, bias=False), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def train(no_sync: str = "", **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer, list[float]]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), *(Block() for _ in range(2)), nn.Linear(6, 5))
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=0.02), fsdp_unit_modules=Block, **options)
    assert optimizer is not None
    losses = []
    for step in range(2):
        for microbatch in range(2):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * microbatch + dist.get_rank()))
            with model.no_sync(no_sync) if no_sync and microbatch == 0 else contextlib.nullcontext():  # type: ignore[arg-type]
                loss = model(x).float().square().mean()
                loss.backward()
            losses.append(loss.item())
        model.scale_gradients(torch.tensor(0.5))
        model.clip_grad_norm_(0.3)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, losses


NARROW = {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
ONE_AXIS: list[dict[str, Any]] = [
    *({"zero_dp_strategy": strategy} for strategy in range(4)),
    {"no_sync": "all", **NARROW},
    {"fsdp_double_buffer": True, **NARROW},
    {"eight_bit_parameters": "*.up.weight"},
]
TWO_AXES: list[dict[str, Any]] = [{"no_sync": "outer"}, {"outer_dp_sharding_strategy": "optim", "no_sync": "outer"}]


def check_two_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    check_equal([{"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer", **options} for options in TWO_AXES])


def check_equal(every: list[dict[str, Any]]) -> None:
    for options in every:
        expected, first, losses = train(**options)
        model, second, actual = train(**options, cpu_offload=True)
        assert actual == losses, options
        whole = dict(model.full_state_dict())
        assert all(torch.equal(value, whole[name]) for name, value in expected.full_state_dict()), options
        # Nothing that the optimizer steps shares memory with what is gathered.
        for group in model.runtime.groups:
            assert group.main.untyped_storage().data_ptr() != group.buffer.flat.untyped_storage().data_ptr()
        # Either loads what the other saved.
        model.load_state_dict(expected.state_dict())
        model.load_optimizer_state_dict(second, expected.optimizer_state_dict(first))
        model.broadcast_params()
        whole = dict(model.full_state_dict())
        assert all(torch.equal(value, whole[name]) for name, value in expected.full_state_dict()), options


@pytest.mark.journey
@pytest.mark.world(2)
def test_training_on_the_host_equals_training_on_the_device_bit_for_bit(world):
    world(check_equal, every=ONE_AXIS)


@pytest.mark.world(4)
def test_training_on_the_host_equals_training_on_the_device_over_two_axes_too(world):
    world(check_two_axes)


def check_wrapping() -> None:
    # A tensor that is not on the device of its mesh stays where it is.
    mesh = init_device_mesh("cpu", (2,))
    shape = torch.Size((4, 3))
    rows = torch.ones(2, 3, device="meta")
    other = dtensor_of(rows, spec_of(mesh, [Shard(0)], shape, rows.dtype))
    assert isinstance(other, DTensor) and other.shape == shape and other.to_local().device.type == "meta"
    assert other.placements == (Shard(0),) and not other.requires_grad and other.stride() == (3, 1)


@pytest.mark.world(2)
def test_a_shard_is_wrapped_where_it_lies(world):
    world(check_wrapping)


def test_one_rank_without_a_process_group_steps_on_the_host():
    results = []
    for offload in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(Block(), Block())
        model, optimizer = fully_shard(
            net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), fsdp_unit_modules=Block, cpu_offload=offload
        )
        assert optimizer is not None
        for _ in range(3):
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(dict(model.full_state_dict()))
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())
