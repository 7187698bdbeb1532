# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""``/tokenize`` and ``/detokenize``: the tokens that a prompt becomes, and texts that are refused before they cost anything."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from mcore_inference.server import InferenceServer, ServerLimits, serve
from mcore_parallel.data import ByteTokenizer

Make = Callable[..., Any]
TOKENIZER = ByteTokenizer()


class CountingTokenizer(ByteTokenizer):
    """Notes how often it is asked, and has a begin-of-text token."""

    calls = 0

    @property
    def bos(self) -> int:
        return 260

    def tokenize(self, text: str) -> list[int]:
        self.calls += 1
        return super().tokenize(text)


@pytest.fixture(scope="module")
def counting() -> CountingTokenizer:
    return CountingTokenizer()


@pytest.fixture(scope="module")
def server(make_model: Make, make_engine: Make, counting: CountingTokenizer) -> Iterator[InferenceServer]:
    engine = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), counting, max_sequence_length=64)
    with serve(engine, limits=ServerLimits(max_characters_per_token=8)) as running:
        yield running


@pytest.fixture(scope="module")
def http(server: InferenceServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


def test_a_text_goes_to_tokens_and_back(http: httpx.Client) -> None:
    text = "h\u00e9llo"
    answer = http.post("/tokenize", json={"model": "mcore", "prompt": text, "return_token_strs": True}).json()
    tokens = TOKENIZER.tokenize(text)
    assert answer == {"count": 6, "max_model_len": 64, "tokens": tokens, "token_strs": [TOKENIZER.detokenize([token]) for token in tokens]}
    assert http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    marked = http.post("/tokenize", json={"prompt": "a", "add_special_tokens": True}).json()
    assert marked["tokens"] == [260, 97] and marked["token_strs"] is None


def test_a_conversation_has_the_tokens_that_its_completion_is_charged(server: InferenceServer, http: httpx.Client) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    answer = http.post("/tokenize", json={"messages": messages}).json()
    plain = [{"role": "user", "content": "hi"}]
    assert answer["tokens"] == TOKENIZER.apply_chat_template(plain, add_generation_prompt=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        usage = client.chat.completions.create(model="mcore", messages=messages, max_completion_tokens=1).usage
    assert usage is not None and usage.prompt_tokens == answer["count"]
    closed = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert closed["tokens"] == TOKENIZER.apply_chat_template(plain)


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/tokenize", {}, 422, "messages"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, 422, "messages"),
        ("/tokenize", {"prompt": ["a"]}, 422, "prompt"),
        ("/tokenize", {"prompt": "a", "propmt": "b"}, 422, "propmt"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "gpt"),
        ("/tokenize", {"prompt": "a" * 65, "return_token_strs": True}, 400, "return_token_strs"),
        ("/detokenize", {}, 422, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 422, "tokens"),
        ("/detokenize", {"tokens": [True]}, 422, "tokens"),
        ("/detokenize", {"tokens": [9999]}, 400, "9999"),
        ("/detokenize", {"tokens": "a"}, 422, "tokens"),
        ("/detokenize", {"tokens": [97] * 65}, 400, "max_sequence_length=64"),
    ],
)
def test_a_bad_body_names_its_field(http: httpx.Client, path: str, body: dict[str, Any], status: int, word: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status and word in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x" * 10_000}),
        ("/v1/completions", {"prompt": ["x" * 10_000]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 10_000}]}),
    ],
)
def test_a_text_beyond_the_context_is_refused_before_it_is_tokenized(
    http: httpx.Client, counting: CountingTokenizer, path: str, body: dict[str, Any]
) -> None:
    before, begin = counting.calls, time.monotonic()
    answer = http.post(path, json=body)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert "max_characters_per_token=8" in answer.json()["error"]["message"]
    assert counting.calls == before and time.monotonic() - begin < 5


def test_the_token_is_asked_for(make_model: Make, make_engine: Make) -> None:
    engine = make_engine(make_model(vocab_size=272, dtype=torch.float32, layers=1), TOKENIZER)
    with serve(engine, token="secret") as running:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            assert httpx.post(f"{running.url}{path}", json=body).status_code == 401
            assert httpx.post(f"{running.url}{path}", json=body, headers={"authorization": "Bearer secret"}).status_code == 200
