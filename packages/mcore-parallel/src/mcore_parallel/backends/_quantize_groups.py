# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows of experts in fp8: a scale an expert, casts, and GEMMs of the casts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.backends._grouped import row_ranges
from mcore_parallel.backends._quantize import LEAST_AMAX, Scaled
from mcore_parallel.comm import all_reduce
from mcore_parallel.groups import Group

# R rows in expert order, N experts, K columns of rows, O output features, I input features, C padded rows

TILE = 128
"""Rows that each expert's are rounded up to in a transposed copy, so that tiles of the weight gradient belong to one expert."""


@dataclass(frozen=True, eq=False)
class ScaledColumns:
    """Rows of experts, transposed; ``data * inverse`` of an expert is what it stands for."""

    data_KC: Tensor
    """Each expert's rows from a multiple of ``TILE`` on, zeros behind them."""
    ends_N: Tensor
    """int32, padded rows of this expert and of all before it."""
    inverse_N: Tensor
    """float32, one an expert."""


def quantize_groups(
    x_RK: Tensor, ends_N: Tensor, dtype: torch.dtype, *, group: Group | None = None, columns: bool = False
) -> tuple[Scaled, ScaledColumns | None]:
    """Rows with one scale an expert, and the same transposed.

    Args:
        x_RK: rows in expert order; those behind the last expert are not looked at.
        ends_N: int32 on the rows' device, the rows of this expert and of all before it.
        dtype: of the result.
        group: ranks that share the scales; None for this one.
        columns: return the transposed rows.
    """
    x_RK = x_RK.contiguous()
    inverse_N = _inverse_of_experts(x_RK, ends_N, dtype, group)
    tiled_N = tiled_ends(ends_N)
    num_columns = (len(x_RK) // TILE + min(len(x_RK), len(ends_N))) * TILE
    if _has_kernel(x_RK):
        from mcore_parallel.backends._triton_fp8_grouped import cast_experts

        wanted = num_columns if columns else None
        data, inverse_R, turned = cast_experts(x_RK, ends_N, tiled_N, inverse_N, dtype, tile=TILE, columns=wanted, size=None)
    else:
        data, inverse_R = _cast_rows(x_RK, ends_N, inverse_N, dtype)
        turned = data.new_zeros((x_RK.shape[1], num_columns)) if columns else None
        if turned is not None:
            for (begin, end), (place, _) in zip(row_ranges(ends_N, len(x_RK)), row_ranges(tiled_N, num_columns), strict=True):
                turned[:, place : place + end - begin] = data[begin:end].t()
    return Scaled(data, inverse_R.unsqueeze(1)), None if turned is None else ScaledColumns(turned, tiled_N, inverse_N)


def quantize_weights(weight_NOI: Tensor, dtype: torch.dtype, group: Group | None = None) -> tuple[Scaled, Scaled]:
    """Matrices with one scale each, and the same transposed: data [N, O, I] and [N, I, O], inverse [N, O, 1] and [N, I, 1].

    Args:
        weight_NOI: one an expert.
        dtype: of the result.
        group: ranks that share the scales; None for this one.
    """
    num_experts, out, width = weight_NOI.shape
    rows_RI = weight_NOI.contiguous().flatten(0, 1)
    ends_N = torch.arange(1, num_experts + 1, dtype=torch.int32, device=weight_NOI.device) * out
    inverse_N = _inverse_of_experts(rows_RI, ends_N, dtype, group)
    if _has_kernel(rows_RI):
        from mcore_parallel.backends._triton_fp8_grouped import cast_experts

        data, _, turned = cast_experts(rows_RI, ends_N, tiled_ends(ends_N), inverse_N, dtype, tile=TILE, columns=None, size=out)
        assert turned is not None
    else:
        data, _ = _cast_rows(rows_RI, ends_N, inverse_N, dtype)
        turned = data.view(num_experts, out, width).transpose(1, 2).contiguous()
    inverse_N11 = inverse_N.view(-1, 1, 1)
    return Scaled(data.view(num_experts, out, width), inverse_N11.expand(-1, out, 1)), Scaled(turned, inverse_N11.expand(-1, width, 1))


def grouped_scaled_product(x: Scaled, weight: Scaled, ends_N: Tensor, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """``x W_e^T`` [R, O] in ``dtype``, summed in float32 or wider; rows behind the last expert hold anything.

    Where there is no unit for it (a CPU), the same values are multiplied in float32, or float64 for a result of that.

    Args:
        x: [R, K], a scale a row.
        weight: [N, O, K], a scale an output feature.
        ends_N: as of ``quantize_groups``.
        dtype: of the result.
        fast: sum in the unit's own, shorter accumulators.
    """
    x_inverse_R, weight_inverse_NO = x.inverse.squeeze(1), weight.inverse.squeeze(2).contiguous()
    if not x.data.is_cuda or dtype == torch.float64:
        wide = torch.promote_types(dtype, torch.float32)
        y_RO = torch.zeros((len(x.data), weight.data.shape[1]), dtype=wide, device=x.data.device)
        for expert, (begin, end) in enumerate(row_ranges(ends_N, len(x.data))):
            product = x.data[begin:end].to(wide) @ weight.data[expert].to(wide).t()
            y_RO[begin:end] = product * x_inverse_R[begin:end, None].to(wide) * weight_inverse_NO[expert].to(wide)
        return y_RO.to(dtype)
    from mcore_parallel.backends import _triton_fp8_grouped as kernels

    return kernels.grouped_scaled_product(x.data, x_inverse_R, weight.data, weight_inverse_NO, ends_N, dtype, fast=fast)


def grouped_scaled_weight_gradient(grad: ScaledColumns, x: ScaledColumns, total_NOI: Tensor, *, add: bool) -> None:
    """``total_e (+)= grad_e x_e^T`` of an output gradient [O, C] and an input [I, C]."""
    if grad.data_KC.is_cuda and total_NOI.dtype != torch.float64:
        from mcore_parallel.backends import _triton_fp8_grouped as kernels

        kernels.grouped_scaled_weight_gradient(grad.data_KC, x.data_KC, grad.ends_N, grad.inverse_N * x.inverse_N, total_NOI, add=add)
        return
    wide = torch.promote_types(total_NOI.dtype, torch.float32)
    inverse_N = grad.inverse_N.to(wide) * x.inverse_N.to(wide)
    for expert, (begin, end) in enumerate(row_ranges(grad.ends_N, grad.data_KC.shape[1])):
        product_OI = grad.data_KC[:, begin:end].to(wide) @ x.data_KC[:, begin:end].to(wide).t() * inverse_N[expert]
        (total_NOI[expert].add_ if add else total_NOI[expert].copy_)(product_OI)


def tiled_ends(ends_N: Tensor) -> Tensor:
    """The ends when each expert's rows are rounded up to ``TILE``; nothing waits for the device."""
    sizes_N = torch.diff(ends_N, prepend=ends_N.new_zeros(1))
    return ((sizes_N + TILE - 1) // TILE * TILE).cumsum(0).to(torch.int32)


def _inverse_of_experts(x_RK: Tensor, ends_N: Tensor, dtype: torch.dtype, group: Group | None) -> Tensor:
    if _has_kernel(x_RK):
        from mcore_parallel.backends._triton_fp8_grouped import amax_of_experts

        amax_N = amax_of_experts(x_RK, ends_N)
    else:
        amax_R = x_RK.abs().amax(-1).float()
        amax_N = amax_R.new_zeros(len(ends_N) + 1).scatter_reduce_(0, _expert_of_rows(x_RK, ends_N), amax_R, "amax")[:-1]
    if group is not None and group.size > 1:
        amax_N = all_reduce(amax_N, group, op="max")
    return amax_N.clamp(min=LEAST_AMAX) / torch.finfo(dtype).max


def _cast_rows(x_RK: Tensor, ends_N: Tensor, inverse_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    inverse_R = torch.cat((inverse_N, inverse_N.new_ones(1)))[_expert_of_rows(x_RK, ends_N)]
    largest = torch.finfo(dtype).max
    return (x_RK.float() * inverse_R.reciprocal().unsqueeze(1)).clamp(-largest, largest).to(dtype), inverse_R


def _expert_of_rows(x_RK: Tensor, ends_N: Tensor) -> Tensor:
    """[R] int64; N behind the last expert."""
    return torch.searchsorted(ends_N, torch.arange(len(x_RK), dtype=ends_N.dtype, device=x_RK.device), right=True)


def _has_kernel(x: Tensor) -> bool:
    # Of float32 rows, Triton 3.6 writes other bytes into the transposed copy on a GPU; the torch code takes them.
    return x.is_cuda and x.dtype.itemsize == 2
