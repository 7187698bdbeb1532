# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The memory of an engine, and the tensors of one step over it."""

from mcore_inference.context._config import InferenceConfig
from mcore_inference.context._context import PENDING, DynamicInferenceContext
from mcore_inference.context._step_builder import HostStep, StepBuilder, StepInputs

__all__ = [
    "PENDING",
    "DynamicInferenceContext",
    "HostStep",
    "InferenceConfig",
    "StepBuilder",
    "StepInputs",
]
