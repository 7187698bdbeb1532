# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recomputed activations together with accumulated gradients equal replicated training bit for bit."""

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MegatronFSDP, fully_shard

STEPS, MICROBATCHES = 2, 2


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 5), nn.Linear(5, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied weight, a block that runs twice, and blocks that are recomputed one by one or together."""

    def __init__(self, segments: tuple[tuple[int, ...], ...], *, reentrant: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(7) for _ in range(3))
        self.segments, self.reentrant = segments, reentrant

    def run(self, segment: tuple[int, ...], x: torch.Tensor) -> torch.Tensor:
        for index in segment:
            x = self.blocks[index](x)
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for segment in self.segments:
            x = checkpoint(self.run, segment, x, use_reentrant=self.reentrant)  # type: ignore[assignment]
        return x @ self.embedding.weight.T


def backward(model: nn.Module, step: int, microbatch: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + dist.get_rank())
    tokens = torch.randint(11, (3, 4), generator=generator)
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.item()


def replicated(net: nn.Module, *, sync: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Whole gradients, summed over ranks after every micro-batch or after the last."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    losses = []
    for step in range(STEPS):
        totals: dict[str, torch.Tensor] = {}
        for microbatch in range(MICROBATCHES):
            losses.append(backward(net, step, microbatch))
            if sync or microbatch == MICROBATCHES - 1:
                for name, parameter in net.named_parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    mean = parameter.grad / dist.get_world_size()
                    totals[name] = totals[name] + mean if name in totals else mean
                    parameter.grad = None
        for name, parameter in net.named_parameters():
            parameter.grad = totals[name]
        optimizer.step()
        optimizer.zero_grad()
    return dict(net.state_dict()), losses


def sharded(net: nn.Module, *, sync: bool, **options: Any) -> tuple[MegatronFSDP, list[float]]:
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters(), lr=0.02), fsdp_unit_modules=Block, **options)
    assert optimizer is not None
    losses = []
    for step in range(STEPS):
        for microbatch in range(MICROBATCHES):
            with contextlib.nullcontext() if sync or microbatch == MICROBATCHES - 1 else model.no_sync():
                losses.append(backward(model, step, microbatch))
        optimizer.step()
        optimizer.zero_grad()
    return model, losses


def check_recompute(reentrant: bool) -> None:
    # What comes again is summed in another order if every replay is a backward of its own.
    again = () if reentrant else ((0,),)
    for segments in (((0,), (1,), (2,), *again), ((0, 1, 2), *again)):

        def build(segments: tuple[tuple[int, ...], ...] = segments) -> Net:
            torch.manual_seed(0)
            return Net(segments, reentrant=reentrant).double()

        for sync in (True, False):
            expected, losses = replicated(build(), sync=sync)
            variants: list[dict[str, Any]] = [{"zero_dp_strategy": strategy} for strategy in range(4)]
            variants += [{"zero_dp_strategy": strategy, "fsdp_double_buffer": True} for strategy in (2, 3)]
            # Blocks that are recomputed together come back in another order: with every second choice.
            for options in variants if len(segments[0]) == 1 else variants[1::2]:
                model, actual = sharded(build(), sync=sync, **options)
                assert actual == losses, (segments, sync, options)
                # Two addends have one sum, so the bits agree.
                assert all(torch.equal(value, expected[name]) for name, value in model.full_state_dict()), (segments, sync, options)


def check_turns(reentrant: bool) -> None:
    net = Net(((0,), (1,), (2,)), reentrant=reentrant)
    model, optimizer = fully_shard(net, torch.optim.SGD(net.parameters(), lr=0.1), fsdp_unit_modules=Block)
    assert optimizer is not None
    reduced: list[list[int]] = []
    net.embedding.register_full_backward_pre_hook(lambda *_: reduced.append([unit.index for unit in model.runtime.units if unit.reduced]))
    for step in range(2):
        backward(model, step, 0)
        optimizer.step()
        optimizer.zero_grad()
    # A unit is reduced before the next one's backward, and the last of them at the next event after its own.
    assert all(set(units) >= {2, 3} for units in reduced) and len(reduced) == 2
    model(torch.zeros(1, 2, dtype=torch.long))
    assert sum(unit.gathered for unit in model.runtime.units) <= 2, "a replay in the last backward leaves nothing behind"


@pytest.mark.world(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_units_are_reduced_in_turn_and_released(world, reentrant):
    world(check_turns, reentrant=reentrant)


@pytest.mark.journey
@pytest.mark.world(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_and_accumulated_gradients_equal_replicated_training_bit_for_bit(world, reentrant):
    world(check_recompute, reentrant=reentrant)
