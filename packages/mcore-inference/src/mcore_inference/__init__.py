# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Dynamic-batching inference with a paged key-value cache; ``mcore_inference.server`` speaks OpenAI's HTTP API."""

from mcore_inference._capability import EngineCapability
from mcore_inference._stability import deprecated, experimental_api, internal_api
from mcore_inference.attention import PagedAttention, PagedStep
from mcore_inference.cache import BlockAllocator, PagedKVCache
from mcore_inference.context import DynamicInferenceContext, InferenceConfig
from mcore_inference.engine import (
    DynamicInferenceEngine,
    EngineHealth,
    EngineRunner,
    ExecutionConfig,
    Increment,
    RequestStream,
    get_asyncio_loop,
)
from mcore_inference.requests import (
    ActiveRequestCountOverflowError,
    BlockOverflowError,
    ContextErrorFactory,
    ContextOverflowError,
    DynamicInferenceEvent,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    EngineDeadError,
    EventType,
    FinishReason,
    InvalidTokenError,
    MaxSequenceLengthOverflowError,
    NonFiniteLogitsError,
    PortInUseError,
    QueueFullError,
    RequestError,
    RequestOverflowError,
    Status,
    StepFailedError,
    TokenOverflowError,
)
from mcore_inference.sampling import SamplingParams
from mcore_inference.scheduling import Limits, RequestView, StepPlan, Work, plan_step
from mcore_inference.text import BosTokenizer, ChatTokenizer, StopTokenizer, TextStream, Tokenizer, TransformersTokenizer, chat_tokens

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
    "ExecutionConfig",
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
    "StopTokenizer",
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
