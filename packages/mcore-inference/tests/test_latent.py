# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine over latent attention, whose cache holds latents, against models that expand keys and values of whole sequences."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    DynamicInferenceRequestRecord,
    ExecutionConfig,
    InferenceConfig,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_parallel import ParallelPlan, ProcessGroups
from mcore_parallel.backends import quantize_base
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import LatentAttentionConfig, MambaConfig, Step, YarnScaling
from mcore_parallel.tensor_parallel import LoraConfig, add_lora, merge_lora

SHARED = list(range(20))
PROMPTS = [[1, 2, 3], [7], SHARED, [9, 9], [*SHARED[:13], 5, 6], [30, 31]]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=8, return_log_probs=True, skip_prompt_log_probs=False)
LATENT = LatentAttentionConfig(q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
# Of each kind the fields of its config: full queries, channels that turn in neighbours, YaRN's scale, state spaces beside.
KINDS: dict[str, dict[str, Any]] = {
    "low rank": {"num_layers": 2, "latent_attention": LATENT},
    "yarn": {
        "num_layers": 1,
        "latent_attention": LatentAttentionConfig(kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5),
        "position_embedding_type": "yarn",
        "yarn": YarnScaling(factor=4.0, original_max_position_embeddings=16, mscale_all_dim=1.0),
        "rotary_interleaved": True,
    },
    "hybrid": {
        "num_layers": 3,
        "hybrid_layer_pattern": "M+-",
        "latent_attention": LATENT,
        "mamba": MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4),
    },
}


@functools.cache
def make_model(kind: str, groups: ProcessGroups | None = None, *, served: bool = True) -> GPTModel:
    config = TransformerConfig(hidden_size=16, num_attention_heads=4, vocab_size=64, init_method_std=0.4, **KINDS[kind])
    core = PagedAttention() if served else None
    return GPTModel(config, groups or ProcessGroups.single(), attention_core=core, dtype=torch.float64).eval()


def make_engine(model: GPTModel, execution: ExecutionConfig | None = None, **sizes: Any) -> DynamicInferenceEngine:
    sizes = {"max_sequence_length": 40, "num_blocks": 40, "block_size_tokens": 4, "max_requests": 4, "max_tokens": 64} | sizes
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, InferenceConfig(**sizes)), execution=execution)


@functools.cache
def naive(kind: str, prompt: tuple[int, ...]) -> tuple[list[int], Tensor]:
    """Greedy tokens behind a prompt, and the log-probabilities [T - 1] of all tokens but the first, by keys and values of each head."""
    model, tokens = make_model(kind, served=False), list(prompt)
    with torch.no_grad():
        for _ in range(8):
            logits = model(torch.tensor(tokens), Step.causal(1, len(tokens)))[0].logits()
            tokens.append(int(logits[-1].argmax()))
        logits = model(torch.tensor(tokens), Step.causal(1, len(tokens)))[0].logits()
    return tokens[len(prompt) :], logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def log_probs_of(record: DynamicInferenceRequestRecord) -> torch.Tensor:
    """Of every token but the first one, as the engine reports them."""
    return torch.tensor([*(record.prompt_log_probs or []), *record.generated_log_probs], dtype=torch.float64)


def check(engine: DynamicInferenceEngine, kind: str) -> list[list[int]]:
    """Greedy tokens and all log-probabilities are those of whole sequences."""
    records = engine.generate(PROMPTS, GREEDY)
    for prompt, record in zip(PROMPTS, records, strict=True):
        tokens, log_probs = naive(kind, tuple(prompt))
        assert record.generated_tokens == tokens
        torch.testing.assert_close(log_probs_of(record), log_probs, rtol=1e-5, atol=1e-5)
    assert engine.stats()["active_requests"] == engine.stats()["used_blocks"] == 0
    return [record.generated_tokens for record in records]


