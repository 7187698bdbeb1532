# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 the mcore authors
"""How the heads of a linear mixer lie in its projection, and their way over context-parallel ranks."""

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_parallel.context_parallel import (
    HeadSplitError,
    SequenceSplitError,
    inverse_permutation,
    join_heads,
    sequence_lengths,
    split_heads,
    zigzag_inverse,
)
from mcore_parallel.groups import Group, ProcessGroups
from mcore_parallel.nn._step import Step


# T tokens, G groups, h heads of a group, P channels of a head, S channels that the heads of a group share, n numbers of a head, c cp ranks.
@dataclass(frozen=True, kw_only=True)
class GroupRows:
    """The columns [h P + h P + S + n h] of one group: gates and values of its heads, what they share, their numbers (all first ones first).

    A group lies on one tensor-parallel rank, so that one column-parallel product with a plain cut of groups makes all of them.
    """

    heads: int
    """h."""
    head_dim: int
    """P."""
    shared: int
    """S."""
    numbers: int
    """n."""

    @property
    def inner(self) -> int:
        """Columns of the gates, and of the values."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Columns that pass the convolution: values and what is shared."""
        return self.inner + self.shared

    @property
    def width(self) -> int:
        return 2 * self.inner + self.shared + self.numbers * self.heads

    def divided(self, pieces: int) -> "GroupRows":
        """Rows of a piece of a group: a share of its heads, and all that is shared."""
        return GroupRows(heads=self.heads // pieces, head_dim=self.head_dim, shared=self.shared, numbers=self.numbers)


def check_degrees(num_groups: int, heads: int, groups: ProcessGroups, name: str) -> None:
    """Whether tp ranks can share the groups and cp ranks the heads of each.

    Raises:
        HeadSplitError: they cannot.
    """
    tp, cp = groups.tp.size, groups.cp.size
    if num_groups % tp:
        raise HeadSplitError(f"tp={tp} must divide {name}={num_groups}; lower tp")
    if num_groups // tp * heads % cp:
        raise HeadSplitError(f"cp={cp} must divide the {num_groups // tp * heads} heads of a tp rank; lower cp or tp")


def whole_lengths(step: Step, tokens: int, cp: int) -> tuple[int, ...]:
    """Lengths of the sequences over all cp ranks.

    Raises:
        SequenceSplitError: they have another number of tokens than the ranks hold.
    """
    if step.prefixes is not None:
        raise SequenceSplitError("linear mixers go on from one state and follow no prefixes of packed sequences; pack without prefixes")
    if step.max_seqlen is not None:
        raise SequenceSplitError(f"max_seqlen={step.max_seqlen}: linear mixers read bounds of sequences on the host; leave it out")
    lengths = (step.seq_len * cp,) * step.batch_size if step.cu_seqlens is None else sequence_lengths(step.cu_seqlens)
    if sum(lengths) != tokens * cp:
        raise SequenceSplitError(f"sequences of {sum(lengths)} tokens, but {cp} cp ranks with {tokens} tokens each; give all bounds")
    return lengths


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Tokens for heads between c cp ranks: each computes a share of the heads for whole sequences.

    Where there are fewer groups than ranks, a group's heads are cut into pieces and what they share goes with each.
    """

    rows: GroupRows
    """Of the groups of this tp rank."""
    num_groups: int
    """Of this tp rank."""
    cp: Group

    @property
    def pieces(self) -> int:
        """Of a group."""
        return self.cp.size // math.gcd(self.num_groups, self.cp.size)

    def scatter(self, x_TGR: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """[T, G, h P + S + n h], the columns without the gates -> this rank's share of the pieces of all tokens in natural order."""
        order, places = _order(lengths, self.cp.size, x_TGR.device)
        values, shared, numbers = x_TGR.split((self.rows.inner, self.rows.shared, x_TGR.shape[-1] - self.rows.channels), dim=-1)
        numbers = numbers.unflatten(-1, (self.rows.numbers, self.pieces, -1)).transpose(-2, -3).flatten(-2)
        cut = torch.cat((self._split(values, -1), self._repeat(shared), numbers), dim=-1).flatten(1, 2)
        mixed = split_heads(cut.unflatten(1, (self.cp.size, -1)).flatten(2), self.cp, order, places)
        return mixed.unflatten(1, (-1, cut.shape[-1]))

    def gather(self, y_THP: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """[c T, H / c, P] in natural order -> this rank's tokens with all heads [T, H, P]."""
        return join_heads(y_THP, self.cp, *_order(lengths, self.cp.size, y_THP.device))

    def channels(self, weight: Tensor) -> Tensor:
        """This rank's part of a parameter of the convolution [G, h P + S, ...]."""
        values, shared = weight.split((self.rows.inner, self.rows.shared), dim=1)
        values = values.unflatten(1, (self.pieces, -1))
        shared = shared.unsqueeze(1).expand(-1, self.pieces, *shared.shape[1:])
        return self._own(torch.cat((values, shared), dim=2).flatten(0, 1))

    def numbers(self, parameter: Tensor) -> Tensor:
        """This rank's part of one number a head [H]."""
        return self._own(parameter)

    def _own(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.cp.size, -1))[self.cp.rank]

    def _split(self, x: Tensor, dim: int) -> Tensor:
        return x.unflatten(dim, (self.pieces, -1))

    def _repeat(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.pieces, x.shape[-1])


# Kept: all layers of a step, and most steps, have the same lengths.
@functools.lru_cache(maxsize=16)
def _order(lengths: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    order = zigzag_inverse(lengths, size)
    return order.to(device), inverse_permutation(order).to(device)
