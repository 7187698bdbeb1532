# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Bodies of requests: what is refused before it is read, and as it is."""

import gc
import json
import time
from typing import Any

import pytest

from mcore_inference.server import ServerLimits
from mcore_inference.server._bodies import _read
from mcore_inference.server._errors import ApiError
from mcore_inference.server._schema import ChatBody, CompletionBody, DetokenizeBody
from mcore_parallel.graphs import collection_paused


def _format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


_USER = {"role": "user", "content": "x"}
_TOOL = {"type": "function", "function": {"name": "a"}}
_CALL = {"id": "a", "function": {"name": "f", "arguments": "["}}


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        (CompletionBody, {"prompt": ["x"] * 400_000}, "prompt"),
        (CompletionBody, {"prompt": [-1] * 400_000}, "prompt"),
        (CompletionBody, {"prompt": [[1]] * 100_000}, "prompt"),
        (CompletionBody, {"prompt": [[-1] * 400_000]}, "prompt"),
        (CompletionBody, {"prompt": "x", "stop": [""] * 400_000}, "stop"),
        (CompletionBody, {"prompt": "x", "structured_outputs": {"choice": [1] * 400_000}}, "structured_outputs"),
        (CompletionBody, {"prompt": "x", **{f"f{number}": 1 for number in range(60_000)}}, None),
        (ChatBody, {"messages": [_USER] * 30_000}, "messages"),
        (ChatBody, {"messages": [{}] * 400_000}, None),
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "image"}] * 60_000}]}, "messages"),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": [_CALL] * 16_000}]}, "messages"),
        (ChatBody, {"messages": [_USER], "tools": [_TOOL] * 20_000}, "tools"),
        (ChatBody, {"messages": [_USER], "tools": [{}] * 400_000}, None),
        (DetokenizeBody, {"tokens": [-1] * 400_000}, "tokens"),
    ],
)
def test_the_first_faults_of_a_very_long_list_are_all_that_is_looked_for(model: Any, body: dict[str, Any], param: str | None) -> None:
    raw = json.dumps(body).encode()
    assert len(raw) < ServerLimits().max_body_bytes
    begin = time.thread_time()
    error = _read(model, raw, 0)
    # At most 50 ms on a quiet machine; a second and more while all faults were described.
    assert time.thread_time() - begin < 0.5
    assert isinstance(error, ApiError) and error.status == 422 and len(error.message) < 2100
    assert (error.param or "").split(".")[0] == (param or "")
    assert param or "60000 faults" in error.message or "brackets" in error.message


def test_a_body_of_many_lists_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcore_inference.server._bodies.from_json", lambda *_, **__: pytest.fail("it was read"))
    for raw in (b'{"prompt": [' + b"[], " * 2**18 + b"[]]}", b'{"prompt": ' + b"[" * 2**19):
        error = _read(CompletionBody, raw, 0)
        assert isinstance(error, ApiError) and error.status == 422 and "at most 262144" in error.message


@pytest.mark.journey
def test_a_body_of_many_names_is_refused_before_it_is_read_and_json_in_a_text_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f'a"{number}': 1 for number in range(2**16)}
    read = _read(CompletionBody, json.dumps({"prompt": json.dumps(names)}).encode(), 0)
    assert isinstance(read, CompletionBody) and len(read.prompt) > 2**19
    monkeypatch.setattr("mcore_inference.server._bodies.from_json", lambda *_, **__: pytest.fail("it was read"))
    for body in ({"prompt": "x", "logit_bias": names}, {"messages": [_USER] * 2**15, "model": "x"}):
        error = _read(CompletionBody, json.dumps(body).encode(), 0)
        assert isinstance(error, ApiError) and error.status == 422 and "names of fields; at most 65536" in error.message


def test_ids_that_are_too_many_by_their_commas_are_refused_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {"model": "," * 256, "tokens": [1] * 64}
    assert isinstance(_read(DetokenizeBody, json.dumps(most).encode(), 64), DetokenizeBody)
    monkeypatch.setattr("mcore_inference.server._bodies.from_json", lambda *_, **__: pytest.fail("it was read"))
    error = _read(DetokenizeBody, json.dumps({"tokens": [1] * 400}).encode(), 64)
    assert isinstance(error, ApiError) and (error.status, error.code, error.param) == (400, "context_length_exceeded", "tokens")


@pytest.mark.parametrize("prompt", [[1] * 65, [[1], [1] * 65], [2**40] * 65])
def test_a_prompt_of_too_many_tokens_is_refused_before_they_are_looked_at(prompt: list[Any]) -> None:
    error = _read(CompletionBody, json.dumps({"prompt": prompt}).encode(), 64)
    assert isinstance(error, ApiError) and (error.status, error.code, error.param) == (400, "context_length_exceeded", "prompt")
    assert "prompt holds 65 tokens and max_sequence_length=64" in error.message and error.__traceback__ is None
    # While no engine is there its limit is not known.
    unlimited = _read(CompletionBody, json.dumps({"prompt": prompt}).encode(), 0)
    assert isinstance(unlimited, CompletionBody) or "2147483648" in unlimited.message


def test_reading_a_body_turns_no_collections_on_that_a_recording_has_off() -> None:
    with collection_paused():
        read = _read(CompletionBody, b'{"prompt": "x"}', 0)
        assert isinstance(read, CompletionBody) and not gc.isenabled()
    assert gc.isenabled()


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels - 1):
        value = {"type": "object", "properties": value}
    return value


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (nested(32), None),
        (nested(33), "nested deeper than 32"),
        ({"enum": [1] * 70_000}, "70000 values"),
        ({"a": [[]] * 70_000}, "70000 values"),
    ],
)
def test_schemas_and_arguments_are_bounded_in_depth_and_size(schema: dict[str, Any], message: str | None) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": json.dumps(schema)}}
    bodies = [
        {"messages": [_USER], "tools": [{"type": "function", "function": {"name": "a", "parameters": {**schema, "type": "object"}}}]},
        {"messages": [_USER], "response_format": _format(schema)},
        {"messages": [{"role": "assistant", "tool_calls": [call]}]},
    ]
    for body in bodies:
        read = _read(ChatBody, json.dumps(body).encode(), 0)
        assert isinstance(read, ChatBody) if message is None else isinstance(read, ApiError) and message in read.message
