# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents: who asks the model, and how good the answer was."""

from mcore_rl.agent._base import EvaluationAgent, GroupedRolloutGenerator, RolloutGenerator, TokenizedRolloutGenerator
from mcore_rl.agent._contrastive import BestAndWorst, ContrastiveRollout, ContrastiveRolloutGenerator
from mcore_rl.agent._conversation import Conversation, Turn, TurnLimits
from mcore_rl.agent._environment_server import EnvironmentServer
from mcore_rl.agent._judged import JudgedAgent, Problem
from mcore_rl.agent._model_judge import (
    ChatEndpoint,
    LLMJudge,
    ModelJudge,
    ResponseScorer,
    RewardModel,
    UnreadableVerdictError,
    VerdictCounts,
    read_score,
)
from mcore_rl.agent._multi_task import WeightedMultiTask
from mcore_rl.agent._multi_turn import Episode, MultiTurnAgent
from mcore_rl.agent._numbered import NumberedAgent, NumberedConversations, NumberedProblems
from mcore_rl.agent._preference_pairs import PreferencePairs
from mcore_rl.agent._process_judge import JudgeLimits, JudgeProcessError, ProcessJudge
from mcore_rl.agent._ray_judge import RayJudge
from mcore_rl.agent._recited import recite
from mcore_rl.agent._remote_environment import RemoteEnvironment
from mcore_rl.agent._reward_only import RewardOnlyAgent
from mcore_rl.agent._stream_position import StreamPosition

__all__ = [
    "BestAndWorst",
    "ChatEndpoint",
    "ContrastiveRollout",
    "ContrastiveRolloutGenerator",
    "Conversation",
    "EnvironmentServer",
    "Episode",
    "EvaluationAgent",
    "GroupedRolloutGenerator",
    "JudgeLimits",
    "JudgeProcessError",
    "JudgedAgent",
    "LLMJudge",
    "ModelJudge",
    "MultiTurnAgent",
    "NumberedAgent",
    "NumberedConversations",
    "NumberedProblems",
    "PreferencePairs",
    "Problem",
    "ProcessJudge",
    "RayJudge",
    "RemoteEnvironment",
    "ResponseScorer",
    "RewardModel",
    "RewardOnlyAgent",
    "RolloutGenerator",
    "StreamPosition",
    "TokenizedRolloutGenerator",
    "Turn",
    "TurnLimits",
    "UnreadableVerdictError",
    "VerdictCounts",
    "WeightedMultiTask",
    "read_score",
    "recite",
]
