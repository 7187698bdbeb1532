# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows in expert order with zeros between them, so that every expert has a multiple of some number; nothing waits for the device."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mcore_parallel.backends._grouped import grouped_matmul, row_ranges
from mcore_parallel.tensor_parallel import MainGradient

# R rows in expert order, S = R + N * (multiple - 1) rows with zeros, N experts of this rank, I input features, O output features.


@dataclass(frozen=True)
class AlignedRows:
    """Rows, their weights, and the experts' ends, with zeros."""

    rows_SD: Tensor
    ends_N: Tensor
    """int32, multiples."""
    weights_S: Tensor | None
    """0 for rows of zeros."""
    places_R: Tensor
    """Where each row lies."""

    @classmethod
    def of(cls, rows_RD: Tensor, ends_N: Tensor, weights_R: Tensor | None, multiple: int) -> "AlignedRows":
        """Differentiable in rows and weights. Rows behind the last expert, which belong to none, lie behind it again."""
        with torch.no_grad():
            starts_N = torch.cat([ends_N.new_zeros(1), ends_N[:-1]])
            missing_N = (starts_N - ends_N) % multiple
            shifts = torch.cat([missing_N.new_zeros(1), missing_N.cumsum(0)])
            numbers_R = torch.arange(len(rows_RD), device=rows_RD.device, dtype=ends_N.dtype)
            places_R = numbers_R + shifts[torch.searchsorted(ends_N, numbers_R, right=True)]
        num_rows = len(rows_RD) + len(ends_N) * (multiple - 1)
        rows_SD = rows_RD.new_zeros(num_rows, rows_RD.shape[1]).index_copy(0, places_R, rows_RD)
        weights_S = None if weights_R is None else weights_R.new_zeros(num_rows).index_copy(0, places_R, weights_R)
        return cls(rows_SD, ends_N + shifts[1:].to(ends_N.dtype), weights_S, places_R)

    def take(self, rows_SD: Tensor) -> Tensor:
        """[R, D], those that are no zeros."""
        return rows_SD.index_select(0, self.places_R)


HostProduct = Callable[[Tensor, Tensor, list[int], MainGradient | None], Tensor]
"""Of rows [R, I], all of which belong to experts, weights [N, O, I], and the rows of each expert."""


def matmul_by_sizes(
    product: HostProduct, rows_RI: Tensor, weight_NOI: Tensor, ends_N: Tensor, main_grad: MainGradient | None, *, multiple: int
) -> Tensor:
    """`grouped_matmul` by a product that takes the rows of each expert on the host, which waits for the device here.

    Args:
        product: sees as many rows of each expert as a multiple, with zeros where there are fewer; it is not called without rows.
        rows_RI: as of `grouped_matmul`; results of those behind the last expert are zeros.
        weight_NOI: as of `grouped_matmul`.
        ends_N: as of `grouped_matmul`.
        main_grad: as of `grouped_matmul`.
        multiple: 1 for any number of rows.
    """
    sizes = [end - begin for begin, end in row_ranges(ends_N, len(rows_RI))]
    if not any(sizes):
        return grouped_matmul(rows_RI, weight_NOI, ends_N, main_grad)
    aligned, rows_SI = None, rows_RI
    if any(size % multiple for size in sizes):
        aligned = AlignedRows.of(rows_RI, ends_N, None, multiple)
        rows_SI, sizes = aligned.rows_SD, [size + -size % multiple for size in sizes]
    y_SO = product(rows_SI[: sum(sizes)], weight_NOI, sizes, main_grad)
    y_SO = F.pad(y_SO, (0, 0, 0, len(rows_SI) - len(y_SO)))
    return y_SO if aligned is None else aligned.take(y_SO)
