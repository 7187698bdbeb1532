# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A norm and the projection behind it as one module."""

from collections.abc import Callable

from torch import Tensor, nn


class NormColumnLinear(nn.Module):
    """``linear(norm(x))``; parameters ``norm.weight`` [D] and ``linear.weight`` [*out, D].

    Args:
        norm: the norm.
        linear: a ``ColumnParallelLinear``.
        function: computes both from their parameters at once; None for one after the other.
    """

    def __init__(self, norm: nn.Module, linear: nn.Module, function: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm, self.linear = norm, linear
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """[T or T / tp, D] -> [T, prod(out) / tp]."""
        return self.linear(self.norm(x)) if self.function is None else self.function(x)
