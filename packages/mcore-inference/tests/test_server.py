# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The HTTP server, called by OpenAI's own client and by a rude one."""

import contextlib
import itertools
import json
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mcore_inference import DynamicInferenceEngine, EngineDeadError, PortInUseError, SamplingParams
from mcore_inference.server import InferenceServer, serve
from mcore_inference.server._format import chat_log_probs
from mcore_inference.server._schema import ChatBody, CompletionBody
from mcore_inference.text import TokenBytes
from tests.support.sentence_pieces import SentencePieces
from tests.support.small_server import LETTERS, TOKENIZER, make_small_engine

Make = Callable[..., Any]
COMMON: dict[str, Any] = {"model": "mcore", "logit_bias": LETTERS}


@pytest.fixture(scope="module")
def server(make_model: Make, make_engine: Make) -> Iterator[InferenceServer]:
    with serve(make_small_engine(make_model, make_engine)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: InferenceServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: InferenceServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made


@pytest.fixture(scope="module")
def reference(make_model: Make, make_engine: Make) -> DynamicInferenceEngine:
    """The same engine without a server."""
    return make_small_engine(make_model, make_engine)


def wait_until(happened: Callable[[], Any], what: str) -> None:
    """The limit is for a server that hangs, not a measure of speed."""
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def wait_idle(server: InferenceServer) -> None:
    wait_until(lambda: not server.runner.health().unfinished_requests, "requests go on")


@contextlib.contextmanager
def slowed(server: InferenceServer) -> Iterator[None]:
    """The engine makes some twenty steps a second at most, so that no long request ends inside the block."""
    free = threading.Event()

    def pause(*_: Any) -> None:
        free.wait(0.05)

    hook = server.runner.engine.model.register_forward_pre_hook(pause)
    try:
        yield
    finally:
        free.set()
        hook.remove()


def test_a_completion_is_what_the_engine_gives(client: openai.OpenAI, reference: DynamicInferenceEngine) -> None:
    answer = client.completions.create(prompt="hello", max_tokens=20, seed=7, temperature=0.8, top_p=0.9, **COMMON)
    params = SamplingParams(
        seed=7, temperature=0.8, top_p=0.9, num_tokens_to_generate=20, logit_bias={int(token): bias for token, bias in LETTERS.items()}
    )
    assert answer.choices[0].text == reference.generate(["hello"], params)[0].generated_text
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.model == "mcore"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 20, 25)
    assert len(client.completions.create(prompt="x", **COMMON).choices[0].text) == 16


@pytest.mark.journey
def test_answers_without_a_seed_are_drawn_anew_after_each_start(make_model: Make, make_engine: Make) -> None:
    texts: list[str] = []
    for _ in range(2):
        with serve(make_small_engine(make_model, make_engine), model_name="mcore") as server:
            for body in ({"prompt": ["a", "a"], "n": 3}, {"prompt": "a"}):
                # So many that two draws are not the same by chance.
                answer = httpx.post(f"{server.url}/v1/completions", json={**body, "max_tokens": 36, "logit_bias": LETTERS}, timeout=30)
                texts += [choice["text"] for choice in answer.json()["choices"]]
    assert len(set(texts)) == 14


def test_several_prompts_and_choices_come_in_order(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=["a", "b"], n=2, seed=3, max_tokens=8, **COMMON)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [client.completions.create(prompt=prompt, seed=seed, max_tokens=8, **COMMON) for prompt in "ab" for seed in (3, 4)]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone]
    assert answer.usage is not None and answer.usage.prompt_tokens == 2
    ids = client.completions.create(prompt=[TOKENIZER.tokenize("a"), TOKENIZER.tokenize("b")], seed=3, max_tokens=8, **COMMON)
    assert [choice.text for choice in ids.choices] == [answer.choices[0].text, answer.choices[2].text]


