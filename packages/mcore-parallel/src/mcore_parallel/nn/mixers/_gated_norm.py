# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Root-mean-square norm with a gate, behind a linear mixer."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_parallel.groups import ProcessGroups, ShardSpec
from mcore_parallel.nn.kernels import fused_gated_rms_norm, has_kernel
from mcore_parallel.tensor_parallel import aligned_rows, each_row, has_row_kernels


# T tokens, R rows of a token that are normalised each, W width of a row, G groups of gates.
class GatedRMSNorm(nn.Module):
    """Rows of a token normalised and gated by silu(z): the gate first, as in Mamba-2, or the norm first, as in the gated delta net.

    Args:
        width: W.
        groups: tp is used.
        rows: R over all tp ranks with a weight of their own each: the weight is [R W], cut over tp. None for one weight [W] of all rows,
            whose gradient is partial over tp.
        epsilon: added to the mean square.
        batch_invariant: compute every token as if it were alone.
        dtype: of the weight.
        device: of the weight.
    """

    def __init__(
        self,
        width: int,
        groups: ProcessGroups,
        *,
        rows: int | None = None,
        epsilon: float = 1e-5,
        batch_invariant: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.batch_invariant = batch_invariant
        self.width, self.epsilon, self.gate_first = width, epsilon, rows is not None
        self._spec = ShardSpec(shape=(width,), partial=("tp",)) if rows is None else ShardSpec(shape=(rows * width,), shards={"tp": 0})
        self.weight = nn.Parameter(torch.ones(self._spec.local_shape(groups), dtype=dtype, device=device))

    def shard_specs(self) -> Mapping[str, ShardSpec]:
        return {"weight": self._spec}

    def forward(self, y: Tensor, z: Tensor) -> Tensor:
        """y [T, R, W] and z [T, G, R / G W] -> [T, R, W] in the dtype of y, computed in float32 at least."""
        if not self.batch_invariant:
            return self._plain(y, z, self.weight)
        if has_row_kernels(y):
            # The kernel sums each row alone, in an order that follows from how it loads.
            return self._plain(aligned_rows(y), aligned_rows(z), aligned_rows(self.weight))
        both = torch.stack((y, z.reshape(y.shape)), dim=1)
        return each_row(lambda rows, weight: self._plain(rows[:, 0], rows[:, 1], weight), both, self.weight)

    def _plain(self, y: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        return gated_rms_norm(y, z, weight, self.epsilon, gate_first=self.gate_first)

    def extra_repr(self) -> str:
        return f"{self._spec.shape[0] // self.width} x {self.width}, gate_first={self.gate_first}"


def gated_rms_norm(y: Tensor, z: Tensor, weight: Tensor, epsilon: float, *, gate_first: bool) -> Tensor:
    """y [T, R, W], z [T, G, R / G W], weight [R W] or [W] -> [T, R, W]."""
    if has_kernel(y):
        return fused_gated_rms_norm(y, z, weight, epsilon, gate_first=gate_first)
    wide = torch.promote_types(y.dtype, torch.float32)
    gate, value = F.silu(z.to(wide)).reshape(y.shape), y.to(wide)
    if gate_first:
        value = value * gate
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + epsilon) * weight.to(wide).view(-1, y.shape[-1])
    return (value if gate_first else value * gate).to(y.dtype)
