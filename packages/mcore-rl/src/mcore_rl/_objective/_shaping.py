# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What changes rewards and groups before advantages are made of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl._fields import check_integers
from mcore_rl._stability import experimental_api

_SAME_REWARD = 1e-6


@experimental_api
@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """Takes away from the reward of long answers (DAPO, Yu et al. 2025): nothing up to L - b tokens, 1 from L on, linear between.

    Raises:
        ValueError: a buffer that does not fit.

    Example:
        >>> OverlongPenalty(max_length=100, buffer=20)(90)
        -0.5
    """

    max_length: int
    """L, generated tokens."""
    buffer: int
    """b, over how many tokens the penalty grows."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "max_length", "buffer")
        if self.buffer > self.max_length:
            raise ValueError(f"buffer={self.buffer} must lie from 1 to max_length={self.max_length}")

    def __call__(self, length: int) -> float:
        """What is added to the reward of an answer of so many tokens, from -1 to 0."""
        return min(0.0, max(-1.0, (self.max_length - self.buffer - length) / self.buffer))


def same_reward(rewards: Sequence[float]) -> bool:
    """Whether a group teaches nothing: its standard deviation is at most 1e-6, or it is empty."""
    mean = sum(rewards) / max(1, len(rewards))
    return sum((reward - mean) ** 2 for reward in rewards) <= _SAME_REWARD**2 * len(rewards)