def test_a_streamed_completion_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    setting: dict[str, Any] = {"prompt": "hello", "max_tokens": 24, "seed": 1, "n": 2, "logprobs": 2, **COMMON}
    whole = client.completions.create(**setting)
    texts, values, reasons, usage, count = {0: "", 1: ""}, {0: [], 1: []}, {}, None, 0
    for chunk in client.completions.create(**setting, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            count += 1
            texts[choice.index] += choice.text
            values[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason
    assert count > 10
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert [values[0], values[1]] == [pytest.approx(choice.logprobs.token_logprobs, abs=1e-4) for choice in whole.choices]
    assert reasons == {0: "length", 1: "length"}
    assert usage is not None and usage == whole.usage


def test_a_chat_streamed_and_whole(client: openai.OpenAI, reference: DynamicInferenceEngine) -> None:
    messages: Any = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    setting: dict[str, Any] = {"messages": messages, "max_completion_tokens": 16, "seed": 1, "logprobs": True, "top_logprobs": 2, **COMMON}
    whole = client.chat.completions.create(**setting)
    params = SamplingParams(seed=1, num_tokens_to_generate=16, logit_bias={int(token): bias for token, bias in LETTERS.items()})
    plain = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    prompt = TOKENIZER.apply_chat_template(plain, add_generation_prompt=True)
    assert whole.choices[0].message.content == reference.generate([prompt], params)[0].generated_text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage is not None and whole.usage.prompt_tokens == len(prompt)
    content = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == whole.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in content)
    text, roles, reason = "", [], None
    for chunk in client.chat.completions.create(**setting, stream=True):
        delta = chunk.choices[0].delta
        roles += [delta.role] if delta.role else []
        text += delta.content or ""
        reason = chunk.choices[0].finish_reason
    assert (text, roles, reason) == (whole.choices[0].message.content, ["assistant"], "length")


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_a_token_are_its_own_where_it_is_no_whole_character(client: openai.OpenAI, stream: bool) -> None:
    setting: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    answer: Any = client.chat.completions.create(model="mcore", **setting, stream=stream, extra_body={"allowed_token_ids": [0xC3]})
    entries = []
    for part in answer if stream else [answer]:
        if part.choices[0].logprobs is not None:
            entries += part.choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in entries] == [("\ufffd", [0xC3])] * 2
    others = [other for entry in entries for other in entry.top_logprobs]
    assert all(len(other.bytes) == 1 or other.token == "" for other in others) and len(others) == 4


@pytest.mark.parametrize("more", [{}, {"stop": ["q", "\u00e9 "]}, {"echo": True}], ids=["whole", "held back", "echoed"])
def test_tokens_are_where_their_text_is_streamed_or_not(client: openai.OpenAI, more: dict[str, Any]) -> None:
    letters = {str(token): 100.0 for token in TOKENIZER.tokenize("a\u00e9\u20ac")}
    body: dict[str, Any] = {
        "model": "mcore",
        "prompt": "h\u00e9",
        "max_tokens": 40,
        "seed": 3,
        "logprobs": 1,
        "logit_bias": letters,
        **more,
    }
    whole = client.completions.create(**body).choices[0]
    assert whole.logprobs is not None and "\u00e9" in whole.text
    # A byte within a character begins where that does.
    for token, place in zip(whole.logprobs.tokens, whole.logprobs.text_offset, strict=True):
        assert token == "\ufffd" or whole.text[place : place + len(token)] == token
    assert any(before == after for before, after in itertools.pairwise(whole.logprobs.text_offset))
    if "echo" not in more:
        chunks = [chunk.choices[0].logprobs for chunk in client.completions.create(**body, stream=True)]
        assert [place for part in chunks if part for place in part.text_offset] == whole.logprobs.text_offset


