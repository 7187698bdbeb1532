# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The dense feed-forward layer."""

import torch
from torch import Tensor, nn

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._activations import Activation, RecomputedActivation
from mcore_parallel.nn._factory import LayerFactory, TorchLayers
from mcore_parallel.nn._step import Step
from mcore_parallel.nn.kernels import has_kernel
from mcore_parallel.tensor_parallel import RowParallelLinear


# T tokens, D model, F feed-forward.
class MLP(nn.Module):
    """``down(activation(up x))``; with a gate up is [2, F, D] (gate, value), so that a tp shard is a plain cut of F, else [F, D].

    Args:
        hidden_size: D.
        ffn_size: F.
        groups: tp is used.
        activation: its name, or the whole choice.
        bias: ``up.bias`` [2, F] or [F], and ``down.bias`` [D].
        layers: who builds the projections.
        dtype: of the weights.
        device: of the weights.
        init: as in the linear layers.

    Raises:
        ValueError: tp does not divide F, or an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        groups: ProcessGroups,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        layers: LayerFactory | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> None:
        super().__init__()
        if ffn_size % groups.tp.size:
            raise ValueError(f"tp={groups.tp.size} must divide ffn_hidden_size={ffn_size}; lower tp or round ffn_hidden_size up")
        self.activation = Activation(name=activation) if isinstance(activation, str) else activation
        layers = TorchLayers() if layers is None else layers
        features, cut = ((2, ffn_size), 1) if self.activation.gated else (ffn_size, 0)
        self.up = layers.column_linear(hidden_size, features, groups, shard_dim=cut, bias=bias, dtype=dtype, device=device, init=init)
        self.down = layers.row_linear(ffn_size, hidden_size, groups, bias=bias, dtype=dtype, device=device, init=init)

    def forward(self, x: Tensor, step: Step) -> tuple[Tensor, None]:
        """[T or T / tp, D] -> the same, and no auxiliary loss."""
        x = self.up(x)
        if self._recomputes(x):
            return self.down(x, RecomputedActivation(activation=self.activation, kernels=True)), None
        return self.down(self.activation(x)), None

    def _recomputes(self, x: Tensor) -> bool:
        """Whether the activation's result is recomputed in the backward: where one kernel does that beside the gradient."""
        plain = isinstance(self.down, RowParallelLinear) and self.down.products is None and self.down.lora is None
        return plain and torch.is_grad_enabled() and not self.activation.fp8_input_store and x.dim() == 2 and has_kernel(x)
