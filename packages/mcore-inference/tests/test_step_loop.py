# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Steps of arrays beside a queue: who runs, who waits and what is drawn are as if every step were planned row by row."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from mcore_inference import DynamicInferenceEngine, SamplingParams
from mcore_parallel.models import GPTModel

Make = Callable[..., Any]
BEGINNINGS = ([1, 2] * 40, [1, 2, 1, 2, 5, 6] * 14, [7] * 80)


@pytest.fixture(scope="module")
def model(make_model: Make) -> GPTModel:
    return make_model(vocab_size=16, layers=1)


def trace(engine: DynamicInferenceEngine, seed: int) -> tuple[list[Any], int]:
    """What each step of a random world leaves behind, and how many steps of arrays there were beside requests that waited for blocks."""
    rng, steps, beside = random.Random(seed), list[Any](), 0
    executor, admission, context = engine._executor, engine._admission, engine.context
    decode, num_decodes, left = executor.decode, 0, 24

    def counted(batch: Any) -> Any:
        nonlocal num_decodes
        num_decodes += 1
        return decode(batch)

    executor.decode = counted
    while left or engine.has_unfinished_requests():
        while left and rng.random() < 0.3:
            left -= 1
            prompt = rng.choice(BEGINNINGS)[: rng.randint(1, min(30, context.cache_tokens))]
            params = SamplingParams(
                num_tokens_to_generate=rng.randint(1, min(30, context.room(len(prompt)))),
                stop_token_ids=rng.choice([(), (3,)]),
                return_log_probs=rng.random() < 0.2,
                min_tokens=1,
            )
            if rng.random() < 0.1:
                params = SamplingParams(num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False)
            engine.add_request(prompt, params, priority=rng.choice([0, 0, -1, 2]))
        chance = rng.random()
        if chance < 0.03 and engine._requests.entries:
            engine.abort(rng.choice(sorted(engine._requests.entries)))
        elif chance < 0.06:
            engine.hold_queue(not admission.holds_queue and bool(left))
        elif chance < 0.07:
            engine.load_weights(list(engine.model.named_parameters()), in_flight="keep")
        elif chance < 0.08:
            engine.reset_prefix_cache()
        elif admission.holds_queue and not admission.num_in_flight:
            engine.hold_queue(False)
        before = num_decodes
        records = engine.step()
        beside += num_decodes > before and bool(admission.waiting) and len(admission.running) < context.max_requests
        running = [entry.record.request_id for entry in admission.running]
        stats = {name: value for name, value in engine.stats().items() if "seconds" not in name}
        # Their last bits depend on how keys and values are gathered.
        log_probs = [[round(value, 9) for value in record.generated_log_probs] for record in records]
        ended = [(record.request_id, record.finish_reason, record.generated_tokens) for record in records]
        waiting = [entry.record.request_id for entry in admission.waiting]
        steps.append((running, waiting, [context.block_table(number) for number in running], ended, log_probs, stats))
    return steps, beside


@pytest.mark.journey
@pytest.mark.parametrize("run_ahead", [False, True])
def test_decode_batches_beside_a_queue_change_no_decision_and_no_token(
    run_ahead: bool, model: GPTModel, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 0
    for seed in range(5):
        rng = random.Random(seed)
        sizes = {
            "num_blocks": rng.randint(12, 24), "block_size_tokens": rng.choice([2, 4]), "max_sequence_length": 48, "max_requests": 8,
            "max_tokens": rng.randint(8, 40), "watermark": rng.choice([0.0, 0.2]), "enable_chunked_prefill": rng.random() < 0.7,
        }  # fmt: skip
        if not sizes["enable_chunked_prefill"]:
            sizes["max_tokens"] = 48
        engine, planned = (make_engine(model, run_ahead=run_ahead, **sizes) for _ in range(2))
        monkeypatch.setattr(planned._loop, "_decoding", lambda admits: None)
        (steps, beside), (expected, none) = trace(engine, seed), trace(planned, seed)
        assert none == 0 and len(steps) == len(expected)
        for step, other in zip(steps, expected, strict=True):
            assert step == other
        total += beside
    assert total > 100


@pytest.mark.parametrize("held", [False, True])
def test_a_request_that_cannot_join_leaves_the_batch_as_it_is(
    held: bool, model: GPTModel, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows grow into new blocks meanwhile, and the queue is looked at again only then."""
    engine = make_engine(model, num_blocks=40 if held else 14, block_size_tokens=4, max_requests=8, watermark=0.0)
    params = SamplingParams(temperature=0.0, ignore_eos=True, num_tokens_to_generate=9)
    for token in (1, 3):
        engine.add_request([token] * 13, params)
    engine.step()
    engine.hold_queue(held)
    waiting = engine.add_request([2] * 29, params)
    batches, looked = [], list[int]()
    executor, admission = engine._executor, engine._admission
    make, join = executor.batch, admission.joins_decoding
    monkeypatch.setattr(executor, "batch", lambda entries: (batches.append(len(entries)), make(entries))[1])
    monkeypatch.setattr(admission, "joins_decoding", lambda *inputs: (looked.append(engine.step_count), join(*inputs))[1])
    monkeypatch.setattr(executor, "run", lambda work: pytest.fail("a step was planned row by row"))
    for _ in range(7):
        engine.step()
    assert batches == [2] and len(looked) == 3, "a new request, and one block each, once"
    # What may change the answer asks again.
    engine.abort(waiting)
    engine.step()
    assert not engine.num_waiting and batches == [2]


def test_an_end_lets_the_first_of_the_queue_join_at_once(model: GPTModel, make_engine: Make) -> None:
    engine = make_engine(model, num_blocks=14, block_size_tokens=4, max_requests=8, watermark=0.0)
    for budget in (5, 20):
        engine.add_request([budget % 7] * 13, SamplingParams(ignore_eos=True, num_tokens_to_generate=budget))
    engine.step()
    waiting = engine.add_request([2] * 29, SamplingParams(ignore_eos=True, num_tokens_to_generate=2))
    ended = [record.request_id for _ in range(4) for record in engine.step()]
    assert ended == [0] and engine.num_waiting == 1
    engine.step()
    assert [entry.record.request_id for entry in engine._admission.running] == [1, waiting]


def test_a_prompt_that_is_only_scored_advances_beside_those_that_decode(model: GPTModel, make_engine: Make) -> None:
    """It draws nothing, so that a batch of those that do would leave it where it is."""
    engine = make_engine(model, max_tokens=8)
    engine.add_request([1], SamplingParams(ignore_eos=True, num_tokens_to_generate=40))
    engine.step()
    scored = engine.add_request([2] * 30, SamplingParams(num_tokens_to_generate=0, return_log_probs=True, skip_prompt_log_probs=False))
    # Seven of its tokens a step.
    assert [record.request_id for _ in range(5) for record in engine.step()] == [scored]