def test_the_text_of_an_answer_goes_on_from_its_prompt(make_model: Make, make_engine: Make) -> None:
    """By a tokenizer that strips the blank of a first token."""
    tokenizer = SentencePieces()
    (ada,) = tokenizer.tokenize("ada")
    engine = make_engine(make_model(vocab_size=tokenizer.vocab_size, layers=1), tokenizer)
    body: dict[str, Any] = {"model": "mcore", "prompt": "name", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    body["logit_bias"] = {str(ada): 100.0}
    with serve(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        for more, begin in (({"n": 2}, ""), ({"echo": True}, "name")):
            for choice in client.completions.create(**body, **more).choices:
                assert choice.text == begin + " ada ada ada" and choice.logprobs is not None
                assert choice.logprobs.text_offset is not None
                assert choice.logprobs.text_offset[-3:] == [len(begin) + place for place in (0, 4, 8)]
        parts = [chunk.choices[0] for chunk in client.completions.create(**body, stream=True)]
        assert "".join(part.text for part in parts) == " ada ada ada"
        assert [place for part in parts if part.logprobs for place in part.logprobs.text_offset or ()] == [0, 4, 8]
        assert client.completions.create(**body, stop=" ada").choices[0].text == ""


@pytest.mark.journey
def test_a_chat_without_limit_runs_to_the_end_of_the_context(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(messages=[{"role": "user", "content": "x"}], extra_body={"ignore_eos": True}, **COMMON)
    assert answer.usage is not None and answer.usage.total_tokens == 256


def test_a_stop_word_cuts_whole_and_streamed_text(client: openai.OpenAI) -> None:
    setting: dict[str, Any] = {"prompt": "hello", "max_tokens": 40, "seed": 9, **COMMON}
    text = client.completions.create(**setting).choices[0].text
    word = text[20:23]
    cut = client.completions.create(**setting, stop=["zzz", word]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(word)], "stop")
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**setting, stop=word, stream=True)) == cut.text
    setting["extra_body"] = {"include_stop_str_in_output": True}
    with_word = client.completions.create(**setting, stop=["zzz", word]).choices[0]
    assert (with_word.text, with_word.finish_reason) == (cut.text + word, "stop")
    chunks = [chunk.choices[0] for chunk in client.completions.create(**setting, stop=word, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == with_word.text and chunks[-1].finish_reason == "stop"
    messages: Any = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"messages": messages, "max_tokens": 40, "seed": 9, **COMMON}
    content = client.chat.completions.create(**body).choices[0].message.content or ""
    stopped = client.chat.completions.create(**body, stop=content[10:12], extra_body=setting["extra_body"]).choices[0]
    assert stopped.message.content == content[: content.index(content[10:12]) + 2]


def test_echo_gives_the_prompts_log_probs(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt="hello", max_tokens=0, echo=True, logprobs=1, **COMMON).choices[0]
    assert answer.text == "hello" and answer.logprobs is not None
    assert answer.logprobs.tokens == list("hello") and answer.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert answer.logprobs.token_logprobs[0] is None and len(answer.logprobs.token_logprobs) == 5
    # Of the first token nothing is known; of the others the best one, which is it where they are as likely.
    first, *best = answer.logprobs.top_logprobs or []
    assert first is None and [len(ranked) for ranked in best] == [1] * 4
    for text, value, ranked in zip(answer.logprobs.tokens[1:], answer.logprobs.token_logprobs[1:], best, strict=True):
        ((likeliest, highest),) = ranked.items()
        assert highest == value if likeliest == text else highest > value
    both = client.completions.create(prompt="hello", max_tokens=3, echo=True, logprobs=5, **COMMON).choices[0].logprobs
    assert both is not None and both.top_logprobs is not None and len(both.top_logprobs) == len(both.tokens) == 8
    assert [list(ranked)[:1] for ranked in both.top_logprobs[1:5]] == [list(ranked) for ranked in best]
    none = client.completions.create(prompt="hello", max_tokens=1, echo=True, logprobs=0, **COMMON).choices[0].logprobs
    assert none is not None and none.top_logprobs == [None] * 6 and None not in none.token_logprobs[1:]


def test_the_best_tokens_of_processed_log_probs_are_those_that_could_be_drawn(client: openai.OpenAI) -> None:
    setting: dict[str, Any] = {"prompt": "hello", "max_tokens": 4, "logprobs": 2, "temperature": 0, **COMMON}
    raw = client.completions.create(**setting).choices[0].logprobs
    processed = client.completions.create(**setting, extra_body={"logprobs_mode": "processed_logprobs"}).choices[0].logprobs
    assert raw is not None and processed is not None and processed.tokens == raw.tokens
    # The bias makes letters of what would be other bytes.
    assert not any(token in best for token, best in zip(raw.tokens, raw.top_logprobs or [], strict=True))
    assert processed.token_logprobs == [0.0] * 4 and processed.top_logprobs == [{token: 0.0} for token in processed.tokens]


def test_two_ids_of_one_text_are_two_of_the_best_tokens(client: openai.OpenAI, reference: DynamicInferenceEngine) -> None:
    # Neither byte is a character, so that both have the text of what is none.
    ids = (0xC3, 0xC4)
    params = SamplingParams(
        seed=3, num_tokens_to_generate=6, allowed_token_ids=ids, return_log_probs=True, processed_log_probs=True, top_n_logprobs=2
    )
    record = reference.generate(["x"], params)[0]
    assert all(sorted(best) == list(ids) for best in record.generated_top_n_logprobs)
    assert all(sum(math.exp(value) for value in best.values()) == pytest.approx(1) for best in record.generated_top_n_logprobs)
    token_bytes = TokenBytes(TOKENIZER)
    chat = chat_log_probs(token_bytes, record.generated_tokens, record.generated_log_probs, record.generated_top_n_logprobs)
    for token, value, best, entry in zip(
        record.generated_tokens, record.generated_log_probs, record.generated_top_n_logprobs, chat["content"], strict=True
    ):
        assert best[token] == pytest.approx(value, abs=1e-6) and (entry["token"], entry["bytes"]) == ("\ufffd", [token])
        assert [(other["bytes"], other["logprob"]) for other in entry["top_logprobs"]] == [([other], p) for other, p in best.items()]
    # OpenAI's older form has a place for each text: the better one's.
    extra = {"allowed_token_ids": list(ids), "logprobs_mode": "processed_logprobs"}
    answer = client.completions.create(model="mcore", prompt="x", seed=3, max_tokens=6, logprobs=2, extra_body=extra).choices[0].logprobs
    assert answer is not None and answer.top_logprobs is not None
    for ranked, best in zip(answer.top_logprobs, record.generated_top_n_logprobs, strict=True):
        assert ranked == {"\ufffd": pytest.approx(max(best.values()), abs=1e-5)}


def test_additions_to_the_api(client: openai.OpenAI) -> None:
    extra = {"top_k": 1, "return_token_ids": True, "min_tokens": 2, "ignore_eos": True}
    one, two = (client.completions.create(prompt="q", max_tokens=5, extra_body=extra, **COMMON).choices[0] for _ in range(2))
    assert one.text == two.text
    assert one.token_ids == TOKENIZER.tokenize(one.text) and one.prompt_token_ids == [113]
    # Both filters at once are legal.
    client.completions.create(prompt="q", top_p=1, extra_body={"top_k": 50}, max_tokens=2, **COMMON)


def test_priorities_and_shared_prompts_reach_the_engine(server: InferenceServer, client: openai.OpenAI) -> None:
    engine, priorities = server.runner.engine, []
    inner = engine.add_request
    engine.add_request = lambda *a, **k: priorities.append(k["priority"]) or inner(*a, **k)  # type: ignore[method-assign]
    try:
        prompt = list(range(40, 77))
        for body in ({}, {"priority": -4}):
            answer = client.completions.create(prompt=prompt, n=3, max_tokens=1, extra_body=body, **COMMON)
    finally:
        del engine.add_request
    assert priorities == [0] * 3 + [-4] * 3
    # Blocks of eight tokens; the last token of a prompt is computed.
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 32
    with pytest.raises(openai.UnprocessableEntityError, match="priority"):
        client.completions.create(prompt=prompt, extra_body={"priority": "high"}, **COMMON)


def test_models_health_and_metrics(client: openai.OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["mcore"]
    assert client.models.retrieve("mcore").id == "mcore"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert http.get("/health").json()["status"] == "ok"
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name, kind in (("steps", "counter"), ("failed_steps", "counter"), ("waiting_requests", "gauge"), ("http_responses", "counter")):
        family = families[f"mcore_inference_{name}"]
        assert family.type == kind and family.documentation and family.samples
    finished = families["mcore_inference_finished_requests"]
    assert {sample.labels["reason"] for sample in finished.samples} == {"stop", "length", "abort", "error"}
    assert families["mcore_inference_alive"].samples[0].value == 1
    assert families["mcore_inference_longest_waiting_seconds"].type == "gauge"
    client.completions.create(prompt="x", max_tokens=3, extra_body={"ignore_eos": True}, **COMMON)
    families = {family.name: family for family in text_string_to_metric_families(http.get("/metrics").text)}
    names = ("time_to_first_token_seconds", "time_per_output_token_seconds", "e2e_request_latency_seconds")
    for name in (*names, "inter_token_latency_seconds", "request_queue_time_seconds"):
        family = families[f"mcore_inference_{name}"]
        values = {sample.labels.get("le", sample.name.rpartition("_")[2]): sample.value for sample in family.samples}
        assert family.type == "histogram" and family.documentation and values["+Inf"] == values["count"] >= 1 and values["sum"] > 0
        counts = [value for bound, value in values.items() if bound not in ("count", "sum")]
        assert counts == sorted(counts) and len(counts) > 10
    # Their counts are no families of their own.
    assert not any("_le_" in name for name in families)
    assert "openmetrics" in http.get("/metrics", headers={"accept": "application/openmetrics-text"}).headers["content-type"]


def test_a_prompt_that_is_too_long_is_a_typed_400(client: openai.OpenAI, server: InferenceServer) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(prompt=["ok", "x" * 300], stream=stream, **COMMON)
        assert caught.value.code == "context_length_exceeded"
        assert "max_sequence_length=256" in str(caught.value)
    wait_idle(server)


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ("{", 400, "JSON"),
        ("[]", 422, "object"),
        ({}, 422, "prompt"),
        ({"prompt": "x", "temperature": -1}, 422, "temperature"),
        # Elsewhere it draws the likeliest token, elsewhere any of them: who means either says so.
        ({"prompt": "x", "top_p": 0}, 422, "top_p"),
        ({"prompt": "x", "max_tokens": 10**9}, 422, "max_tokens"),
        ({"prompt": "x", "n": 1000}, 422, "n"),
        ({"prompt": ["x"] * 100, "n": 100}, 422, "n"),
        ({"prompt": "x", "stop": ["a"] * 5}, 422, "stop"),
        ({"prompt": "x", "temprature": 1}, 422, "temprature"),
        ({"prompt": "x", "tools": []}, 422, "tools"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": []}, 422, "prompt"),
        ({"prompt": [5000]}, 400, "5000"),
        ({"prompt": [True]}, 422, "prompt"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, 422, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"9999": 1}}, 400, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": math.nan}}, 422, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": -math.inf}}, 422, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": 1001}}, 422, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"5": True}}, 422, "logit_bias"),
        ({"prompt": "x", "logit_bias": {"05": 1}}, 422, "logit_bias"),
        ({"prompt": "x", "temperature": math.nan}, 422, "temperature"),
        ({"prompt": "x", "temperature": "1"}, 422, "temperature"),
        ({"prompt": "x", "max_tokens": True}, 422, "max_tokens"),
        ({"prompt": "x", "max_tokens": 2.0}, 422, "max_tokens"),
        ({"prompt": "x", "n": "2"}, 422, "n"),
        ({"prompt": "x", "stream": 1}, 422, "stream"),
        ({"prompt": [1.0]}, 422, "prompt"),
        ({"prompt": [-1]}, 422, "prompt"),
        ({"prompt": "x", "stop_token_ids": [999]}, 400, "stop_token_ids"),
        ({"prompt": "x", "allowed_token_ids": [999]}, 400, "allowed_token_ids"),
        ({"prompt": "x", "allowed_token_ids": []}, 422, "allowed_token_ids"),
        ({"prompt": "x", "echo": True, "stream": True}, 400, "echo"),
        ({"prompt": "x", "logprobs_mode": "processed_logprobs"}, 400, "logprobs_mode"),
        ({"prompt": "x", "model": "gpt"}, 404, "gpt"),
        ("[" * 10_000, 400, ""),
    ],
)
def test_a_bad_body_is_an_openai_shaped_error_and_the_server_lives(http: httpx.Client, body: Any, status: int, word: str) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code", "request_id"} and error["type"] == "invalid_request_error"
    assert word in error["message"]
    assert http.get("/health").status_code == 200


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "more", "status", "field"),
    [
        ("completions", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("completions", {"stream": False, "stream_options": {}}, 400, "stream_options"),
        ("chat/completions", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ("chat/completions", {"stream": True, "stream_options": {"include_obfuscation": True}}, 422, "stream_options.include_obfuscation"),
        ("completions", {"logprobs_mode": "processed_logprobs"}, 400, "logprobs_mode"),
        ("completions", {"logprobs_mode": "raw_logprobs"}, 400, "logprobs_mode"),
        ("completions", {"min_tokens": 3}, 400, "min_tokens"),
        ("completions", {"min_tokens": 17, "max_tokens": None}, 400, "min_tokens"),
        ("chat/completions", {"min_tokens": 3}, 400, "min_tokens"),
        ("chat/completions", {"min_tokens": 300, "max_tokens": None}, 400, "min_tokens"),
        ("chat/completions", {"max_completion_tokens": 3}, 400, "max_tokens"),
        ("chat/completions", {"parallel_tool_calls": True}, 400, "parallel_tool_calls"),
        ("chat/completions", {"parallel_tool_calls": False}, 400, "parallel_tool_calls"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x", "name": "ada"}]}, 400, "messages.name"),
    ],
)
def test_a_field_that_would_change_nothing_is_refused_by_name(
    http: httpx.Client, path: str, more: dict[str, Any], status: int, field: str
) -> None:
    body = {**(CHAT if path.startswith("chat") else {"prompt": "x", "max_tokens": 2}), **more}
    answer = http.post(f"/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == field and field.rpartition(".")[2] in answer.json()["error"]["message"]


def test_the_same_fields_are_taken_where_they_say_something(http: httpx.Client) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "x", "stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}),
        ("completions", {"prompt": "x", "logprobs": 0, "logprobs_mode": "raw_logprobs", "min_tokens": 2, "max_tokens": 2}),
        ("completions", {"prompt": "x", "stream": None, "stream_options": None, "logprobs_mode": None, "min_tokens": 0, "max_tokens": 0}),
        ("chat/completions", {**CHAT, "max_completion_tokens": 2, "min_tokens": 2, "parallel_tool_calls": None}),
    ]
    for path, body in bodies:
        answer = http.post(f"/v1/{path}", json=body)
        assert answer.status_code == 200, answer.text


def test_other_faults_of_a_call_are_named(http: httpx.Client) -> None:
    good = json.dumps({"prompt": "x", "max_tokens": 1})
    assert http.post("/v1/completions", content=good, headers={"content-type": "text/plain"}).status_code == 415
    long = http.post("/v1/completions", content=b"x" * (5 * 2**20), headers={"content-type": "application/json"})
    assert long.status_code == 413 and "4194304 bytes" in long.json()["error"]["message"]
    # Far beyond the limit the server closes the connection before it has read everything.
    with contextlib.suppress(httpx.WriteError):
        assert http.post("/v1/completions", content=b"x" * (17 * 2**20), headers={"content-type": "application/json"}).status_code == 413
    assert http.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert http.get("/v1/completions").status_code == 405
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "[::2]:1", "x" * 1000):
        answer = http.get("/v1/models", headers={"host": host, "x-request-id": "host-1"})
        error = answer.json()["error"]
        assert answer.status_code == 400 and (error["type"], error["code"], error["request_id"]) == (
            "invalid_request_error", "invalid_host", "host-1",
        )  # fmt: skip
        assert (
            f"{host[:80]!r} names another server; ask by one of 127.0.0.1, localhost, [::1], or start the server with" in error["message"]
        )
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]", "[::1]:80"):
        assert http.get("/v1/models", headers={"host": host}).status_code == 200, host
    surrogate = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
    answer = http.post("/v1/chat/completions", content=surrogate, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422) and answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_request(server: InferenceServer, http: httpx.Client) -> None:
    body = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "n": 8, **COMMON}
    counts = server.runner.engine.finished_counts
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    with slowed(server):
        before = counts["abort"]
        with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
            next(answer.iter_lines())
        wait_until(lambda: counts["abort"] > before, "the stream goes on")
        wait_idle(server)
        before = counts["abort"]
        with socket.create_connection((server.host, server.port)) as raw:
            raw.sendall(head.encode() + data)
            wait_until(lambda: server.runner.health().unfinished_requests, "no request came")
        wait_until(lambda: counts["abort"] > before, "the request goes on")
    wait_idle(server)


