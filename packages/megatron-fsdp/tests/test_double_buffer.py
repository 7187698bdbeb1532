# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Units that take turns in two persistent buffers."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.ones(()))
        self.unused = nn.Parameter(torch.ones(3))
        self.look: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.up(x))
        if self.look is not None and inner.requires_grad:
            inner.register_hook(lambda _: self.look and self.look())
        return x + self.scale * self.down(inner)


class Tower(nn.Module):
    def __init__(self, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer(6, each) for each in hidden)
        self.order = list(range(len(hidden)))
        self.recompute = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.entry(x)
        for index in self.order:
            layer = self.layers[index]
            x = checkpoint(layer, x, use_reentrant=True) if self.recompute else layer(x)  # type: ignore[assignment]
        return x


def tower(hidden: tuple[int, ...] = (8, 8, 8, 8, 8), **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Tower(hidden)
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=0.01), **{"fsdp_unit_modules": Layer, **options})
    assert optimizer is not None
    return model, optimizer


def train(model: MegatronFSDP, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dist.get_rank())
            loss = model(torch.randn(4, 6, generator=generator)).float().square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def watch(model: MegatronFSDP) -> tuple[list[tuple[int, ...]], list[int]]:
    """Addresses of whole weights and of the buffer of their gradients inside each backward, and how many units are gathered then."""
    addresses, gathered = [], []

    def look(index: int) -> None:
        layer, unit = model.module.layers[index], model.runtime.units[1 + index]
        whole = [group.gradients._whole for group in unit.groups if group.topology.num_shards > 1]
        assert whole[0] is not None
        addresses.append((index, layer.up.weight.data_ptr(), layer.down.bias.data_ptr(), whole[0].data_ptr()))
        gathered.append(sum(each.gathered for each in model.runtime.units[1:]))

    for index, layer in enumerate(model.module.layers):
        layer.look = functools.partial(look, index)
    return addresses, gathered


def check_addresses() -> None:
    for policy, hidden, largest in (
        (MixedPrecisionPolicy(), (8, 8, 8, 8, 8), False),
        (MixedPrecisionPolicy(), (8, 5, 3, 9, 1), True),
        (MixedPrecisionPolicy(param_dtype=torch.bfloat16), (8, 5, 3, 9, 1), True),
    ):
        expected = train(*tower(hidden, mixed_precision=policy), 2)
        model, optimizer = tower(
            hidden, mixed_precision=policy, fsdp_double_buffer=True, maxpool_double_buffer=largest, num_prefetch_units=3
        )
        addresses, gathered = watch(model)
        assert train(model, optimizer, 2) == expected
        once = len(addresses) // 4
        assert once == 5 and all(addresses[:once] == addresses[at : at + once] for at in range(once, len(addresses), once))
        weights = {index: weight for index, weight, *_ in addresses}
        assert len(set(weights.values())) == 2 and weights[0] == weights[2] == weights[4] != weights[1] == weights[3]
        assert max(gathered) <= 2
        with torch.no_grad():
            model(torch.ones(1, 6))


@pytest.mark.journey
@pytest.mark.world(2)
def test_units_lie_at_two_addresses_in_every_step_and_train_as_without(world):
    world(check_addresses)


def check_strategies() -> None:
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    named = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    for options in ({"zero_dp_strategy": 1}, {"zero_dp_strategy": 2}, named, {**named, "outer_dp_sharding_strategy": "optim"}):
        expected, optimizer = tower((8, 8, 8), **options)
        losses = train(expected, optimizer, 2)
        model, optimizer = tower((8, 8, 8), **options, fsdp_double_buffer=True)
        assert train(model, optimizer, 2) == losses
        for scope in ("all", "outer"):
            for each in (expected, model):
                each.zero_grad()
                with each.no_sync(scope):
                    each(torch.ones(4, 6)).square().mean().backward()
                each(torch.ones(4, 6)).square().mean().backward()
            actual = model.gradients()
            assert all(torch.equal(value.to_local(), actual[name].to_local()) for name, value in expected.gradients().items())


@pytest.mark.journey
@pytest.mark.world(4)
def test_gradients_that_wait_for_their_sum_do_not_share_a_buffer(world):
    world(check_strategies)


def check_unusual_orders() -> None:
    for order, recompute in (([0, 2, 4, 1, 3], False), ([0, 1, 2, 3, 4, 0], False), ([0, 2, 0, 2], False), ([0, 2, 0, 1], True)):
        results = []
        for double in (False, True):
            model, optimizer = tower(fsdp_double_buffer=double)
            model.module.order, model.module.recompute = order, recompute
            results.append(train(model, optimizer, 2))
        assert results[0] == results[1], (order, recompute)


@pytest.mark.journey
@pytest.mark.world(2)
def test_units_that_run_in_another_order_or_twice_take_the_buffer_they_need(world):
    world(check_unusual_orders)


def check_late() -> None:
    model, _ = tower(fsdp_double_buffer=True)
    # Somebody gathers a unit in the middle of the backward of the one that shares its buffer.
    model.module.layers[0].look = model.runtime.units[3].start_gather
    with pytest.raises(RuntimeError, match=r"came after another unit took the buffer of unit 'layers.0'; .*fsdp_double_buffer=False"):
        model(torch.ones(2, 6)).sum().backward()
    model.module.layers[0].look = None
    model(torch.ones(2, 6)).sum().backward()


@pytest.mark.world(2)
def test_a_gradient_that_comes_after_its_unit_left_the_buffer_is_refused_by_name(world):
    world(check_late)


class Nest(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.parametrize(
    ("net", "options", "message"),
    [
        (
            lambda: Tower((8, 8, 5)),
            {},
            r"gathered parameters unit 'layers.0' needs \[.*\] elements of torch.float32.*and unit 'layers.2' \[",
        ),
        (lambda: Tower((8, 8)), {"fsdp_unit_modules": ()}, "the root is the only unit; set fsdp_unit_modules"),
        (lambda: nn.Sequential(Nest(), Nest()), {"fsdp_unit_modules": (Nest, Layer)}, "unit '0.inner' lies inside unit '0'"),
        (lambda: Tower((8, 8)), {"fsdp_double_buffer": False, "maxpool_double_buffer": True}, "maxpool_double_buffer=True"),
    ],
)
def test_units_that_cannot_take_turns_are_refused(net, options, message):
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, main_params_dtype=torch.float64)
    with pytest.raises(ValueError, match=message):
        fully_shard_model(net(), **{"fsdp_unit_modules": Layer, "fsdp_double_buffer": True, "mixed_precision": policy, **options})
