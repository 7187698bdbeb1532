# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines in lock-step over a split model against one engine over the whole one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    EngineRunner,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
    WeightSlice,
)
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig

CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.3)
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9]]


def make_engine(groups: ProcessGroups, seed: int = 0) -> DynamicInferenceEngine:
    model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64, seed=seed)
    sizes = InferenceConfig(max_sequence_length=40, num_blocks=9, block_size_tokens=4, max_tokens=8, max_requests=4)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))


def settings() -> list[SamplingParams]:
    common = {"num_tokens_to_generate": 12, "return_log_probs": True, "skip_prompt_log_probs": False}
    return [SamplingParams(temperature=float(i % 2), top_p=0.9, **common) for i in range(4)]


def check_split_engine() -> list[list[int]]:
    split = make_engine(ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False)))
    whole = make_engine(ProcessGroups.single())
    assert split.context.cache.num_bytes * 2 == whole.context.cache.num_bytes
    ours, theirs = split.generate(PROMPTS, settings()), whole.generate(PROMPTS, settings())
    assert split.num_preemptions == whole.num_preemptions > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.generated_tokens == other.generated_tokens
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=1e-10, atol=1e-10)
    # Full tensors come from a model in another layout; each rank cuts its part.
    fresh = make_engine(ProcessGroups.single(), seed=1)
    full = [(shard.name, shard.parameter.detach()) for shard in named_shards(fresh.model)]
    # Rows in two parts that the ranks' shards do not follow.
    parts: list[tuple[str, Any]] = []
    for name, tensor in full:
        cut = 1 if len(tensor) == 2 else 5
        offsets = (0,) * (tensor.dim() - 1)
        parts += [(name, WeightSlice(tensor=part, offsets=(at, *offsets))) for at, part in ((cut, tensor[cut:]), (0, tensor[:cut]))]
    split.load_weights(parts)
    again = [record.generated_tokens for record in split.generate(PROMPTS, settings()[0])]
    assert again == [record.generated_tokens for record in fresh.generate(PROMPTS, settings()[0])]
    with pytest.raises(ValueError, match="tp=2"):
        EngineRunner(split)
    return again


@pytest.mark.world(2)
def test_tensor_parallel_engines_draw_the_tokens_of_one(world: Callable[..., list[Any]]) -> None:
    one, two = world(check_split_engine)
    assert one == two


def check_refused_layouts() -> None:
    cases = (
        (ParallelPlan(tp=2, sequence_parallel=True), "sequence_parallel"),
        (ParallelPlan(pp=2), "pp=2"),
        (ParallelPlan(cp=2), "cp=2"),
        (ParallelPlan(dp=2, ep=2), "ep=2"),
    )
    for plan, word in cases:
        with pytest.raises(ValueError, match=word):
            make_engine(ProcessGroups.build(plan))


@pytest.mark.world(2)
def test_layouts_that_cannot_serve_are_refused(world: Callable[..., list[Any]]) -> None:
    world(check_refused_layouts)
