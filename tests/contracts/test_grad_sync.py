# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gradient sync: after the last micro-batch every gradient is the sum over micro-batches and replicas."""

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig, TransformerLayer
from mcore_parallel.optim import MegatronOptimizer, OptimizerConfig, PieceSource
from mcore_parallel.training import Batch, CrossEntropyObjective, GradSync, Optimizer
from mcore_tools.assembly import FullyShardedModel
from megatron_fsdp import fully_shard_model
from tests.contracts.conformance import mismatches

CONFIG = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, vocab_size=16, init_method_std=0.3)


def replicated(model: GPTModel, groups: ProcessGroups) -> DistributedDataParallel:
    return DistributedDataParallel(DistributedDataParallelConfig(), model, groups)


def sliced(model: GPTModel, groups: ProcessGroups) -> DistributedDataParallel:
    return DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), model, groups)


def fully_sharded(model: GPTModel, groups: ProcessGroups) -> Any:
    return fully_shard_model(model, fsdp_unit_modules=[TransformerLayer], gradient_reduce="sum", process_group=groups.dp.pg)


# What wraps the model, and how the optimizer config calls it; None where it is no source of gradients for MegatronOptimizer.
PROVIDERS: dict[str, tuple[Callable[[GPTModel, ProcessGroups], Any], bool | None]] = {
    "ddp": (replicated, False),
    "distributed-optimizer": (sliced, True),
    "megatron-fsdp": (fully_sharded, None),
    "fully-sharded-model": (FullyShardedModel, True),
    "fully-sharded-model-optim": (functools.partial(FullyShardedModel, zero_dp_strategy="optim"), True),
    "fully-sharded-model-no-shard": (functools.partial(FullyShardedModel, zero_dp_strategy="no_shard"), True),
}


def micro_batches(step: int) -> list[Batch]:
    """Two micro-batches for each of two replicas."""
    tokens = torch.randint(16, (4, 2, 7), generator=torch.Generator().manual_seed(step))
    return [Batch(tokens=part[:, :-1], labels=part[:, 1:], loss_mask=torch.ones(2, 6, dtype=torch.float64)) for part in tokens]


def backward(model: nn.Module, batch: Batch) -> None:
    output, _ = model(batch.tokens.flatten(), batch.step())
    CrossEntropyObjective()(output, batch).sum.backward()


def expected_gradients(step: int) -> dict[str, Tensor]:
    model = GPTModel(CONFIG, ProcessGroups.single(), dtype=torch.float64)
    for batch in micro_batches(step):
        backward(model, batch)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def local_gradients(sync: Any) -> list[tuple[str, int, Tensor]]:
    """(parameter, first element, values) of what this rank holds complete."""
    if isinstance(sync, PieceSource):
        return [(piece.name, piece.start, piece.gradient.clone()) for piece in sync.pieces()]
    return [(name, shard.start, shard.gradient.clone()) for name, shard in sync.flat_shards().items()]


def check_sums(name: str) -> list[list[tuple[str, int, Tensor]]]:
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    model = GPTModel(CONFIG, groups, dtype=torch.float64)
    sync = PROVIDERS[name][0](model, groups)
    assert mismatches(sync, GradSync) == []
    found = []
    for step in range(2):
        first, second = micro_batches(step)[groups.dp.rank :: 2]
        # What is left of an abandoned step must be forgotten.
        backward(sync, first)
        sync.finish_grad_sync()
        sync.zero_grad_buffer()
        with sync.no_sync():
            backward(sync, first)
        backward(sync, second)
        sync.finish_grad_sync()
        found.append(local_gradients(sync))
    return found


@pytest.mark.world(2, shared=True)
@pytest.mark.parametrize("name", PROVIDERS)
def test_gradients_are_sums_over_micro_batches_and_replicas(world, name: str) -> None:
    ranks = world(check_sums, name=name)
    for step in range(2):
        expected = expected_gradients(step)
        pieces = sorted((name, start, rank, values) for rank, steps in enumerate(ranks) for name, start, values in steps[step])
        for parameter, start, _, values in pieces:
            torch.testing.assert_close(values, expected[parameter].view(-1)[start : start + len(values)], rtol=1e-10, atol=1e-12)
        assert covered(pieces) == {name: gradient.numel() for name, gradient in expected.items()}


def check_held(name: str) -> tuple[int, int]:
    """Elements of gradients that a rank holds between two micro-batches, and of all parameters."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    model = GPTModel(CONFIG, groups, dtype=torch.float64)
    numel = sum(parameter.numel() for parameter in model.parameters())
    sync = PROVIDERS[name][0](model, groups)
    with sync.no_sync():
        backward(sync, micro_batches(0)[groups.dp.rank])
    held = [group.gradients for chunk in sync.chunks for group in chunk.runtime.groups]
    return sum(gradients._whole.numel() if gradients.has_unreduced else gradients.reduced.numel() for gradients in held), numel


@pytest.mark.world(2)
@pytest.mark.parametrize(("name", "share"), [("fully-sharded-model", 2), ("fully-sharded-model-optim", 1)])
def test_divided_gradients_are_divided_between_micro_batches_too(world, name: str, share: int) -> None:
    for held, numel in world(check_held, name=name):
        assert numel / share <= held <= 1.1 * numel / share


def covered(pieces: list[tuple[str, int, int, Tensor]]) -> dict[str, int]:
    """Elements of each parameter that are held by somebody, from the first without a gap."""
    ends: dict[str, int] = {}
    for parameter, start, _, values in pieces:
        assert start <= ends.get(parameter, 0), f"{parameter}: nobody holds what lies before {start}"
        ends[parameter] = max(ends.get(parameter, 0), start + len(values))
    return ends


def check_updates(name: str) -> list[float]:
    """The loss of one batch after each of three updates on it."""
    groups = ProcessGroups.build(ParallelPlan(dp=2))
    model = GPTModel(CONFIG, groups, dtype=torch.float64)
    sync = PROVIDERS[name][0](model, groups)
    sliced = PROVIDERS[name][1]
    assert sliced is not None
    optimizer = MegatronOptimizer(OptimizerConfig(lr=0.05, use_distributed_optimizer=sliced), sync, groups)
    assert mismatches(optimizer, Optimizer) == []
    losses, batches = [], micro_batches(0)
    for _ in range(4):
        sync.zero_grad_buffer()
        backward(sync, batches[groups.dp.rank])
        sync.finish_grad_sync()
        optimizer.step(grad_scale=1 / 24, lr=0.05)
        with torch.no_grad():
            output, _ = sync(batches[2].tokens.flatten(), batches[2].step())
            losses.append(CrossEntropyObjective()(output, batches[2]).sum.item())
    return losses


@pytest.mark.journey
@pytest.mark.world(2)
def test_an_optimizer_makes_the_same_updates_from_every_source(world) -> None:
    found = {name: world(check_updates, name=name) for name, (_, sliced) in PROVIDERS.items() if sliced is not None}
    reference = found.pop("ddp")
    assert reference[0] == reference[1] and all(before != after for before, after in pairwise(reference[0]))
    for losses in found.values():
        assert losses[0] == losses[1] == pytest.approx(reference[0], rel=1e-10)
