# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Softmax whose weights may sum to less than one."""

import math

import torch
from torch import Tensor, nn


class SoftmaxOne(nn.Module):
    """``exp(x_j) / (offset + sum_i exp(x_i))``: what is left to one is attention to nothing (Miller, 2023).

    The offset is a number, 1 by default, or the exponential of a logit for each head, as attention sinks learn it. A row of -inf
    gives zeros, with and without an offset.

    Args:
        denominator_offset: added to the denominator: a number, 0 or None for the usual softmax; or a tensor [A] of logits, one a
            head, whose exponentials are added. x is [..., A, sq, sk] then.
        dim: over which weights are normalised; the last one with a tensor.

    Raises:
        ValueError: a negative number; with a tensor, a ``dim`` other than the last one.

    Example:
        >>> SoftmaxOne()(torch.zeros(1, 3)).tolist()
        [[0.25, 0.25, 0.25]]
    """

    def __init__(self, denominator_offset: Tensor | float | None = 1.0, dim: int = -1) -> None:
        super().__init__()
        if isinstance(denominator_offset, Tensor):
            if dim != -1:
                raise ValueError(f"dim={dim} must be -1 when denominator_offset is a tensor with a logit a head")
        elif denominator_offset is not None and denominator_offset < 0:
            raise ValueError(f"denominator_offset={denominator_offset} must not be negative; give logits as a tensor")
        # A parameter belongs to the module that made it.
        self._offset = (denominator_offset,)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Weights of the shape and dtype of ``x``, computed in float32 (float64 for float64)."""
        (offset,) = self._offset
        if isinstance(offset, Tensor):
            return softmax_with_sink(x, offset[:, None, None])
        if not offset:
            return softmax_with_sink(x, None, self.dim)
        return softmax_with_sink(x, x.new_full((), math.log(offset), dtype=_wide(x)), self.dim)


def softmax_with_sink(x: Tensor, sink: Tensor | None, dim: int = -1) -> Tensor:
    """Softmax of ``x`` and one more logit, which broadcasts against it, without the weight of that one; a row of -inf gives zeros."""
    wide = x.to(_wide(x))
    highest = wide.detach().amax(dim, keepdim=True)
    if sink is not None:
        sink = sink.to(wide.dtype)
        highest = torch.maximum(highest, sink.detach())
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = (wide - highest).exp()
    total = weights.sum(dim, keepdim=True)
    if sink is not None:
        total = total + (sink - highest).exp()
    return (weights / total.masked_fill(total == 0, 1.0)).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
