# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Normalisation over the last dim."""

from collections.abc import Mapping
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from mcore_parallel.groups import ShardSpec
from mcore_parallel.nn.kernels import fused_layer_norm, fused_rms_norm, has_kernel
from mcore_parallel.tensor_parallel import aligned_rows, each_row, has_row_kernels


class RMSNorm(nn.Module):
    """``y = x / sqrt(mean(x^2) + epsilon) * weight`` over the last dim (Zhang and Sennrich, 2019).

    Statistics and scaling are computed in float32 (float64 input stays float64); the result has the dtype of x.

    Args:
        size: width of the last dim.
        epsilon: added to the mean square.
        zero_centered: the weight is stored less 1, so that weight decay draws it towards 1.
        partial: model axes over which the gradient of the weight is a partial sum. Under sequence parallelism
            a rank sees T / tp of the tokens, so it is ``("tp",)``; a per-head norm behind a column-parallel layer says the same.
        dtype: of the weight.
        device: of the weight.

    Example:
        >>> RMSNorm(4)(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float = 1e-5,
        zero_centered: bool = False,
        partial: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.batch_invariant = False
        """Compute every row as if it were alone, so that its bits do not depend on the others."""
        self.epsilon, self.partial, self.zero_centered = epsilon, partial, zero_centered
        self.weight = nn.Parameter(torch.full((size,), 0.0 if zero_centered else 1.0, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"weight": ShardSpec(shape=tuple(self.weight.shape), partial=self.partial)}

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: Any) -> Tensor:
        """1, stored less 1 when that is how the weight is stored."""
        return _initial_value(name, shape, self.zero_centered)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, residual: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, *, residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """[..., D] -> the same; with ``residual`` also x, whose further gradients the norm's backward adds to its own on a GPU."""
        if has_kernel(x):
            # The kernel sums each row alone, in an order that follows from how it loads.
            weight = self.weight
            if self.batch_invariant:
                x, weight = aligned_rows(x), aligned_rows(weight)
            outputs = fused_rms_norm(x, weight, self.epsilon, shift=float(self.zero_centered))
            return outputs if residual else outputs[0]
        y = each_row(self._plain, x, self.weight) if self.batch_invariant and not has_row_kernels(x) else self._plain(x, self.weight)
        return (y, x) if residual else y

    def _plain(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * _factor(weight, self.zero_centered)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}, zero_centered={self.zero_centered}, partial={self.partial}"


class LayerNorm(nn.Module):
    """``y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias`` over the last dim (Ba et al., 2016).

    Statistics and scaling are computed in float32 (float64 input stays float64); the result has the dtype of x.

    Args:
        size: width of the last dim.
        epsilon: added to the variance.
        zero_centered: the weight is stored less 1, so that weight decay draws it towards 1.
        partial: as of ``RMSNorm``, for weight and bias.
        dtype: of the parameters.
        device: of the parameters.

    Example:
        >>> LayerNorm(2, epsilon=0.0)(torch.tensor([[1.0, 3.0]])).tolist()
        [[-1.0, 1.0]]
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float = 1e-5,
        zero_centered: bool = False,
        partial: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.batch_invariant = False
        """Compute every row as if it were alone, so that its bits do not depend on the others."""
        self.epsilon, self.partial, self.zero_centered = epsilon, partial, zero_centered
        self.weight = nn.Parameter(torch.full((size,), 0.0 if zero_centered else 1.0, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {name: ShardSpec(shape=tuple(self.weight.shape), partial=self.partial) for name in ("weight", "bias")}

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: Any) -> Tensor:
        """1, stored less 1 when that is how the weight is stored, and 0 for the bias."""
        return _initial_value(name, shape, self.zero_centered)

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, residual: Literal[True]) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, *, residual: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """As ``RMSNorm``."""
        if has_kernel(x):
            weight, bias = self.weight, self.bias
            if self.batch_invariant:
                x, weight, bias = aligned_rows(x), aligned_rows(weight), aligned_rows(bias)
            outputs = fused_layer_norm(x, weight, bias, self.epsilon, shift=float(self.zero_centered))
            return outputs if residual else outputs[0]
        both = self.weight, self.bias
        y = each_row(self._plain, x, *both) if self.batch_invariant and not has_row_kernels(x) else self._plain(x, *both)
        return (y, x) if residual else y

    def _plain(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.epsilon)
        return (centred * scale * _factor(weight, self.zero_centered) + bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}, zero_centered={self.zero_centered}, partial={self.partial}"


def _factor(weight: Tensor, zero_centered: bool) -> Tensor:
    """What multiplies; a stored difference from 1 keeps its digits in float32."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1.0 if zero_centered else weight


def _initial_value(name: str, shape: tuple[int, ...], zero_centered: bool) -> Tensor:
    return torch.ones(shape) if name == "weight" and not zero_centered else torch.zeros(shape)
