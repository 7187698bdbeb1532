# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Records over several segments, and their data form."""

import json
import random
from typing import Any

import pytest

from mcore_inference import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    DynamicInferenceEvent,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EventType,
    FinishReason,
    RequestError,
    SamplingParams,
    Status,
    StepFailedError,
)


@pytest.mark.parametrize("seed", range(20))
def test_checkpoints_do_not_show_in_the_merged_request(seed: int) -> None:
    rng = random.Random(seed)
    prompt, outputs = [1, 2, 3], list(range(10, 10 + rng.randint(0, 12)))
    request = DynamicInferenceRequest(request_id=4, prompt_tokens=prompt, sampling_params=SamplingParams(), num_tokens_to_generate=12)
    record = DynamicInferenceRequestRecord.from_request(request)
    for token in outputs:
        if rng.random() < 0.3:
            record.checkpoint()
        record[-1].generated_tokens.append(token)
        record[-1].generated_log_probs.append(-float(token))
        record[-1].generated_top_n_logprobs.append({token: -float(token)})
    last = record[-1]
    assert last.prompt_tokens + last.generated_tokens == prompt + outputs
    assert last.num_tokens_to_generate - len(last.generated_tokens) == 12 - len(outputs)
    merged = record.merge()
    assert (merged.prompt_tokens, merged.generated_tokens, merged.num_tokens_to_generate) == (prompt, outputs, 12)
    assert merged.generated_log_probs == [-float(token) for token in outputs]
    assert record.num_generated == len(outputs) == sum(count for _, count in record.weight_versions)
    for start in range(len(outputs) + 1):
        assert record.since(start)[0] == outputs[start:]
        assert record.since(start)[1] == merged.generated_log_probs[start:]


def test_records_survive_json() -> None:
    params = SamplingParams(stop_words=["x"], logit_bias={3: 1.0})
    request = DynamicInferenceRequest(request_id=1, prompt_tokens=[5], sampling_params=params, prompt="p")
    request.generated_tokens, request.generated_top_n_logprobs = [7], [{7: -0.5, 9: -1.5}]
    request.prompt_log_probs, request.prompt_top_n_logprobs = [-1.0], [{4: -0.25, 5: -1.0}]
    request.add_event_add()
    record = DynamicInferenceRequestRecord.from_request(request)
    record.checkpoint()
    record[-1].status, record[-1].finish_reason, record[-1].error = Status.FAILED, FinishReason.ERROR, ValueError("boom")
    record[-1].add_event_error_nontransient(ValueError("boom"))
    record.generated_text, record.latency = "hello", 1.5
    data = record.serialize()
    back = DynamicInferenceRequestRecord.deserialize(json.loads(json.dumps(data)))
    assert back.requests[0] == record.requests[0]
    assert back.status is Status.FAILED and back.finish_reason is FinishReason.ERROR
    assert str(back.error) == "ValueError: boom"
    assert (back.generated_text, back.latency, back.generated_top_n_logprobs) == ("hello", 1.5, [{7: -0.5, 9: -1.5}])


@pytest.mark.parametrize("is_transient", [False, True])
@pytest.mark.parametrize("kind", [StepFailedError, BlockOverflowError, RequestError])
def test_whether_an_error_passes_survives_json(kind: type[RequestError], is_transient: bool) -> None:
    request = DynamicInferenceRequest(request_id=1, prompt_tokens=[5], sampling_params=SamplingParams())
    request.status, request.finish_reason, request.error = Status.FAILED, FinishReason.ERROR, kind(1, "boom", is_transient=is_transient)
    request.add_event_error(request.error)
    assert [event.type for event in request.events] == [EventType.ERROR_TRANSIENT if is_transient else EventType.ERROR_NONTRANSIENT]
    back = DynamicInferenceRequest.deserialize(json.loads(json.dumps(request.serialize())))
    assert type(back.error) is kind and back.error.message == "boom" and back.error.is_transient is is_transient


def test_data_of_another_version_are_refused_by_the_field() -> None:
    data = DynamicInferenceRequest(request_id=1, prompt_tokens=[5], sampling_params=SamplingParams()).serialize()
    with pytest.raises(ValueError, match="DynamicInferenceRequest of this version has no field 'later'; give what"):
        DynamicInferenceRequest.deserialize({**data, "later": 1})
    for name in data:
        with pytest.raises(ValueError, match=f"needs a field '{name}'"):
            DynamicInferenceRequest.deserialize({other: value for other, value in data.items() if other != name})


def test_data_of_no_record_and_no_error_are_refused_by_the_field() -> None:
    request = DynamicInferenceRequest(request_id=1, prompt_tokens=[5], sampling_params=SamplingParams())
    whole: list[tuple[Any, dict[str, Any]]] = [
        (DynamicInferenceRequestRecord, DynamicInferenceRequestRecord.from_request(request).serialize()),
        (ContextErrorFactory, ContextErrorFactory.serialize(BlockOverflowError(3, "full"))),
        (ContextErrorFactory, ContextErrorFactory.serialize(ActiveRequestCountOverflowError(1, 2))),
    ]
    for kind, data in whole:
        kind.deserialize(data)
        with pytest.raises(ValueError, match="of this version needs a field "):
            kind.deserialize({})
        with pytest.raises(ValueError, match="of this version has no field 'later'"):
            kind.deserialize({**data, "later": 1})
        with pytest.raises(ValueError, match="is made of a mapping of its fields, found a bytes"):
            kind.deserialize(b"")
        for name in data:
            with pytest.raises(ValueError, match=f"needs a field '{name}'"):
                kind.deserialize({other: value for other, value in data.items() if other != name})


def test_only_error_events_have_a_payload() -> None:
    with pytest.raises(ValueError, match="payload"):
        DynamicInferenceEvent(type=EventType.ADD, payload="x")
    with pytest.raises(ValueError, match="payload"):
        DynamicInferenceEvent(type=EventType.ERROR_TRANSIENT)
