# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Frozen weights of stacked experts beside adapters, kept in eight bits."""

from typing import Any

import torch
from torch import Tensor, nn

from mcore_parallel.backends._grouped import expert_product
from mcore_parallel.backends._quantize import Scaled, has_triton, quantize_rows
from mcore_parallel.groups import Group

# R rows, N experts of this rank, I input features, O output features (of this rank)

_E4M3 = torch.float8_e4m3fn


def has_widening_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a kernel multiplies rows of that place and dtype by experts in e4m3, which it widens as it reads them.

    Triton is installed and the device has e4m3: compute capability 8.9.
    """
    here = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_triton()
    return here and torch.cuda.get_device_capability(device) >= (8, 9)


def grouped_widened_product(rows_RI: Tensor, weight_NOI: Scaled, ends_N: Tensor) -> Tensor:
    """As ``grouped_matmul`` without gradients, by weights in e4m3: [R, O] in the dtype of the rows.

    A kernel widens them as it reads them, where there is one (``has_widening_kernel``); else they are widened before.

    Args:
        rows_RI: in the order of experts; results of those behind the last expert hold anything.
        weight_NOI: one matrix an expert, a scale an output feature [N, O, 1].
        ends_N: int32 on the rows' device, the rows of this expert and of all before it.

    Example:
        >>> rows = quantize_rows(torch.ones(8, 4), torch.float8_e4m3fn, powers_of_two=True)
        >>> weight = Scaled(rows.data.view(2, 4, 4), rows.inverse.view(2, 4, 1))
        >>> grouped_widened_product(torch.ones(3, 4), weight, torch.tensor([1, 3], dtype=torch.int32)).tolist()[2]
        [4.0, 4.0, 4.0, 4.0]
    """
    if has_widening_kernel(rows_RI.device, rows_RI.dtype):
        from mcore_parallel.backends import _triton_fp8_grouped as kernels

        return kernels.grouped_widened_product(rows_RI.contiguous(), weight_NOI.data, weight_NOI.inverse.contiguous(), ends_N)
    # The scales of small weights are outside of the range of float16.
    first = torch.float32 if rows_RI.dtype == torch.float16 else rows_RI.dtype
    return expert_product(rows_RI, weight_NOI.value(first).to(rows_RI.dtype).transpose(1, 2), ends_N)


class StoredGroupedProducts:
    """Products of rows with one frozen e4m3 matrix an expert; they are widened for the time of a GEMM.

    Args:
        inverse_NO1: float32 [N, O, 1], what the stored values are multiplied by: powers of two, so that what they stand for is exact in
            bfloat16.

    Example:
        >>> weight = nn.Parameter(torch.randn(2, 8, 4), requires_grad=False)
        >>> products = StoredGroupedProducts.of(weight)
        >>> weight.dtype, products.matmul(torch.randn(3, 4), weight, torch.tensor([1, 3], dtype=torch.int32)).shape
        (torch.float8_e4m3fn, torch.Size([3, 8]))
    """

    def __init__(self, inverse_NO1: Tensor) -> None:
        self.inverse_NO1 = inverse_NO1

    @classmethod
    @torch.no_grad()
    def of(cls, weight: nn.Parameter, *, group: Group | None = None) -> "StoredGroupedProducts":
        """Round ``weight`` [N, ..., I] to e4m3 with a scale per output feature of an expert, in place: the wide values are given up.

        Args:
            weight: frozen.
            group: ranks that each hold some input features of the same experts, and share their scales; None for this one.
        """
        shape = weight.shape
        stored = quantize_rows(weight.flatten(0, -2), _E4M3, group=group, powers_of_two=True)
        # Whoever knows the parameter goes on knowing it.
        weight.data = stored.data.view(shape)
        return cls(stored.inverse.view(shape[0], -1, 1))

    def matmul(self, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
        """As `grouped_matmul`, of the values that the stored ones stand for; the weight has no gradient."""
        return _StoredMatmul.apply(rows_RI, Scaled(weight_NOI.detach(), self.inverse_NO1), ends_N)


class _StoredMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight: Scaled, ends_N: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(ends_N)
        return expert_product(rows_RI, weight.value(rows_RI.dtype).transpose(1, 2), ends_N)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (ends_N,) = ctx.saved_tensors
        # The kernels refuse the broadcast gradient of a sum.
        grad_RO = grads[0].contiguous()
        return expert_product(grad_RO, ctx.weight.value(grad_RO.dtype), ends_N), None, None
