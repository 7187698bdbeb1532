# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Requests, their prompts, and the errors they end with."""

from mcore_inference.requests._errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    CoordinatorError,
    EngineDeadError,
    EngineLostError,
    InvalidTokenError,
    MaxSequenceLengthOverflowError,
    NonFiniteLogitsError,
    PortInUseError,
    QueueFullError,
    RequestError,
    RequestOverflowError,
    StepFailedError,
    StructuredOutputError,
    TokenOverflowError,
    request_error,
)
from mcore_inference.requests._prompt import Prompt, encode_prompt, integers_of, stop_tokens
from mcore_inference.requests._request import (
    DynamicInferenceEvent,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EventType,
    FinishReason,
    Status,
)

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockOverflowError",
    "ContextErrorFactory",
    "ContextOverflowError",
    "CoordinatorError",
    "DynamicInferenceEvent",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "EngineDeadError",
    "EngineLostError",
    "EventType",
    "FinishReason",
    "InvalidTokenError",
    "MaxSequenceLengthOverflowError",
    "NonFiniteLogitsError",
    "PortInUseError",
    "Prompt",
    "QueueFullError",
    "RequestError",
    "RequestOverflowError",
    "Status",
    "StepFailedError",
    "StructuredOutputError",
    "TokenOverflowError",
    "encode_prompt",
    "integers_of",
    "request_error",
    "stop_tokens",
]
