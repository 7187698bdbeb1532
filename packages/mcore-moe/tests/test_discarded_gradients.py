# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gradients of experts overwrite sums that hold nothing; experts without rows get zeros, whatever was there before."""

import functools
import sys
from typing import Any

import pytest
import torch
from torch import nn

from mcore_moe import MoEConfig, moe_feed_forward
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import Fp8Config, choose_backend
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.pipeline import Overlap, PipelineConfig
from mcore_parallel.training import Batch
from tests.support.interpreter import run_interpreted
from tests.support.poisoned_gradients import PoisonedGradients, check_same_bits, trained

CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=2, ffn_hidden_size=48, vocab_size=64, init_method_std=0.2)
MIXTURE = MoEConfig(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=16, moe_aux_loss_coeff=0.01)
ALONE = ProcessGroups.single()


def mixture(groups: ProcessGroups, **options: Any) -> GPTModel:
    return GPTModel(CONFIG, groups, feed_forward=moe_feed_forward(MIXTURE), **{"dtype": torch.float64, "seed": 3, **options})


def micro_batches(model: nn.Module, step: int, *, count: int, rank: int = 0) -> list[Batch]:
    """Of three tokens, which eight experts share."""
    tokens = torch.randint(CONFIG.vocab_size, (count, 1, 4), generator=torch.Generator().manual_seed(100 * rank + step))
    return [Batch(tokens=part[:, :-1], labels=part[:, 1:], loss_mask=torch.ones(1, 3)) for part in tokens]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("recipe", [None, "tensorwise", "rowwise"])
def test_a_mixture_trains_with_the_bits_of_zeroed_sums(recipe: Any, count: int) -> None:
    options: dict[str, Any] = {}
    if recipe is not None:
        options = {"dtype": torch.float32, "backend": choose_backend("torch", fp8=Fp8Config(recipe=recipe))}
    check_same_bits(lambda: mixture(ALONE, **options), ALONE, functools.partial(micro_batches, count=count))


def test_experts_without_rows_are_among_those_that_are_compared() -> None:
    tensors, _ = trained(lambda: mixture(ALONE), ALONE, functools.partial(micro_batches, count=1), PoisonedGradients, steps=1)
    names = [name for name, _ in mixture(ALONE).named_parameters()]
    gradient = dict(zip(names, tensors[2:], strict=False))["layers.0.mlp.experts.up"].view(8, -1)
    used = gradient.any(1)
    assert used.any() and not used.all()


@pytest.mark.parametrize("pipeline", [PipelineConfig(schedule="zero_bubble"), PipelineConfig(schedule="combined", delay_weight_grad=True)])
def test_delayed_weight_gradients_of_experts_too(pipeline: PipelineConfig) -> None:
    overlap = Overlap() if pipeline.schedule == "combined" else None
    batches = functools.partial(micro_batches, count=4)
    check_same_bits(lambda: mixture(ALONE), ALONE, batches, pipeline=pipeline.build(1), overlap=overlap)


def check_expert_parallel() -> None:
    groups = ProcessGroups.build(ParallelPlan(dp=2, ep=2))
    batches = functools.partial(micro_batches, count=2, rank=groups.dp.rank)
    for options in ({}, {"use_distributed_optimizer": True}):
        check_same_bits(lambda: mixture(groups), groups, batches, ddp={"bucket_size": 2000, **options})


@pytest.mark.journey
@pytest.mark.world(2)
def test_ranks_that_share_experts_train_with_the_bits_of_zeroed_sums(world) -> None:
    world(check_expert_parallel)


def check_kernel() -> None:
    """With and without a sum to add to, and an expert without rows."""
    from mcore_parallel.backends._triton_grouped import Tiles, grouped_weight_gradient

    tiles = Tiles(rows=32, cols=32, depth=16, warps=4, stages=2)
    generator = torch.Generator().manual_seed(0)
    grad, x = torch.randn(30, 40, generator=generator), torch.randn(30, 24, generator=generator)
    ends = torch.tensor([7, 7, 29], dtype=torch.int32)
    zeroed, poisoned = torch.zeros(3, 40, 24), torch.full((3, 40, 24), torch.nan)
    grouped_weight_gradient(grad, x, ends, zeroed, add=True, tiles=tiles)
    grouped_weight_gradient(grad, x, ends, poisoned, add=False, tiles=tiles)
    assert torch.equal(poisoned, zeroed) and not poisoned[1].any()
    assert torch.allclose(poisoned[2], grad[7:29].T @ x[7:29], atol=1e-4)


def test_the_kernel_overwrites_what_it_does_not_add_to() -> None:
    run_interpreted(__file__)


if __name__ == "__main__":
    check_kernel()
    sys.stdout.write("same\n")
