# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Suspended before any of its steps, an engine says what it says without: chunks, proposals, preemptions, shared beginnings, states."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

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
from mcore_parallel import ProcessGroups
from mcore_parallel.models import GPTModel, hybrid_config
from mcore_parallel.nn import GatedDeltaNetConfig, MambaConfig
from tests.support.journeys import journeys_among

MAMBA = MambaConfig(state_dim=6, head_dim=8, num_groups=2, chunk_size=4)
DELTA = GatedDeltaNetConfig(num_key_heads=2, num_value_heads=4, key_head_dim=6, value_head_dim=5, chunk_size=4)
# A token, a whole block of four, one more, and several chunks.
PROMPTS = ([7], [1, 2, 3, 4], [9, 8, 7, 6, 5], [*range(20, 35)])
REPEATED = ([3, 4, 5] * 4, [6, 7] * 7, [8])
SHORT = ([1, 2, 3], [4, 5, 6, 7], [8, 9])
ALIKE = ([*range(12)], [*range(12), 50, 51], [*range(12)])


@dataclass(frozen=True, kw_only=True)
class Case:
    """An engine and what it is asked."""

    pattern: str = ""
    """Layers of a hybrid model; empty for attention alone."""
    sizes: tuple[tuple[str, int], ...] = ()
    speculation: NgramSpeculation | None = None
    run_ahead: bool = False
    prompts: Sequence[list[int]] = PROMPTS
    letters: tuple[int, ...] = ()
    """All that outputs have, where proposals are to be right now and then."""
    proves: Callable[[DynamicInferenceEngine], bool] = lambda engine: True
    """Whether the engine, at its end, did what the case is about."""


CASES = {
    "ahead": Case(run_ahead=True),
    "chunks": Case(sizes=(("max_tokens", 7),), proves=lambda engine: engine.stats()["steps"] > 10),
    "proposals in chunks": Case(
        speculation=NgramSpeculation(num_tokens=2, min_ngram=1), prompts=REPEATED, letters=(3, 4, 5), sizes=(("max_tokens", 9),),
        proves=lambda engine: engine.num_drafted > engine.num_accepted > 0,
    ),
    "preemptions": Case(sizes=(("num_blocks", 7),), prompts=SHORT, proves=lambda engine: engine.num_preemptions > 0),
    "shared beginnings": Case(prompts=ALIKE, proves=lambda engine: engine.stats()["prefix_cache_hits"] > 0),
    "states ahead, in chunks": Case(pattern="M*-", run_ahead=True, sizes=(("max_tokens", 12),)),
    "states, shared beginnings": Case(
        pattern="M*-", sizes=(("enable_prefix_caching", True),), prompts=ALIKE,
        proves=lambda engine: engine.stats()["prefix_cache_hits"] > 0,
    ),
    "states, preemptions": Case(pattern="G*-", sizes=(("num_blocks", 7),), prompts=SHORT, proves=lambda engine: engine.num_preemptions > 0),
}  # fmt: skip


def build(case: Case, make_model: Callable[..., GPTModel]) -> DynamicInferenceEngine:
    if case.pattern:
        sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 64}
        sizes |= {"init_method_std": 0.4}
        mixers = {"mamba": MAMBA if "M" in case.pattern else None, "delta_net": DELTA if "G" in case.pattern else None}
        config = hybrid_config(case.pattern, **mixers, **sizes)
        model = GPTModel(config, ProcessGroups.single(), attention_core=PagedAttention(), dtype=torch.float64).eval()
    else:
        model = make_model(layers=1)
    settings = {"max_sequence_length": 40, "num_blocks": 40, "block_size_tokens": 4, "max_requests": 3, "max_tokens": 64}
    context = DynamicInferenceContext.for_model(model, InferenceConfig(**settings | dict(case.sizes)))
    execution = ExecutionConfig(run_ahead=False if case.speculation else case.run_ahead, speculation=case.speculation)
    return DynamicInferenceEngine(model, context, execution=execution)


def run(engine: DynamicInferenceEngine, case: Case, suspends: Callable[[int], bool]) -> list[DynamicInferenceRequestRecord]:
    """Finished records in the order of the prompts; the last prompt comes when the others have begun."""
    params = SamplingParams(
        seed=5, num_tokens_to_generate=8, ignore_eos=True, return_log_probs=True, top_n_logprobs=2,
        logit_bias=dict.fromkeys(case.letters, 100.0),
    )  # fmt: skip
    engine.reset_prefix_cache()
    numbers = [engine.add_request(prompt, params) for prompt in case.prompts[:-1]]
    records, steps = {}, 0
    while steps < 3 or engine.has_unfinished_requests():
        if suspends(steps):
            engine.suspend()
            assert engine.context.cache.pages.untyped_storage().size() == 0
        if steps == 2:
            # To a suspended engine, too.
            numbers.append(engine.add_request(case.prompts[-1], params))
        if engine.is_suspended:
            engine.resume()
        records |= {record.request_id: record for record in engine.step()}
        steps += 1
    assert engine.context.allocator.total_used == 0
    return [records[number] for number in numbers]


def assert_equal(records: Sequence[DynamicInferenceRequestRecord], wanted: Sequence[DynamicInferenceRequestRecord], what: str) -> None:
    for record, reference in zip(records, wanted, strict=True):
        assert record.generated_tokens == reference.generated_tokens, what
        assert record.finish_reason == reference.finish_reason
        torch.testing.assert_close(record.generated_log_probs, reference.generated_log_probs, rtol=1e-9, atol=1e-9)
        assert [set(each) for each in record.generated_top_n_logprobs] == [set(each) for each in reference.generated_top_n_logprobs]


@pytest.mark.parametrize(
    "name", journeys_among(CASES, "ahead", "preemptions", "states ahead, in chunks", "states, preemptions", "states, shared beginnings")
)
def test_suspended_before_any_step_an_engine_says_the_same(name: str, make_model: Callable[..., GPTModel]) -> None:
    case = CASES[name]
    engine = build(case, make_model)
    wanted = run(engine, case, lambda step: False)
    num_steps = int(engine.stats()["steps"])
    assert case.proves(engine) and num_steps >= 6
    assert len({tuple(record.generated_tokens) for record in wanted}) > 1
    for stop in range(num_steps):
        assert_equal(run(engine, case, lambda step, stop=stop: step == stop), wanted, f"suspended before step {stop}")
    draw = random.Random(0)
    assert_equal(run(engine, case, lambda step: draw.random() < 0.4), wanted, "suspended at random")
