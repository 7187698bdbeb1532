# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Recorded steps with prompts: tokens and log-probabilities of steps without a recording, in float64."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_inference.engine import _mixed_graphs
from mcore_inference.engine._mixed_graphs import mixed_sizes, recorded_size
from mcore_inference.scheduling import InferenceBatchDimensions, Limits, RequestView, plan_step
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig, MambaConfig
from tests.support.decode_graphs import serve_as_on_a_gpu

SHARED: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 64, "init_method_std": 0.3}
LATENT = LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, chunk_size=4)
CONFIGS = {
    "attention": TransformerConfig(num_query_groups=2, **SHARED),
    "batch-invariant": TransformerConfig(num_query_groups=2, **SHARED),
    "latents": TransformerConfig(latent_attention=LATENT, **SHARED),
    "mamba": TransformerConfig(hybrid_layer_pattern="M*", mamba=MAMBA, num_query_groups=2, **SHARED),
    "delta net": TransformerConfig(hybrid_layer_pattern="G*", delta_net=DELTA, num_query_groups=2, **SHARED),
    "states alone": TransformerConfig(hybrid_layer_pattern="MM", mamba=MAMBA, **SHARED),
    "states and latents": TransformerConfig(hybrid_layer_pattern="M+", mamba=MAMBA, latent_attention=LATENT, **SHARED),
}
# Prompts in one step, in chunks, of one token, and more of them than a size has places for.
PROMPTS = [list(range(1, 2 + 3 * i % 40)) for i in range(30)]
RECORDED = ExecutionConfig(use_cuda_graphs_for_non_decode_steps=True)


def make_engine(execution: ExecutionConfig | None = None, kind: str = "attention", **fields: Any) -> DynamicInferenceEngine:
    backend = choose_backend(batch_invariant=kind == "batch-invariant")
    place: dict[str, Any] = {"attention_core": PagedAttention(), "backend": backend, "dtype": torch.float64}
    model = GPTModel(CONFIGS[kind], ProcessGroups.single(), **place).eval()
    # Few blocks: some requests are preempted.
    fields = {"num_blocks": 40, "max_requests": 24, "max_tokens": 48, **fields}
    sizes = InferenceConfig(max_sequence_length=64, block_size_tokens=4, **fields)
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)


def check_recorded(kind: str, shares: bool | None = None) -> tuple[int, int, dict[str, int]]:
    settings = [
        SamplingParams(
            temperature=float(i % 2),
            num_tokens_to_generate=6 + i % 7,
            return_log_probs=True,
            skip_prompt_log_probs=i != 4,
            frequency_penalty=0.5 * (i == 3),
            seed=i,
        )
        for i in range(len(PROMPTS))
    ]
    theirs = make_engine(kind=kind).generate(PROMPTS, settings)
    serve_as_on_a_gpu()
    engine = make_engine(RECORDED, kind, enable_prefix_caching=shares)
    gap = 0 if kind == "batch-invariant" else 1e-10
    for one, other in zip(engine.generate(PROMPTS, settings), theirs, strict=True):
        assert one.generated_tokens == other.generated_tokens
        torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=gap, atol=gap)
        torch.testing.assert_close(one.prompt_log_probs, other.prompt_log_probs, rtol=gap, atol=gap)
    graphs = engine._executor.mixed_graphs
    assert graphs is not None
    # Prompts that begin alike take fewer blocks.
    assert engine.stats()["state_snapshots"] if shares else engine.num_preemptions, engine.stats()
    assert engine.stats()["used_blocks"] == 0
    return engine.step_count, int(engine.stats()["graph_steps"]), {str(size): count for size, count in graphs.step_counts.items()}


@pytest.mark.world(1)
@pytest.mark.parametrize(("kind", "shares"), [*((kind, None) for kind in CONFIGS), ("mamba", True), ("delta net", True)])
def test_recorded_steps_with_prompts_give_the_tokens_of_plain_ones(world: Callable[..., Any], kind: str, shares: bool | None) -> None:
    [(num_steps, num_graph_steps, counts)] = world(check_recorded, kind=kind, shares=shares)
    # Only the prompt whose log-probabilities are asked for, and steps with more prompts than places, are none.
    assert num_steps - 4 <= num_graph_steps <= num_steps
    assert sum(counts.values()) > 5 and len(counts) > 1


