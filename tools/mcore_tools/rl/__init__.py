# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Reinforcement learning from the checkpoint of a run."""

from mcore_tools.rl._post_train import post_train_rank

__all__ = [
    "post_train_rank",
]
