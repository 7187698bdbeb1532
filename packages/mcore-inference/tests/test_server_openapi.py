# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The server keeps its OpenAPI document, whatever is sent."""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings

from mcore_inference import LoraSlots
from mcore_inference.server import InferenceServer, LoraFolders, WeightFolders, serve
from mcore_parallel.data import ByteTokenizer
from tests.support.adapters import random_adapter

schemathesis = pytest.importorskip("schemathesis")

Make = Callable[..., Any]
LABELS = {
    "GET /health": 1,
    "GET /metrics": 1,
    "GET /v1/models": 1,
    "GET /v1/models/{model}": 1,
    "POST /v1/completions": 50,
    "POST /v1/chat/completions": 30,
    "POST /tokenize": 25,
    "POST /detokenize": 25,
    "POST /update_weights_from_disk": 20,
    "POST /v1/load_lora_adapter": 20,
    "POST /v1/unload_lora_adapter": 10,
}
"""Requests to each; by default half as many."""
GOOD: dict[str, dict[str, Any]] = {
    "POST /v1/completions": {"prompt": "x", "max_tokens": 2},
    "POST /v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2},
    "POST /tokenize": {"prompt": "x"},
    "POST /detokenize": {"tokens": [97]},
    "POST /v1/unload_lora_adapter": {"lora_name": "sql"},
}
"""What is answered for certain, as nothing is refused: of the bodies that a schema makes now and then all are refused for what it does
not say."""
FOLDERS = {"POST /update_weights_from_disk": "model_path", "POST /v1/load_lora_adapter": "lora_path"}
"""What names a folder."""
OF_TOOLS = {"POST /v1/chat/completions", "POST /tokenize"}
"""What answers otherwise where there are tools; all else is asked where there are."""
TOKEN = {"Authorization": "Bearer secret"}
WITH_TOOLS: dict[str, Any] = {
    "messages": [{"role": "user", "content": "x"}],
    "tools": [{"type": "function", "function": {"name": "now"}}],
    "tool_choice": "auto",
    "max_tokens": 16,
    # What would be refused beside them, more often than not.
    **dict.fromkeys(("response_format", "structured_outputs", "max_completion_tokens", "min_tokens", "stream_options", "top_logprobs")),
    **dict.fromkeys(("logit_bias", "stop_token_ids", "allowed_token_ids")),
}


class ToolTokenizer(ByteTokenizer):
    """Writes tools, calls and names as JSON."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False) -> list[int]:
        return self.apply_tool_template(messages, [], add_generation_prompt)

    def apply_tool_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool = False
    ) -> list[int]:
        return self.tokenize(json.dumps([list(tools), list(messages)]))


@pytest.fixture(scope="module", params=[True, False], ids=["with tools", "without tools"])
def has_tools(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That a server takes weights from."""
    made = tmp_path_factory.mktemp("weights") / "one"
    made.mkdir()
    return made


@pytest.fixture(scope="module")
def server(has_tools: bool, folder: Path, make_model: Make, make_engine: Make) -> Iterator[InferenceServer]:
    tokenizer = ToolTokenizer() if has_tools else ByteTokenizer()
    model = make_model(vocab_size=272, dtype=torch.float32, layers=1)
    engine = make_engine(model, tokenizer, max_sequence_length=256, lora=LoraSlots(max_loras=64, max_lora_rank=1))
    loras = LoraFolders(root=folder.parent, read=lambda _: random_adapter(model, 1, 0))
    weights = WeightFolders(root=folder.parent, read=lambda _: [(name, tensor.detach()) for name, tensor in model.named_parameters()])
    with serve(engine, token="secret", tool_call_parser="hermes" if has_tools else None, weights=weights, loras=loras) as running:
        yield running


def whole(value: Any) -> Any:
    """JSON schema knows no difference between 1 and 1.0, and the server takes only the first for an integer."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def answers(cases: Any, count: int, fields: Mapping[str, Any], **options: Any) -> Counter[int]:
    """How often each status was answered; every answer is checked. Bodies have these fields."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=cases)
    def check(case: Any) -> None:
        case.body = whole(case.body)
        # 413 is for a longer one, and no refusal that schemathesis knows.
        assume(len(json.dumps(case.body, default=str)) < 2**22)
        if fields:
            case.body |= fields
        statuses[case.call_and_validate(headers=TOKEN, timeout=30, **options).status_code] += 1

    check()
    return statuses


@pytest.mark.journey
@pytest.mark.timeout(120)
@pytest.mark.parametrize("share", [0.5, pytest.param(1.0, marks=pytest.mark.slow)], ids=["half", "all"])
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_answers_are_those_of_the_document(server: InferenceServer, folder: Path, has_tools: bool, mode: str, share: float) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=TOKEN)
    schemathesis.checks.load_all_checks()
    # Schemas do not say that a token is outside of the vocabulary, that a grammar is wrong or that some fields exclude each other.
    unsaid = schemathesis.checks.CHECKS.get_by_names(["positive_data_acceptance"])
    operations = {operation.label: operation for operation in (result.ok() for result in schema.get_all_operations())}
    assert set(operations) == set(LABELS)
    for label, operation in operations.items():
        # Nothing of what is only read can be wrong.
        if (mode == "negative" and label.startswith("GET")) or (not has_tools and label not in OF_TOOLS):
            continue
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode))
        # The one folder that can be loaded, which no schema says.
        fields = {FOLDERS[label]: str(folder)} if mode == "positive" and label in FOLDERS else {}
        if mode == "positive" and label == "POST /v1/unload_lora_adapter":
            body = {"lora_name": "sql", "lora_path": str(folder)}
            assert httpx.post(f"{server.url}/v1/load_lora_adapter", json=body, headers=TOKEN, timeout=30).status_code == 200
        statuses = answers(strategy, math.ceil(share * LABELS[label]), fields, excluded_checks=unsaid)
        if label.startswith("POST") and not fields:
            case = operation.Case(body=GOOD[label] if mode == "positive" else {}, media_type="application/json")
            statuses[case.call_and_validate(headers=TOKEN, timeout=30, excluded_checks=unsaid).status_code] += 1
        assert statuses[200 if mode == "positive" else 422] > 0, (label, statuses)
        if mode == "positive" and label == "POST /v1/chat/completions" and has_tools:
            statuses = answers(strategy, math.ceil(share * 15), WITH_TOOLS, excluded_checks=unsaid)
            assert statuses[200] > 0, (label, statuses)
    assert httpx.get(f"{server.url}/health", headers=TOKEN).json() == {"status": "ok", "last_step_age_s": None, "unfinished_requests": 0}


def test_the_document_is_behind_the_token(server: InferenceServer) -> None:
    assert httpx.get(f"{server.url}/openapi.json").status_code == 401
    document = httpx.get(f"{server.url}/openapi.json", headers=TOKEN).json()
    assert document["openapi"].startswith("3.1") and "bearer" in document["components"]["securitySchemes"]
