# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Words that an output must not hold, in an engine: as one token after the other on the host."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from mcore_inference import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    ExecutionConfig,
    InferenceConfig,
    NgramSpeculation,
    NonFiniteLogitsError,
    SamplingParams,
    StructuredOutput,
)
from mcore_inference.requests import bad_word_tokens
from mcore_inference.sampling import SamplingRows, sample
from mcore_inference.server import serve
from mcore_parallel.data import ByteTokenizer
from mcore_parallel.models import GPTModel
from mcore_parallel.nn import Step

Make = Callable[..., Any]
TOKENIZER = ByteTokenizer()
FEW = tuple(TOKENIZER.tokenize("abc "))
"""So that most words would be drawn."""
WORDS: tuple[tuple[str, ...], ...] = (("ca",), ("b", "aca"), (), ("aa", "bb", "cc", "  ", " c"), ("cbb", "abcabcabc"), ("cc", "ccc", "b c"))
PROMPTS = [f"prompt {number} " + "ab" * number for number in range(len(WORDS))]
PARAMS = [
    SamplingParams(
        num_tokens_to_generate=20 + 3 * number, seed=number, allowed_token_ids=FEW, bad_words=words, temperature=float(number % 3 > 0),
        frequency_penalty=0.1 * (number == 4),
    )
    for number, words in enumerate(WORDS)
]  # fmt: skip


def naive(model: GPTModel, prompt: str, params: SamplingParams) -> str:
    """Every token from a forward of all tokens before it, the words looked for in the text."""
    tokens, text = TOKENIZER.tokenize(prompt), ""
    while len(text) < (params.num_tokens_to_generate or 0):
        with torch.no_grad():
            output, _ = model(torch.tensor(tokens), Step.causal(1, len(tokens)))
        scores = output.logits()[-1]
        for letter in set(text):
            scores[TOKENIZER.tokenize(letter)] -= params.frequency_penalty * text.count(letter)
        for token in range(model.config.vocab_size):
            if token not in FEW or any((text + chr(token)).endswith(word.lstrip() or word) for word in params.bad_words or ()):
                scores[token] = -torch.inf
        tokens.append(int(sample(scores[None], SamplingRows.of([params], [params.seed or 0], [len(text)], model.config.vocab_size))))
        text += TOKENIZER.detokenize(tokens[-1:])
    return text


@pytest.fixture(scope="module")
def model(make_model: Make) -> GPTModel:
    return make_model(vocab_size=272)


