# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameter updates and learning-rate schedules."""

from mcore_parallel.optim._config import OptimizerConfig
from mcore_parallel.optim._norm import global_grad_norm
from mcore_parallel.optim._optimizer import GradientSource, MegatronOptimizer, StateShard, StepResult
from mcore_parallel.optim._schedule import ConstantSchedule, CosineSchedule, LinearSchedule, WSDSchedule

__all__ = [
    "ConstantSchedule",
    "CosineSchedule",
    "GradientSource",
    "LinearSchedule",
    "MegatronOptimizer",
    "OptimizerConfig",
    "StateShard",
    "StepResult",
    "WSDSchedule",
    "global_grad_norm",
]
