# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What an engine and its requests cannot be, and are refused for by name."""

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    FinishReason,
    InferenceConfig,
    InvalidTokenError,
    QueueFullError,
    RequestError,
    SamplingParams,
    StaticInferenceEngine,
)
from mcore_parallel import ProcessGroups
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel, TransformerConfig
from tests.support.engine_checks import check_idle

Make = Callable[..., Any]
GREEDY = SamplingParams(temperature=0, num_tokens_to_generate=10)


@pytest.fixture(params=[False, True], ids=["in turn", "ahead"])
def make_engine(request: pytest.FixtureRequest, make_engine: Make) -> Make:
    """Engines that read the results of a step at once, and while the next is computed."""
    return functools.partial(make_engine, run_ahead=request.param)


NO_PROMPTS: list[Any] = [
    [None], [True], [1.0], ["1"], [-1], [64], [2**70], [np.float32(1)], [np.bool_(True)], [[1]], [], (), None, 5, b"ab", {1: 2}, {1},
    iter([1]), np.array([1.0]), np.array([[1]]), np.array([True]), np.array(1), torch.tensor([1.0]), torch.tensor([[1]]),
    torch.tensor([True]), torch.tensor(1), torch.tensor([64]),
]  # fmt: skip


def test_what_is_no_prompt_is_refused_before_a_step(make_engine: Make) -> None:
    engine = make_engine()
    for prompt in NO_PROMPTS:
        with pytest.raises(InvalidTokenError, match="prompt"):
            engine.add_request(prompt)
        (record,) = engine.generate([prompt])
        assert isinstance(record.error, InvalidTokenError)
    check_idle(engine)


class Strict(ByteTokenizer):
    """Takes text only, and says so as Rust does."""

    def tokenize(self, text: str) -> list[int]:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise TypeError("TextInputSequence must be str")
        return super().tokenize(text)


def test_a_prompt_that_the_tokenizer_refuses_fails_alone(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272), Strict())
    with pytest.raises(InvalidTokenError, match="the tokenizer refused the prompt: TextInputSequence must be str"):
        engine.add_request("x\ud800")
    first, refused, last = engine.generate(["a", "x\ud800", "a"], GREEDY)
    assert isinstance(refused.error, InvalidTokenError) and refused[-1].prompt == "x\ud800"
    assert first.generated_tokens == last.generated_tokens != []
    check_idle(engine)


def test_prompts_of_any_integers_are_equal(make_engine: Make) -> None:
    engine = make_engine()
    same: list[Any] = [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        [np.int64(1), np.uint8(2), 3],
        np.array([1, 2, 3], np.int32),
        torch.tensor([1, 2, 3]),
    ]
    records = engine.generate(same, GREEDY)
    assert all(type(token) is int for record in records for token in record.prompt_tokens)
    assert len({tuple(record.generated_tokens) for record in records}) == 1


def test_a_prompt_whose_settings_this_engine_cannot_take_fails_alone(make_engine: Make) -> None:
    engine = make_engine()
    bad = [SamplingParams(logit_bias={100: 1.0}), SamplingParams(stop_words=["end"]), SamplingParams(add_BOS=True)]
    records = engine.generate([[1], [1], [1], "text", [1]], [GREEDY, *bad, GREEDY])
    assert [record.succeeded() for record in (record.merge() for record in records)] == [True, False, False, False, True]
    assert records[0].generated_tokens == records[4].generated_tokens == engine.generate([[1]], GREEDY)[0].generated_tokens
    for record, words in zip(
        records[1:4], ("logit_bias holds .100.", "stop_words need a tokenizer", "text prompt needs a token"), strict=True
    ):
        assert isinstance(record.error, RequestError) and re.search(words, str(record.error))
        assert record.finish_reason is FinishReason.ERROR
    assert engine.finished_counts[FinishReason.ERROR.value] == 3
    check_idle(engine)


