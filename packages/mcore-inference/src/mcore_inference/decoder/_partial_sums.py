# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums of what the tensor-parallel ranks of a decoder computed."""

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.comm import SymmetricBuffer, all_reduce

__all__ = ["PartialSums", "PeerRows"]

_ONE_SHOT_BYTES = 512 * 1024
"""Of a partial result; above, reading all of each peer's takes longer than a ring."""
_ONE_SHOT_SIZES, _ONE_SHOT_DTYPES = (2, 4, 8), (torch.bfloat16, torch.float32)
"""Of groups whose ranks all add in one order, and of results; others have no such kernel."""
_ALIGNMENT_BYTES = 16
_ONE_LAUNCH_WIDTH = 8192
"""Of a row that one program holds, with those of its peers; wider ones are summed by a kernel of its own."""
_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class PeerRows:
    """Where a kernel finds the partial results of all ranks, [T, D] at the beginning of each memory, and where its programs meet."""

    addresses: Tensor
    """int64 [ranks], where the memory of each rank begins."""
    counters: Tensor
    """int32 [2, T] of this rank, zeros between launches: of programs that begin, and of those that have read, one a row."""
    counters_at: int
    """Bytes from the beginning of each memory to its counters."""


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
        self._peers: PeerRows | None = None
        row_bytes = width * dtype.itemsize
        rows = min(max_tokens, _ONE_SHOT_BYTES // row_bytes)
        fits = group.size in _ONE_SHOT_SIZES and dtype in _ONE_SHOT_DTYPES and not row_bytes % _ALIGNMENT_BYTES
        counters = 2 * rows if width <= _ONE_LAUNCH_WIDTH else 0
        if rows and fits and SymmetricBuffer.obstacle(group, device) is None:
            self._shared = self._share(rows * row_bytes, counters * torch.int32.itemsize, device)
        if self._shared is None:
            return
        own = self._shared.peers[group.rank]
        self._rows_TD = own[: rows * row_bytes].view(dtype).view(rows, width)
        if counters:
            places = own[rows * row_bytes :].view(torch.int32).view(2, rows)
            self._peers = PeerRows(addresses=self._shared.addresses, counters=places, counters_at=rows * row_bytes)

    def rows(self, tokens: int) -> Tensor | None:
        """[T, D] to write a partial result into; None where any memory will do."""
        return self._rows_TD[:tokens] if self._rows_TD is not None and tokens <= len(self._rows_TD) else None

    def peers(self, partial_TD: Tensor) -> PeerRows | None:
        """What a kernel needs that adds up these partial results itself, in place of ``sum``; None where ``sum`` has to.

        Behind its launch, too, what ``rows`` gave may be written again.
        """
        return self._peers if self._is_shared(partial_TD) else None

    def sum(self, partial_TD: Tensor) -> Tensor:
        """[T, D] of all ranks. What ``rows`` gave may be written again behind this launch."""
        if not self._is_shared(partial_TD):
            return all_reduce(partial_TD, self._group)
        return torch.ops.symm_mem.one_shot_all_reduce(partial_TD, "sum", self._group.name)

    def _is_shared(self, partial_TD: Tensor) -> bool:
        return self._rows_TD is not None and partial_TD.data_ptr() == self._rows_TD.data_ptr()

    def _share(self, row_bytes: int, counter_bytes: int, device: torch.device) -> SymmetricBuffer | None:
        """On every rank, or on none; the counters, behind the rows, are zeros."""
        buffer, reason = None, "another rank cannot"
        try:
            buffer = SymmetricBuffer(self._group, row_bytes + counter_bytes, device, timeout_s=_TIMEOUT_S)
            buffer.peers[self._group.rank][row_bytes:].zero_()
        except (ValueError, RuntimeError) as error:
            reason = str(error)
        # Whoever reads the result knows that all counters are zero, too.
        if float(all_reduce(torch.tensor([float(buffer is not None)], device=device), self._group, "min")):
            return buffer
        warnings.warn(f"tp={self._group.size}: small sums go through NCCL, which is slower: {reason}", stacklevel=2)
        return None
