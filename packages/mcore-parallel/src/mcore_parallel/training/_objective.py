# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Losses as sums, and the usual one."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_parallel.models import BertOutput, ModelOutput
from mcore_parallel.training._batch import Batch


@dataclass(frozen=True, kw_only=True)
class LossReport:
    """A loss that is not divided yet, so that reports of micro-batches and replicas add up.

    Example:
        >>> LossReport(sum=torch.tensor(6.0), count=torch.tensor(3.0)).mean
        tensor(2.)
    """

    sum: Tensor
    """Scalar, differentiable: sum over the tokens of this rank."""
    count: Tensor
    """Scalar: what the global sum is divided by; the sum of the batch's loss mask, by which auxiliary losses are weighted. An objective
    that counts something else says so by ``num_units(batch, cp)``, by which they are weighted then."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars that are sums over the same tokens; they are reported divided by the global count."""
    counts: Mapping[str, Tensor] = field(default_factory=dict)
    """Of metrics over other tokens: what their global sum is divided by instead."""

    @property
    def mean(self) -> Tensor:
        """sum / count; 0 when nothing counts."""
        return self.sum / self.count.clamp(min=torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyObjective:
    """Sum of the masked cross entropies of the labels.

    Heads that predict further tokens, if the model has them, add those of their own labels, times ``mtp_loss_scaling_factor`` divided
    by how many there are; ``lm_loss`` and ``mtp_1_loss``, ``mtp_2_loss`` ... are reported apart, each as the mean over its own labels.

    Raises:
        ValueError: a factor that is negative or not finite.
    """

    mtp_loss_scaling_factor: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.mtp_loss_scaling_factor < math.inf:
            raise ValueError(f"mtp_loss_scaling_factor={self.mtp_loss_scaling_factor} must not be negative, and finite; 0 trains no head")

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        total = output.loss_sum(batch.labels.flatten(), batch.loss_mask.flatten())
        if not output.depths:
            return LossReport(sum=total, count=batch.weight())
        metrics, counts = {"lm_loss": total.detach()}, {}
        scale = self.mtp_loss_scaling_factor / len(output.depths)
        for number, depth in enumerate(output.depths, 1):
            ahead = batch.ahead(number, output.layer.groups.cp)
            loss = depth.loss_sum(ahead.labels.flatten(), ahead.loss_mask.flatten())
            total = total + scale * loss
            metrics[f"mtp_{number}_loss"], counts[f"mtp_{number}_loss"] = loss.detach(), ahead.weight()
        return LossReport(sum=total, count=batch.weight(), metrics=metrics, counts=counts)


@dataclass(frozen=True, kw_only=True)
class BertObjective:
    """Sum of the cross entropies of the masked tokens, and the sentence-pair loss where a batch knows the pairs.

    ``batch.loss_mask`` marks the masked tokens and ``batch.labels`` says what they were. ``batch.extras["is_random"]`` [B] is 1 where the
    second sentence does not follow the first one; the mean over the sequences of a micro-batch is added to the mean over its masked
    tokens. ``lm_loss`` and ``sentence_loss`` are reported apart.
    """

    def __call__(self, output: BertOutput, batch: Batch) -> LossReport:
        total, count = output.loss_sum(batch.labels.flatten(), batch.loss_mask.flatten()), batch.weight()
        if "is_random" not in batch.extras:
            return LossReport(sum=total, count=count)
        pairs = output.sentence_losses(batch.extras["is_random"].flatten())
        metrics = {"lm_loss": total.detach(), "sentence_loss": pairs.detach().sum()}
        both = total + pairs.mean() * count.to(pairs.dtype)
        return LossReport(sum=both, count=count, metrics=metrics, counts={"sentence_loss": count.new_tensor(pairs.numel())})