@pytest.mark.journey
def test_many_clients_at_once_get_their_own_answers(client: openai.OpenAI) -> None:
    alone = {seed: client.completions.create(prompt=str(seed), seed=seed, max_tokens=12, **COMMON).choices[0].text for seed in range(12)}
    crowd: dict[int, str] = {}

    def call(seed: int) -> None:
        crowd[seed] = client.completions.create(prompt=str(seed), seed=seed, max_tokens=12, **COMMON).choices[0].text

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert crowd == alone


def test_a_full_queue_is_429_and_a_dead_engine_503(make_model: Make, make_engine: Make) -> None:
    engine = make_small_engine(make_model, make_engine, max_requests=1, max_waiting=1)
    with serve(engine, port=0) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        with pytest.raises(openai.RateLimitError):
            client.completions.create(prompt=["x"] * 8, max_tokens=100, **COMMON)
        wait_idle(running)
        assert client.completions.create(prompt="x", max_tokens=2, **COMMON).choices[0].text

        def fail(*_: Any) -> None:
            raise RuntimeError("device lost")

        hook = engine.model.register_forward_pre_hook(fail)
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="device lost") as caught:
                client.completions.create(prompt="x", **COMMON)
            assert caught.value.status_code == 503 and caught.value.code == "StepFailedError"
            assert caught.value.response.headers["Retry-After"] == "1"
        hook.remove()
        assert client.completions.create(prompt="x", max_tokens=2, **COMMON).choices[0].text
        engine.model.register_forward_pre_hook(fail)
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match="device lost"):
                client.completions.create(prompt="x", **COMMON)
        wait_until(lambda: running.runner.failure, "the runner goes on")
        assert httpx.get(f"{running.url}/health").status_code == 503
        with pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(prompt="x", **COMMON)
        assert caught.value.status_code == 503
        with pytest.raises(EngineDeadError, match="device lost"):
            running.wait()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{running.url}/health")


