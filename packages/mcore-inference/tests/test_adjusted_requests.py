# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests with penalties, biases or a least number of tokens in an engine: as if each were alone, step by step, on the host."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mcore_inference import DynamicInferenceEngine, DynamicInferenceRequestRecord, SamplingParams
from mcore_inference.sampling import SamplingRows, request_seed, sample
from mcore_parallel.models import GPTModel
from mcore_parallel.nn import Step

Make = Callable[..., Any]
STOPS = tuple(range(0, 64, 4))
KINDS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.7, "seed": 1},
    {},
    {"frequency_penalty": 0.9, "presence_penalty": -0.4, "temperature": 0.7, "top_p": 0.9},
    {"logit_bias": {3: 4.0, 9: -2.0, 60: 3.0}, "seed": 4, "allowed_token_ids": (60, 3, 7, 41, 7)},
    {"min_tokens": 9, "stop_token_ids": STOPS},
    {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": {5: 2.5}},
    {"repetition_penalty": 0.6, "frequency_penalty": 1.1, "min_tokens": 12, "stop_token_ids": STOPS, "logit_bias": {4: 6.0}},
    {"temperature": 0.0, "stop_token_ids": STOPS},
)
PROMPTS = [[random.Random(number).randrange(64) for _ in range(1 + 3 * number)] for number in range(len(KINDS))]
PARAMS = [SamplingParams(**{"num_tokens_to_generate": 18 + number, **kind}) for number, kind in enumerate(KINDS)]


def naive(model: GPTModel, prompt: list[int], params: SamplingParams, number: int) -> list[int]:
    """Every token from a forward of all tokens before it, and settings applied on the host."""
    output: list[int] = []
    while len(output) < (params.num_tokens_to_generate or 0) and not (output and output[-1] in params.stop_token_ids):
        tokens = [*prompt, *output]
        with torch.no_grad():
            result, _ = model(torch.tensor(tokens), Step.causal(1, len(tokens)))
        scores = result.logits()[-1].clone()
        for token in {*tokens}:
            scores[token] *= 1 / params.repetition_penalty if scores[token] > 0 else params.repetition_penalty
        for token in {*output}:
            scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
        for token, bias in (params.logit_bias or {}).items():
            scores[token] += bias
        if len(output) < params.min_tokens:
            scores[list(params.stop_token_ids)] = -torch.inf
        if params.allowed_token_ids is not None:
            scores[[token not in params.allowed_token_ids for token in range(64)]] = -torch.inf
        seed = request_seed(0, number) if params.seed is None else params.seed
        output.append(int(sample(scores[None], SamplingRows.of([params], [seed], [len(output)], 64))))
    return output


@pytest.fixture(scope="module")
def wanted(make_model: Make) -> list[list[int]]:
    model = make_model()
    return [naive(model, prompt, params, number) for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))]


def tokens_of(records: list[DynamicInferenceRequestRecord]) -> list[list[int]]:
    return [record.generated_tokens for record in records]


def serve(engine: DynamicInferenceEngine, between: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request(prompt, params)
    records: list[DynamicInferenceRequestRecord] = []
    for step in range(1000):
        records += engine.step()
        if not engine.has_unfinished_requests():
            break
        between(step)
    return tokens_of(sorted(records, key=lambda record: record.request_id))


def test_the_settings_of_these_requests_change_their_tokens(make_engine: Make, wanted: list[list[int]]) -> None:
    plain = ("temperature", "top_p", "seed", "stop_token_ids", "num_tokens_to_generate")
    bare = [SamplingParams(**{name: getattr(params, name) for name in plain}) for params in PARAMS]
    others = tokens_of(make_engine().generate(PROMPTS, bare))
    assert [one == other for one, other in zip(wanted, others, strict=True)] == [not {*kind} - {*plain} for kind in KINDS]
    assert sorted({params.min_tokens for params in PARAMS}) == [0, 9, 12] and all(len(tokens) > 12 for tokens in (wanted[6],))


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"max_requests": 3}, {"num_blocks": 9}, {"max_tokens": 9}], ids=str)
def test_tokens_in_company_are_those_of_each_request_alone(
    make_engine: Make, wanted: list[list[int]], run_ahead: bool, sizes: dict[str, int]
) -> None:
    engine = make_engine(run_ahead=run_ahead, **sizes)
    assert serve(engine) == wanted
    assert (engine.num_preemptions > 3) == ("num_blocks" in sizes)
    for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(prompt, replace(params, seed=request_seed(0, number) if params.seed is None else params.seed))
        while engine.has_unfinished_requests():
            for record in engine.step():
                assert record.generated_tokens == wanted[number]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("what", ["suspend", "reset", "load", "keep", pytest.param("abort", marks=pytest.mark.journey)])
