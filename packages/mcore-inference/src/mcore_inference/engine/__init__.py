# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The engine, and the thread that steps it for an event loop."""

from mcore_inference.engine._engine import DynamicInferenceEngine
from mcore_inference.engine._event_loop import get_asyncio_loop
from mcore_inference.engine._executor import ExecutionConfig
from mcore_inference.engine._expert_balance import ExpertBalancing, add_redundant_experts
from mcore_inference.engine._follower import follow_runner
from mcore_inference.engine._lockstep_config import LockstepConfig
from mcore_inference.engine._loras import LoraInUseError
from mcore_inference.engine._queue import asyncio_Queue, asyncio_QueueShutDown
from mcore_inference.engine._runner import EngineHealth, EngineRunner
from mcore_inference.engine._static import StaticInferenceEngine
from mcore_inference.engine._stream import EndingQueue, Increment, RequestStream, deliver
from mcore_inference.engine._weights import IncompleteWeightsError, WeightLoadError, WeightSlice

__all__ = [
    "DynamicInferenceEngine",
    "EndingQueue",
    "EngineHealth",
    "EngineRunner",
    "ExecutionConfig",
    "ExpertBalancing",
    "IncompleteWeightsError",
    "Increment",
    "LockstepConfig",
    "LoraInUseError",
    "RequestStream",
    "StaticInferenceEngine",
    "WeightLoadError",
    "WeightSlice",
    "add_redundant_experts",
    "asyncio_Queue",
    "asyncio_QueueShutDown",
    "deliver",
    "follow_runner",
    "get_asyncio_loop",
]
