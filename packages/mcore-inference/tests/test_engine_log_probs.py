# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Log-probabilities that an engine returns, of prompts and of outputs, against the model's own."""

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    InferenceConfig,
    SamplingParams,
)
from tests.support.engine_checks import check_idle, random_prompts
from tests.support.generation import full_log_probs

Make = Callable[..., Any]


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def make_engine(request: pytest.FixtureRequest, make_engine: Make) -> Make:
    """Engines that read the results of a step at once, and while the next is computed."""
    return functools.partial(make_engine, run_ahead=request.param)


def test_log_probs_are_the_models_own_whatever_the_sampling(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    params = SamplingParams(temperature=0.3, top_k=4, top_p=0.9, presence_penalty=1.0, return_log_probs=True, top_n_logprobs=3, seed=3)
    record = make_engine(model).generate([[1, 2, 3]], params)[0]
    tokens = [1, 2, 3, *record.generated_tokens]
    wanted = full_log_probs(model, tokens)[2:-1]
    for row, token, value, best in zip(
        wanted, record.generated_tokens, record.generated_log_probs, record.generated_top_n_logprobs, strict=True
    ):
        assert value == pytest.approx(row[token].item(), abs=1e-9)
        top = row.topk(3)
        assert list(best) == top.indices.tolist()
        assert list(best.values()) == pytest.approx(top.values.tolist(), abs=1e-9)


def test_the_best_tokens_of_prompts_are_those_of_the_model_in_chunks_too(make_model: Make, make_engine: Make) -> None:
    model, prompts = make_model(), random_prompts(random.Random(3), 4, 40)
    scored = SamplingParams(num_tokens_to_generate=2, return_log_probs=True, skip_prompt_log_probs=False, seed=1)
    params = [replace(scored, top_n_logprobs=count) for count in (0, 3, 1, 64)]
    engine = make_engine(model, max_tokens=9)
    for record, wanted in zip(engine.generate([*prompts, [5]], [*params, params[1]]), [*params, params[1]], strict=True):
        assert record.prompt_top_n_logprobs == record.merge().prompt_top_n_logprobs
        if len(record.prompt_tokens) == 1:
            # Asked for, and there are none.
            assert record.prompt_log_probs == record.prompt_top_n_logprobs == []
        if not wanted.top_n_logprobs:
            assert record.prompt_top_n_logprobs is None
            continue
        best = record.prompt_top_n_logprobs
        assert best is not None and len(best) == len(record.prompt_tokens) - 1 == len(record.prompt_log_probs or [])
        for row, token, value, ranked in zip(
            full_log_probs(model, record.prompt_tokens), record.prompt_tokens[1:], record.prompt_log_probs or [], best, strict=False
        ):
            top = row.topk(wanted.top_n_logprobs)
            assert list(ranked) == top.indices.tolist() and list(ranked.values()) == pytest.approx(top.values.tolist(), abs=1e-9)
            assert token not in ranked or ranked[token] == pytest.approx(value, abs=1e-12)
    check_idle(engine)
    (skipped,) = engine.generate([prompts[0]], replace(params[1], skip_prompt_log_probs=True))
    assert skipped.prompt_top_n_logprobs is skipped.prompt_log_probs is None and len(skipped.generated_top_n_logprobs) == 2


def test_the_best_tokens_of_prompts_exist(make_model: Make) -> None:
    model = make_model()
    context = DynamicInferenceContext.for_model(model, InferenceConfig(num_blocks=8, block_size_tokens=8, max_sequence_length=32))
    engine = DynamicInferenceEngine(model, context, vocab_size=5)
    params = SamplingParams(num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False, top_n_logprobs=8)
    (record,) = engine.generate([[1, 2, 3]], params)
    assert [sorted(best) for best in record.prompt_top_n_logprobs or ()] == [[0, 1, 2, 3, 4]] * 2


def test_processed_log_probs_are_of_the_distribution_that_drew_each_token(make_model: Make, make_engine: Make) -> None:
    model, common = make_model(), {"return_log_probs": True, "num_tokens_to_generate": 8}
    raw = SamplingParams(temperature=0.7, seed=1, **common)
    processed = replace(raw, processed_log_probs=True)
    biased = replace(processed, logit_bias={5: 4.0}, top_k=3)
    records = make_engine(model).generate([[1, 2, 3]] * 4, [raw, processed, biased, replace(processed, temperature=0.0)])
    assert records[3].generated_log_probs == [0.0] * 8
    for record, temperature, bias, top_k in zip(records, (1.0, 0.7, 0.7), (0.0, 0.0, 4.0), (None, None, 3), strict=False):
        scores = full_log_probs(model, [1, 2, 3, *record.generated_tokens])[2:-1]
        scores[:, 5] += bias
        scores = scores / temperature
        if top_k is not None:
            scores = scores.masked_fill(scores < scores.topk(top_k).values[:, -1:], -torch.inf)
        wanted = scores.log_softmax(-1).gather(1, torch.tensor(record.generated_tokens)[:, None])[:, 0]
        assert record.generated_log_probs == pytest.approx(wanted.tolist(), abs=1e-9)


def test_the_best_tokens_are_those_of_the_distribution_that_drew_each_token(make_model: Make, make_engine: Make) -> None:
    common = {"return_log_probs": True, "processed_log_probs": True, "top_n_logprobs": 4, "num_tokens_to_generate": 6}
    biased = SamplingParams(temperature=0.7, seed=1, logit_bias={5: 4.0}, **common)
    few = replace(biased, top_k=3, allowed_token_ids=(5, 9, 11, 12, 13))
    greedy = replace(biased, temperature=0.0)
    prompt_too = replace(biased, top_n_logprobs=2, skip_prompt_log_probs=False)
    raw = replace(biased, processed_log_probs=False, top_n_logprobs=1)
    model, prompt = make_model(), [1, 2, 3]
    records = make_engine(model).generate([prompt] * 5, [biased, few, greedy, prompt_too, raw])
    for record in records:
        scores = full_log_probs(model, [*prompt, *record.generated_tokens])
        if record.prompt_top_n_logprobs is not None:
            # Nobody drew these.
            for row, ranked in zip(scores, record.prompt_top_n_logprobs, strict=False):
                assert list(ranked) == row.topk(2).indices.tolist()
        for row, token, value, ranked in zip(
            scores[2:], record.generated_tokens, record.generated_log_probs, record.generated_top_n_logprobs, strict=False
        ):
            wanted = record.requests[0].sampling_params
            if wanted.processed_log_probs:
                bias = torch.zeros_like(row).index_fill(0, torch.tensor(5), 4.0)
                row = (row + bias) / (wanted.temperature or 1.0)
            if wanted.allowed_token_ids is not None:
                allowed = row[list(wanted.allowed_token_ids)]
                row = torch.full_like(row, -torch.inf).scatter(0, torch.tensor(wanted.allowed_token_ids), allowed)
                row = row.masked_fill(row < row.topk(3).values[-1], -torch.inf)
            if wanted.is_greedy:
                assert ranked == {token: 0.0} == {int(row.argmax()): value}
                continue
            top = row.log_softmax(-1).topk(3 if wanted.top_k else wanted.top_n_logprobs)
            assert list(ranked) == top.indices.tolist() and list(ranked.values()) == pytest.approx(top.values.tolist(), abs=1e-9)
            assert token not in ranked or ranked[token] == pytest.approx(value, abs=1e-12)
    assert all(len(ranked) == 3 for ranked in records[1].generated_top_n_logprobs)
    assert all(token in ranked for token, ranked in zip(records[1].generated_tokens, records[1].generated_top_n_logprobs, strict=True))
