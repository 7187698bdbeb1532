# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""An engine over a batch-invariant model: the same bits in any company, and those of the trainer."""

import dataclasses
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    MtpSpeculation,
    NgramSpeculation,
    PagedAttention,
    SamplingParams,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.backends import choose_backend
from mcore_parallel.models import GPTModel, ModelOutput, TransformerConfig
from mcore_parallel.nn import Step

SIZES = TransformerConfig(num_layers=2, hidden_size=48, num_attention_heads=4, num_query_groups=2, vocab_size=90, init_method_std=0.2)
WINDOW = {"window_size": (9, 0), "softmax_type": "learnable", "qk_layernorm": True}
ONE_HEAD = {"num_attention_heads": 1, "num_query_groups": 1, "mtp_num_layers": 1}
"""Of attention, beside one that predicts further tokens in training."""
PARAMS = [
    SamplingParams(temperature=1.0, num_tokens_to_generate=9, return_log_probs=True, processed_log_probs=True, seed=3),
    SamplingParams(temperature=0.7, num_tokens_to_generate=12, return_log_probs=True, processed_log_probs=True, top_n_logprobs=2, seed=4),
    SamplingParams(temperature=0, num_tokens_to_generate=7, return_log_probs=True, skip_prompt_log_probs=False, top_n_logprobs=2),
    SamplingParams(temperature=0.9, top_k=20, top_n_logprobs=3, num_tokens_to_generate=8, return_log_probs=True, seed=5),
    SamplingParams(
        temperature=1.3, top_p=0.9, num_tokens_to_generate=8, return_log_probs=True, processed_log_probs=True, top_n_logprobs=5, seed=6
    ),
]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    shared = torch.randint(90, (16,), generator=generator).tolist()
    return [shared + torch.randint(90, (1 + 7 * i,), generator=generator).tolist() for i in range(5)]


def build(
    max_tokens: int, fields: dict[str, Any], dtype: torch.dtype, *, caching: bool, execution: ExecutionConfig | None = None
) -> DynamicInferenceEngine:
    config, backend = dataclasses.replace(SIZES, **fields), choose_backend(batch_invariant=True)
    model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), backend=backend, dtype=dtype).eval()
    sizes = InferenceConfig(
        max_sequence_length=80, max_requests=4, max_tokens=max_tokens, block_size_tokens=8, num_blocks=24, enable_prefix_caching=caching
    )
    return DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), execution=execution)


def results(records: Any) -> list[Any]:
    return [
        (r.generated_tokens, r.generated_log_probs, r.prompt_log_probs, r.generated_top_n_logprobs, r.prompt_top_n_logprobs)
        for r in records
    ]


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        pytest.param(fields, dtype, id=f"{name}-{dtype}", marks=() if name == "plain" and dtype is torch.float32 else pytest.mark.journey)
        for name, fields in {"plain": {}, "window and sinks": WINDOW, "one head and further tokens": ONE_HEAD}.items()
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_requests_have_the_same_bits_in_any_company_and_as_the_trainer(fields: dict[str, Any], dtype: torch.dtype) -> None:
    alone = []
    for prompt, params in zip(prompts(), PARAMS, strict=True):
        alone += results(build(80, fields, dtype, caching=False).generate([prompt], params))
    for max_tokens, caching in ((80, False), (7, False), (11, True)):
        engine = build(max_tokens, fields, dtype, caching=caching)
        assert results(engine.generate(prompts(), PARAMS)) == alone
    plain = GPTModel(
        dataclasses.replace(SIZES, **fields), ProcessGroups.single(), backend=choose_backend(batch_invariant=True), dtype=dtype
    )
    for number, temperature in ((0, 1.0), (1, 0.7)):
        prompt, (tokens, values, *_) = prompts()[number], alone[number]
        whole = torch.tensor([*prompt, *tokens])
        output, _ = plain(whole[:-1], Step.causal(1, len(whole) - 1))
        assert isinstance(output, ModelOutput)
        assert output.log_probs(whole[1:], temperature)[len(prompt) - 1 :].tolist() == values


@pytest.mark.journey
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_speculation_changes_no_bit(dtype: torch.dtype) -> None:
    # What follows in a prompt was there before.
    repeating = [prompt[:5] * 4 for prompt in prompts()]
    settings = [dataclasses.replace(params, num_tokens_to_generate=20) for params in PARAMS]
    speculation = ExecutionConfig(speculation=NgramSpeculation(num_tokens=3, min_ngram=1))
    for max_tokens, caching in ((80, False), (9, True)):
        plain = build(max_tokens, {}, dtype, caching=caching).generate(repeating, settings)
        engine = build(max_tokens, {}, dtype, caching=caching, execution=speculation)
        assert results(engine.generate(repeating, settings)) == results(plain)
        assert engine.num_drafted > engine.num_accepted > 0


def test_proposals_of_heads_for_further_tokens_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="MtpSpeculation and batch_invariant=True of the backend exclude each other"):
        build(80, {"mtp_num_layers": 1}, torch.float32, caching=False, execution=ExecutionConfig(speculation=MtpSpeculation()))


def test_a_cache_of_another_dtype_is_refused_by_name() -> None:
    model = build(80, {}, torch.float32, caching=False).model
    sizes = InferenceConfig(max_sequence_length=80, max_requests=4, block_size_tokens=8, num_blocks=24)
    with pytest.raises(ValueError, match="batch_invariant=True of the backend keeps keys and values as they are"):
        DynamicInferenceEngine(model, DynamicInferenceContext(SIZES, sizes, dtype=torch.bfloat16))
