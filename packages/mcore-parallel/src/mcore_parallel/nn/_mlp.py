# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The dense feed-forward layer."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from mcore_parallel._groups import ProcessGroups
from mcore_parallel.nn._activations import swiglu
from mcore_parallel.nn._fused import fused_swiglu, has_kernel
from mcore_parallel.nn._step import Step
from mcore_parallel.tensor_parallel import ColumnParallelLinear, RowParallelLinear


# T tokens, D model, F feed-forward.
class GatedMLP(nn.Module):
    """``down(activation(up[0] x, up[1] x))``; up is [2, F, D] (gate, value), so a tp shard is a plain cut of F.

    Args:
        hidden_size: D.
        ffn_size: F.
        groups: tp is used.
        activation: of gate and value.
        dtype: of the weights.
        device: of the weights.
        init: as in the linear layers.

    Raises:
        ValueError: tp does not divide F.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        groups: ProcessGroups,
        *,
        activation: Callable[[Tensor, Tensor], Tensor] = swiglu,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        super().__init__()
        if ffn_size % groups.tp.size:
            raise ValueError(f"tp={groups.tp.size} must divide ffn_hidden_size={ffn_size}; lower tp or round ffn_hidden_size up")
        self.activation = activation
        self.up = ColumnParallelLinear(hidden_size, (2, ffn_size), groups, shard_dim=1, dtype=dtype, device=device, init=init)
        self.down = RowParallelLinear(ffn_size, hidden_size, groups, dtype=dtype, device=device, init=init)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, None]:
        """[T or T / tp, D] -> the same, and no auxiliary loss."""
        up = self.up(x)
        if self.activation is swiglu and has_kernel(up):
            return self.down(fused_swiglu(up)), None
        gate, value = up.chunk(2, dim=-1)
        return self.down(self.activation(gate, value)), None
