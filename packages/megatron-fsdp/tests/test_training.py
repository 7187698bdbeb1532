# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sharded training equals replicated training."""

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.table = nn.Parameter(torch.randn(2, 3, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x)))) + self.table.sum((0, 1))


class Net(nn.Module):
    """Odd sizes, a tied weight, a frozen and an unused parameter, a block that runs twice."""

    def __init__(self, width: int = 7, *, recompute: str = "none") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for hidden in (3, 5, 1))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.randn(5, width), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(3))
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.frozen.sum(0)
        for block in (*self.blocks, self.blocks[0]):
            if self.recompute == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")  # type: ignore[assignment]
        return self.head(x)


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options).to(dtype)


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    plain = [parameter for parameter in net.parameters() if parameter.ndim >= 2]
    rest = [parameter for parameter in net.parameters() if parameter.ndim < 2]
    return torch.optim.AdamW([{"params": plain, "lr": 0.02, "weight_decay": 0.1}, {"params": rest, "lr": 0.005, "weight_decay": 0.0}])


def momentum(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def batch(step: int, microbatch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + rank)
    return torch.randint(0, 11, (3, 4), generator=generator)


def loss_of(net: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(net(tokens).flatten(0, 1).float().to(torch.float64), tokens.flatten())


def replicated(
    make: Callable[[nn.Module], torch.optim.Optimizer], steps: int, microbatches: int, *, mean: bool = True, max_norm: float | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Replicated data parallelism on this very world: all-reduce whole gradients, step whole parameters."""
    net = build()
    optimizer = make(net)
    losses = []
    for step in range(steps):
        for microbatch in range(microbatches):
            loss = loss_of(net, batch(step, microbatch, dist.get_rank()))
            loss.backward()
            losses.append(loss.item())
        for parameter in net.parameters():
            # What no rank uses has none, and its optimizer skips it.
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                if mean:
                    parameter.grad /= dist.get_world_size()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict()), losses


def sharded(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    steps: int,
    microbatches: int,
    *,
    no_sync: str = "",
    max_norm: float | None = None,
    recompute: str = "none",
    **options: Any,
) -> tuple[MegatronFSDP, list[float]]:
    net = build(recompute=recompute)
    model, optimizer = fully_shard(net, make(net), **{"fsdp_unit_modules": [Block], **options})
    assert optimizer is not None
    losses = []
    for step in range(steps):
        for microbatch in range(microbatches):
            with model.no_sync(no_sync) if no_sync and microbatch < microbatches - 1 else contextlib.nullcontext():
                loss = loss_of(model, batch(step, microbatch, dist.get_rank()))
                loss.backward()
            losses.append(loss.item())
        if max_norm is not None:
            model.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def difference(model: MegatronFSDP, expected: dict[str, torch.Tensor]) -> float:
    actual = dict(model.full_state_dict())
    assert actual.keys() == expected.keys()
    assert all(actual[name].shape == expected[name].shape for name in expected)
    return max((actual[name] - expected[name]).abs().max().item() for name in expected)


def check_trajectories() -> None:
    warnings.simplefilter("error")
    for microbatches, variants in ((1, ((3, "none"), (2, "non-reentrant"))), (2, ((3, "none"), (1, "none"), (0, "none")))):
        expected, losses = replicated(adamw, 3, microbatches)
        for strategy, recompute in variants:
            model, actual = sharded(adamw, 3, microbatches, zero_dp_strategy=strategy, recompute=recompute, no_sync="all")
            # Two addends have one sum, so the bits agree.
            assert difference(model, expected) == 0, (microbatches, strategy)
            assert actual == losses


@pytest.mark.world(2)
def test_steps_on_two_ranks_equal_replicated_training_bit_for_bit(world):
    world(check_trajectories)


def check_more_ranks() -> None:
    expected, losses = replicated(momentum, 3, 1)
    model, actual = sharded(momentum, 3, 1)
    # More addends are summed in another order.
    assert difference(model, expected) < 1e-12
    assert max(abs(a - b) for a, b in zip(losses, actual, strict=True)) < 1e-12


@pytest.mark.world(4)
def test_steps_on_four_ranks_equal_replicated_training(world):
    world(check_more_ranks)


def check_accumulation() -> None:
    expected, losses = replicated(adamw, 2, 3)
    for strategy in range(4):
        for no_sync in ("", "all", "outer"):
            model, actual = sharded(adamw, 2, 3, zero_dp_strategy=strategy, no_sync=no_sync)
            assert difference(model, expected) < 1e-12
            assert max(abs(a - b) for a, b in zip(losses, actual, strict=True)) < 1e-12


@pytest.mark.journey
@pytest.mark.world(2)
def test_accumulated_gradients_equal_replicated_training_with_and_without_no_sync(world):
    world(check_accumulation)


def check_variants() -> None:
    expected, _ = replicated(momentum, 3, 1)
    for options in (
        {"fsdp_unit_modules": ()},
        {"fsdp_unit_modules": ["blocks.?"]},
        {"fsdp_unit_modules": ["Linear", "Embedding", "LayerNorm"]},
        {"fsdp_unit_modules": lambda name, module: name.endswith("up") or isinstance(module, Block)},
        {"num_prefetch_units": 0},
        {"num_prefetch_units": 3},
        {"recompute": "non-reentrant"},
        {"recompute": "reentrant"},
    ):
        model, _ = sharded(momentum, 3, 1, **options)
        assert difference(model, expected) < 1e-12, options


@pytest.mark.journey
@pytest.mark.world(2)
def test_units_prefetch_and_recomputation_do_not_change_the_result(world):
    world(check_variants)


def check_hybrid() -> None:
    expected, _ = replicated(adamw, 2, 2)
    for shape, strategies in (((2, 2), range(4)), ((1, 4), (3,)), ((4, 1), ())):
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner"))
        named = {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer"}
        if shape == (2, 2):
            model, _ = sharded(adamw, 2, 2, device_mesh=mesh)
            assert difference(model, expected) < 1e-12, shape
        for strategy in strategies:
            model, _ = sharded(adamw, 2, 2, zero_dp_strategy=strategy, no_sync="outer", **named)
            assert difference(model, expected) < 1e-12, (shape, strategy)
        for no_sync in {(2, 2): ("", "all", "outer"), (1, 4): (), (4, 1): ("outer",)}[shape]:
            model, _ = sharded(adamw, 2, 2, outer_dp_sharding_strategy="optim", no_sync=no_sync, **named)
            assert difference(model, expected) < 1e-12, (shape, no_sync)
            assert all(group.main.numel() == group.layout.shard_numel for group in model.runtime.groups)
            divided = [group for group in model.runtime.groups if group.topology.num_shards == 4]
            assert len(divided) == 5, "three blocks and the root, which has a frozen one; not the scalars"


@pytest.mark.journey
@pytest.mark.world(4)
def test_replicas_of_shards_equal_replicated_training(world):
    world(check_hybrid)


def check_sum_and_clip() -> None:
    expected, _ = replicated(momentum, 3, 1, mean=False)
    model, _ = sharded(momentum, 3, 1, gradient_reduce="sum")
    assert difference(model, expected) < 1e-12
    expected, _ = replicated(momentum, 4, 1, max_norm=0.1)
    for strategy in range(4):
        model, _ = sharded(momentum, 4, 1, zero_dp_strategy=strategy, max_norm=0.1)
        assert difference(model, expected) < 1e-12


@pytest.mark.journey
@pytest.mark.world(2)
def test_sums_and_clipping_equal_replicated_training(world):
    world(check_sum_and_clip)


def check_norm() -> None:
    model, _ = sharded(momentum, 0, 1)
    loss_of(model, batch(0, 0, dist.get_rank())).backward()
    whole = [gradient.full_tensor() for gradient in model.gradients().values()]
    for norm_type in (1.0, 2.0, float("inf")):
        wanted = torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in whole]), norm_type)
        torch.testing.assert_close(model.clip_grad_norm_(1e9, norm_type), wanted, rtol=1e-12, atol=0)
    assert model.clip_grad_norm_(0.5) > 0.5
    torch.testing.assert_close(model.clip_grad_norm_(0.5), torch.tensor(0.5, dtype=torch.float64), rtol=1e-5, atol=0)


@pytest.mark.world(4)
def test_the_gradient_norm_counts_every_parameter_once(world):
    world(check_norm)


def check_mixed_precision() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, grad_comm_dtype=torch.float32)
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=0.01), fsdp_unit_modules=nn.Linear, mixed_precision=policy)
    assert optimizer is not None
    x = torch.randn(32, 6, generator=torch.Generator().manual_seed(1))
    mine = x.chunk(2)[dist.get_rank()]
    first = None
    for _ in range(20):
        wanted = reference(x).square().mean()
        wanted.backward()
        plain.step()
        plain.zero_grad()
        output = model(mine)
        assert output.dtype == torch.bfloat16
        loss = output.float().square().mean()
        loss.backward()
        assert all(gradient.dtype == torch.float32 for gradient in model.gradients().values())
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach())
        first = first or wanted.item()
        assert abs(loss.item() / 2 - wanted.item()) < 0.02 * first
    # A bfloat16 module keeps float32 main parameters.
    half = nn.Linear(3, 3).to(torch.bfloat16)
    model, _ = fully_shard(half)
    assert half.weight.dtype == torch.float32
    assert model(torch.ones(1, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.world(2)
def test_bfloat16_compute_with_float32_gradients_follows_float32_training(world):
    world(check_mixed_precision)


class Branching(nn.Module):
    """A unit with a path from a parameter that does not pass through its input, so that its gradient comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.start = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        side = self.second(torch.tanh(self.second(self.start)))
        return torch.tanh(self.first(x)) + side


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.units = nn.ModuleList(Branching() for _ in range(3))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        x = self.entry(x)
        for unit in self.units:
            x = unit(x) if which else x * unit(x)
        return x


def check_late_gradients() -> None:
    results = []
    for shard in (False, True):
        torch.manual_seed(0)
        net = Stack().double()
        model: Any = net
        if shard:
            model, _ = fully_shard(net, fsdp_unit_modules=Branching)
        for step in range(3):
            x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            # Two forwards under one backward: the first one's gradients come after the second one's are through.
            (model(x, 0).sum() + model(2 * x, 1).square().sum()).backward()
        parameters = model.sharded_parameters() if shard else dict(net.named_parameters())
        results.append({name: p.grad.full_tensor() if shard else p.grad for name, p in parameters.items()})
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-12, atol=1e-12)


@pytest.mark.world(2)
def test_gradients_that_come_late_are_reduced_too(world):
    world(check_late_gradients)


def check_data_dependent_use() -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}).double()

    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.experts["ab"[dist.get_rank()]](x)

    model, _ = fully_shard(nn.Sequential(nn.Linear(3, 3).double(), Router(), Router()), fsdp_unit_modules=Router)
    for _ in range(2):
        model.zero_grad_buffer()
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    assert all(gradient.full_tensor().abs().sum() > 0 for gradient in model.gradients().values())


@pytest.mark.world(2)
def test_ranks_may_use_different_parameters_of_a_unit(world):
    world(check_data_dependent_use)
