# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""The backend that needs torch only."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mcore_parallel.backends._batch_invariant_mode import is_batch_invariant_mode_enabled
from mcore_parallel.backends._fp8_config import Fp8Config
from mcore_parallel.backends._fp8_grouped import Fp8GroupedProducts
from mcore_parallel.backends._fp8_loss import Fp8LossProducts
from mcore_parallel.backends._fp8_products import Fp8Products
from mcore_parallel.backends._grouped import BatchInvariantGroupedProducts
from mcore_parallel.backends._protocol import NormColumnLinear
from mcore_parallel.backends._quantize import MULTIPLE
from mcore_parallel.groups import ProcessGroups
from mcore_parallel.nn import TorchLayers
from mcore_parallel.tensor_parallel import BatchInvariantProducts, ColumnParallelLinear, GroupedProducts, LinearProducts, RowParallelLinear

RECIPES_OF_TORCH = ("tensorwise", "rowwise")


class TorchBackend:
    """The classes of this package, with GEMMs in the model's dtype or in fp8; conforms to ``Backend``.

    Eight bits hold for the projections of attention and feed-forward, and for experts.

    Args:
        fp8: None for the model's dtype everywhere; recipes "tensorwise" and "rowwise".
        batch_invariant: the forward of a token depends, bit by bit, on its own sequence only: neither on the other sequences of a batch
            nor on how they are packed. On a GPU by kernels of this package, in 16 or 32 bits; on a CPU every token is computed alone. None
            for what ``set_batch_invariant_mode`` says, False outside of it.

    Raises:
        ValueError: a recipe that needs Transformer Engine, or fp8 with ``batch_invariant``.
    """

    def __init__(self, fp8: Fp8Config | None = None, *, batch_invariant: bool | None = None) -> None:
        if batch_invariant is None:
            batch_invariant = is_batch_invariant_mode_enabled()
        if fp8 is not None and batch_invariant:
            raise ValueError("batch_invariant=True excludes fp8, whose scales are of all tokens of a step; leave one of them out")
        if fp8 is not None and fp8.recipe not in RECIPES_OF_TORCH:
            raise ValueError(f'recipe={fp8.recipe!r} needs backend "te"; torch alone has "tensorwise" and "rowwise"')
        self.fp8 = fp8
        self.batch_invariant = batch_invariant

    def layers(self, layer: int, num_layers: int) -> "TorchBackendLayers":
        fp8 = self.fp8 if self.fp8 is not None and self.fp8.covers(layer, num_layers) else None
        return TorchBackendLayers(fp8, batch_invariant=self.batch_invariant)

    def output_loss(self) -> Fp8LossProducts | None:
        return Fp8LossProducts(self.fp8) if self.fp8 is not None and self.fp8.output_layer else None

    def running(self, groups: ProcessGroups) -> AbstractContextManager[object]:
        return nullcontext()


class TorchBackendLayers:
    """The parts of one layer; conforms to ``BackendLayers``.

    Args:
        fp8: None for products in the dtype of the weights. A layer whose features do not come in multiples of 16 keeps that, too.
        batch_invariant: as of ``TorchBackend``.
    """

    def __init__(self, fp8: Fp8Config | None = None, *, batch_invariant: bool = False) -> None:
        self.fp8 = fp8
        self.batch_invariant = batch_invariant

    def norm(self, size: int, **options: Any) -> nn.Module:
        norm: Any = TorchLayers().norm(size, **options)
        norm.batch_invariant = self.batch_invariant
        return norm

    def column_linear(
        self, in_features: int, out_features: int | tuple[int, ...], groups: ProcessGroups, **options: Any
    ) -> ColumnParallelLinear:
        out = math.prod((out_features,) if isinstance(out_features, int) else out_features)
        products = self._products(in_features, out // groups.tp.size)
        return ColumnParallelLinear(in_features, out_features, groups, products=products, **options)

    def row_linear(self, in_features: int, out_features: int, groups: ProcessGroups, **options: Any) -> RowParallelLinear:
        products = self._products(in_features // groups.tp.size, out_features)
        return RowParallelLinear(in_features, out_features, groups, products=products, **options)

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
    ) -> NormColumnLinear:
        partial = ("tp",) if groups.sequence_parallel else ()
        norm = self.norm(in_features, epsilon=epsilon, partial=partial, dtype=dtype, device=device)
        linear = self.column_linear(in_features, out_features, groups, shard_dim=shard_dim, dtype=dtype, device=device, init=init)
        return NormColumnLinear(norm, linear)

    def grouped_products(self, in_features: int, out_features: int, groups: ProcessGroups) -> GroupedProducts | None:
        """As of ``LayerFactory``; in fp8, features that do not come in multiples of 16 keep the dtype of the weights."""
        if self.batch_invariant:
            return BatchInvariantGroupedProducts()
        if self.fp8 is None or in_features % MULTIPLE or out_features % MULTIPLE:
            return None
        return Fp8GroupedProducts(self.fp8, groups.expt_tp)

    def _products(self, in_features: int, out_features: int) -> LinearProducts | None:
        if self.batch_invariant:
            return BatchInvariantProducts()
        if self.fp8 is None or in_features % MULTIPLE or out_features % MULTIPLE:
            return None
        return Fp8Products(self.fp8)