def test_a_token_is_asked_for(make_model: Make, make_engine: Make) -> None:
    with serve(make_small_engine(make_model, make_engine), token="secret") as running:
        for key, works in (("secret", True), ("wrong", False)):
            with openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=30) as client:
                if works:
                    assert client.completions.create(prompt="x", max_tokens=1, model="").choices
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.completions.create(prompt="x", max_tokens=1, model="")
        # Probes have no token, and learn nothing of the load.
        assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
        health = httpx.get(f"{running.url}/health", headers={"Authorization": "Bearer secret"}).json()
        assert set(health) == {"status", "last_step_age_s", "unfinished_requests"}
        for path in ("/v1/models", "/metrics", "/openapi.json"):
            assert httpx.get(f"{running.url}{path}").status_code == 401


def test_where_a_server_may_bind(make_model: Make, make_engine: Make) -> None:
    engine = make_small_engine(make_model, make_engine)
    with pytest.raises(ValueError, match=r"0\.0\.0\.0.*token"):
        serve(engine, host="0.0.0.0")
    with pytest.raises(ValueError, match="token=''"):
        serve(engine, token="")
    with pytest.raises(ValueError, match="port=70000"):
        serve(engine, port=70000)
    with pytest.raises(OSError, match=r"192\.0\.2\.1"):
        serve(engine, host="192.0.2.1", token="secret")
    with serve(engine) as running, pytest.raises(PortInUseError, match=f"port={running.port}"):
        serve(make_small_engine(make_model, make_engine), port=running.port)
    # Closed for good: the port is free again.
    with serve(engine, port=running.port) as again:
        assert again.port == running.port


