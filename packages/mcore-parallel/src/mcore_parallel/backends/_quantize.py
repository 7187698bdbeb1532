# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Tensors in fp8: scales, casts and the GEMM of two of them."""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import Group

# T rows, K columns, N columns of a product

MULTIPLE = 16
"""Every dim of an fp8 GEMM is a multiple of it."""
LEAST_AMAX = 1e-30
"""Largest value that a tensor of zeros is taken to have."""


@dataclass(frozen=True, eq=False)
class Scaled:
    """``data * inverse`` is what it stands for."""

    data: Tensor
    """[T, K] in an fp8 format, rows side by side."""
    inverse: Tensor
    """float32: [] for one scale, [T, 1] for one a row."""

    def value(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[T, K] in ``dtype``."""
        return self.data.to(dtype) * self.inverse.to(dtype)


def has_kernel(x: Tensor) -> bool:
    """Whether casts of ``x`` run as kernels; a graph under compilation fuses the torch code itself."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16, torch.float32) and not torch.compiler.is_compiling() and has_triton()


def quantize(
    x_TK: Tensor, dtype: torch.dtype, *, group: Group | None = None, rows: bool = True, columns: bool = False
) -> tuple[Scaled | None, Scaled | None]:
    """``x`` with one scale, and the same transposed.

    Args:
        x_TK: [T, K], side by side. What is not finite makes everything not finite, or stays so.
        dtype: of the result, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        group: ranks that share the scale; None for this one.
        rows: return [T, K].
        columns: return [K, T].
    """
    if has_kernel(x_TK):
        kernels = _kernels()
        amax = kernels.partial_amax(x_TK)
        if group is not None and group.size > 1:
            amax = all_reduce(amax.amax(0, keepdim=True), group, op="max")
        data, turned, inverse = kernels.cast(x_TK, amax, dtype, rows=rows, columns=columns, least_amax=LEAST_AMAX)
    else:
        amax = x_TK.abs().amax().float() if x_TK.numel() else x_TK.new_zeros((), dtype=torch.float32)
        if group is not None and group.size > 1:
            amax = all_reduce(amax, group, op="max")
        inverse = _inverse(amax, dtype)
        data = _cast(x_TK, inverse, dtype)
        turned = data.t().contiguous() if columns else None
    return Scaled(data, inverse) if rows else None, None if turned is None else Scaled(turned, inverse)


def quantize_rows(x_TK: Tensor, dtype: torch.dtype, *, group: Group | None = None, powers_of_two: bool = False) -> Scaled:
    """``x`` with one scale a row.

    Args:
        x_TK: [T, K].
        dtype: of the result, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        group: ranks that each hold some columns of the same rows, and share their scales; None for this one.
        powers_of_two: scales are powers of two, the next above those that fill the range: what is stored is exact in bfloat16.

    Returns:
        Data [T, K] and scales [T, 1].
    """
    shared = group is not None and group.size > 1
    if not shared and not powers_of_two and has_kernel(x_TK):
        return Scaled(*_kernels().cast_rows(x_TK, dtype, least_amax=LEAST_AMAX))
    amax_T1 = x_TK.abs().amax(-1, keepdim=True).float()
    inverse = _inverse(all_reduce(amax_T1, group, op="max") if shared and group is not None else amax_T1, dtype)
    if powers_of_two:
        inverse = _power_above(inverse)
    return Scaled(_cast(x_TK, inverse, dtype), inverse)


def quantize_columns(x_NTK: Tensor, dtype: torch.dtype) -> Scaled:
    """Of each matrix its transpose, with one scale a column of ``x``.

    Args:
        x_NTK: [N, T, K].
        dtype: of the result, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.

    Returns:
        Data [N, K, T] and scales [N, K, 1].
    """
    # Of float32, Triton 3.6 writes other bytes into a transposed copy on a GPU.
    if has_kernel(x_NTK) and x_NTK.dtype.itemsize == 2:
        return Scaled(*_kernels().cast_columns(x_NTK, dtype, least_amax=LEAST_AMAX))
    turned_NKT = x_NTK.transpose(1, 2).contiguous()
    rows = quantize_rows(turned_NKT.flatten(0, 1), dtype)
    return Scaled(rows.data.view(turned_NKT.shape), rows.inverse.view(*turned_NKT.shape[:2], 1))


def turn(scaled: Scaled) -> Scaled:
    """[T, K] -> [K, T], of one scale."""
    data = scaled.data
    if data.is_cuda and not torch.compiler.is_compiling() and has_triton():
        return Scaled(_kernels().transpose(data), scaled.inverse)
    return Scaled(data.t().contiguous(), scaled.inverse)


def scaled_product(a_TK: Scaled, b_NK: Scaled, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """``a b^T`` [T, N] in ``dtype``, summed in float32 or wider.

    Where there is no unit for it (a CPU), the same fp8 values are multiplied in float32, or float64 for a result of that.

    Args:
        a_TK: left factor.
        b_NK: right factor, transposed; both have one scale, or both one a row.
        dtype: of the result.
        fast: sum in the unit's own, shorter accumulators.
    """
    if not a_TK.data.is_cuda:
        wide = torch.promote_types(dtype, torch.float32)
        # Scales are common factors: the sums are those of the unit, up to their order.
        y_TN = a_TK.data.to(wide) @ b_NK.data.to(wide).t()
        return (y_TN * a_TK.inverse.to(wide) * b_NK.inverse.to(wide).t()).to(dtype)
    # One scale a row gives bfloat16 only.
    out_dtype = dtype if a_TK.inverse.dim() == 0 else torch.bfloat16
    product = torch.ops.aten._scaled_mm.default
    y_TN = product(a_TK.data, b_NK.data.t(), a_TK.inverse, b_NK.inverse.t(), out_dtype=out_dtype, use_fast_accum=fast)
    return y_TN.to(dtype)


def _inverse(amax: Tensor, dtype: torch.dtype) -> Tensor:
    return amax.clamp(min=LEAST_AMAX) / torch.finfo(dtype).max


def _power_above(x: Tensor) -> Tensor:
    """The least power of two that is not below ``x``; NaN of what is not finite."""
    mantissa, exponent = torch.frexp(x)
    power = torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())
    return power.where(x.isfinite(), torch.nan)


def _cast(x: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x.float() * inverse.reciprocal()).clamp(-largest, largest).to(dtype)


# Kept: the answer does not change while a process runs.
@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernels() -> Any:
    from mcore_parallel.backends import _triton_quantize

    return _triton_quantize
