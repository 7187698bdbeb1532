# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How much better than its group a trajectory did."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mcore_rl._stability import experimental_api

_BASELINES, _SCALES = ("group_mean", "leave_one_out", "batch_mean", "none"), ("group_std", "batch_std", "batch_reward_std", "none")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """Advantages (R - baseline) / scale.

    GRPO: the defaults. Dr. GRPO: ``scale="none"``. RLOO: ``baseline="leave_one_out", scale="none"``. REINFORCE++:
    ``baseline="batch_mean", scale="batch_std"``, and with a baseline ``baseline="group_mean", scale="batch_std"``.
    TRL's: ``std_correction=1``; its ``scale_rewards="batch"`` is ``scale="batch_reward_std"``, and its RLOO with normalised advantages is
    ``baseline="leave_one_out", scale="batch_std"``.

    Raises:
        ValueError: an unknown name, or another correction than 0 and 1.
    """

    baseline: str = "group_mean"
    """group_mean; leave_one_out: the mean of the others of the group; batch_mean: of all; none."""
    scale: str = "group_std"
    """group_std; batch_std, of what the baseline left; batch_reward_std, of the rewards of all; none. Standard deviations plus 1e-4."""
    std_correction: int = 0
    """0: standard deviations of a population, divided by n; 1: of a sample, divided by n - 1, which is 0 for one reward."""
    per_environment: bool = False
    """Means and standard deviations of the batch are those of the rewards of the same environment, where several share it."""

    def __post_init__(self) -> None:
        if self.baseline not in _BASELINES:
            raise ValueError(f"baseline={self.baseline!r} must be one of {', '.join(_BASELINES)}")
        if self.scale not in _SCALES:
            raise ValueError(f"scale={self.scale!r} must be one of {', '.join(_SCALES)}")
        if self.std_correction not in (0, 1):
            raise ValueError(f"std_correction={self.std_correction} must be 0 (population) or 1 (sample)")
        if self.per_environment and not (self.baseline == "batch_mean" or self.scale.startswith("batch_")):
            raise ValueError(
                f"per_environment=True has no effect with baseline={self.baseline!r} and scale={self.scale!r}, which see one group; "
                "set scale='batch_std', or per_environment=False"
            )

    def advantages(self, rewards: Sequence[Sequence[float]], env_ids: Sequence[str] | None = None) -> list[list[float]]:
        """One a reward.

        A group of equal rewards has no advantage where its own mean is the baseline; a reward that is alone in its group, whose others
        were lost, is compared with nothing and has none.

        Args:
            rewards: one sequence a group; groups may differ in size.
            env_ids: the environment of each group, for ``per_environment``; None where all are of one.
        """
        if self.per_environment and env_ids is not None:
            by_group: list[list[float]] = [[] for _ in rewards]
            for env_id in dict.fromkeys(env_ids):
                places = [place for place, name in enumerate(env_ids) if name == env_id]
                for place, values in zip(places, self.advantages([rewards[place] for place in places]), strict=True):
                    by_group[place] = values
            return by_group
        groups = [torch.tensor(group, dtype=torch.float64) for group in rewards]
        flat = torch.cat(groups) if groups else torch.empty(0, dtype=torch.float64)
        centred = [self._centred(group, flat) for group in groups]
        if self.scale == "group_std":
            centred = [part / self._divisor(group) for part, group in zip(centred, groups, strict=True)]
        elif self.scale != "none" and len(flat):
            whole = self._divisor(torch.cat(centred) if self.scale == "batch_std" else flat)
            centred = [part / whole for part in centred]
        return [part.tolist() for part in centred]

    def _divisor(self, values: torch.Tensor) -> float:
        spread = values.std(correction=self.std_correction).item() if len(values) > self.std_correction else 0.0
        return spread + 1e-4

    def _centred(self, group: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        if not len(group) or self.baseline == "none":
            return group
        if self.baseline == "batch_mean":
            return group - _mean(flat)
        centred = group - _mean(group)
        # R - (sum - R) / (n - 1) = (R - mean) n / (n - 1).
        return centred * len(group) / max(1, len(group) - 1) if self.baseline == "leave_one_out" else centred


def _mean(values: torch.Tensor) -> torch.Tensor:
    """Their own value where all are equal, which a sum of them misses by a bit: rules that look at signs alone would follow that."""
    return torch.where((values == values[0]).all(), values[0], values.mean())


@experimental_api
def group_relative_advantages(rewards: Sequence[Sequence[float]], *, std_norm: bool = True) -> list[list[float]]:
    """(R - mean) / (std + 1e-4) within each group, population standard deviation (Shao et al. 2024, GRPO).

    Args:
        rewards: one sequence a group; groups may differ in size.
        std_norm: divide by the standard deviation; without it this is the estimator of Dr. GRPO (Liu et al. 2025).

    Returns:
        Advantages in the same shape; zero throughout a group of equal rewards, none in an empty group.
    """
    return AdvantageConfig(scale="group_std" if std_norm else "none").advantages(rewards)
