# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Advantages of tokens from rewards and a critic's values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mcore_rl._stability import experimental_api


@experimental_api
@dataclass(frozen=True, kw_only=True)
class GAEConfig:
    """Generalised advantage estimation (Schulman et al. 2016, equation 16).

    Raises:
        ValueError: a field out of its range.

    Example:
        >>> GAEConfig(lam=0.5).estimate([torch.tensor([0.0, 1.0])], [torch.tensor([0.5, 0.5])])[0][0].tolist()
        [0.25, 0.5]
    """

    discount: float = 1.0
    """gamma, of the reward of a later token."""
    lam: float = 0.95
    """lambda: 1 compares the return with the value, 0 a step with the next value."""
    whiten: bool = True
    """Advantages of an iteration get mean 0 and standard deviation 1 over all tokens of all ranks; returns stay as they are."""

    def __post_init__(self) -> None:
        for name in ("discount", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie from 0 to 1")

    def estimate(self, rewards: Sequence[Tensor], values: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Advantages, not whitened, and returns of the tokens of each trajectory, [T] float64.

        delta_t = r_t + discount V_(t+1) - V_t and A_t = delta_t + discount lam A_(t+1), both 0 behind the last token: a trajectory ends
        there, truncated or not. The return is A_t + V_t.

        Args:
            rewards: [T] a trajectory.
            values: [T] a trajectory.

        Raises:
            ValueError: rewards and values of different lengths.
        """
        if [len(part) for part in rewards] != [len(part) for part in values]:
            raise ValueError(f"rewards of lengths {[*map(len, rewards)]} come with values of lengths {[*map(len, values)]}")
        if not rewards:
            return []
        # Places behind the end of a trajectory have reward and value 0, and so advantage 0.
        reward, value = (pad_sequence([part.double() for part in parts], batch_first=True) for parts in (rewards, values))
        following = torch.zeros_like(value)
        following[:, :-1] = value[:, 1:]
        advantages = reward + self.discount * following - value
        for t in reversed(range(advantages.shape[1] - 1)):
            advantages[:, t] += self.discount * self.lam * advantages[:, t + 1]
        return [(row[:length], row[:length] + own[:length]) for row, own, length in zip(advantages, value, map(len, rewards), strict=True)]
