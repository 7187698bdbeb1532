# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Which statistics of a row of logits are computed, and in which precision."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel._stability import internal_api


@internal_api
@dataclass(frozen=True, kw_only=True)
class RowMaths:
    """What is computed of a row; z = logit / temperature over the columns that count."""

    vocab_size: int
    """Columns that count, over all ranks; the ones after them take no part."""
    smoothing: float = 0.0
    """a: the loss is (1 - a) * nll - a * mean of log p."""
    entropy: bool = False
    temperature: float = 1.0

    def columns(self, rank: int, width: int) -> int:
        """Columns that count among the ``width`` of a rank."""
        return min(max(self.vocab_size - rank * width, 0), width)

    @property
    def num_statistics(self) -> int:
        return 3 + bool(self.smoothing) + self.entropy


def maths_dtype(logits: Tensor) -> torch.dtype:
    """float64 for float64 logits, else float32."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def lowest(dtype: torch.dtype) -> float:
    """Below every logit, and finite so that differences are numbers."""
    return torch.finfo(dtype).min / 4
