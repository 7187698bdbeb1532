# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Six steps under every strategy, rule, accumulation and recomputation equal those of torch's DistributedDataParallel."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, TensorAtomic, fully_shard_model, fully_shard_optimizer

STEPS, WIDTH = 6, 5


class Block(nn.Module):
    def __init__(self, hidden: int, recompute: str) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden)
        self.down, self.recompute = nn.Linear(hidden, WIDTH, bias=False), recompute

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: Any = checkpoint(self.inner, x, use_reentrant=False) if self.recompute == "inside" else self.inner(x)
        return x + part


class Net(nn.Module):
    """Blocks for four rules, and a table that is tied to the output."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        self.table, self.recompute = nn.Embedding(11, WIDTH), recompute
        self.sgd, self.adamw, self.muon, self.flat = (Block(hidden, recompute) for hidden in (3, 7, 6, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        for block in (self.sgd, self.adamw, self.muon, self.flat):
            x = checkpoint(block, x, use_reentrant=False) if self.recompute == "units" else block(x)  # type: ignore[assignment]
        return x @ self.table.weight.T


def build(recompute: str = "none") -> Net:
    torch.manual_seed(0)
    return Net(recompute)


def torch_optimizers(net: nn.Module, *, muon: bool) -> list[torch.optim.Optimizer]:
    """All but the block that is stepped as flat memory."""
    named = [(name, parameter) for name, parameter in net.named_parameters() if not name.startswith("flat")]
    matrices = [parameter for name, parameter in named if name.startswith("muon") and parameter.ndim == 2 and muon]
    sgd = [parameter for name, parameter in named if name.startswith("sgd")]
    rest = [parameter for _, parameter in named if not any(parameter is other for other in (*matrices, *sgd))]
    actual: list[torch.optim.Optimizer] = [
        torch.optim.SGD(sgd, lr=0.05, momentum=0.9, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=0.05, weight_decay=0.1),
    ]
    return [*actual, torch.optim.Muon(matrices, lr=0.02)] if muon else actual


class FlatAdam:
    """Steps ranges of flat memory, as fused optimizers do."""

    def __init__(self, ranges: Iterable[torch.Tensor]) -> None:
        self._ranges = list(ranges)
        self._first, self._second = ([torch.zeros_like(each) for each in self._ranges] for _ in range(2))
        self._count = 0

    @torch.no_grad()
    def step(self, gradients: Iterable[torch.Tensor]) -> None:
        self._count += 1
        for parameter, gradient, first, second in zip(self._ranges, gradients, self._first, self._second, strict=True):
            first.lerp_(gradient, 0.1)
            second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            rate = 0.02 * (1 - 0.99**self._count) ** 0.5 / (1 - 0.9**self._count)
            parameter.addcdiv_(first, second.sqrt().add_(1e-8), value=-rate)


def loss_of(net: Callable[[torch.Tensor], torch.Tensor], step: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dist.get_rank())
    tokens = torch.randint(11, (2, 4), generator=generator)
    return nn.functional.cross_entropy(net(tokens).flatten(0, 1).float(), tokens.flatten())


def losses_of(model: Any, microbatches: int, update: Callable[[], None]) -> list[float]:
    """Of every micro-batch; all but the last of a step only accumulate."""
    losses = []
    for step in range(STEPS):
        for microbatch in range(microbatches):
            with contextlib.nullcontext() if microbatch == microbatches - 1 else model.no_sync():
                loss = loss_of(model, step, microbatch)
                loss.backward()
            losses.append(loss.item())
        update()
    return losses


def replicated(microbatches: int, *, muon: bool = True) -> tuple[list[float], dict[str, torch.Tensor]]:
    net = build()
    model = DistributedDataParallel(net)
    optimizers, fused = torch_optimizers(net, muon=muon), FlatAdam(each.detach().view(-1) for each in net.flat.parameters())

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
        fused.step(each.grad.view(-1) for each in net.flat.parameters() if each.grad is not None)
        net.zero_grad()

    return losses_of(model, microbatches, update), dict(net.state_dict())


def narrow(microbatches: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Computes in bfloat16; gradients add up over micro-batches and ranks in float32, where weights are stepped."""
    net, shadow = build(), build().to(torch.bfloat16)
    optimizers, fused = torch_optimizers(net, muon=True), FlatAdam(each.detach().view(-1) for each in net.flat.parameters())
    pairs, losses = list(zip(net.parameters(), shadow.parameters(), strict=True)), []
    for step in range(STEPS):
        for parameter, copy in pairs:
            copy.data.copy_(parameter.data)
            parameter.grad = torch.zeros_like(parameter)
        for microbatch in range(microbatches):
            loss = loss_of(shadow, step, microbatch)
            loss.backward()
            losses.append(loss.item())
            for parameter, copy in pairs:
                assert parameter.grad is not None and copy.grad is not None
                parameter.grad += copy.grad
                copy.grad = None
        for parameter in net.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        for optimizer in optimizers:
            optimizer.step()
        fused.step(each.grad.view(-1) for each in net.flat.parameters() if each.grad is not None)
    return losses, dict(net.state_dict())


