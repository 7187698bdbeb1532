# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Losses as sums, and the usual one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_parallel.models import ModelOutput
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
    """Scalar: what the global sum is divided by; the sum of the batch's loss mask, unless auxiliary losses (which are
    weighted by that) are to weigh differently."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Scalars that are sums over the same tokens; they are reported divided by the global count."""

    @property
    def mean(self) -> Tensor:
        """sum / count; 0 when nothing counts."""
        return self.sum / self.count.clamp(min=torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, kw_only=True)
class CrossEntropyObjective:
    """Sum of the masked cross entropies of the labels."""

    def __call__(self, output: ModelOutput, batch: Batch) -> LossReport:
        return LossReport(sum=output.loss_sum(batch.labels.flatten(), batch.loss_mask.flatten()), count=batch.weight())
