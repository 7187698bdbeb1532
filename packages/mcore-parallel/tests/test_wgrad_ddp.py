# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Gradient buffers that layers add to themselves, against buffers that autograd fills."""

import pytest
import torch
from torch import Tensor

from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import RecomputeConfig, Step
from mcore_parallel.tensor_parallel import WeightGradientQueue

CONFIG = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=16, ffn_hidden_size=12)


def steps(groups: ProcessGroups, *, fused: bool, deferred: bool = False, dtype: torch.dtype = torch.float32, **options) -> list[Tensor]:
    """Gradients after each of three steps of four micro-batches; the later ones start their sums in the backward."""
    model = GPTModel(CONFIG, groups, dtype=dtype, seed=1, **options)
    config = DistributedDataParallelConfig(bucket_size=200, gradient_accumulation_fusion=fused)
    ddp = DistributedDataParallel(config, model, groups)
    queue = WeightGradientQueue(limit=2)
    if deferred:
        model.output.defer_weight_gradients_to(queue)
    found = []
    for step in range(3):
        ddp.zero_grad_buffer()
        for microbatch in range(4):
            seed = 100 * step + 10 * microbatch + groups.dp.rank
            tokens = torch.randint(0, 16, (12,), generator=torch.Generator().manual_seed(seed))

            def backward(tokens: Tensor = tokens) -> None:
                ddp(tokens, Step.causal(2, 6))[0].token_losses(tokens, fused=True).sum().backward()

            if microbatch < 3:
                with ddp.no_sync():
                    backward()
            else:
                backward()
        queue.drain()
        ddp.finish_grad_sync()
        found += [gradient.clone() for gradient in ddp.gradients().values()]
    return found


def check(tp: int, dp: int) -> None:
    groups = ProcessGroups.build(ParallelPlan.for_world(tp * dp, tp=tp, sequence_parallel=True))
    expected = steps(groups, fused=False)
    for options in ({}, {"recompute": RecomputeConfig(modules=("norm", "mlp"))}):
        for ours, plain in zip(steps(groups, fused=True, **options), expected, strict=True):
            assert torch.equal(ours, plain)
    for ours, plain in zip(steps(groups, fused=True, deferred=True), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    assert all(gradient.any() for gradient in expected)
    coarse = steps(groups, fused=True, dtype=torch.bfloat16)
    assert all(gradient.dtype == torch.float32 for gradient in coarse)
    for ours, plain in zip(coarse, steps(groups, fused=False, dtype=torch.bfloat16), strict=True):
        torch.testing.assert_close(ours, plain, rtol=2**-6, atol=2**-5)


@pytest.mark.world(2)
def test_replicas_have_the_same_gradients_with_and_without_fusion(world) -> None:
    world(check, tp=1, dp=2)


@pytest.mark.journey
@pytest.mark.world(4)
def test_tensor_parallel_replicas_have_the_same_gradients_with_and_without_fusion(world) -> None:
    world(check, tp=2, dp=2)
