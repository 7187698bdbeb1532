# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Models with capped scores and logits, such as Gemma 2, in an engine: as whole sequences, one after the other."""

import functools
from dataclasses import replace

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
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, TransformerConfig
from mcore_parallel.nn import Step

CONFIG = TransformerConfig(
    num_layers=4, hidden_size=16, num_attention_heads=4, num_query_groups=2, vocab_size=64, init_method_std=0.5, activation="geglu_tanh",
    window_size=(6, 0), window_attn_skip_freq=2, sandwich_norm=True, softmax_scale=0.4, attn_logit_softcapping=0.8,
    final_logit_softcapping=5.0,
)  # fmt: skip
PROMPTS = [[1, 2, 3], list(range(30)), [7], [5] * 17]
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=NUM_TOKENS, return_log_probs=True)


def build(config: TransformerConfig = CONFIG, execution: ExecutionConfig | None = None, **sizes: object) -> DynamicInferenceEngine:
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64, seed=1).eval()
    fields = {"max_sequence_length": 64, "num_blocks": 40, "block_size_tokens": 4, "max_requests": 8, "max_tokens": 64, **sizes}
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, InferenceConfig(**fields)), execution=execution)


@functools.cache
def naive(config: TransformerConfig = CONFIG, num_prompts: int = len(PROMPTS)) -> list[tuple[list[int], list[float]]]:
    """Each token from a forward of all before it, without a cache."""
    model, results = GPTModel(config, ProcessGroups.single(), dtype=torch.float64, seed=1).eval(), []
    for prompt in PROMPTS[:num_prompts]:
        tokens, log_probs = list(prompt), list[float]()
        for _ in range(NUM_TOKENS):
            with torch.no_grad():
                scores = model(torch.tensor(tokens), Step.causal(1, len(tokens)))[0].logits()[-1].log_softmax(-1)
            tokens.append(int(scores.argmax()))
            log_probs.append(float(scores.max()))
        results.append((tokens[len(prompt) :], log_probs))
    return results


@pytest.mark.parametrize("softmax_type", ["vanilla", "learnable"])
@pytest.mark.parametrize("sizes", [{}, {"max_tokens": 9}, {"num_blocks": 14}], ids=str)
def test_tokens_and_log_probabilities_are_those_of_whole_sequences(softmax_type: str, sizes: dict[str, int]) -> None:
    config = replace(CONFIG, softmax_type=softmax_type)
    for record, (tokens, log_probs) in zip(build(config, **sizes).generate(PROMPTS, GREEDY), naive(config), strict=True):
        assert record.generated_tokens == tokens
        torch.testing.assert_close(torch.tensor(record.generated_log_probs), torch.tensor(log_probs), rtol=1e-5, atol=1e-5)


def test_each_cap_changes_the_tokens_or_their_log_probabilities() -> None:
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert naive(replace(CONFIG, **{field: None}), 1) != naive(CONFIG, 1)


def test_proposals_change_nothing() -> None:
    engine = build(execution=ExecutionConfig(speculation=NgramSpeculation(num_tokens=3, min_ngram=1)))
    assert [record.generated_tokens for record in engine.generate(PROMPTS, GREEDY)] == [tokens for tokens, _ in naive()]


def test_a_cache_in_fp8_is_read_before_scores_are_capped() -> None:
    scored = replace(GREEDY, num_tokens_to_generate=1, skip_prompt_log_probs=False)
    wide, narrow = (build(kv_cache_dtype=kind).generate(PROMPTS[1:2], scored)[0].prompt_log_probs for kind in (None, "fp8"))
    errors = (torch.tensor(wide) - torch.tensor(narrow)).abs()
    assert 0 < errors.mean() < 0.1
