# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a rank holds of each parameter as flat memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import fully_shard
from tests.support.towers import Headed, Layer


def check_flat_shards() -> list[tuple[str, int, int, int]]:
    torch.manual_seed(0)
    net = Headed()
    net.head.bias.requires_grad_(False)
    expected = {name: value.clone() for name, value in net.state_dict().items()}
    model, _ = fully_shard(net, fsdp_unit_modules=Layer, gradient_reduce="sum", **_hybrid())
    shards = model.flat_shards()
    for name, shard in shards.items():
        assert shard.shape == expected[name].shape
        assert torch.equal(shard.parameter, expected[name].view(-1)[shard.start : shard.end])
        for offset, view in shard.blocks(shard.parameter):
            index = tuple(slice(begin, begin + size) for begin, size in zip(offset, view.shape, strict=True))
            assert torch.equal(view, expected[name][index])
        assert sum(view.numel() for _, view in shard.blocks(shard.parameter)) == shard.end - shard.start
    assert all((shard.gradient is None) is (name == "head.bias") for name, shard in shards.items())
    for step in range(2):
        model.zero_grad_buffer()
        net.head(model(torch.ones(2, 8))).sum().backward()
        whole = {name: gradient.full_tensor() for name, gradient in model.gradients().items()}
        for name, shard in shards.items():
            if shard.gradient is not None:
                assert torch.equal(shard.gradient, whole[name].reshape(-1)[shard.start : shard.end])
                assert step or shard.gradient.abs().sum() > 0
                shard.parameter.sub_(shard.gradient, alpha=0.01)
        for name, gradient in whole.items():
            expected[name] -= 0.01 * gradient
        model.install_optimized_model_weights()
    for name, value in model.full_state_dict():
        torch.testing.assert_close(value, expected[name])
    return [(name, shard.start, shard.end, shard.replica) for name, shard in shards.items()]


def _hybrid() -> dict[str, Any]:
    if dist.get_world_size() == 2:
        return {}
    return {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}


def assert_covered(rows: list[tuple[str, int, int, int]], replicas: int) -> None:
    sizes = {name: value.numel() for name, value in Headed().state_dict().items()}
    for name, size in sizes.items():
        for replica in range(replicas):
            ranges = sorted((start, end) for actual, start, end, copy in rows if (actual, copy) == (name, replica))
            assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
            assert ranges[-1][1] == size


@pytest.mark.world(2)
def test_flat_shards_cover_every_parameter_once(world):
    assert_covered([row for rows in world(check_flat_shards) for row in rows], 1)


@pytest.mark.world(4)
def test_flat_shards_of_replicas_cover_every_parameter_once_a_replica(world):
    assert_covered([row for rows in world(check_flat_shards) for row in rows], 2)


def check_gradients_leave(strategy: str) -> None:
    """Training where the gradients' memory goes and comes between steps, beside training where it stays."""
    results = []
    for leaves in (False, True):
        torch.manual_seed(0)
        net = Headed()
        model, _ = fully_shard(net, fsdp_unit_modules=Layer, zero_dp_strategy=strategy)
        shards = model.flat_shards()
        for step in range(4):
            model.zero_grad_buffer()
            net.head(model(torch.full((2, 8), 1.0 + step))).sum().backward()
            model.finish_grad_sync()
            for shard in shards.values():
                shard.parameter.sub_(shard.gradient, alpha=0.01)
            model.install_optimized_model_weights()
            if leaves and step % 2 == 0:
                model.offload_grad_buffers()
                assert not any(shard.gradient.untyped_storage().nbytes() for shard in shards.values())
                assert not model.gradients()
                model.restore_grad_buffers()
                assert not any(shard.gradient.any() for shard in shards.values())
        results.append([shard.parameter.clone() for shard in shards.values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.world(2)
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_gradients_leave_between_steps_and_training_goes_on(world, strategy: str) -> None:
    world(check_gradients_leave, strategy=strategy)


def check_host_gradients_stay() -> None:
    model, _ = fully_shard(Headed(), fsdp_unit_modules=Layer, cpu_offload=True)
    with pytest.raises(RuntimeError, match="cpu_offload=True keeps gradients in host memory"):
        model.offload_grad_buffers()


@pytest.mark.world(2)
def test_gradients_in_the_host_have_nowhere_to_go(world) -> None:
    world(check_host_gradients_stay)
