# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""Sums over each sequence of a micro-batch, whose tokens context-parallel ranks may share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel import Group
from mcore_parallel.comm import all_reduce
from mcore_parallel.context_parallel import sequence_of_tokens
from mcore_parallel.training import Batch


@dataclass(frozen=True)
class Sequences:
    """To which of N sequences each of this rank's T tokens belongs."""

    ids: Tensor
    """[T] int64."""
    num: int
    cp: Group
    """The ranks that share the tokens."""

    @classmethod
    def of(cls, batch: Batch, cp: Group) -> "Sequences":
        """Those of a micro-batch, packed or one a row; of a context-parallel rank's share."""
        B, S = batch.tokens.shape
        if batch.max_seqlen is not None and batch.cu_seqlens is not None:
            return cls(sequence_of_tokens(batch.cu_seqlens, B * S), len(batch.cu_seqlens) - 1, cp)
        if batch.cu_seqlens is None:
            lengths = torch.full((B,), S)
        else:
            lengths = batch.cu_seqlens.cpu().long().diff() // batch.context_size
        ids = torch.arange(len(lengths)).repeat_interleave(lengths, output_size=B * S)
        return cls(ids.to(batch.tokens.device), len(lengths), cp)

    def sum(self, values: Tensor) -> Tensor:
        """[N] from [T], over all ranks that share the sequences; without a gradient."""
        values = values.detach()
        return all_reduce(values.new_zeros(self.num).index_add_(0, self.ids, values), self.cp)

    def mean(self, values: Tensor, keep: Tensor) -> Tensor:
        """[N]: over the tokens that ``keep`` [T] marks; 0 where there are none."""
        return self.sum(torch.where(keep, values, 0)) / self.sum(keep.to(values.dtype)).clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[T] from [N]."""
        return values[self.ids]
