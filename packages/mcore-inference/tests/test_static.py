# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Fixed batches give the tokens of each prompt alone."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mcore_inference import FinishReason, MaxSequenceLengthOverflowError, SamplingParams, StaticInferenceEngine
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.generation import naive_greedy

Make = Callable[..., Any]
GREEDY = SamplingParams(temperature=0.0, num_tokens_to_generate=7, return_log_probs=True)
PROMPTS = [[1], list(range(30)), [2, 3, 4], [9] * 64, [5, 6]]


def test_unequal_prompts_of_a_batch_equal_each_prompt_alone_and_the_dynamic_engine(make_model: Make, make_engine: Make) -> None:
    model = make_model()
    engine = StaticInferenceEngine(model, max_batch_size=3, max_sequence_length=96)
    records = engine.generate(PROMPTS, GREEDY)
    for prompt, record, other in zip(PROMPTS, records, make_engine(model).generate(PROMPTS, GREEDY), strict=True):
        assert record.prompt_tokens == prompt
        assert record.generated_tokens == other.generated_tokens == naive_greedy(model, prompt, 7)
        assert record.generated_log_probs == pytest.approx(other.generated_log_probs, abs=1e-9)
        assert record.finish_reason is FinishReason.LENGTH


def test_a_batch_ends_before_the_next_begins_and_the_longest_fit_without_preemption(make_model: Make) -> None:
    engine = StaticInferenceEngine(make_model(layers=1), max_batch_size=2, max_sequence_length=70)
    inner, company = engine.engine.step, []

    def step() -> Any:
        ended = inner()
        company.append(sorted(engine.engine._requests.entries))
        return ended

    engine.engine.step = step  # type: ignore[method-assign]
    budgets = [40, 3, 2, 70]
    settings = [replace(GREEDY, num_tokens_to_generate=budget) for budget in budgets]
    records = engine.generate([[1] * 30, [2] * 30, [3], [4]], settings)
    assert [record.num_generated for record in records] == [40, 3, 2, 69]
    assert records[3].merge().budget_clamped and engine.engine.num_preemptions == 0
    assert {tuple(numbers) for numbers in company} == {(0, 1), (0,), (), (2, 3), (3,)}
    full = engine.generate([[1] * 69, [2] * 69], GREEDY)
    assert [record.num_generated for record in full] == [1, 1] and engine.engine.num_preemptions == 0


def test_text_completions_and_refused_prompts_keep_their_places(make_model: Make) -> None:
    engine = StaticInferenceEngine(make_model(vocab_size=272), ByteTokenizer(), max_batch_size=2, max_sequence_length=32)
    params = SamplingParams(seed=4, n=3, num_tokens_to_generate=5)
    records = engine.generate(["abc", "x" * 40, "d"], params)
    assert [type(record.error) for record in records] == [type(None)] * 3 + [MaxSequenceLengthOverflowError] * 3 + [type(None)] * 3
    alone = engine.generate(["d"], replace(params, n=1, seed=6))[0]
    assert records[8].generated_tokens == alone.generated_tokens and records[8].generated_text == alone.generated_text
    assert engine.generate([]) == []
    with pytest.raises(ValueError, match="2 entries for 1 prompts"):
        engine.generate(["a"], [GREEDY, GREEDY])
    engine.engine.add_request("a")
    with pytest.raises(ValueError, match="unfinished"):
        engine.generate(["a"])


def test_sizes_and_models_that_cannot_be_are_refused(make_model: Make) -> None:
    for name in ("max_batch_size", "max_sequence_length"):
        for bad in (0, True, 1.5, "2"):
            with pytest.raises(ValueError, match=f"{name}="):
                StaticInferenceEngine(make_model(layers=1), **{"max_batch_size": 1} | {name: bad})
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8)
    with pytest.raises(ValueError, match="PagedAttention"):
        StaticInferenceEngine(GPTModel(config, ProcessGroups.single()), max_batch_size=1)