def check_recorded_at_once() -> None:
    serve_as_on_a_gpu()
    settings = SamplingParams(temperature=0, num_tokens_to_generate=6)
    engine = make_engine(RECORDED)
    engine.create_cuda_graphs()
    graphs, mixed = engine._executor.graphs, engine._executor.mixed_graphs
    assert graphs is not None and mixed is not None
    decode, prompts = dict(graphs._recorded), dict(mixed._recorded)
    assert sorted(decode) == graphs._sizes and set(prompts) == set(mixed._sizes)
    # What was recorded is padding: no request and no counter saw it, and nothing is in the cache.
    assert engine.step_count == 0 and engine.cuda_graph_request_count_map == {} and engine.stats()["used_blocks"] == 0
    wanted = make_engine(ExecutionConfig(use_graphs=False)).generate(PROMPTS, settings)
    assert [record.generated_tokens for record in engine.generate(PROMPTS, settings)] == [record.generated_tokens for record in wanted]
    assert graphs._recorded == decode and mixed._recorded == prompts
    engine.generate([PROMPTS[9]], settings)
    engine.create_cuda_graphs(reset_context=False)
    assert graphs._recorded == decode
    assert engine.generate([PROMPTS[9]], settings)[0].cached_prompt_tokens > 0
    engine.create_cuda_graphs()
    assert engine.generate([PROMPTS[9]], settings)[0].cached_prompt_tokens == 0
    engine.add_request([1, 2], settings)
    with pytest.raises(RuntimeError, match="idle engine, and this one has 1 unfinished requests"):
        engine.create_cuda_graphs()
    while engine.has_unfinished_requests():
        engine.step()
    engine.suspend()
    with pytest.raises(RuntimeError, match="this one is suspended"):
        engine.create_cuda_graphs()
    with pytest.raises(ValueError, match="records no steps: use_graphs=False"):
        make_engine(ExecutionConfig(use_graphs=False)).create_cuda_graphs()


@pytest.mark.world(1)
def test_all_sizes_are_recorded_at_once_when_asked_for(world: Callable[..., Any]) -> None:
    world(check_recorded_at_once)


def test_sizes_are_those_of_the_plan() -> None:
    assert [str(size) for size in mixed_sizes(512, 8192, 4096) if size.decode_req_count] == [
        "[8192]: 16 P + 496 D",
        "[2048]: 16 P + 496 D",
        "[1024]: 16 P + 496 D",
        "[512]: 16 P + 496 D",
        "[256]: 16 P + 240 D",
        "[128]: 16 P + 112 D",
    ]
    assert all(size.token_count <= 100 for size in mixed_sizes(20, 100, 64))
    largest = [max(size.token_count for size in mixed_sizes(20, most, 4096)) for most in (2048, 2049, 4096, 8192, 8193, 2**20)]
    assert largest == [2048, 2049, 4096, 8192, 2048, 2048]
    # Beside full steps none is padded to more than 8/7 of its tokens, or 2048.
    sizes = mixed_sizes(20, 8192, 4096)
    recorded = {tokens: recorded_size(InferenceBatchDimensions(tokens, 3, 5), sizes) for tokens in (8192, 7168, 7167, 2049, 2048, 9)}
    assert {tokens: size and size.token_count for tokens, size in recorded.items()} == {
        8192: 8192, 7168: 8192, 7167: None, 2049: None, 2048: 2048, 9: 128
    }  # fmt: skip


