# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Root-mean-square normalisation."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mcore_parallel._shards import ShardSpec
from mcore_parallel.nn._fused import fused_rms_norm, has_kernel


class RMSNorm(nn.Module):
    """``y = x / sqrt(mean(x^2) + epsilon) * weight`` over the last dim (Zhang and Sennrich, 2019).

    Statistics and scaling are computed in float32 (float64 input stays float64); the result has the dtype of x.

    Args:
        size: width of the last dim.
        epsilon: added to the mean square.
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
        partial: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.partial = partial
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"weight": ShardSpec(shape=tuple(self.weight.shape), partial=self.partial)}

    def forward(self, x: Tensor) -> Tensor:
        if has_kernel(x):
            return fused_rms_norm(x, self.weight, self.epsilon)
        wide = x if x.dtype == torch.float64 else x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return (wide * scale * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, epsilon={self.epsilon}, partial={self.partial}"
