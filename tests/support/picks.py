# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Experts that tokens pick at random."""

import torch
from torch import Tensor


def random_picks(tokens: int, num_experts: int, topk: int, generator: torch.Generator, *, skewed: bool = False) -> Tensor:
    """int32 [T, K], distinct within a row; some are no expert."""
    keys = torch.rand(tokens, num_experts, generator=generator)
    keys[:, 0] += 2 * skewed
    experts = keys.argsort(-1)[:, :topk]
    return torch.where(torch.rand(experts.shape, generator=generator) < 0.8, experts, -1).to(torch.int32)
