# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Agents: who asks the model, and how good the answer was."""

from mcore_rl.agent._base import EvaluationAgent, GroupedRolloutGenerator
from mcore_rl.agent._contrastive import BestAndWorst, ContrastiveRollout, ContrastiveRolloutGenerator
from mcore_rl.agent._multi_task import WeightedMultiTask
from mcore_rl.agent._numbered import NumberedProblems
from mcore_rl.agent._reward_only import Problem, RewardOnlyAgent

__all__ = [
    "BestAndWorst",
    "ContrastiveRollout",
    "ContrastiveRolloutGenerator",
    "EvaluationAgent",
    "GroupedRolloutGenerator",
    "NumberedProblems",
    "Problem",
    "RewardOnlyAgent",
    "WeightedMultiTask",
]
