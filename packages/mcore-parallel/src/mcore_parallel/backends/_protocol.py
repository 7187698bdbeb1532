# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a backend builds: layers, and a norm and the projection behind it as one module."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mcore_parallel.backends._fp8_config import Fp8Config
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn import LayerFactory
from mcore_parallel.tensor_parallel import LossProducts


@runtime_checkable
class BackendLayers(LayerFactory, Protocol):
    """A ``LayerFactory`` that says in how many bits it multiplies, and builds a part which only some models have."""

    fp8: Fp8Config | None
    """None for the dtype of the weights."""

    def norm_linear(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        groups: ProcessGroups,
        *,
        shard_dim: int = 0,
        epsilon: float = 1e-5,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> nn.Module:
        """As ``NormColumnLinear``: a norm and the column-parallel layer that reads it, in one."""
        ...


class Backend(Protocol):
    """Decides who computes the norms and products of a model, and in how many bits.

    Attention's core is chosen by name among those of ``mcore_parallel.nn.choose_attention``, Transformer Engine's being one of them.
    """

    def layers(self, layer: int, num_layers: int) -> BackendLayers:
        """The parts of layer ``layer`` of ``num_layers``; a number from ``num_layers`` on is the end of the model."""
        ...

    def output_loss(self) -> LossProducts | None:
        """What computes the loss of an output layer; None for ``fused_linear_cross_entropy``."""
        ...

    def running(self, groups: ProcessGroups) -> AbstractContextManager[object]:
        """Around each forward of a model."""
        ...


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
