# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reinforcement learning: agents, rollouts, group-relative policy optimisation, refit."""

from mcore_rl._advantage import group_relative_advantages
from mcore_rl._batches import rollout_batches
from mcore_rl._loop import GRPOConfig, IterationReport, Learner, grpo_iteration
from mcore_rl._objective import GRPOObjective, calculate_grpo_loss
from mcore_rl._reference import with_ref_logprobs
from mcore_rl._refit import WeightSink, gather_weights, refit
from mcore_rl._stability import deprecated, experimental_api, internal_api
from mcore_rl._types import (
    EvaluationResponse,
    GenericGenerationArgs,
    InferenceRequest,
    InferenceResponse,
    RewardEvaluationResult,
    TokenRollout,
)
from mcore_rl.agent import EvaluationAgent, GroupedRolloutGenerator, Problem, RewardOnlyAgent
from mcore_rl.inference import InferenceInterface, MegatronLocal

__all__ = [
    "EvaluationAgent",
    "EvaluationResponse",
    "GRPOConfig",
    "GRPOObjective",
    "GenericGenerationArgs",
    "GroupedRolloutGenerator",
    "InferenceInterface",
    "InferenceRequest",
    "InferenceResponse",
    "IterationReport",
    "Learner",
    "MegatronLocal",
    "Problem",
    "RewardEvaluationResult",
    "RewardOnlyAgent",
    "TokenRollout",
    "WeightSink",
    "calculate_grpo_loss",
    "deprecated",
    "experimental_api",
    "gather_weights",
    "group_relative_advantages",
    "grpo_iteration",
    "internal_api",
    "refit",
    "rollout_batches",
    "with_ref_logprobs",
]
