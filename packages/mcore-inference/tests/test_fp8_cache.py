# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Keys and values in fp8: how far the log-probabilities move, and that everything else stays as it is."""

import dataclasses
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
from mcore_inference.cache import LayerSlots
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import GatedDeltaNetConfig, LatentAttentionConfig

LATENT = LatentAttentionConfig(q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10)
KINDS: dict[str, dict[str, Any]] = {"heads": {}, "latents": {"latent_attention": LATENT, "num_query_groups": None}}
PROMPTS = [[number * 7 % 64 for number in range(first, first + 20 + first)] for first in range(5)]
SCORED = SamplingParams(temperature=0, num_tokens_to_generate=1, return_log_probs=True, skip_prompt_log_probs=False)


def test_an_element_is_off_by_a_sixteenth_of_itself() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(50, 3, 16) * torch.logspace(-6, 6, 50)[:, None, None], torch.randn(50, 3, 16)
    k[7], k[:, 0, 3] = 0, 0
    scales = torch.zeros(2, 3, 60).transpose(1, 2)
    cached = LayerSlots(
        keys=torch.zeros(60, 3, 16).to(torch.float8_e4m3fn),
        values=torch.zeros(60, 3, 16).to(torch.float8_e4m3fn),
        scales=(scales[0], scales[1]),
    )
    slots = torch.randperm(60)[:50]
    cached.write(slots, k, v)
    for x, stored in zip((k, v), cached.read(slots, torch.float32), strict=True):
        least = x.abs().amax(-1, keepdim=True) / 448 * 2**-10
        assert ((stored - x).abs() <= torch.maximum(x.abs() / 16, least) * 1.0001).all()
        assert (stored - x).abs().max() > 0


def test_latents_have_a_scale_a_token_and_rotary_keys_stay_as_they_are() -> None:
    torch.manual_seed(0)
    entries = torch.randn(50, 1, 24) * torch.logspace(-6, 6, 50)[:, None, None]
    entries[7, :, :16] = 0
    latents, scales = torch.zeros(60, 1, 16).to(torch.float8_e4m3fn), torch.zeros(60, 1)
    cached = LayerSlots(keys=latents, values=latents, scales=(scales, scales), rotary=torch.zeros(60, 8))
    slots = torch.randperm(60)[:50]
    cached.write(slots, entries, entries)
    keys, values = cached.read(slots.view(5, 10), torch.float32)
    assert torch.equal(keys, values) and keys.shape == (5, 10, 1, 24)
    found, wanted = keys.flatten(0, 1)[..., :16], entries[..., :16]
    assert torch.equal(keys.flatten(0, 1)[..., 16:], entries[..., 16:])
    least = wanted.abs().amax(-1, keepdim=True) / 448 * 2**-10
    assert ((found - wanted).abs() <= torch.maximum(wanted.abs() / 16, least) * 1.0001).all()
    assert (found - wanted).abs().max() > 0


@pytest.mark.parametrize("kind", KINDS)
def test_log_probabilities_differ_little_from_those_of_a_wide_cache(
    make_engine: Callable[..., Any], make_model: Callable[..., GPTModel], kind: str
) -> None:
    wide, narrow = (make_engine(make_model(**KINDS[kind]), kv_cache_dtype=dtype).generate(PROMPTS, SCORED) for dtype in (None, "fp8"))
    values = [torch.tensor([number for record in records for number in record.prompt_log_probs]) for records in (wide, narrow)]
    errors = (values[0] - values[1]).abs()
    # Weights of std 0.3 at width 32 make logits of large variance; a mean of 0.08 is what they give.
    assert 0 < errors.mean() < 0.16 and errors.max() < 1.2