def test_other_arguments_of_a_request_are_checked_too(make_engine: Make) -> None:
    engine = make_engine()
    for number in (-1, True, 1.0, "1", 2**63):
        with pytest.raises(ValueError, match="request_id"):
            engine.add_request([1], request_id=number)
    for params in ({}, {"temperature": 0}, "greedy", SamplingParams):
        with pytest.raises(ValueError, match="sampling_params is a"):
            engine.add_request([1], params)
    for field in ({"termination_id": 64}, {"stop_token_ids": [64]}, {"logit_bias": {64: 1.0}}, {"allowed_token_ids": [64]}):
        with pytest.raises(ValueError, match=f"{next(iter(field))} holds .64.; token ids are from 0 to 63"):
            engine.add_request([1], SamplingParams(**field))
    few: dict[str, Any] = {"allowed_token_ids": [5, 6], "stop_token_ids": [5], "num_tokens_to_generate": 3}
    with pytest.raises(ValueError, match="min_tokens=2 leaves nothing to draw: all allowed_token_ids end the output; allow others"):
        engine.add_request([1], SamplingParams(**few, termination_id=6, min_tokens=2))
    [record] = engine.generate([[1]], SamplingParams(**few, min_tokens=2))
    assert record.generated_tokens[:2] == [6, 6]
    with pytest.raises(ValueError, match="sampling_params holds a dict"):
        engine.generate([[1]], [{}])
    with pytest.raises(ValueError, match="prompts is one string"):
        engine.generate("abc")
    assert engine.add_request([1], request_id=np.int64(7)) == 7 and type(engine.get_request(7).request_id) is int
    engine.abort(7)
    check_idle(engine)


@pytest.mark.parametrize("sizes", [{"num_blocks": 2.0}, {"max_requests": True}, {"block_size_tokens": None}, {"watermark": float("nan")}])
def test_sizes_of_a_context_are_integers(sizes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(sizes))):
        InferenceConfig(**sizes)


@pytest.mark.parametrize("name", ["run_ahead", "use_graphs", "use_cuda_graphs_for_non_decode_steps", "record_routing"])
def test_flags_of_execution_are_true_or_false(name: str) -> None:
    for bad in ("no", 0, 1, 1.0):
        with pytest.raises(ValueError, match=f"{name}={bad!r} must be True or False"):
            ExecutionConfig(**{name: bad})  # type: ignore[arg-type]


def test_the_seed_of_an_engine_is_an_integer_of_64_bits(make_model: Callable[..., GPTModel]) -> None:
    model = make_model(layers=1)
    context = DynamicInferenceContext.for_model(model, InferenceConfig(num_blocks=2))
    for bad in ("x", None, True, 1.5, 2**63):
        with pytest.raises(ValueError, match="seed="):
            DynamicInferenceEngine(model, context, seed=bad)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="seed="):
            StaticInferenceEngine(model, max_batch_size=1, seed=bad)  # type: ignore[arg-type]
    assert DynamicInferenceEngine(model, context, seed=np.int64(-3)).generate([[1]], SamplingParams(num_tokens_to_generate=2))  # type: ignore[arg-type]


def test_parts_of_other_types_are_refused_by_name(make_model: Make) -> None:
    model = make_model(layers=1)
    context = DynamicInferenceContext.for_model(model, InferenceConfig(num_blocks=2))
    for make, words in (
        (lambda: DynamicInferenceContext.for_model(model, {"num_blocks": 2}), r"config is a dict; give InferenceConfig\(...\)"),
        (lambda: DynamicInferenceContext(model.config, {"num_blocks": 2}), r"config is a dict; give InferenceConfig\(...\)"),
        (lambda: DynamicInferenceEngine(model, None), "context is a NoneType; give DynamicInferenceContext.for_model"),
        (lambda: DynamicInferenceEngine(model, context, object()), "tokenizer is a object, which lacks a part of vocab_size, eod"),
        (lambda: DynamicInferenceEngine(model, context, execution={}), r"execution is a dict; give ExecutionConfig\(...\)"),
        (lambda: StaticInferenceEngine(model, max_batch_size=1, execution={}), r"execution is a dict; give ExecutionConfig\(...\)"),
    ):
        with pytest.raises(ValueError, match=words):
            make()
    engine = DynamicInferenceEngine(model, context)
    for prompts in (None, iter([[1]]), 5):
        with pytest.raises(ValueError, match="prompts is a .*; give a list of them"):
            engine.generate(prompts)
    assert [record.generated_tokens for record in engine.generate(torch.ones(2, 3, dtype=torch.int64), GREEDY)]