def test_counts_come_back_after_an_interruption(
    make_model: Make, make_engine: Make, wanted: list[list[int]], run_ahead: bool, what: str
) -> None:
    model = make_model()
    engine = make_engine(model, run_ahead=run_ahead)
    weights = [(name, parameter.detach().clone()) for name, parameter in model.named_parameters()]
    others: list[int] = []

    def interrupt(step: int) -> None:
        if step % 5 != 4:
            return
        if what == "suspend":
            engine.suspend()
            engine.resume()
        elif what == "reset":
            engine.reset_prefix_cache()
        elif what in ("load", "keep"):
            engine.load_weights(iter(weights), in_flight="keep" if what == "keep" else "recompute")
        else:
            # Others, which have the lines of those that ended, and leave them to others.
            for number in others:
                engine.abort(number)
            params = SamplingParams(frequency_penalty=9.0, num_tokens_to_generate=30)
            others[:] = [engine.add_request([7, 7], params, request_id=1000 + step, priority=-1)]

    assert serve(engine, interrupt)[: len(wanted)] == wanted


def test_a_lone_row_of_each_kind_keeps_the_batch_and_the_step_ahead(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(run_ahead=True)
    executor, planned = engine._executor, []
    run = executor.run
    monkeypatch.setattr(executor, "run", lambda work: (planned.append(len(work)), run(work))[1])
    for prompt, params in zip(PROMPTS, PARAMS, strict=True):
        engine.add_request(prompt, replace(params, num_tokens_to_generate=30, stop_token_ids=(), logit_bias={1: 1.0}, min_tokens=0))
    for _ in range(20):
        engine.step()
    # Prompts of 92 tokens take two steps, and every other one is of arrays.
    assert len(planned) == 2
    assert all(entry.num_pending == 1 for entry in engine._requests.entries.values())


@pytest.mark.parametrize("run_ahead", [False, True])
def test_rows_that_may_end_are_adjusted_no_more(make_engine: Make, run_ahead: bool) -> None:
    engine = make_engine(run_ahead=run_ahead)
    params = SamplingParams(temperature=0.0, min_tokens=6, stop_token_ids=(63,), num_tokens_to_generate=12)
    engine.add_request([1, 2], params)
    adjusted = []
    while engine.has_unfinished_requests():
        engine.step()
        batch = engine._loop._batch
        adjusted.append(batch is not None and batch.adjust_rows is not None)
    # The first token is drawn with the prompt.
    assert adjusted[1:6] == [True] * 5 and not any(adjusted[6:])


def test_outputs_of_requests_whose_tokens_count_for_nothing_are_read_once(
    make_engine: Make, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts wait for those that decode, whose steps are planned one by one.
    engine, extended = make_engine(run_ahead=True, max_requests=3), list[tuple[int, Any]]()
    monkeypatch.setattr(engine._executor.draws.adjusted.adjuster, "extend", lambda *inputs: extended.append(inputs))
    assert serve(engine) == wanted and not extended


def test_memory_of_counts_goes_with_its_requests_and_comes_again_after_a_suspension(make_engine: Make, wanted: list[list[int]]) -> None:
    engine = make_engine()
    adjuster = engine._executor.draws.adjusted.adjuster
    assert adjuster.num_bytes == 0
    assert serve(engine) == wanted
    held = adjuster.num_bytes
    # Four of the requests have penalties; a row of counts for each, or two.
    assert 4 * 4 * 64 <= held - 24 * 1024 <= 8 * 4 * 64
    for first in range(1, 4):
        # On other lines.
        engine.generate([*PROMPTS[first:], *PROMPTS[:first]], [*PARAMS[first:], *PARAMS[:first]])
    assert adjuster.num_bytes == held
    engine.suspend()
    assert adjuster.num_bytes == 0
    engine.resume()
    records = engine.generate(PROMPTS[:1], PARAMS[:1])
    assert tokens_of(records) == wanted[:1]
