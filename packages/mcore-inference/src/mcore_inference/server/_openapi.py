# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The OpenAPI document of the server: bodies as they are checked, answers as they are written."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic.json_schema import models_json_schema

from mcore_inference.server._schema import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    LoadLoraBody,
    TokenizeBody,
    UnloadLoraBody,
    UpdateWeightsBody,
)

_REFS = "#/components/schemas/{model}"
_BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, UpdateWeightsBody, LoadLoraBody, UnloadLoraBody)
_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_ANY_OBJECT = {"type": "object"}


def openapi_document(
    model_names: Sequence[str], *, needs_token: bool, takes_weights: bool = False, takes_loras: bool = False
) -> dict[str, Any]:
    """The document, OpenAPI 3.1.

    Args:
        model_names: the model, and its adapters.
        needs_token: whether clients bring a bearer token.
        takes_weights: whether there is the route for new weights.
        takes_loras: whether there are the routes for adapters.
    """
    _, bodies = models_json_schema([(model, "validation") for model in _BODIES], ref_template=_REFS)
    for name in _BODIES:
        if "model" in bodies["$defs"][name.__name__]["properties"]:
            bodies["$defs"][name.__name__]["properties"]["model"] = {"enum": ["", *model_names], "default": ""}
    guarded = [{"bearer": []}] if needs_token else []
    codes = {"400", "404", "413", "415", "422", "429", "500", "503"}
    paths = {
        "/health": _get("health", "Whether the engine makes progress", {"200": _ref("Health"), "503": _ref("Health")}),
        "/metrics": _get("metrics", "Prometheus metrics", {"200": None}, needs_token),
        "/v1/models": _get("list_models", "The model, and its adapters", {"200": _ref("ModelList")}, needs_token),
        "/v1/models/{model}": {
            "get": {
                **_get("retrieve_model", "A model", {"200": _ref("Model"), "404": _ref("Error")}, needs_token)["get"],
                "parameters": [{"name": "model", "in": "path", "required": True, "schema": {"enum": [*model_names]}}],
            }
        },
        "/v1/completions": _post("create_completion", "Continue prompts", CompletionBody, "Completion", codes, needs_token, streams=True),
        "/v1/chat/completions": _post("create_chat_completion", "Answer", ChatBody, "ChatCompletion", codes, needs_token, streams=True),
        "/tokenize": _post("tokenize", "Tokens of a text", TokenizeBody, "Tokens", codes - {"429", "500", "503"}, needs_token),
        "/detokenize": _post("detokenize", "Text of tokens", DetokenizeBody, "Detokenized", codes - {"429", "500", "503"}, needs_token),
    }
    if takes_weights:
        refusals = codes - {"429"}
        paths["/update_weights_from_disk"] = _post(
            "update_weights", "Take the weights of a folder", UpdateWeightsBody, "WeightUpdate", refusals, needs_token
        )
    if takes_loras:
        refusals = codes - {"429"}
        paths["/v1/load_lora_adapter"] = _post(
            "load_lora", "Take the adapter of a folder", LoadLoraBody, "LoraChange", refusals, needs_token
        )
        paths["/v1/unload_lora_adapter"] = _post(
            "unload_lora", "Forget an adapter", UnloadLoraBody, "LoraChange", refusals | {"409"}, needs_token
        )
    for item in paths.values():
        for operation in item.values():
            if "401" in operation["responses"]:
                operation["security"] = guarded
    components: dict[str, Any] = {"schemas": {**bodies["$defs"], **_answers()}}
    if needs_token:
        components["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return {"openapi": "3.1.0", "info": {"title": "mcore-inference", "version": "1"}, "paths": paths, "components": components}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REFS.format(model=name)}


def _json(schema: Mapping[str, Any], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _get(name: str, summary: str, answers: Mapping[str, Mapping[str, Any] | None], needs_token: bool = False) -> dict[str, Any]:
    responses = {
        status: {"description": summary, "content": {"text/plain": {}}} if schema is None else _json(schema, summary)
        for status, schema in answers.items()
    }
    if needs_token:
        responses["401"] = _json(_ref("Error"), "The bearer token is missing or wrong")
    return {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _post(
    name: str, summary: str, body: type, answer: str, errors: set[str], needs_token: bool, *, streams: bool = False
) -> dict[str, Any]:
    success = _json(_ref(answer), summary)
    if streams:
        success["content"]["text/event-stream"] = {}
    failures = errors | ({"401"} if needs_token else set())
    return {
        "post": {
            "operationId": name,
            "summary": summary,
            "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body.__name__)}}},
            "responses": {"200": success, **{status: _json(_ref("Error"), "Refused") for status in sorted(failures)}},
        }
    }


def _object(required: Mapping[str, Any], **optional: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": {**required, **optional}}


def _array(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _or_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _answers() -> dict[str, dict[str, Any]]:
    reason = {"enum": ["stop", "length", "tool_calls", "abort"]}
    tokens = _array(_INTEGER)
    usage = _object(dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), _INTEGER))
    call = _object({"id": _STRING, "type": {"const": "function"}, "function": _object({"name": _STRING, "arguments": _STRING})})
    message = _object({"role": {"const": "assistant"}, "content": _or_null(_STRING)}, tool_calls=_array(call), refusal={"type": "null"})
    choice = {"index": _INTEGER, "finish_reason": reason, "logprobs": _or_null(_ANY_OBJECT)}
    ids = {"token_ids": tokens, "prompt_token_ids": tokens, "weight_versions": tokens}
    envelope = {"id": _STRING, "created": _INTEGER, "model": _STRING, "usage": usage}
    error = {"message": _STRING, "type": _STRING, "param": _or_null(_STRING), "code": _or_null(_STRING), "request_id": _or_null(_STRING)}
    model = {"id": _STRING, "object": {"const": "model"}, "created": _INTEGER, "owned_by": _STRING, "max_model_len": _INTEGER}
    model["parent"] = _or_null(_STRING)
    return {
        "Error": _object({"error": _object(error)}),
        "Health": _object(
            {"status": {"enum": ["ok", "dead"]}}, last_step_age_s=_or_null(_NUMBER), unfinished_requests={**_INTEGER, "minimum": 0}
        ),
        "Model": _object(model),
        "ModelList": _object({"object": {"const": "list"}, "data": _array(_ref("Model"))}),
        "Completion": _object(
            {
                **envelope,
                "object": {"const": "text_completion"},
                "choices": _array(_object({**choice, "text": _STRING}, **ids)),
            }
        ),
        "ChatCompletion": _object(
            {**envelope, "object": {"const": "chat.completion"}, "choices": _array(_object({**choice, "message": message}, **ids))}
        ),
        "Tokens": _object({"count": _INTEGER, "max_model_len": _INTEGER, "tokens": tokens, "token_strs": _or_null(_array(_STRING))}),
        "Detokenized": _object({"prompt": _STRING}),
        "LoraChange": _object({"success": {"const": True}, "message": _STRING}),
        "WeightUpdate": _object({"success": {"const": True}, "message": _STRING, "weight_version": _INTEGER}),
    }
