# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Dynamic-batching inference with a paged key-value cache; ``mcore_inference.server`` speaks OpenAI's HTTP API."""

from mcore_inference._stability import deprecated, experimental_api, internal_api
from mcore_inference.attention import PagedAttention, PagedStep
from mcore_inference.cache import BlockAllocator, PagedKVCache
from mcore_inference.capability import EngineCapability
from mcore_inference.context import DynamicInferenceContext, InferenceConfig
from mcore_inference.engine import DynamicInferenceEngine
from mcore_inference.errors import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    EngineDeadError,
    InvalidTokenError,
    MaxSequenceLengthOverflowError,
    NonFiniteLogitsError,
    PortInUseError,
    QueueFullError,
    RequestError,
    RequestOverflowError,
    StepFailedError,
    TokenOverflowError,
)
from mcore_inference.event_loop import get_asyncio_loop
from mcore_inference.request import (
    DynamicInferenceEvent,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EventType,
    FinishReason,
    Status,
)
from mcore_inference.runner import EngineHealth, EngineRunner, Increment, RequestStream
from mcore_inference.sampling import SamplingParams
from mcore_inference.scheduler import Limits, RequestView, StepPlan, Work, plan_step
from mcore_inference.text import BosTokenizer, ChatTokenizer, TextStream, Tokenizer, TransformersTokenizer, chat_tokens

__all__ = [
    "ActiveRequestCountOverflowError",
    "BlockAllocator",
    "BlockOverflowError",
    "BosTokenizer",
    "ChatTokenizer",
    "ContextErrorFactory",
    "ContextOverflowError",
    "DynamicInferenceContext",
    "DynamicInferenceEngine",
    "DynamicInferenceEvent",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "EngineCapability",
    "EngineDeadError",
    "EngineHealth",
    "EngineRunner",
    "EventType",
    "FinishReason",
    "Increment",
    "InferenceConfig",
    "InvalidTokenError",
    "Limits",
    "MaxSequenceLengthOverflowError",
    "NonFiniteLogitsError",
    "PagedAttention",
    "PagedKVCache",
    "PagedStep",
    "PortInUseError",
    "QueueFullError",
    "RequestError",
    "RequestOverflowError",
    "RequestStream",
    "RequestView",
    "SamplingParams",
    "Status",
    "StepFailedError",
    "StepPlan",
    "TextStream",
    "TokenOverflowError",
    "Tokenizer",
    "TransformersTokenizer",
    "Work",
    "chat_tokens",
    "deprecated",
    "experimental_api",
    "get_asyncio_loop",
    "internal_api",
    "plan_step",
]
