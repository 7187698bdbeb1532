# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Who builds the norms and projections of a layer."""

from typing import Protocol

import torch
from torch import nn

from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn._norm import LayerNorm, RMSNorm
from mcore_parallel.tensor_parallel import ColumnParallelLinear, GroupedProducts, RowParallelLinear


class LayerFactory(Protocol):
    """Builds the parts of one layer that hold its large products; attention, feed-forward and mixers take it as ``layers``.

    What it builds has the parameters (names, shapes, ``shard_specs``) and the ``forward`` of the classes named, whatever computes them.
    """

    def norm(
        self,
        size: int,
        *,
        normalization: str = "RMSNorm",
        zero_centered: bool = False,
        epsilon: float = 1e-5,
        partial: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        """As ``RMSNorm``, or the norm that ``normalization`` names."""
        ...

    def column_linear(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        groups: ProcessGroups,
        *,
        shard_dim: int = 0,
        gather_output: bool = False,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> nn.Module:
        """As ``ColumnParallelLinear``."""
        ...

    def row_linear(
        self,
        in_features: int,
        out_features: int,
        groups: ProcessGroups,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> nn.Module:
        """As ``RowParallelLinear``."""
        ...

    def grouped_products(self, in_features: int, out_features: int, groups: ProcessGroups) -> GroupedProducts | None:
        """What multiplies a stack of experts; None for ``mcore_parallel.backends.grouped_matmul`` in the dtype of the weights.

        Args:
            in_features: of this rank.
            out_features: of this rank.
            groups: ranks that share an expert may share its scales.
        """
        ...


class TorchLayers:
    """The classes of ``mcore_parallel.nn`` and ``mcore_parallel.tensor_parallel``; conforms to ``LayerFactory``.

    Example:
        >>> TorchLayers().norm(4).weight.shape
        torch.Size([4])
    """

    def norm(
        self,
        size: int,
        *,
        normalization: str = "RMSNorm",
        zero_centered: bool = False,
        epsilon: float = 1e-5,
        partial: tuple[str, ...] = (),
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> nn.Module:
        if normalization not in ("RMSNorm", "LayerNorm"):
            raise ValueError(f'normalization={normalization!r} must be "RMSNorm" or "LayerNorm"')
        norm = LayerNorm if normalization == "LayerNorm" else RMSNorm
        return norm(size, epsilon=epsilon, zero_centered=zero_centered, partial=partial, dtype=dtype, device=device)

    def column_linear(
        self,
        in_features: int,
        out_features: int | tuple[int, ...],
        groups: ProcessGroups,
        *,
        shard_dim: int = 0,
        gather_output: bool = False,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> nn.Module:
        return ColumnParallelLinear(
            in_features, out_features, groups, shard_dim=shard_dim, gather_output=gather_output, bias=bias,
            dtype=dtype, device=device, init=init,
        )  # fmt: skip

    def row_linear(
        self,
        in_features: int,
        out_features: int,
        groups: ProcessGroups,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init: bool = True,
    ) -> nn.Module:
        return RowParallelLinear(in_features, out_features, groups, bias=bias, dtype=dtype, device=device, init=init)

    def grouped_products(self, in_features: int, out_features: int, groups: ProcessGroups) -> None:
        return None
