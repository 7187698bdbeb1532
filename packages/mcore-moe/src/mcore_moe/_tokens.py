# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What a step says about the tokens that a mixture holds on this rank."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel import ProcessGroups
from mcore_parallel.comm import local_slice
from mcore_parallel.context_parallel import sequence_lengths
from mcore_parallel.nn import Step

# T tokens of this rank, K experts a token, S sequences, L layers.


@dataclass(frozen=True)
class LocalTokens:
    """This rank's tokens: under sequence parallelism a slice of those that the step speaks of."""

    step: Step
    groups: ProcessGroups
    valid_T: Tensor | None
    """bool, False at padding; None where every token is real."""

    @classmethod
    def of(cls, step: Step, groups: ProcessGroups, num_tokens: int) -> "LocalTokens":
        """Of ``num_tokens`` hidden states.

        Raises:
            ValueError: ``step.valid`` speaks of another number of tokens.
        """
        tokens = cls(step, groups, None)
        if step.valid is None:
            return tokens
        valid_T = tokens.local(step.valid)
        if len(valid_T) != num_tokens:
            raise ValueError(f"step.valid speaks of {len(step.valid)} tokens, of which {len(valid_T)} lie here, but {num_tokens} came")
        return cls(step, groups, valid_T)

    def local(self, values: Tensor) -> Tensor:
        """This rank's part of [all tokens, ...]."""
        return local_slice(values, self.groups.tp, 0) if self.groups.sequence_parallel else values

    def masked(self, values: Tensor) -> Tensor:
        """[T, ...] with zeros at padding."""
        if self.valid_T is None:
            return values
        return values.masked_fill(~self.valid_T.view(-1, *[1] * (values.dim() - 1)), 0.0)

    def of_layer(self, values: Tensor | None, layer: int) -> Tensor | None:
        """[T, K] of this rank's tokens from [all tokens, L, K]; None of a layer that it does not hold."""
        return None if values is None or layer >= values.shape[1] else self.local(values[:, layer])

    def sequences(self) -> tuple[Tensor, int]:
        """[T] the sequence of each token, and how many sequences there are."""
        step, cp = self.step, self.groups.cp.size
        device = step.positions.device
        if step.cu_seqlens is None:
            index = torch.arange(step.batch_size * step.seq_len, device=device) // step.seq_len
            return self.local(index), step.batch_size
        lengths = torch.tensor([length // cp for length in sequence_lengths(step.cu_seqlens)])
        index = torch.arange(len(lengths)).repeat_interleave(lengths).to(device, non_blocking=True)
        return self.local(index), len(lengths)
