# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reinforcement learning: a run of its own, or on from the checkpoint of another."""

from mcore_tools.rl._conversations import open_policy_tokenizer
from mcore_tools.rl._critic import CRITIC
from mcore_tools.rl._environment import build_environment
from mcore_tools.rl._imitation import best_attempt, texts
from mcore_tools.rl._post_train import post_train_rank
from mcore_tools.rl._reference import REFERENCE, reference_weights
from mcore_tools.rl._run import Reinforced, reinforce_rank
from mcore_tools.rl._teacher import check_tokenizer, teacher_run

__all__ = [
    "CRITIC",
    "REFERENCE",
    "Reinforced",
    "best_attempt",
    "build_environment",
    "check_tokenizer",
    "open_policy_tokenizer",
    "post_train_rank",
    "reference_weights",
    "reinforce_rank",
    "teacher_run",
    "texts",
]
