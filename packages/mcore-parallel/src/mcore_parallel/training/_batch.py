# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""One micro-batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mcore_parallel.nn import Step


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B sequences of S tokens with what is to be learnt from them; the same on all tp and pp ranks of a replica.

    Raises:
        ValueError: tensors whose shapes differ.

    Example:
        >>> row = torch.arange(5)[None]
        >>> Batch(tokens=row[:, :-1], labels=row[:, 1:], loss_mask=torch.ones(1, 4)).step().seq_len
        4
    """

    tokens: Tensor
    """[B, S] int64."""
    labels: Tensor
    """[B, S] int64, the token that follows each token."""
    loss_mask: Tensor
    """[B, S] float, weight of each label; 0 leaves it out."""
    positions: Tensor | None = None
    """[B, S] int64; None for 0 to S - 1 in every sequence."""
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    """What an objective needs beside (advantages, teacher logits)."""

    def __post_init__(self) -> None:
        if self.tokens.dim() != 2:
            raise ValueError(f"tokens of shape {tuple(self.tokens.shape)} must be [B, S]")
        for name in ("labels", "loss_mask", "positions"):
            value = getattr(self, name)
            if value is not None and value.shape != self.tokens.shape:
                raise ValueError(f"{name} of shape {tuple(value.shape)} must have the shape of tokens, {tuple(self.tokens.shape)}")

    def step(self) -> Step:
        """The forward pass over this batch."""
        B, S = self.tokens.shape
        if self.positions is None:
            return Step.causal(B, S, self.tokens.device)
        return Step(batch_size=B, seq_len=S, positions=self.positions.flatten())

    def weight(self) -> Tensor:
        """Scalar float64: sum of the mask, the number of labels that count."""
        return self.loss_mask.sum(dtype=torch.float64)
