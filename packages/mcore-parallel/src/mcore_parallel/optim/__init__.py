# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Parameter updates and learning-rate schedules."""

from mcore_parallel.optim._config import AdamOptimizerConfig, OptimizerConfig, ParamGroup
from mcore_parallel.optim._loss_scale import DynamicLossScale
from mcore_parallel.optim._muon import orthogonalise
from mcore_parallel.optim._norm import global_grad_norm
from mcore_parallel.optim._optimizer import GradientSource, MegatronOptimizer, PieceSource, StateShard, StepResult
from mcore_parallel.optim._rate import Rate
from mcore_parallel.optim._schedule import (
    ConstantSchedule,
    CosineSchedule,
    InverseSquareRootSchedule,
    LinearSchedule,
    RateAndDecaySchedule,
    WeightDecaySchedule,
    WSDSchedule,
)

__all__ = [
    "AdamOptimizerConfig",
    "ConstantSchedule",
    "CosineSchedule",
    "DynamicLossScale",
    "GradientSource",
    "InverseSquareRootSchedule",
    "LinearSchedule",
    "MegatronOptimizer",
    "OptimizerConfig",
    "ParamGroup",
    "PieceSource",
    "Rate",
    "RateAndDecaySchedule",
    "StateShard",
    "StepResult",
    "WSDSchedule",
    "WeightDecaySchedule",
    "global_grad_norm",
    "orthogonalise",
]
