# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How the losses of tokens become one number."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.training import Batch, LossReport
from mcore_rl._stability import experimental_api

_MODES = ("token_mean", "sequence_mean", "sequence_sum", "constant")


@experimental_api
@dataclass(frozen=True, kw_only=True)
class Aggregation:
    """How the losses l of tokens are aggregated over the sequences of a global batch, whatever the micro-batches, ranks and packing.

    Raises:
        ValueError: an unknown mode, a constant that is missing or of no use.

    Example:
        >>> Aggregation(mode="sequence_mean").weights(4)
        (0.25, 1.0)
    """

    mode: str = "token_mean"
    """token_mean: mean over all tokens (DAPO). sequence_mean: mean over sequences of the mean over their tokens (GRPO). sequence_sum: mean
    over sequences of the sum over their tokens. constant: that, divided by ``length`` (Dr. GRPO)."""
    length: int | None = None
    """The divisor of constant, for instance the longest answer there may be."""

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode={self.mode!r} must be one of {', '.join(_MODES)}")
        if (self.length is None) != (self.mode != "constant") or (self.length is not None and self.length < 1):
            raise ValueError(f"length={self.length} must be at least 1 with mode='constant' and None with others, found mode={self.mode!r}")

    def weights(self, num_tokens: int) -> tuple[float, float]:
        """Of each token of a sequence with so many that count: its share in the divisor, and what multiplies its loss beside that."""
        if self.mode == "token_mean":
            return 1.0, 1.0
        factor = {"sequence_mean": 1.0, "sequence_sum": float(num_tokens), "constant": num_tokens / (self.length or 1)}[self.mode]
        return 1.0 / max(1, num_tokens), factor


def weighted_report(loss: Tensor, metrics: Mapping[str, Tensor], batch: Batch, factors: Tensor | None) -> LossReport:
    """Sums over the tokens that count of losses and metrics [T]; ``factors`` [T] multiply the losses alone."""
    mask = batch.loss_mask.flatten().to(loss.dtype)
    keep = mask != 0
    weight = mask if factors is None else torch.where(keep, factors.to(loss.dtype), 0) * mask
    with torch.no_grad():
        sums = {name: (torch.where(keep, value.to(loss.dtype), 0) * mask).sum() for name, value in metrics.items()}
    return LossReport(sum=(torch.where(keep, loss, 0) * weight).sum(), count=batch.weight(), metrics=sums)