@pytest.mark.parametrize(("max_tokens", "least"), [(8192, 0.95), (4096, 0.95)])
def test_nearly_all_steps_of_many_requests_are_recorded(max_tokens: int, least: float) -> None:
    # 512 requests of 512 tokens and 256 new ones, that arrive at once.
    count, length, new = 512, 512, 256
    limits = Limits(max_requests=count, max_tokens=max_tokens, free_blocks=count * 13, block_size=64)
    sizes = mixed_sizes(count, max_tokens, 1024)
    num_steps, cached, waiting = Counter[bool](), dict[int, int](), list(range(count))
    while waiting or cached:
        running = [
            RequestView(request_id=number, num_tokens=max(length, done + 1), num_cached=done, num_blocks=-(-done // 64))
            for number, done in cached.items()
        ]
        queue = [RequestView(request_id=number, num_tokens=length) for number in waiting]
        used = sum(view.num_blocks for view in running)
        plan = plan_step(running, queue, dataclasses.replace(limits, free_blocks=count * 13 - used))
        waiting = waiting[len(plan.admitted) :]
        tokens = [item.num_tokens for item in plan.work]
        real = InferenceBatchDimensions(sum(tokens), sum(n > 1 for n in tokens), sum(n == 1 for n in tokens))
        num_steps[real.prefill_req_count == 0 or recorded_size(real, sizes) is not None] += 1
        for item in plan.work:
            cached[item.request_id] = cached.get(item.request_id, 0) + item.num_tokens
        # The last token that is drawn is not computed.
        cached = {number: done for number, done in cached.items() if done < length + new - 1}
    assert num_steps[True] / num_steps.total() >= least, num_steps


def test_recorded_steps_copy_the_states_of_few_prompts() -> None:
    sizes, few = mixed_sizes(512, 8192, 4096), mixed_sizes(512, 8192, 4096, has_states=True)
    assert few == [size for size in sizes if size.decode_req_count] and {size.prefill_req_count for size in few} == {16}
    assert mixed_sizes(8, 4096, 96, has_states=True) == mixed_sizes(8, 4096, 96)


def check_full_steps() -> None:
    serve_as_on_a_gpu()
    _mixed_graphs._MAX_TOKENS = 16
    engine = make_engine(RECORDED, max_tokens=64, max_requests=6, num_blocks=120)
    mixed = engine._executor.mixed_graphs
    assert mixed is not None and max(size.token_count for size in mixed._sizes) == 64
    settings = SamplingParams(temperature=1.0, seed=3, num_tokens_to_generate=5, return_log_probs=True)
    prompts = [[1 + number] * length for number, length in enumerate((40, 40, 30, 3, 33))]
    # Two steps of 64 tokens, one of 23, which is launched, and those that only decode.
    records = engine.generate(prompts, settings)
    assert {size.token_count: count for size, count in engine.cuda_graph_mixed_count_map.items()} == {64: 2}
    assert engine.cuda_graph_proposal_count_map == {} and sum(engine.cuda_graph_request_count_map.values()) == engine.step_count - 3
    assert engine.stats()["graph_steps"] == engine.step_count - 1
    for record, wanted in zip(records, make_engine(ExecutionConfig(use_graphs=False)).generate(prompts, settings), strict=True):
        assert record.generated_tokens == wanted.generated_tokens
        torch.testing.assert_close(record.generated_log_probs, wanted.generated_log_probs, rtol=1e-10, atol=1e-10)


@pytest.mark.world(1)
def test_full_steps_are_recorded_and_those_between_are_launched(world: Callable[..., Any]) -> None:
    world(check_full_steps)


def check_defaults() -> None:
    serve_as_on_a_gpu()
    assert make_engine()._executor.mixed_graphs is not None
    for execution in (
        ExecutionConfig(use_graphs=False),
        ExecutionConfig(use_cuda_graphs_for_non_decode_steps=False),
        ExecutionConfig(use_cuda_graphs_for_non_decode_steps=False, speculation=NgramSpeculation()),
    ):
        executor = make_engine(execution)._executor
        # Proposals are verified in decode steps.
        assert executor.mixed_graphs is None and (executor.proposal_graphs is not None) == (execution.speculation is not None)


@pytest.mark.world(1)
def test_steps_with_prompts_are_recorded_where_they_can_be(world: Callable[..., Any]) -> None:
    world(check_defaults)


def test_steps_with_prompts_are_not_recorded_where_decode_steps_are_not() -> None:
    assert make_engine().cuda_graph_mixed_count_map == make_engine().cuda_graph_proposal_count_map == {}
    with pytest.raises(ValueError, match="this engine records no steps: graphs need a GPU"):
        make_engine().create_cuda_graphs()
    with pytest.raises(ValueError, match="use_cuda_graphs_for_non_decode_steps=True: graphs need a GPU"):
        make_engine(RECORDED)
    with pytest.raises(ValueError, match="num_cuda_graphs=4: graphs need a GPU, .*; or leave it at None"):
        make_engine(ExecutionConfig(num_cuda_graphs=4))
    with pytest.raises(ValueError, match="use_cuda_graphs_for_non_decode_steps=True and use_graphs=False exclude each other"):
        ExecutionConfig(use_cuda_graphs_for_non_decode_steps=True, use_graphs=False)
