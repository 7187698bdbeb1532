# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How much better than its group a trajectory did."""

from collections.abc import Sequence

import torch


def group_relative_advantages(rewards: Sequence[Sequence[float]], *, std_norm: bool = True) -> list[list[float]]:
    """(R - mean) / (std + 1e-4) within each group, population standard deviation (Shao et al. 2024, GRPO).

    Args:
        rewards: one sequence a group; groups may differ in size.
        std_norm: divide by the standard deviation; without it this is the estimator of Dr. GRPO (Liu et al. 2025).

    Returns:
        Advantages in the same shape; zero throughout a group of equal rewards, none in an empty group.
    """
    advantages = []
    for group in rewards:
        if not group:
            advantages.append([])
            continue
        values = torch.tensor(group, dtype=torch.float64)
        centred = values - values.mean()
        advantages.append((centred / (values.std(correction=0) + 1e-4) if std_norm else centred).tolist())
    return advantages
