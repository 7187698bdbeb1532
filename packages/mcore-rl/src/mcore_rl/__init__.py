# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reinforcement learning: agents, rollouts, group-relative policy optimisation, refit."""

from mcore_rl._aggregation import Aggregation
from mcore_rl._config import GRPOConfig
from mcore_rl._critic import Critic, ValueObjective
from mcore_rl._loop._disjoint import DisjointLoop, RolloutServer
from mcore_rl._loop._dpo import dpo_iteration, preference_margins
from mcore_rl._loop._loop import IterationReport, grpo_iteration
from mcore_rl._loop._update import Learner
from mcore_rl._memory import MemorySwitch
from mcore_rl._objective._advantage import AdvantageConfig, group_relative_advantages
from mcore_rl._objective._correction import ImportanceCorrection, MismatchReport
from mcore_rl._objective._gae import GAEConfig
from mcore_rl._objective._kl import kl_estimate
from mcore_rl._objective._objective import GRPOObjective, calculate_grpo_loss
from mcore_rl._objective._policy_loss import PolicyLossConfig
from mcore_rl._objective._preference import DPOObjective, pair_batches
from mcore_rl._objective._shaping import OverlongPenalty
from mcore_rl._packing._packed import PackingContext
from mcore_rl._packing._packing import PackingConfig, balance
from mcore_rl._packing._trajectories import BatchStyle, TrajectoryBatches, rollout_batches
from mcore_rl._pass_at import pass_at_k
from mcore_rl._ranks._placement import Placement, RankTimeoutError
from mcore_rl._ranks._rendezvous import rendezvous
from mcore_rl._ray_workers import RayOptions, RayWorkerError, RayWorkers
from mcore_rl._reference import FrozenWeights, with_old_logprobs, with_ref_logprobs
from mcore_rl._refit._plan import RefitPlan, RefitPlanError, WeightCopy, WeightFill, WeightShard, plan_refit
from mcore_rl._refit._refit import WeightSink, gather_weights
from mcore_rl._refit._transfer import RefitTimeoutError, WeightTransfer, refit
from mcore_rl._rollouts._special_tokens import TrajectoryError
from mcore_rl._rollouts._statistics import EnvironmentReport
from mcore_rl._served_weights import ServedWeights, ServedWeightsError
from mcore_rl._stability import deprecated, experimental_api, internal_api
from mcore_rl._types import (
    EvaluationResponse,
    GenericGenerationArgs,
    InferenceRequest,
    InferenceResponse,
    RewardEvaluationResult,
    Rollout,
    TokenRollout,
)
from mcore_rl.agent import (
    BestAndWorst,
    ChatEndpoint,
    ContrastiveRollout,
    ContrastiveRolloutGenerator,
    Conversation,
    EnvironmentServer,
    Episode,
    EvaluationAgent,
    GroupedRolloutGenerator,
    JudgedAgent,
    JudgeLimits,
    JudgeProcessError,
    LLMJudge,
    ModelJudge,
    MultiTurnAgent,
    NumberedAgent,
    NumberedConversations,
    NumberedProblems,
    PreferencePairs,
    Problem,
    ProcessJudge,
    RayJudge,
    RemoteEnvironment,
    RewardModel,
    RewardOnlyAgent,
    RolloutGenerator,
    StreamPosition,
    TokenizedRolloutGenerator,
    Turn,
    TurnLimits,
    UnreadableVerdictError,
    WeightedMultiTask,
    recite,
)
from mcore_rl.inference import (
    ChatInferenceInterface,
    HFInference,
    InferenceInterface,
    LostError,
    MegatronChatLocal,
    MegatronLocal,
    RayInference,
)

__all__ = [
    "AdvantageConfig",
    "Aggregation",
    "BatchStyle",
    "BestAndWorst",
    "ChatEndpoint",
    "ChatInferenceInterface",
    "ContrastiveRollout",
    "ContrastiveRolloutGenerator",
    "Conversation",
    "Critic",
    "DPOObjective",
    "DisjointLoop",
    "EnvironmentReport",
    "EnvironmentServer",
    "Episode",
    "EvaluationAgent",
    "EvaluationResponse",
    "FrozenWeights",
    "GAEConfig",
    "GRPOConfig",
    "GRPOObjective",
    "GenericGenerationArgs",
    "GroupedRolloutGenerator",
    "HFInference",
    "ImportanceCorrection",
    "InferenceInterface",
    "InferenceRequest",
    "InferenceResponse",
    "IterationReport",
    "JudgeLimits",
    "JudgeProcessError",
    "JudgedAgent",
    "LLMJudge",
    "Learner",
    "LostError",
    "MegatronChatLocal",
    "MegatronLocal",
    "MemorySwitch",
    "MismatchReport",
    "ModelJudge",
    "MultiTurnAgent",
    "NumberedAgent",
    "NumberedConversations",
    "NumberedProblems",
    "OverlongPenalty",
    "PackingConfig",
    "PackingContext",
    "Placement",
    "PolicyLossConfig",
    "PreferencePairs",
    "Problem",
    "ProcessJudge",
    "RankTimeoutError",
    "RayInference",
    "RayJudge",
    "RayOptions",
    "RayWorkerError",
    "RayWorkers",
    "RefitPlan",
    "RefitPlanError",
    "RefitTimeoutError",
    "RemoteEnvironment",
    "RewardEvaluationResult",
    "RewardModel",
    "RewardOnlyAgent",
    "Rollout",
    "RolloutGenerator",
    "RolloutServer",
    "ServedWeights",
    "ServedWeightsError",
    "StreamPosition",
    "TokenRollout",
    "TokenizedRolloutGenerator",
    "TrajectoryBatches",
    "TrajectoryError",
    "Turn",
    "TurnLimits",
    "UnreadableVerdictError",
    "ValueObjective",
    "WeightCopy",
    "WeightFill",
    "WeightShard",
    "WeightSink",
    "WeightTransfer",
    "WeightedMultiTask",
    "balance",
    "calculate_grpo_loss",
    "deprecated",
    "dpo_iteration",
    "experimental_api",
    "gather_weights",
    "group_relative_advantages",
    "grpo_iteration",
    "internal_api",
    "kl_estimate",
    "pair_batches",
    "pass_at_k",
    "plan_refit",
    "preference_margins",
    "recite",
    "refit",
    "rendezvous",
    "rollout_batches",
    "with_old_logprobs",
    "with_ref_logprobs",
]