@pytest.mark.parametrize("sizes", [{"max_tokens": 9}, {"num_blocks": 11}, {"enable_prefix_caching": False}, {"block_size_tokens": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_chunks_preemption_or_prefix_hits(
    make_engine: Callable[..., Any], make_model: Callable[..., GPTModel], kind: str, sizes: dict[str, int]
) -> None:
    settings = [SamplingParams(temperature=t, seed=3, num_tokens_to_generate=16, return_log_probs=True) for t in (0, 1, 0, 1, 0)]
    model = make_model(**KINDS[kind])
    wanted = make_engine(model, kv_cache_dtype="fp8").generate(PROMPTS, settings)
    engine = make_engine(model, kv_cache_dtype="fp8", **sizes)
    for again in range(2):
        for record, expected in zip(engine.generate(PROMPTS, settings), wanted, strict=True):
            assert record.generated_tokens == expected.generated_tokens, again
            assert record.generated_log_probs == pytest.approx(expected.generated_log_probs, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_suspended_engines_and_proposals_keep_their_tokens(
    make_engine: Callable[..., Any], make_model: Callable[..., GPTModel], kind: str
) -> None:
    greedy, model = SamplingParams(temperature=0, num_tokens_to_generate=20), make_model(**KINDS[kind])
    wanted = [record.generated_tokens for record in make_engine(model, kv_cache_dtype="fp8").generate(PROMPTS, greedy)]
    engine = make_engine(model, kv_cache_dtype="fp8")
    numbers = [engine.add_request(prompt, greedy) for prompt in PROMPTS]
    done = {record.request_id: record for _ in range(6) for record in engine.step()}
    engine.suspend()
    cache = engine.context.cache
    assert (cache.rotary is not None) == (kind == "latents")
    parts = [part for part in (cache.pages, cache.scales, cache.rotary) if part is not None]
    assert cache.num_bytes and not any(part.untyped_storage().size() for part in parts)
    engine.resume()
    while engine.has_unfinished_requests():
        done |= {record.request_id: record for record in engine.step()}
    assert [done[number].generated_tokens for number in numbers] == wanted
    sizes = InferenceConfig(max_sequence_length=96, num_blocks=64, block_size_tokens=8, max_requests=8, kv_cache_dtype="fp8")
    execution = ExecutionConfig(speculation=NgramSpeculation())
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)
    assert [record.generated_tokens for record in engine.generate(PROMPTS, greedy)] == wanted


def test_bytes_are_counted_with_the_scales() -> None:
    config = TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=8)
    one = 2 * 3 * 4 * 2 * (4 + 4)
    sizes = InferenceConfig(max_sequence_length=96, block_size_tokens=4, buffer_size_gb=(one * 10 + 1) / 2**30, kv_cache_dtype="fp8")
    context = DynamicInferenceContext(config, sizes)
    assert context.allocator.total_count == 10 and context.cache.num_bytes == 10 * one
    assert context.cache.pages.dtype == torch.float8_e4m3fn


def test_bytes_of_latents_are_counted_with_their_scales_and_rotary_keys() -> None:
    config = TransformerConfig(num_layers=3, hidden_size=32, num_attention_heads=4, vocab_size=8, latent_attention=LATENT)
    one = 3 * 4 * (32 + 4 + 8 * 2)
    sizes = InferenceConfig(max_sequence_length=96, block_size_tokens=4, buffer_size_gb=(one * 10 + 1) / 2**30, kv_cache_dtype="fp8")
    context = DynamicInferenceContext(config, sizes, dtype=torch.bfloat16)
    cache = context.cache
    assert context.allocator.total_count == 10 and cache.num_bytes == 10 * one and cache.holds_latents
    assert cache.pages.shape[-1] == 32 and cache.width == 40 and cache.rotary is not None
    assert cache.pages.dtype == torch.float8_e4m3fn and cache.rotary.dtype == torch.bfloat16


def check_layouts() -> list[list[int]]:
    """Ranks of tensor parallelism and stages have the tokens of one process."""
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, init_method_std=0.3, latent_attention=LATENT
    )
    sizes = InferenceConfig(max_sequence_length=64, num_blocks=40, block_size_tokens=8, max_requests=8, kv_cache_dtype="fp8")
    greedy, results = SamplingParams(temperature=0, num_tokens_to_generate=8, return_log_probs=True), []
    plans = ParallelPlan(tp=2, sequence_parallel=False), ParallelPlan(pp=2)
    for groups in (*(ProcessGroups.build(plan) for plan in plans), ProcessGroups.single()):
        model = GPTModel(config, groups, attention_core=PagedAttention(), dtype=torch.float64, seed=0).eval()
        engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes))
        results.append(engine.generate(PROMPTS[:3], greedy))
    *split, whole = results
    for records in split:
        for one, other in zip(records, whole, strict=True):
            assert one.generated_tokens == other.generated_tokens
            torch.testing.assert_close(one.generated_log_probs, other.generated_log_probs, rtol=1e-6, atol=1e-6)
    return [record.generated_tokens for record in whole]


@pytest.mark.world(2)
def test_ranks_and_stages_keep_latents_in_fp8(world: Callable[..., Any]) -> None:
    one, two = world(check_layouts)
    assert one == two


def model_of(backend: Any = None, **fields: Any) -> GPTModel:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, **fields)
    return GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend)


@pytest.mark.parametrize(
    ("rank", "dtype", "message"),
    [
        (36, torch.float32, r"layers\.0 has latents of kv_lora_rank=32 in 40 channels and the cache of 36 in 40"),
        (32, torch.bfloat16, "the cache holds rotary keys in dtype=torch.bfloat16 and the model is in torch.float32"),
    ],
    ids=["split", "rotary dtype"],
)
def test_a_cache_of_other_latents_is_refused_by_name(rank: int, dtype: torch.dtype, message: str) -> None:
    """Of as many channels in all, or with rotary keys of another dtype beside them."""
    other = dataclasses.replace(LATENT, kv_lora_rank=rank, qk_rope_head_dim=40 - rank)
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=64, latent_attention=other)
    sizes = InferenceConfig(num_blocks=8, block_size_tokens=8, max_sequence_length=32, max_requests=2, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match=message):
        DynamicInferenceEngine(model_of(latent_attention=LATENT), DynamicInferenceContext(config, sizes, dtype=dtype))


def test_what_has_no_keys_and_values_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype='fp4' is unknown"):
        InferenceConfig(kv_cache_dtype="fp4")  # type: ignore[arg-type]
    sizes = InferenceConfig(num_blocks=8, block_size_tokens=8, max_sequence_length=32, max_requests=2, kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8': the cache of latent attention holds keys and values of every head"):
        DynamicInferenceContext.for_model(model_of(choose_backend(batch_invariant=True), latent_attention=LATENT), sizes)
    delta = GatedDeltaNetConfig(key_head_dim=16, value_head_dim=16, num_key_heads=2, num_value_heads=2)
    with pytest.raises(ValueError, match="kv_cache_dtype='fp8': every layer keeps a state"):
        DynamicInferenceContext.for_model(model_of(hybrid_layer_pattern="GG", delta_net=delta), sizes)
    for pattern, fields in (("G*", {}), ("G+", {"latent_attention": LATENT})):
        hybrid = model_of(hybrid_layer_pattern=pattern, delta_net=delta, **fields)
        engine = DynamicInferenceEngine(hybrid, DynamicInferenceContext.for_model(hybrid, sizes))
        greedy = SamplingParams(temperature=0, num_tokens_to_generate=4, ignore_eos=True)
        assert engine.generate([[1, 2, 3]], greedy)[0].num_generated == 4
