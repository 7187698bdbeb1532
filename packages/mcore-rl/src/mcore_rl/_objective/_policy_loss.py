# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The policy's part of the loss, token by token."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl._objective._kl import MAX_LOG_RATIO
from mcore_rl._objective._sequences import Sequences
from mcore_rl._stability import experimental_api

_KINDS, _RATIO_LEVELS = ("clip", "cispo"), ("token", "sequence")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """How the ratio r = exp(current - old) of a token and its advantage A make a loss.

    PPO, GRPO, RLOO, REINFORCE++: the defaults. DAPO: ``clip_high=0.28``. GSPO: ``ratio_level="sequence"`` with ranges near 3e-4. CISPO:
    ``kind="cispo", clip_low=math.inf, clip_high=4.0``.

    Raises:
        ValueError: a field out of its range.
    """

    kind: str = "clip"
    """clip: -min(r A, clip(r) A). cispo: -clip(r) A current, in which the clipped ratio is a constant: each token keeps its gradient."""
    clip_low: float = 0.2
    """Of the bound below 1."""
    clip_high: float = 0.2
    """Ratios are clipped to [1 - clip_low, 1 + clip_high]."""
    dual_clip: float | None = None
    """c: where A is negative the loss is at most -c A (Ye et al. 2020). None for no bound."""
    ratio_level: str = "token"
    """sequence: the geometric mean of the ratios of a sequence takes the place of each (GSPO, Zheng et al. 2025)."""

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind={self.kind!r} must be one of {', '.join(_KINDS)}")
        if self.ratio_level not in _RATIO_LEVELS:
            raise ValueError(f"ratio_level={self.ratio_level!r} must be one of {', '.join(_RATIO_LEVELS)}")
        for name in ("clip_low", "clip_high"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.dual_clip is not None and (self.kind != "clip" or not 1 < self.dual_clip < math.inf):
            raise ValueError(f"dual_clip={self.dual_clip} must be above 1, and kind='clip', found {self.kind!r}")
        if self.kind == "cispo" and self.ratio_level == "sequence":
            raise ValueError("ratio_level='sequence' has no meaning with kind='cispo', which weighs tokens; set ratio_level='token'")

    def losses(self, current: Tensor, advantages: Tensor, ratio: Tensor) -> Tensor:
        """The loss of each token, from its log-probability, advantage and ``ratio``."""
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        if self.kind == "cispo":
            return -clipped.detach() * advantages * current
        gain = torch.minimum(ratio * advantages, clipped * advantages)
        if self.dual_clip is not None:
            gain = torch.where(advantages < 0, torch.maximum(gain, self.dual_clip * advantages), gain)
        return -gain

    def ratio(self, current: Tensor, old: Tensor, keep: Tensor, sequences: Sequences | None) -> Tensor:
        """[T]; of a whole sequence where that is the level, with the gradient of each token's own.

        Args:
            current: [T] log-probabilities, differentiable.
            old: [T], of the policy before the update.
            keep: [T] bool, tokens that count.
            sequences: to which the tokens belong; needed for the level of sequences only.
        """
        log_ratio = (current - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        if self.ratio_level == "token":
            return log_ratio.exp()
        assert sequences is not None
        whole = sequences.spread(sequences.mean(log_ratio, keep)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        # The mean of the tokens' gradients is that of the sequence.
        return whole * (log_ratio - log_ratio.detach()).exp()
