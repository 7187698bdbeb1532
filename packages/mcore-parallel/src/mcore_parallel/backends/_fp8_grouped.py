# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Grouped GEMMs of experts with fp8 operands, by torch and Triton alone."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.backends._fp8_config import Fp8Config
from mcore_parallel.backends._grouped import finish_weight_gradient
from mcore_parallel.backends._quantize import Scaled, quantize_columns, quantize_rows
from mcore_parallel.backends._quantize_groups import (
    ScaledColumns,
    grouped_scaled_product,
    grouped_scaled_weight_gradient,
    quantize_groups,
    quantize_weights,
)
from mcore_parallel.groups import Group
from mcore_parallel.tensor_parallel import DeferredWeightGrads, MainGradient

# R rows in expert order, N experts of this rank, I input features, O output features

_FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Fp8GroupedProducts:
    """``grouped_matmul`` of one stack of experts in fp8; conforms to ``GroupedProducts``.

    "tensorwise" has one scale for the rows of an expert and one for its weight, whichever rank holds it.
    "rowwise" has one a row and one an output feature; its weight gradients keep the dtype of the model. Rows of an expert may be any
    number: transposed copies, which the weight gradients read, round each expert's rows up with zeros.

    Casts of the weights are kept until they change, if somebody says when (``WeightCopyHolder``).

    Args:
        config: "tensorwise" or "rowwise".
        group: ranks that hold slices of the same experts; with ``reduce_amax`` they share the scales. None for this one.
    """

    reads_sizes = False

    def __init__(self, config: Fp8Config, group: Group | None = None) -> None:
        self.config = config
        self.by_rows = config.recipe == "rowwise"
        self.narrow_weight_gradients = config.weight_gradients and not self.by_rows
        self.gradient_dtype = _FORMATS[config.gradient_format or ("e4m3" if self.by_rows else "e5m2")]
        self._group = group if config.reduce_amax else None
        self._told = False
        self._copies: tuple[tuple[int, int], Scaled, Scaled] | None = None

    def matmul(self, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: MainGradient | None = None) -> Tensor:
        """[R, I] -> [R, O]; arguments as of ``grouped_matmul``."""
        return _Fp8GroupedMatmul.apply(rows_RI, weight_NOI, ends_N, main_grad, self)

    def weight_changed(self) -> None:
        self._told, self._copies = True, None

    def weights(self, weight_NOI: Tensor) -> tuple[Scaled, Scaled]:
        """The weights [N, O, I] for the forward, and [N, I, O] for the gradient of the rows."""
        if torch.compiler.is_compiling() or not self._told:
            return self._cast_weights(weight_NOI)
        key = (weight_NOI.data_ptr(), weight_NOI._version)
        if self._copies is None or self._copies[0] != key:
            self._copies = (key, *self._cast_weights(weight_NOI))
        return self._copies[1:]

    def cast(self, x_RK: Tensor, ends_N: Tensor, dtype: torch.dtype, *, columns: bool) -> tuple[Scaled, ScaledColumns | None]:
        """Rows or their gradients, and with ``columns`` ("tensorwise" only) their transpose."""
        if self.by_rows:
            return quantize_rows(x_RK, dtype), None
        return quantize_groups(x_RK, ends_N, dtype, group=self._group, columns=columns)

    def _cast_weights(self, weight_NOI: Tensor) -> tuple[Scaled, Scaled]:
        dtype, weight_NOI = torch.float8_e4m3fn, weight_NOI.detach()
        if not self.by_rows:
            return quantize_weights(weight_NOI, dtype, self._group)
        rows = quantize_rows(weight_NOI.flatten(0, 1), dtype)
        forth = Scaled(rows.data.view(weight_NOI.shape), rows.inverse.view(*weight_NOI.shape[:2], 1))
        return forth, quantize_columns(weight_NOI, dtype)


class _Fp8GroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: MainGradient | None, products: Fp8GroupedProducts
    ) -> Tensor:
        wants_rows, wants_weight = ctx.needs_input_grad[:2]
        ctx.narrow = products.narrow_weight_gradients and wants_weight
        ctx.main_grad, ctx.products = main_grad, products
        ctx.later = None if torch.compiler.is_compiling() else DeferredWeightGrads()
        rows, columns = products.cast(rows_RI, ends_N, torch.float8_e4m3fn, columns=ctx.narrow)
        forth, back = products.weights(weight_NOI)
        kept = (None, None, None) if columns is None else (columns.data_KC, columns.ends_N, columns.inverse_N)
        kept_rows = rows_RI if wants_weight and not ctx.narrow else None
        kept_back = (back.data, back.inverse) if wants_rows else (None, None)
        ctx.save_for_backward(ends_N, weight_NOI, kept_rows, *kept, *kept_back)
        return grouped_scaled_product(rows, forth, ends_N, rows_RI.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ends_N, weight_NOI, rows_RI, data, column_ends_N, inverse_N, back, back_inverse = ctx.saved_tensors
        products: Fp8GroupedProducts = ctx.products
        grad_RO = grads[0].contiguous()
        narrow, columns = products.cast(grad_RO, ends_N, products.gradient_dtype, columns=ctx.narrow)
        grad_RI = None
        if back is not None:
            grad_RI = grouped_scaled_product(narrow, Scaled(back, back_inverse), ends_N, grad_RO.dtype, fast=products.by_rows)
        if not ctx.needs_input_grad[1]:
            return grad_RI, None, None, None, None
        if columns is not None:
            x = ScaledColumns(data, column_ends_N, inverse_N)
            weight_gradient: Callable[[], Tensor | None] = functools.partial(_narrow_gradient, columns, x, weight_NOI, ctx.main_grad)
        else:
            weight_gradient = functools.partial(finish_weight_gradient, grad_RO, rows_RI, ends_N, weight_NOI, ctx.main_grad)
        jobs = None if ctx.later is None else ctx.later.jobs
        if jobs is None:
            return grad_RI, weight_gradient(), None, None, None
        jobs.append((1, weight_gradient))
        return grad_RI, None, None, None, None


def _narrow_gradient(grad: ScaledColumns, x: ScaledColumns, weight_NOI: Tensor, main_grad: MainGradient | None) -> Tensor | None:
    """Adds it to the main gradient; without one, returns it."""
    if main_grad is None:
        grad_NOI = torch.empty_like(weight_NOI, memory_format=torch.contiguous_format)
        grouped_scaled_weight_gradient(grad, x, grad_NOI, add=False)
        return grad_NOI
    with main_grad.open_or_claim() as (total, fresh):
        grouped_scaled_weight_gradient(grad, x, total.view(weight_NOI.shape), add=not fresh)
    return None