def sharded(microbatches: int, *, recompute: str = "none", muon: bool = True, **options: Any) -> tuple[list[float], MegatronFSDP]:
    net = build(recompute)
    optimizers = torch_optimizers(net, muon=muon)
    placements = {"muon.*.weight": TensorAtomic()} if muon else {}
    model = fully_shard_model(net, fsdp_unit_modules=Block, shard_placements=placements, **options)
    for optimizer in optimizers:
        fully_shard_optimizer(optimizer, model)
    shards = [shard for name, shard in model.flat_shards().items() if name.startswith("flat")]
    fused = FlatAdam(shard.parameter for shard in shards)

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()
        fused.step(shard.gradient for shard in shards if shard.gradient is not None)
        model.install_optimized_model_weights()
        model.zero_grad_buffer()

    return losses_of(model, microbatches, update), model


def check_bits(microbatches: int, recomputes: tuple[str, ...]) -> None:
    expected, weights = replicated(microbatches)
    assert expected[-1] < 0.8 * expected[0]
    for strategy, recompute in enumerate(recomputes):
        actual, model = sharded(microbatches, recompute=recompute, zero_dp_strategy=strategy)
        # Two addends have one sum, so the bits agree.
        assert actual == expected, (strategy, recompute)
        assert all(torch.equal(value, weights[name]) for name, value in model.full_state_dict()), (strategy, recompute)


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("microbatches", "recomputes"), [(1, ("none", "inside", "none", "units")), (4, ("units", "none", "inside", "inside"))]
)
def test_float32_training_equals_replicated_training_bit_for_bit(world, microbatches, recomputes):
    """``recomputes``: what is recomputed under each strategy; accumulation with each of them has a test of its own."""
    world(check_bits, microbatches=microbatches, recomputes=recomputes)


def check_narrow() -> None:
    expected, weights = narrow(2)
    for strategy in range(4):
        actual, model = sharded(2, zero_dp_strategy=strategy, mixed_precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert actual == expected, strategy
        assert all(torch.equal(value, weights[name]) for name, value in model.full_state_dict()), strategy


@pytest.mark.journey
@pytest.mark.world(2)
def test_bfloat16_training_adds_gradients_and_steps_weights_in_float32_bit_for_bit(world):
    world(check_narrow)


def check_levels() -> None:
    expected, _ = replicated(2, muon=False)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    named = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
    for outer in ("no_shard", "optim"):
        actual, _ = sharded(2, muon=False, outer_dp_sharding_strategy=outer, **named)
        # Four addends are summed in another order.
        torch.testing.assert_close(torch.tensor(actual), torch.tensor(expected), rtol=1e-6, atol=0)


@pytest.mark.journey
@pytest.mark.world(4)
def test_replicas_of_shards_and_shards_of_shards_follow_replicated_training(world):
    world(check_levels)
