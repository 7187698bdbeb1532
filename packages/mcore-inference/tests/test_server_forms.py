# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Forms of outputs that are asked for over HTTP."""

import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, cast

import openai
import pytest

from mcore_inference import StructuredOutputError
from mcore_inference.server import InferenceServer, serve
from mcore_inference.server._errors import ApiError
from tests.support.small_server import LETTERS, TOKENIZER, make_small_engine

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def server(make_model: Make, make_engine: Make) -> Iterator[InferenceServer]:
    with serve(make_small_engine(make_model, make_engine)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: InferenceServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made


RECORD = {
    "type": "object",
    "properties": {"name": {"enum": ["ada", "grace"]}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
SCHEMA_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "record", "schema": RECORD, "strict": True}}
MESSAGES: Any = [{"role": "user", "content": "who?"}]


@pytest.mark.parametrize("stream", [False, True])
def test_response_format_gives_json_of_the_schema_to_every_choice(client: openai.OpenAI, stream: bool) -> None:
    common: dict[str, Any] = {"model": "mcore", "n": 3, "seed": 5, "max_tokens": 80}
    if stream:
        texts, reasons = [""] * 3, [""] * 3
        for chunk in client.chat.completions.create(messages=MESSAGES, response_format=SCHEMA_FORMAT, stream=True, **common):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    else:
        answer = client.chat.completions.create(messages=MESSAGES, response_format=SCHEMA_FORMAT, **common)
        texts, reasons = [choice.message.content or "" for choice in answer.choices], [choice.finish_reason for choice in answer.choices]
    for text in texts:
        value = json.loads(text)
        assert set(value) == {"name", "ok"} and value["name"] in ("ada", "grace") and value["ok"] in (True, False)
    assert reasons == ["stop"] * 3
    extra = {"response_format": SCHEMA_FORMAT}
    completion = client.completions.create(prompt="x", extra_body=extra, model="mcore", seed=1, max_tokens=80)
    assert set(json.loads(completion.choices[0].text)) == {"name", "ok"}


def test_other_forms_are_asked_for_by_response_format_and_structured_outputs(client: openai.OpenAI) -> None:
    ask = functools.partial(client.chat.completions.create, model="mcore", messages=MESSAGES, seed=3, max_tokens=40)
    closing: Any = {str(token): 50.0 for token in TOKENIZER.tokenize("}")}
    assert json.loads(ask(response_format={"type": "json_object"}, logit_bias=closing).choices[0].message.content or "") == {}
    forms = (({"choice": ["left", "right"]}, "left|right"), ({"regex": "[0-9]{3}"}, "[0-9]{3}"), ({"grammar": 'start: "q"'}, "q"))
    for form, wanted in forms:
        text = ask(extra_body={"structured_outputs": form}).choices[0].message.content or ""
        assert re.fullmatch(wanted, text), text
    plain = ask(response_format={"type": "text"}, logit_bias=LETTERS).choices[0].message.content
    assert plain == ask(logit_bias=LETTERS).choices[0].message.content


@pytest.mark.parametrize(("is_transient", "status"), [(False, 400), (True, 503)])
def test_a_form_that_could_not_be_compiled_for_now_is_not_the_fault_of_its_client(is_transient: bool, status: int) -> None:
    error = ApiError.of(StructuredOutputError(3, "structured_output: no room", is_transient=is_transient))
    assert (error.status, error.code, error.message) == (status, "StructuredOutputError", "structured_output: no room")


def test_an_output_that_cannot_go_on_in_its_form_is_refused_as_one_that_cannot_begin_in_it(client: openai.OpenAI) -> None:
    grammar = 'start: e\ne: e e e | e e | "a" | \n'
    ambiguous: Any = {"structured_outputs": {"grammar": grammar}, "ignore_eos": True, "logit_bias": {97: 100.0}}
    with pytest.raises(openai.BadRequestError, match="structured_output cannot go on") as caught:
        client.completions.create(model="mcore", prompt="x", max_tokens=120, seed=1, extra_body=ambiguous)
    assert (caught.value.code, caught.value.param) == ("StructuredOutputError", "structured_outputs")


def test_a_form_that_cannot_be_had_is_refused_and_says_why(client: openai.OpenAI) -> None:
    ask = functools.partial(client.chat.completions.create, model="mcore", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        ask(response_format=_format({"type": "array", "uniqueItems": True}))
    assert caught.value.code == "StructuredOutputError" and caught.value.param == "response_format"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(extra_body={"structured_outputs": {"regex": "("}})
    assert (caught.value.code, caught.value.param) == ("StructuredOutputError", "structured_outputs")
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        ask(response_format={"type": "json_object"}, extra_body={"structured_outputs": {"regex": "a"}})
    with pytest.raises(openai.BadRequestError, match="min_tokens=2 and structured_output"):
        ask(response_format={"type": "json_object"}, extra_body={"min_tokens": 2})
    for bad in ({"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"schema": {}}}):
        with pytest.raises(openai.UnprocessableEntityError, match="response_format"):
            ask(response_format=cast(Any, bad))


def _format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
