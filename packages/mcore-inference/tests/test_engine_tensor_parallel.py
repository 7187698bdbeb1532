# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Engines in lock-step over a split model against one engine over the whole one."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    InferenceConfig,
    PagedAttention,
    SamplingParams,
    WeightLoadError,
    WeightSlice,
)
from mcore_parallel import ParallelPlan, ProcessGroups, named_shards
from mcore_parallel.models import GPTModel, TransformerConfig

CONFIG = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.3)
PROMPTS = [[1, 2, 3], [7], list(range(20)), [9, 9]]


def make_engine(groups: ProcessGroups, seed: int = 0, config: TransformerConfig = CONFIG) -> DynamicInferenceEngine:
    model = GPTModel(config, groups, attention_core=PagedAttention(), dtype=torch.float64, seed=seed)
    sizes = InferenceConfig(max_sequence_length=40, num_blocks=9, block_size_tokens=4, max_tokens=8, max_requests=4)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))


def settings() -> list[SamplingParams]:
    common = {"num_tokens_to_generate": 8, "return_log_probs": True, "skip_prompt_log_probs": False}
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
    return again


@pytest.mark.world(2, shared=True)
def test_tensor_parallel_engines_draw_the_tokens_of_one(world: Callable[..., list[Any]]) -> None:
    one, two = world(check_split_engine)
    assert one == two


def check_stages(tp: int, pp: int, config: TransformerConfig) -> list[list[int]]:
    plan = ParallelPlan(tp=tp, pp=pp, sequence_parallel=False)
    split, whole = make_engine(ProcessGroups.build(plan), config=config), make_engine(ProcessGroups.single(), config=config)
    ours, theirs = split.generate(PROMPTS, settings()), whole.generate(PROMPTS, settings())
    assert split.num_preemptions == whole.num_preemptions > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.generated_tokens == other.generated_tokens
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=1e-10, atol=1e-10)
    fresh = make_engine(ProcessGroups.single(), seed=1, config=config)
    full = [(shard.name, shard.parameter.detach()) for shard in named_shards(fresh.model)]
    with pytest.raises(WeightLoadError, match=r"unknown\.weight"):
        split.load_weights([*full, ("unknown.weight", full[0][1])])
    split.load_weights(full)
    split.suspend()
    split.resume()
    again = [record.generated_tokens for record in split.generate(PROMPTS, settings()[0])]
    assert again == [record.generated_tokens for record in fresh.generate(PROMPTS, settings()[0])]
    return again


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.world(2, shared=True)
def test_pipelined_engines_draw_the_tokens_of_one(world: Callable[..., list[Any]], tied: bool) -> None:
    config = dataclasses.replace(CONFIG, num_layers=4, share_embeddings_and_output_weights=tied)
    one, two = world(functools.partial(check_stages, 1, 2, config))
    assert one == two


@pytest.mark.world(4, shared=True)
def test_stages_of_split_layers_draw_the_tokens_of_one(world: Callable[..., list[Any]]) -> None:
    ranks = world(functools.partial(check_stages, 2, 2, CONFIG))
    assert all(tokens == ranks[0] for tokens in ranks)


@pytest.mark.journey
@pytest.mark.world(2, shared=True)
def test_split_norms_across_heads_draw_the_tokens_of_one(world: Callable[..., list[Any]]) -> None:
    config = dataclasses.replace(CONFIG, qk_layernorm=True, qk_layernorm_across_heads=True)
    one, two = world(functools.partial(check_stages, 2, 1, config))
    assert one == two


def check_unequal_memory() -> tuple[int, int]:
    groups = ProcessGroups.build(ParallelPlan(pp=2))
    model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64)
    sizes = InferenceConfig(max_sequence_length=40, num_blocks=9 + 3 * groups.pp.rank, block_size_tokens=4, max_tokens=8)
    context = DynamicInferenceContext.for_model(model, sizes)
    return context.allocator.usable_count, context.max_requests


@pytest.mark.world(2, shared=True)
def test_stages_agree_on_the_smallest_memory(world: Callable[..., list[Any]]) -> None:
    assert world(check_unequal_memory) == [(9, 8), (9, 8)]


def check_unequal_ranks() -> None:
    for plan in (ParallelPlan(tp=2, sequence_parallel=False), ParallelPlan(pp=2)):
        groups = ProcessGroups.build(plan)
        other = groups.tp_pp.rank
        model = GPTModel(CONFIG, groups, attention_core=PagedAttention(), dtype=torch.float64)
        sizes = InferenceConfig(max_sequence_length=40, num_blocks=9, block_size_tokens=4, max_tokens=8, max_requests=4)
        unequal: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("max_sequence_length is .* from 39 to 40", {"max_sequence_length": 40 - other}, {}),
            ("block_size_tokens is .* from 4 to 8", {"block_size_tokens": 4 + 4 * other}, {}),
            ("vocab_size is .* from 63 to 64", {}, {"vocab_size": 64 - other}),
            (f"seed is .* from {-(2**63)} to {2**63 - 1}", {}, {"seed": 2**63 - 1 if other else -(2**63)}),
        ]
        if plan.tp == 2:
            # Stages agree on these.
            unequal += [
                ("num_blocks is .* from 9 to 20", {"num_blocks": 20 if other else 9}, {}),
                ("max_requests is .* from 3 to 4", {"max_requests": 4 - other}, {}),
                ("max_tokens is .* from 7 to 8", {"max_tokens": 8 - other}, {}),
            ]
        for words, differing, arguments in unequal:
            context = DynamicInferenceContext.for_model(model, dataclasses.replace(sizes, **differing))
            with pytest.raises(ValueError, match=f"{words} over the tp={plan.tp} pp={plan.pp} ranks of this engine.*give all of them the"):
                DynamicInferenceEngine(model, context, **arguments)
        context = DynamicInferenceContext.for_model(model, sizes)
        DynamicInferenceEngine(model, context, seed=-(2**63)).generate(PROMPTS, settings())


@pytest.mark.world(2, shared=True)
def test_ranks_of_unequal_sizes_or_seeds_are_refused_by_the_field(world: Callable[..., list[Any]]) -> None:
    world(check_unequal_ranks)


def check_refused_layouts() -> None:
    cases = (
        (ParallelPlan(tp=2, sequence_parallel=True), "sequence_parallel"),
        (ParallelPlan(cp=2), "cp=2"),
    )
    for plan, word in cases:
        with pytest.raises(ValueError, match=word):
            make_engine(ProcessGroups.build(plan))


@pytest.mark.world(2, shared=True)
def test_layouts_that_cannot_serve_are_refused(world: Callable[..., list[Any]]) -> None:
    world(check_refused_layouts)