@pytest.fixture(scope="module")
def wanted(model: GPTModel) -> list[str]:
    return [naive(model, prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def texts(engine: DynamicInferenceEngine, params: list[SamplingParams]) -> list[str]:
    return [record.generated_text for record in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("sizes", [{}, {"max_requests": 2}, {"num_blocks": 10}, {"max_tokens": 9}], ids=str)
def test_no_output_holds_its_words_whatever_it_is_batched_with(
    model: GPTModel, make_engine: Make, wanted: list[str], run_ahead: bool, sizes: dict[str, int]
) -> None:
    engine = make_engine(model, TOKENIZER, run_ahead=run_ahead, **sizes)
    assert texts(engine, PARAMS) == wanted
    assert (engine.num_preemptions > 0) == ("num_blocks" in sizes)


def test_without_them_outputs_do(model: GPTModel, make_engine: Make, wanted: list[str]) -> None:
    plain = texts(make_engine(model, TOKENIZER), [replace(params, bad_words=None) for params in PARAMS])
    for text, without, words in zip(wanted, plain, WORDS, strict=True):
        bare = [word.lstrip() or word for word in words]
        assert not any(word in text for word in bare) and any(word in without for word in bare) == bool(words)


def test_proposals_are_judged_by_the_words_too(model: GPTModel, wanted: list[str]) -> None:
    sizes = InferenceConfig(max_sequence_length=96, num_blocks=64, block_size_tokens=8, max_requests=8, max_tokens=64)
    execution = ExecutionConfig(speculation=NgramSpeculation(num_tokens=4, max_ngram=2, min_ngram=1))
    engine = DynamicInferenceEngine(model, DynamicInferenceContext.for_model(model, sizes), TOKENIZER, execution=execution)
    assert texts(engine, PARAMS) == wanted
    stats = engine.stats()
    assert 0 < stats["accepted_tokens"] < stats["drafted_tokens"]


def test_a_form_is_kept_beside_them_and_one_of_bad_words_alone_ends_its_request_by_name(model: GPTModel, make_engine: Make) -> None:
    engine = make_engine(model, TOKENIZER)
    params = SamplingParams(
        num_tokens_to_generate=12, seed=1, bad_words=("ab", "c", "red"), structured_output=StructuredOutput(regex="[abc]{8}")
    )
    one, other = engine.generate(["x", "y"], [params, replace(params, structured_output=StructuredOutput(choices=["red", "rea"]))])
    assert {*one.generated_text} == {"a", "b"} and len(one.generated_text) == 8 and "ab" not in one.generated_text
    assert other.generated_text == "rea"
    [none] = engine.generate(["x"], replace(params, structured_output=StructuredOutput(choices=["red"])))
    assert isinstance(none.error, NonFiniteLogitsError)
    assert "none is finite; check the weights, the logit_bias and the bad_words" in str(none.error)


class Words(ByteTokenizer):
    """Some words are tokens, with a space before them others."""

    def tokenize(self, text: str) -> list[int]:
        known = {"cat": [300], " cat": [301], "dog": [302, 303], " dog": [304], "hat": [305, 306], " hat": [307, 305, 306], "far": [999]}
        if text.strip() == "no text":
            raise TypeError("of another kind")  # As tokenizers of others do.
        return known[text] if text in known else [] if text == "none" else super().tokenize(text)


def test_words_are_tokens_as_they_are_and_behind_a_space() -> None:
    def tokens(*words: str, **fields: Any) -> tuple[tuple[int, ...], ...]:
        return bad_word_tokens(SamplingParams(bad_words=words, **fields), {7}, Words(), 400)

    assert tokens("cat", " cat", "  cat") == ((300,), (301,))
    assert tokens("dog") == ((302, 303), (304,)) and tokens("hat") == ((305, 306), (307, 305, 306))
    assert tokens(" ") == (tuple(TOKENIZER.tokenize(" ")), tuple(TOKENIZER.tokenize("  ")))
    assert tokens() == bad_word_tokens(SamplingParams(), (), None, 400) == ()
    reasons = {"none": "which is 0 tokens", "x" * 33: "which is 33 tokens; a word has 1 to 32", "far": "whose token 999 is never drawn"}
    reasons["no text"] = "which the tokenizer refused: of another kind"
    for word, reason in reasons.items():
        with pytest.raises(ValueError, match=f"bad_words holds '{word}', {reason}"):
            tokens(word)
    with pytest.raises(ValueError, match="bad_words need a tokenizer; give the engine one, or use logit_bias"):
        bad_word_tokens(SamplingParams(bad_words=("cat",)), (), None, 400)
    nothing = "bad_words leave nothing to draw: they are all of allowed_token_ids; allow others"
    with pytest.raises(ValueError, match=nothing):
        tokens("cat", allowed_token_ids=[300, 301])
    with pytest.raises(ValueError, match=nothing):
        tokens("cat", allowed_token_ids=[300, 7], min_tokens=1)
    assert tokens("cat", allowed_token_ids=[300, 7]) and tokens("dog", allowed_token_ids=[302, 303])


def test_they_are_asked_for_over_http(model: GPTModel, make_engine: Make, wanted: list[str]) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "allowed_token_ids": FEW}
    with serve(make_engine(model, TOKENIZER)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        answer = http.post("/v1/completions", json={**body, "bad_words": WORDS[0]})
        assert answer.json()["choices"][0]["text"] == wanted[0]
        assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] != wanted[0]
        for words, status in ((["x" * 33], 400), ([""], 422), (["x"] * 65, 422), ("x", 422), ([1], 422), (["x" * 257], 422)):
            answer = http.post("/v1/completions", json={**body, "bad_words": words})
            assert answer.status_code == status and "bad_words" in answer.text, answer.text
