# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums of what the tensor-parallel ranks of a decoder computed."""

import warnings

import torch
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.comm import SymmetricBuffer, all_reduce

__all__ = ["PartialSums"]

_ONE_SHOT_BYTES = 512 * 1024
"""Of a partial result; above, reading all of each peer's takes longer than a ring."""
_ONE_SHOT_SIZES, _ONE_SHOT_DTYPES = (2, 4, 8), (torch.bfloat16, torch.float32)
"""Of groups whose ranks all add in one order, and of results; others have no such kernel."""
_ALIGNMENT_BYTES = 16
_TIMEOUT_S = 300.0


# T tokens, D model
class PartialSums:
    """Adds up partial results over tensor-parallel ranks: few rows by reading those of all peers at once, more by the group's all-reduce.

    The one-shot sum needs memory that all ranks of one host map. Every rank makes it at the same point; where one cannot, none does, and
    all sums are all-reduces. Either way all ranks get the same bits.

    Args:
        group: the ranks.
        max_tokens: rows of a decode step.
        width: D.
        dtype: of the results.
        device: of this rank.
    """

    def __init__(self, group: Group, max_tokens: int, width: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._group = group
        self._shared: SymmetricBuffer | None = None
        self._rows_TD: Tensor | None = None
        row_bytes = width * dtype.itemsize
        rows = min(max_tokens, _ONE_SHOT_BYTES // row_bytes)
        fits = group.size in _ONE_SHOT_SIZES and dtype in _ONE_SHOT_DTYPES and not row_bytes % _ALIGNMENT_BYTES
        if rows and fits and SymmetricBuffer.obstacle(group, device) is None:
            self._shared = self._share(rows * row_bytes, device)
        if self._shared is not None:
            self._rows_TD = self._shared.peers[group.rank].view(dtype).view(rows, width)

    def rows(self, tokens: int) -> Tensor | None:
        """[T, D] to write a partial result into; None where any memory will do."""
        return self._rows_TD[:tokens] if self._rows_TD is not None and tokens <= len(self._rows_TD) else None

    def sum(self, partial_TD: Tensor) -> Tensor:
        """[T, D] of all ranks. What ``rows`` gave may be written again behind this launch."""
        if self._rows_TD is None or partial_TD.data_ptr() != self._rows_TD.data_ptr():
            return all_reduce(partial_TD, self._group)
        return torch.ops.symm_mem.one_shot_all_reduce(partial_TD, "sum", self._group.name)

    def _share(self, num_bytes: int, device: torch.device) -> SymmetricBuffer | None:
        """On every rank, or on none."""
        buffer, reason = None, "another rank cannot"
        try:
            buffer = SymmetricBuffer(self._group, num_bytes, device, timeout_s=_TIMEOUT_S)
        except (ValueError, RuntimeError) as error:
            reason = str(error)
        if float(all_reduce(torch.tensor([float(buffer is not None)], device=device), self._group, "min")):
            return buffer
        warnings.warn(f"tp={self._group.size}: small sums go through NCCL, which is slower: {reason}", stacklevel=2)
        return None
