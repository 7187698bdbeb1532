# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How the losses of distillation are weighed against each other."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_SMALLEST = 1e-6
"""A loss counts as at least this part of the one that it is scaled to."""


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """Scalars, sums over tokens; or their weights."""

    language: Tensor
    """Cross entropy of the labels."""
    logits: Tensor
    """Divergence from the teacher."""
    intermediate: Tensor | None = None
    """Mean over the pairs of hidden states; None without pairs."""


class LossBalancer(Protocol):
    """Chooses weights."""

    @property
    def trains_language(self) -> bool:
        """Whether the cross entropy has a weight; without one it is reported only."""
        ...

    def weights(self, totals: LossParts) -> LossParts:
        """Weight of each part, from their sums over the context-parallel ranks; neither has a gradient."""
        ...


@dataclass(frozen=True, kw_only=True)
class RatioBalancer:
    """Scales losses to each other by their present sizes, micro-batch by micro-batch.

    The intermediate loss is scaled to the divergence: kd = logits + intermediate * [logits / intermediate]. With ``skip_lm_loss`` that
    is all. Otherwise kd is scaled to the cross entropy: language + s kd [language / kd], with s = ``kd_loss_scale``, half of it when
    there are intermediate losses. Brackets have no gradient, and divide by no less than a millionth of their numerator.

    Raises:
        ValueError: a negative scale.
    """

    skip_lm_loss: bool = True
    kd_loss_scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.kd_loss_scale >= 0:
            raise ValueError(f"kd_loss_scale={self.kd_loss_scale} must be at least 0")

    @property
    def trains_language(self) -> bool:
        return not self.skip_lm_loss

    def weights(self, totals: LossParts) -> LossParts:
        one = torch.ones_like(totals.logits)
        inner = None if totals.intermediate is None else _ratio(totals.logits, totals.intermediate)
        if self.skip_lm_loss:
            return LossParts(language=torch.zeros_like(one), logits=one, intermediate=inner)
        kd, scale = totals.logits, self.kd_loss_scale
        if totals.intermediate is not None and inner is not None:
            kd, scale = kd + inner * totals.intermediate, scale / 2
        outer = scale * _ratio(totals.language, kd)
        return LossParts(language=one, logits=outer, intermediate=None if inner is None else outer * inner)


@dataclass(frozen=True, kw_only=True)
class FixedBalancer:
    """Weights that stay; losses of micro-batches add up as those of one large batch would.

    Raises:
        ValueError: a negative weight.
    """

    language: float = 0.0
    logits: float = 1.0
    intermediate: float = 1.0

    def __post_init__(self) -> None:
        for name in ("language", "logits", "intermediate"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")

    @property
    def trains_language(self) -> bool:
        return self.language > 0

    def weights(self, totals: LossParts) -> LossParts:
        like = totals.logits
        inner = None if totals.intermediate is None else torch.full_like(like, self.intermediate)
        return LossParts(language=torch.full_like(like, self.language), logits=torch.full_like(like, self.logits), intermediate=inner)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    least = (_SMALLEST * a).clamp(min=torch.finfo(a.dtype).tiny)
    return a / torch.maximum(b, least)
