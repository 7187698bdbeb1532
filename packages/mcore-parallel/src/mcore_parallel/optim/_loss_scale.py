# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Factor that keeps float16 gradients in range."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DynamicLossScale:
    """Halves the scale after overflows, doubles it after a run of good steps; decided on the device.

    The state is one float64 tensor [scale, good steps in a row, overflows left], so that no step waits for the host.

    Example:
        >>> rule = DynamicLossScale(initial=8.0, window=1, hysteresis=1)
        >>> state = rule.start()
        >>> rule.update(state, torch.tensor(True))
        >>> state.tolist()
        [4.0, 0.0, 0.0]
    """

    initial: float = 2.0**32
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    """Overflows until the scale halves."""
    rearms: bool = False
    """A good step makes all of them good again; otherwise only a full window does."""
    constant: bool = False

    def __post_init__(self) -> None:
        if not self.initial >= self.minimum > 0.0:
            raise ValueError(f"initial={self.initial} must be at least minimum={self.minimum}, which must be positive")

    def start(self, device: torch.device | None = None) -> Tensor:
        """The state before the first step."""
        return torch.tensor([self.initial, 0.0, self.hysteresis], dtype=torch.float64, device=device)

    def update(self, state: Tensor, overflow: Tensor) -> None:
        """Take note of a step, in place.

        Args:
            state: of ``start``.
            overflow: boolean scalar, the gradients were not finite.
        """
        if self.constant:
            return
        scale, good, left = state.unbind()
        left_bad = left - 1
        halves = left_bad <= 0
        scale_bad = torch.where(halves, (scale * 0.5).clamp(min=self.minimum), scale)
        full = good + 1 >= self.window
        scale_good = torch.where(full, scale * 2, scale)
        armed = torch.full_like(left, self.hysteresis)
        left_good = armed if self.rearms else torch.where(full, armed, left)
        good_next = torch.where(full, torch.zeros_like(good), good + 1)
        bad = torch.stack([scale_bad, torch.zeros_like(good), left_bad.clamp(min=0)])
        state.copy_(torch.where(overflow, bad, torch.stack([scale_good, good_next, left_good])))