def test_close_is_clean_while_streams_are_open(make_model: Make, make_engine: Make) -> None:
    running = serve(make_small_engine(make_model, make_engine))
    with httpx.Client(base_url=running.url, timeout=30) as http:
        body = {"prompt": "x", "max_tokens": 240, "ignore_eos": True, "stream": True, **COMMON}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            running.close()
            assert any("EngineDeadError" in line for line in lines)
    running.close()
    names = {thread.name for thread in threading.enumerate() if str(running.port) in thread.name}
    assert not names
    assert not running.runner._thread.is_alive() and not running._thread.is_alive()


@pytest.mark.journey
def test_random_bodies_never_break_the_server(http: httpx.Client, server: InferenceServer) -> None:
    rng = random.Random(0)
    values = [
        None,
        True,
        -1,
        0,
        1,
        2**70,
        0.5,
        -1e300,
        "",
        "x",
        "\x00",
        [],
        ["x"],
        [0, 1],
        [[1]],
        {},
        {"a": 1},
        {"1": 0.5},
        [None],
        "1" * 5000,
    ]
    for _ in range(80):
        chat = rng.random() < 0.5
        body: dict[str, Any] = {"max_tokens": 2} | ({"messages": [{"role": "user", "content": "x"}]} if chat else {"prompt": "x"})
        names = [*(ChatBody if chat else CompletionBody).model_fields, "unknown"]
        for name in rng.sample(names, rng.randint(0, 3)):
            body[name] = rng.choice(values)
        path = "/v1/chat/completions" if chat else "/v1/completions"
        answer = http.post(path, json=body)
        assert answer.status_code < 500, (body, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]
    wait_idle(server)
    assert http.get("/health").status_code == 200
