# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A norm of queries or keys over all their heads together."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.comm import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.nn.kernels import fused_rms_norm, has_kernel
from mcore_parallel.tensor_parallel import aligned_rows, each_row, has_row_kernels


# T tokens, A heads of all tp ranks, a of this rank, d width of a head.
class RMSNormAcrossHeads(nn.Module):
    """``y = x / sqrt(mean(x^2) + epsilon) * weight``, the mean over the heads of all tp ranks and their channels (OLMo 2, OLMoE).

    ``weight`` is [A d], sharded over tp. Ranks exchange one number a token, forward and backward. Statistics and scaling are computed
    in float32 (float64 input stays float64); the result has the dtype of x.

    Args:
        num_heads: A; tp divides it.
        head_dim: d.
        groups: tp is used.
        epsilon: added to the mean square.
        zero_centered: the weight is stored less 1.
        batch_invariant: compute every token as if it were alone; with one tp rank.
        dtype: of the weight.
        device: of the weight.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        groups: ProcessGroups,
        *,
        epsilon: float = 1e-5,
        zero_centered: bool = False,
        batch_invariant: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.epsilon, self.zero_centered, self.batch_invariant = groups.tp, epsilon, zero_centered, batch_invariant
        self._spec = ShardSpec(shape=(num_heads * head_dim,), shards={"tp": 0})
        first = 0.0 if zero_centered else 1.0
        self.weight = nn.Parameter(torch.full(self._spec.local_shape(groups), first, dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"weight": self._spec}

    def initial_value(self, name: str, shape: tuple[int, ...], generator: torch.Generator, config: Any) -> Tensor:
        """1, stored less 1 when that is how the weight is stored."""
        return torch.zeros(shape) if self.zero_centered else torch.ones(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[T, a, d] -> the same."""
        rows = x.flatten(1)
        if self.tp.size == 1 and has_kernel(rows):
            # The kernel sums each row alone, in an order that follows from how it loads.
            rows, weight = (aligned_rows(rows), aligned_rows(self.weight)) if self.batch_invariant else (rows, self.weight)
            return fused_rms_norm(rows, weight, self.epsilon, shift=float(self.zero_centered))[0].view_as(x)
        alone = self.batch_invariant and not has_row_kernels(rows)
        return (each_row(self._plain, rows, self.weight) if alone else self._plain(rows, self.weight)).view_as(x)

    def _plain(self, rows: Tensor, weight: Tensor) -> Tensor:
        """[T, a d] -> the same."""
        wide = rows if rows.dtype == torch.float64 else rows.float()
        total = reduce_from_tensor_model_parallel_region(wide.square().mean(-1, keepdim=True), self.tp)
        # Every rank scales its own heads by the total, so its gradient is a sum over them.
        mean = copy_to_tensor_model_parallel_region(total, self.tp) / self.tp.size
        return (wide * torch.rsqrt(mean + self.epsilon) * (weight.to(wide.dtype) + float(self.zero_centered))).to(rows.dtype)
