# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""A stack of experts' weights in fp8, for engines."""

import torch
from torch import Tensor, nn

from mcore_moe._stability import experimental_api
from mcore_parallel.backends import Scaled, grouped_scaled_product, grouped_widened_product, quantize_rows

# R rows in expert order, N experts of this rank, I input features, O output features (of this rank)

FEW_ROWS = 16
"""Rows an expert, on average, up to which activations keep their dtype: such a GEMM is bound by reading its weights."""
_E4M3 = torch.float8_e4m3fn
_MULTIPLE = 16
"""Of which the features of an fp8 GEMM are multiples."""


@experimental_api
class Fp8Stack:
    """Products of rows with one e4m3 matrix an expert, with a float32 scale for each expert and output feature. There is no backward.

    Scales are powers of two: the stored weights are exact in bfloat16. Each rank has scales of its own, for its part of the weights.
    There may be more scales than the parameter has matrices: of redundant experts behind them.

    Args:
        weight: [N, ..., I]; it is rounded, in place: the parameter keeps its name and shape, and is e4m3.
        multiply: with more than ``FEW_ROWS`` rows an expert, multiply in fp8: activations get a scale a row. Else, and where features are
            no multiples of 16, the weights are widened for the GEMM.

    Example:
        >>> weight = nn.Parameter(torch.randn(2, 8, 4))
        >>> stack = Fp8Stack(weight, multiply=False)
        >>> weight.dtype, stack.matmul(torch.randn(3, 4), weight, torch.tensor([1, 3], dtype=torch.int32)).shape
        (torch.float8_e4m3fn, torch.Size([3, 8]))
    """

    @torch.no_grad()
    def __init__(self, weight: nn.Parameter, *, multiply: bool) -> None:
        self.multiply = multiply
        self.dtype = weight.dtype
        """Of the weights before."""
        data = torch.empty_like(weight, dtype=_E4M3, memory_format=torch.contiguous_format)
        features = weight[0].numel() // weight.shape[-1]
        self.inverse_NO1 = torch.empty((len(weight), features, 1), dtype=torch.float32, device=weight.device)
        self.store(data, weight)
        # Whoever knows the parameter goes on knowing it.
        weight.requires_grad_(False).data = data

    @torch.no_grad()
    def store(self, weight: Tensor, wide: Tensor) -> None:
        """Round other values into the weights, in place: addresses stay.

        Args:
            weight: the parameter.
            wide: of its shape.
        """
        # One by one: what a cast needs beside a whole stack is several times as large.
        for into_OI, expert_OI, inverse_O1 in zip(weight.detach(), wide, self.inverse_NO1[: len(weight)], strict=True):
            scaled = quantize_rows(expert_OI.flatten(0, -2), _E4M3, powers_of_two=True)
            # Bytes: fp8 has no such copy on every device.
            into_OI.view(torch.uint8).copy_(scaled.data.view(torch.uint8).view(into_OI.shape))
            inverse_O1.copy_(scaled.inverse)

    def matmul(self, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor) -> Tensor:
        """[R, O] in the dtype of the rows; arguments as of ``mcore_parallel.backends.grouped_matmul``."""
        weight, rows = self.scaled(weight_NOI), self.multiplied(rows_RI, weight_NOI, len(rows_RI))
        if isinstance(rows, Scaled):
            return grouped_scaled_product(rows, weight, ends_N, rows_RI.dtype, fast=True)
        return grouped_widened_product(rows, weight, ends_N)

    def multiplied(self, rows: Tensor, weight: Tensor, num_rows: int) -> Tensor | Scaled:
        """Rows, or tokens [T, I], as they are multiplied by the weights: in fp8 with a scale each, or as they are.

        Args:
            rows: in the dtype of the model.
            weight: the parameter, or [N, O, I].
            num_rows: of all experts.
        """
        width = weight.shape[-1]
        features = weight[0].numel() // width, width
        narrow = self.multiply and num_rows > FEW_ROWS * len(weight) and not any(size % _MULTIPLE for size in features)
        return quantize_rows(rows, _E4M3) if narrow else rows

    def scaled(self, weight: Tensor) -> Scaled:
        """The weights as [N, O, I], with their scales."""
        return Scaled(weight.detach().flatten(1, -2), self.inverse_NO1[: len(weight)])

    def widened(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The weights in ``dtype`` and their own shape; float16 may not hold their scales."""
        first = torch.float32 if dtype == torch.float16 else dtype
        return self.scaled(weight).value(first).to(dtype).view(weight.shape)