@pytest.mark.parametrize("max_tokens", [5, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_many_requests_equal_whole_sequences(kind: str, max_tokens: int) -> None:
    check(make_engine(make_model(kind), ExecutionConfig(run_ahead=max_tokens == 5), max_tokens=max_tokens), kind)


def test_preempted_requests_are_computed_again() -> None:
    engine = make_engine(make_model("low rank"), num_blocks=9, max_tokens=8)
    check(engine, "low rank")
    assert engine.num_preemptions > 0


def test_beginnings_are_shared_and_proposals_verified() -> None:
    engine = make_engine(make_model("low rank"), ExecutionConfig(speculation=NgramSpeculation()))
    without_prompts = SamplingParams(temperature=0, num_tokens_to_generate=8)
    for prompt in (PROMPTS[2], PROMPTS[4]):
        assert engine.generate([prompt], without_prompts)[0].generated_tokens == naive("low rank", tuple(prompt))[0]
    assert engine.stats()["prefix_cache_hits"] == 12 and engine.num_drafted > 0


def test_the_cache_holds_one_latent_a_token() -> None:
    context = make_engine(make_model("low rank")).context
    assert context.cache.pages.shape == (2, 1, 41, 4, 1, 12) and context.cache.holds_latents
    assert context.cache.num_bytes == 2 * 41 * 4 * 12 * 8
    hybrid = make_engine(make_model("hybrid")).context
    assert hybrid.cache.layers == (1,) and hybrid.cache.pages.shape[:2] == (1, 1)


def test_the_same_model_scores_without_a_cache() -> None:
    tokens, step = torch.tensor(SHARED), Step.causal(2, 10)
    for kind in KINDS:
        one, other = (make_model(kind, served=served)(tokens, step)[0].logits() for served in (True, False))
        torch.testing.assert_close(one, other)


def test_what_a_cache_of_latents_cannot_do_is_refused() -> None:
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=4, vocab_size=64, latent_attention=LATENT, window_size=(4, 0)
    )
    with pytest.raises(ValueError, match=r"window_size=\(4, 0\) is nothing that a cache of latents knows of"):
        GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention())
    with pytest.raises(ValueError, match=r"layers\.0\.attention\.core is .*PagedAttention"):
        make_engine(make_model("low rank", served=False))
    model = make_model("low rank")
    plain = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=64)
    sizes = InferenceConfig(num_blocks=8, block_size_tokens=4, max_sequence_length=16)
    with pytest.raises(ValueError, match=r"layers\.0 is a LatentSelfAttention and the cache holds keys and values"):
        DynamicInferenceEngine(model, DynamicInferenceContext(plain, sizes))
    with pytest.raises(ValueError, match="expands_latents=True is for latent attention, and latent_attention is None; leave it out"):
        DynamicInferenceContext(plain, sizes, expands_latents=True)
    with pytest.raises(ValueError, match=r"layers\.0 has latents of kv_lora_rank=8 in 12 channels and the cache of 10 in 14"):
        wider = LatentAttentionConfig(kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
        other = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=4, vocab_size=64, latent_attention=wider)
        DynamicInferenceEngine(model, DynamicInferenceContext(other, sizes))


def check_split(kind: str) -> list[list[int]]:
    groups = ProcessGroups.build(ParallelPlan(tp=2, sequence_parallel=False))
    return check(make_engine(make_model(kind, groups), max_tokens=7), kind)


@pytest.mark.world(2)
def test_two_tensor_parallel_ranks_serve_the_tokens_of_one(world: Callable[..., Any]) -> None:
    one, two = world(check_split, kind="low rank")
    assert one == two


def test_adapters_are_part_of_absorbed_weights() -> None:
    config = TransformerConfig(hidden_size=16, num_attention_heads=4, vocab_size=64, init_method_std=0.4, **KINDS["low rank"])
    groups = ProcessGroups.single()
    model = GPTModel(config, groups, attention_core=PagedAttention(), dtype=torch.float64).eval()
    [plain] = make_engine(model).generate([PROMPTS[0]], GREEDY)
    add_lora(model, LoraConfig(rank=2, targets=("kv_up", "kv_down")), groups)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora.B"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    [record] = make_engine(model).generate([PROMPTS[0]], GREEDY)
    merge_lora(model)
    [merged] = make_engine(model).generate([PROMPTS[0]], GREEDY)
    assert record.generated_tokens == merged.generated_tokens
    assert record.generated_log_probs == pytest.approx(merged.generated_log_probs, abs=1e-10)
    assert plain.generated_log_probs != pytest.approx(merged.generated_log_probs, abs=1e-3)


@pytest.mark.parametrize("targets", [("kv_up",), ("q_down", "q_up", "kv_down", "kv_up", "out", "up", "down")])
@pytest.mark.parametrize("base_dtype", ["fp8", "fp8_weight_only"])
def test_weights_in_eight_bits_beside_adapters_are_absorbed_with_their_scales(base_dtype: Any, targets: tuple[str, ...]) -> None:
    config = TransformerConfig(hidden_size=16, num_attention_heads=4, vocab_size=64, init_method_std=0.4, **KINDS["low rank"])
    models = []
    for core in (PagedAttention(), None):
        model = GPTModel(config, ProcessGroups.single(), attention_core=core, dtype=torch.float64).eval()
        add_lora(model, LoraConfig(rank=2, targets=targets, base_dtype=base_dtype), model.groups)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("lora.B"):
                    parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
        assert "layers.0.attention.kv_up" in quantize_base(model)
        models.append(model)
    served, plain = models
    for prompt, record in zip(PROMPTS, make_engine(served).generate(PROMPTS, GREEDY), strict=True):
        tokens = torch.tensor([*prompt, *record.generated_tokens])
        with torch.no_grad():
            log_probs = plain(tokens, Step.causal(1, len(tokens)))[0].logits().log_softmax(-1)[:-1]
        assert record.generated_tokens == log_probs[len(prompt) - 1 :].argmax(-1).tolist()
        torch.testing.assert_close(log_probs_of(record), log_probs.gather(1, tokens[1:, None])[:, 0], rtol=1e-5, atol=1e-5)
