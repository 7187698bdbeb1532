# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Implementations of the norms and GEMMs of a model: torch or Transformer Engine, in the model's dtype or in fp8."""

from mcore_parallel.backends._align import AlignedRows
from mcore_parallel.backends._batch_invariant_mode import is_batch_invariant_mode_enabled, set_batch_invariant_mode
from mcore_parallel.backends._factory import choose_backend, quantization
from mcore_parallel.backends._fp8_config import RECIPES, Fp8Config
from mcore_parallel.backends._fp8_grouped import Fp8GroupedProducts
from mcore_parallel.backends._fp8_loss import Fp8LossProducts
from mcore_parallel.backends._gathered import RowOrder, gathered_swiglu, has_gathered_kernel
from mcore_parallel.backends._grouped import BatchInvariantGroupedProducts, check_grouped_width, grouped_matmul, row_ranges
from mcore_parallel.backends._protocol import Backend, BackendLayers, NormColumnLinear
from mcore_parallel.backends._quantize import Scaled, quantize_rows, scaled_product
from mcore_parallel.backends._quantize_groups import grouped_scaled_product
from mcore_parallel.backends._quantized_base import quantize_base
from mcore_parallel.backends._stored_grouped import StoredGroupedProducts, grouped_widened_product, has_widening_kernel
from mcore_parallel.backends._torch import TorchBackend

__all__ = [
    "RECIPES",
    "AlignedRows",
    "Backend",
    "BackendLayers",
    "BatchInvariantGroupedProducts",
    "Fp8Config",
    "Fp8GroupedProducts",
    "Fp8LossProducts",
    "NormColumnLinear",
    "RowOrder",
    "Scaled",
    "StoredGroupedProducts",
    "TorchBackend",
    "check_grouped_width",
    "choose_backend",
    "gathered_swiglu",
    "grouped_matmul",
    "grouped_scaled_product",
    "grouped_widened_product",
    "has_gathered_kernel",
    "has_widening_kernel",
    "is_batch_invariant_mode_enabled",
    "quantization",
    "quantize_base",
    "quantize_rows",
    "row_ranges",
    "scaled_product",
    "set_batch_invariant_mode",
]
