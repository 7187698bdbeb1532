# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Rows in expert order with zeros between them, so that every expert has a multiple of some number; nothing waits for the device."""

from dataclasses import dataclass

import torch
from torch import Tensor

# R rows in expert order, S = R + N * (multiple - 1) rows with zeros, N experts of this rank.


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
