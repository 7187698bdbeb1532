# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Proposals change the number of steps and nothing else."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    Limits,
    NgramSpeculation,
    RequestView,
    SamplingParams,
    StructuredOutput,
    plan_step,
)
from mcore_inference.scheduling import plan_drafts
from mcore_inference.speculation import NgramDrafter
from mcore_parallel.data import ByteTokenizer

Make = Callable[..., Any]
CONFIG = NgramSpeculation(num_tokens=4, max_ngram=3, min_ngram=1)


def build(model: Any, tokenizer: Any = None, speculation: NgramSpeculation | None = CONFIG, **sizes: Any) -> DynamicInferenceEngine:
    sizes = {"max_sequence_length": 96, "num_blocks": 64, "block_size_tokens": 4, "max_requests": 8, "max_tokens": 64} | sizes
    context = DynamicInferenceContext.for_model(model, InferenceConfig(**sizes))
    execution = ExecutionConfig(speculation=speculation)
    return DynamicInferenceEngine(model, context, tokenizer, seed=3, execution=execution)


def brute_force(config: NgramSpeculation, tokens: Sequence[int]) -> list[int]:
    for length in range(min(config.max_ngram, len(tokens) - 1), config.min_ngram - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                text = list(tokens)
                for place in range(config.num_tokens):
                    text.append(text[start + length + place])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize("seed", range(5))
def test_proposals_are_what_followed_the_longest_run_last_time(seed: int) -> None:
    rng = random.Random(seed)
    config = NgramSpeculation(num_tokens=rng.randint(1, 6), max_ngram=rng.randint(2, 4), min_ngram=rng.randint(1, 2))
    tokens: list[int] = []
    drafter = NgramDrafter(config, tokens)
    for _ in range(120):
        tokens.append(rng.randrange(3))
        drafter.push(tokens[-1])
        assert drafter.propose() == brute_force(config, tokens)
        assert drafter.propose(1) == brute_force(config, tokens)[:1] and drafter.propose(0) == []


def test_lengths_out_of_range_and_a_look_ahead_beside_them_are_refused() -> None:
    for bad in ({"num_tokens": 0}, {"max_ngram": 0}, {"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}, {"num_tokens": True}):
        with pytest.raises(ValueError, match="num_tokens|ngram"):
            NgramSpeculation(**bad)
    with pytest.raises(ValueError, match="run_ahead=True and speculation"):
        ExecutionConfig(run_ahead=True, speculation=CONFIG)
    with pytest.raises(ValueError, match="speculation is a int"):
        ExecutionConfig(speculation=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_drafts_take_only_what_a_plan_leaves(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 5)
    views = []
    for number in range(rng.randint(1, 6)):
        cached = rng.randint(1, 12)
        held = -(-cached // size) + rng.randint(0, 1)
        views.append(RequestView(request_id=number, num_tokens=cached + rng.choice([1, 1, 1, 5]), num_cached=cached, num_blocks=held))
    limits = Limits(max_requests=6, max_tokens=rng.randint(6, 20), block_size=size, free_blocks=rng.randint(0, 8))
    waiting = [RequestView(request_id=9, num_tokens=3)] if rng.random() < 0.3 else []
    plan, wanted = plan_step(views, waiting, limits), {view.request_id: rng.randint(0, 6) for view in views}
    granted = plan_drafts(plan, views, wanted, limits)
    if plan.admitted or plan.preempted:
        assert granted == {}
        return
    work = {item.request_id: item.num_tokens + granted.get(item.request_id, 0) for item in plan.work}
    assert sum(work.values()) <= limits.max_tokens
    grown = sum(max(0, limits.blocks(view.num_cached + work.get(view.request_id, 0)) - view.num_blocks) for view in views)
    assert grown <= limits.free_blocks
    decoding = {view.request_id for view in views if view.num_missing == 1}
    assert all(number in decoding and 0 < count <= wanted[number] for number, count in granted.items())
    # Nothing is held back: what is denied does not fit.
    for view in views:
        number = view.request_id
        if number in decoding and number in work and granted.get(number, 0) < wanted[number]:
            more = limits.blocks(view.num_cached + work[number] + 1) - max(view.num_blocks, limits.blocks(view.num_cached + work[number]))
            assert sum(work.values()) == limits.max_tokens or more > limits.free_blocks - grown


SETTINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.3, seed=2, top_k=3),
    SamplingParams(temperature=0.5, seed=3, top_p=0.7, min_p=0.05),
    SamplingParams(temperature=0.4, seed=4, frequency_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, presence_penalty=1.0, logit_bias={7: 3.0}),
    SamplingParams(temperature=0.2, min_tokens=12, stop_token_ids=(5, 9, 40)),
    SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=tuple(range(0, 64, 3))),
]


@pytest.mark.parametrize(
    "sizes", [{}, {"num_blocks": 22, "max_tokens": 13}, {"block_size_tokens": 1, "max_requests": 3, "num_blocks": 200}]
)
def test_every_token_and_log_prob_is_that_of_the_engine_without_proposals(make_model: Make, sizes: dict[str, Any]) -> None:
    model, rng = make_model(), random.Random(0)
    settings = [replace(p, num_tokens_to_generate=30, return_log_probs=True, top_n_logprobs=2, processed_log_probs=i % 2 == 1)
                for i, p in enumerate(SETTINGS)]  # fmt: skip
    # Prompts that repeat, so that there is something to propose.
    prompts = [[rng.randrange(64) for _ in range(3)] * 4 for _ in settings]
    plain, engine = build(model, speculation=None, **sizes), build(model, **sizes)
    for wanted, record in zip(plain.generate(prompts, settings), engine.generate(prompts, settings), strict=True):
        assert record.generated_tokens == wanted.generated_tokens
        assert record.finish_reason is wanted.finish_reason
        assert record.generated_log_probs == pytest.approx(wanted.generated_log_probs, abs=1e-9)
        assert [list(best) for best in record.generated_top_n_logprobs] == [list(best) for best in wanted.generated_top_n_logprobs]
    assert engine.num_drafted > engine.num_accepted > 0
    assert engine.stats()["accepted_tokens"] == engine.num_accepted
    assert engine.context.allocator.total_used == 0 and engine.context.get_active_request_count() == 0
    if "num_blocks" in sizes and sizes["num_blocks"] < 64:
        assert engine.num_preemptions


def test_right_proposals_save_steps_and_wrong_ones_give_their_blocks_back(make_model: Make) -> None:
    model = make_model()
    loop = SamplingParams(temperature=0.0, num_tokens_to_generate=60, logit_bias={11: 1e4})
    plain, engine = build(model, speculation=None), build(model)
    assert engine.generate([[1, 2]], loop)[0].generated_tokens == plain.generate([[1, 2]], loop)[0].generated_tokens == [11] * 60
    assert plain.step_count == 60 and engine.step_count < 20
    assert engine.num_accepted == engine.num_drafted > 40
    # Seven of eight proposals are wrong when draws are nearly uniform.
    engine = build(model, block_size_tokens=1)
    number = engine.add_request([1, 2, 3] * 5, SamplingParams(temperature=30.0, seed=1, num_tokens_to_generate=20))
    while engine.has_unfinished_requests():
        engine.step()
        if engine.has_unfinished_requests():
            assert engine.context.num_blocks(number) == engine.context.num_cached(number)
            assert engine.context.num_cached(number) == 14 + engine.get_request(number).num_generated
    assert engine.num_drafted > engine.num_accepted


def test_stop_words_forms_and_text_go_with_proposals(make_model: Make) -> None:
    model, tokenizer = make_model(vocab_size=272), ByteTokenizer()
    letters = dict.fromkeys(tokenizer.tokenize("ab"), 100.0)
    settings = [SamplingParams(seed=seed, num_tokens_to_generate=40, logit_bias=letters, stop_words=["abba", "bbbb"]) for seed in range(4)]
    settings.append(SamplingParams(seed=1, num_tokens_to_generate=30, structured_output=StructuredOutput(regex="(ab){6}")))
    plain, engine = build(model, tokenizer, None), build(model, tokenizer)
    for wanted, record in zip(plain.generate(["abab"] * 5, settings), engine.generate(["abab"] * 5, settings), strict=True):
        assert (record.generated_text, record.generated_tokens) == (wanted.generated_text, wanted.generated_tokens)
    assert record.generated_text == "ab" * 6
    assert engine.num_accepted


@pytest.mark.parametrize("seed", range(2))
def test_a_storm_of_requests_aborts_and_loads_leaks_nothing(make_model: Make, seed: int) -> None:
    rng = random.Random(seed)
    engine = build(make_model(layers=1), num_blocks=20, max_tokens=12, max_requests=5, max_sequence_length=48)
    alone = build(make_model(layers=1), speculation=None, max_sequence_length=48)
    asked, ended = {}, []
    for _ in range(80):
        if rng.random() < 0.4:
            params = SamplingParams(temperature=rng.choice([0, 0.2]), seed=rng.randrange(9), num_tokens_to_generate=rng.randint(0, 12))
            prompt = [rng.randrange(64) for _ in range(rng.randint(1, 4))] * 3
            asked[engine.add_request(prompt, params)] = prompt, params
        if rng.random() < 0.1 and asked and engine.abort(number := rng.choice(sorted(asked))) is not None:
            del asked[number]
        if rng.random() < 0.03:
            engine.suspend()
            engine.resume()
        ended += engine.step()
    while engine.has_unfinished_requests():
        ended += engine.step()
    assert sorted(record.request_id for record in ended) == sorted(asked)
    for record in ended:
        assert record.generated_tokens == alone.generate(*([value] for value in asked[record.request_id]))[0].generated_tokens
    assert engine.context.allocator.total_used == 0
