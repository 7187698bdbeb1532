# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""What linear mixers keep of sequences, and where a server keeps it."""

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.nn.kernels import BoundedSequences, SlotSpans


# B sequences, G groups, W channels of a group, H heads, K taps of the convolution; all of this tp rank. M sequences that a server holds.
@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentState:
    """All that a linear mixer keeps of B sequences; its size does not depend on their lengths.

    ``LinearMixer.prefill`` and ``step`` return it, ``empty_state`` is where sequences begin. They write to no state: to go back, keep
    the one before.
    """

    conv: Tensor
    """[B, K - 1, G, W] what the convolution saw last, in the dtype of the projection."""
    memory: Tensor
    """[B, H, ...] state of each head, float32 or float64: Mamba-2 [P, N], delta net [width of keys, width of values]."""

    def rows(self, index: Tensor) -> "RecurrentState":
        """Of some sequences."""
        return RecurrentState(conv=self.conv[index], memory=self.memory[index])

    def copy(self) -> "RecurrentState":
        """In memory of its own."""
        whole = torch.contiguous_format
        return RecurrentState(conv=self.conv.clone(memory_format=whole), memory=self.memory.clone(memory_format=whole))

    def write(self, index: Tensor, other: "RecurrentState") -> None:
        """Replace those of some sequences, each of them once, in place."""
        self.conv.index_copy_(0, index, other.conv)
        self.memory.index_copy_(0, index, other.memory)


@dataclass(frozen=True, kw_only=True, eq=False)
class RecurrentRows:
    """What ``Step.states`` carries: the B sequences of a step go on from states that lie in slots, and leave their new states there.

    Example:
        Three sequences in slots 4, 0 and 2; the first gets one more token, the others two and three:

        >>> import torch
        >>> kept = RecurrentState(conv=torch.zeros(5, 3, 1, 8), memory=torch.zeros(5, 2, 4, 4))
        >>> rows = RecurrentRows(layers={0: kept}, slots=torch.tensor([4, 0, 2]), num_decode=1, lengths=(2, 3))
        >>> rows.num_tokens
        6
    """

    layers: Mapping[int, RecurrentState]
    """Of each linear mixer, by its ``layer``, the states of all M slots; a step writes to them in place."""
    slots: Tensor
    """[B] int64, each slot once; -1 for a row of padding in a step that the kernels compute (``LinearMixer.has_decode_kernel``)."""
    num_decode: int
    """Sequences that get one token; they come first."""
    lengths: tuple[int, ...]
    """Tokens of each of the others; empty where ``starts`` says it."""
    starts: Tensor | None = None
    """[number of the others + 1] int32, in a step whose lengths the device alone knows, the first token of each of the others and the end
    of the last. Tokens of no sequence may lie before and behind; what a mixer gives for them is 0. A sequence without tokens leaves its
    state as it is, and may share its slot with others of them."""
    finished: Tensor | None = None
    """[at least num_decode G] int32 of zeros, which the kernels of single tokens count in, and leave zero; None to make them."""

    @functools.cached_property
    def bounded(self) -> BoundedSequences | None:
        """Of ``starts``, for all layers."""
        return None if self.starts is None else BoundedSequences(self.starts)

    @functools.cached_property
    def spans(self) -> SlotSpans:
        """Where the B sequences and their states lie, for all layers of a batch-invariant model."""
        device = self.slots.device
        firsts = torch.arange(self.num_decode, dtype=torch.int32, device=device)
        begins, ends, starts = [firsts], [firsts + 1], self.starts
        if starts is None and self.lengths:
            bounds = list(itertools.accumulate(self.lengths, initial=self.num_decode))
            starts = torch.tensor(bounds, dtype=torch.int32, device=device)
        if starts is not None:
            begins.append(starts[:-1])
            ends.append(starts[1:])
        return SlotSpans(begins=torch.cat(begins), ends=torch.cat(ends), slots=self.slots)

    @property
    def num_tokens(self) -> int:
        return self.num_decode + sum(self.lengths)