def test_an_engine_forgets_what_a_used_context_knew(make_model: Make) -> None:
    one, other = make_model(seed=0), make_model(seed=1)
    sizes = InferenceConfig(num_blocks=16, block_size_tokens=8, max_sequence_length=64)
    context, prompt = DynamicInferenceContext.for_model(one, sizes), list(range(20))
    first = DynamicInferenceEngine(one, context)
    first.generate([prompt], GREEDY)
    second = DynamicInferenceEngine(other, context)
    [record] = second.generate([prompt], GREEDY)
    [fresh] = DynamicInferenceEngine(other, DynamicInferenceContext.for_model(other, sizes)).generate([prompt], GREEDY)
    assert record.cached_prompt_tokens == 0 and record.generated_tokens == fresh.generated_tokens
    # The first one's keys and values would be found by the second.
    for call in (first.step, lambda: first.add_request(prompt), lambda: first.generate([prompt])):
        with pytest.raises(RuntimeError, match="the context of this engine was given to another one; make a context for each"):
            call()


def test_an_engine_whose_context_was_taken_over_leaves_it_alone(make_model: Make) -> None:
    one, other = make_model(seed=0), make_model(seed=1)
    sizes = InferenceConfig(num_blocks=16, block_size_tokens=8, max_sequence_length=64)
    context, prompt = DynamicInferenceContext.for_model(one, sizes), list(range(20))
    first = DynamicInferenceEngine(one, context)
    second = DynamicInferenceEngine(other, context)
    [wanted] = DynamicInferenceEngine(other, DynamicInferenceContext.for_model(other, sizes)).generate([prompt], GREEDY)
    second.add_request(prompt, GREEDY)
    second.step()
    weights = [(name, tensor) for name, tensor in one.state_dict().items()]
    for call in (
        first.suspend,
        first.suspend_within_process,
        first.resume,
        first.reset_prefix_cache,
        first.warm_up,
        lambda: first.load_weights(weights),
    ):
        with pytest.raises(RuntimeError, match="the context of this engine was given to another one"):
            call()
    first.close()
    assert not second.is_suspended
    records = []
    while second.has_unfinished_requests():
        records += second.step()
    assert [record.generated_tokens for record in records] == [wanted.generated_tokens]


def test_a_context_with_requests_is_not_taken_over(make_model: Make) -> None:
    model = make_model()
    sizes = InferenceConfig(num_blocks=16, block_size_tokens=8, max_sequence_length=64, weight_dtype="fp8_weight_only")
    context = DynamicInferenceContext.for_model(model, sizes)
    engine, untouched = DynamicInferenceEngine(model, context), make_model()
    number = engine.add_request([1, 2], GREEDY)
    engine.step()
    with pytest.raises(ValueError, match="the context serves 1 requests of another engine"):
        DynamicInferenceEngine(untouched, context)
    assert all(parameter.dtype == torch.float64 for parameter in untouched.parameters())
    while engine.has_unfinished_requests():
        [*records] = engine.step()
    assert records[0].request_id == number and records[0].error is None and len(records[0].generated_tokens) == 10
    DynamicInferenceEngine(model, context)


def test_a_full_queue_and_a_used_number_are_refused(make_engine: Make) -> None:
    engine = make_engine(max_waiting=2)
    engine.add_request([1], request_id=1)
    with pytest.raises(ValueError, match="request_id=1"):
        engine.add_request([1], request_id=1)
    assert engine.add_request([1], GREEDY) not in (1,)
    with pytest.raises(QueueFullError):
        engine.add_request([1])
    with pytest.raises(ValueError, match="unfinished"):
        engine.generate([[1]])


def test_settings_that_need_a_tokenizer_or_unknown_ids_are_refused(make_engine: Make) -> None:
    engine = make_engine()
    for prompt, params, word in (
        ("text", None, "tokenizer"),
        ([1], SamplingParams(stop_words=["x"]), "stop_words"),
        ([1], SamplingParams(detokenize_stop_sequence=True), "detokenize_stop_sequence=True needs a tokenizer"),
        ([1], SamplingParams(stop_token_ids=[64]), "stop_token_ids"),
        ([1], SamplingParams(logit_bias={64: 1.0}), "logit_bias"),
        ([True], None, "True"),
        ([1.5], None, "1.5"),
    ):
        with pytest.raises(ValueError, match=word):
            engine.add_request(prompt, params)
    check_idle(engine)


def test_a_model_without_paged_attention_is_refused() -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, vocab_size=8)
    model = GPTModel(config, ProcessGroups.single())
    with pytest.raises(ValueError, match="PagedAttention"):
        DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, InferenceConfig(num_blocks=2)))
